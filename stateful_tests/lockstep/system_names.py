"""Names of systems under test: what `--impl` means, on the command line and in pytest."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from impl.adapter import AnySystem, System, UnusableImplementation
from impl.engines import DEFAULTS, DriveOptions, engine
from impl.process import fork_server
from impl.process.remote_system import LIMITS, Limits, StrangerSystem
from impl.process.worker import make_system
from impl.system_spec import ENGINES, SystemSpec, option
from reference.all_clauses import ALL_CLAUSES
from stateful_tests.lockstep.known_faults import skipped_clauses


def resolve(
    name: str,
    *,
    device: str = "cpu",
    checkout: str | None = None,
    calls: bool = False,
    limits: Limits = LIMITS,
    in_process: bool = True,
) -> AnySystem:
    """Return the system of a name: a System, or an EngineSystem. Raises as `driven_system` does.

    reference | torch | torch+BUG | module:factory | sglang==VERSION | vllm==VERSION | transformers==VERSION
    lmdeploy==VERSION
    sglang | vllm | transformers | lmdeploy, with a `checkout` of it
    After an engine the ways to run, such as `+rust+overlap` of SGLang and `+async` of vLLM: see the record of
    the engine.

    calls: it notes them (see SGLangSystem).
    limits: of a worker process.
    in_process: false drives a factory's system in one.
    """
    options = DriveOptions(checkout, device, calls, limits)
    return driven_system(SystemSpec.parse(name), options, in_process)


def driven_system(spec: SystemSpec, options: DriveOptions = DEFAULTS, in_process: bool = True) -> AnySystem:
    """Return the system that `spec` names. Raises UnusableImplementation with a one-line reason."""
    is_engine = spec.engine in ENGINES
    if options.checkout is not None and not (is_engine and spec.version is None):
        raise UnusableImplementation(
            f"a checkout goes with the name of an engine ({', '.join(ENGINES)}), not {str(spec)!r}"
        )
    if str(spec) == "reference":
        from stateful_tests.lockstep.reference_system import ReferenceSystem

        return ReferenceSystem()
    if (is_engine or spec.engine == "torch") and importlib.util.find_spec("torch") is None:
        raise UnusableImplementation(f"--impl {spec} needs torch: pip install 'kvspec[torch]'")
    if str(spec) == "torch":
        return _resolve_torch(None, options.device)
    if spec.bug is not None:
        return _resolve_torch(spec.bug, options.device)
    if is_engine:
        return _resolve_release(spec, options)
    if spec.stranger:
        return _resolve_factory(str(spec), options.limits, in_process)
    if Path(f"{spec.engine.replace('.', '/')}.py").is_file():
        raise UnusableImplementation(f"--impl {spec}: names no factory, such as {spec.engine}:make")
    raise UnusableImplementation(
        f"--impl {str(spec)!r}: not one of reference, torch, torch+BUG, sglang==VERSION, sglang,"
        " vllm==VERSION, vllm, transformers==VERSION, lmdeploy==VERSION, module:factory"
    )


def _resolve_release(spec: SystemSpec, options: DriveOptions) -> AnySystem:
    """Return a release or a checkout. A check skips the clauses that its release is known to violate."""
    record = engine(spec.engine)
    if options.device not in record.devices:
        raise UnusableImplementation(
            f"--device: releases of {record.name} are not driven on {options.device}"
        )
    if not spec.version and options.checkout is None:
        raise UnusableImplementation(
            f"--impl {record.name} needs {option(record.name)} DIR or {record.name}==VERSION"
        )
    if options.device == "cpu":
        fork_server.start_early()
    system = record.drive(spec, options)
    if known := skipped_clauses(record.name, system.release, spec.ways):
        system.capabilities = replace(system.capabilities, known=known)
    return system


def _resolve_factory(spec: str, limits: Limits, in_process: bool) -> AnySystem:
    stranger: AnySystem = make_system(spec) if in_process else StrangerSystem(spec, limits)
    excused = {*stranger.capabilities.waived, *stranger.capabilities.known}
    if unknown := sorted(excused - ALL_CLAUSES.keys()):
        raise UnusableImplementation(
            f"--impl {spec}: waives {', '.join(unknown)}, which is no clause"
        )
    return stranger


def as_base(base: SystemSpec, spec: SystemSpec) -> SystemSpec:
    """Return the base of a system that `spec` names, driven in the same ways: for `vllm+async` the base
    `vllm==0.33.0` is `vllm==0.33.0+async`. Raises UnusableImplementation where it names another way."""
    if spec.engine not in ENGINES or base.engine != spec.engine:
        return base
    if base.ways not in ((), spec.ways):
        advice = "without it the base runs as --impl"
        raise UnusableImplementation(f"--impl {spec} does not run as +{base.way}; {advice}")
    return replace(base, ways=spec.ways)


def _resolve_torch(bug: str | None, device: str) -> System:
    import torch

    from impl.bugs import BUGS
    from impl.torch_kv import TorchKV

    if device == "cuda" and not torch.cuda.is_available():
        raise UnusableImplementation("--device cuda: torch sees no CUDA device here")
    torch.set_num_threads(1)  # the tensors are tiny; threads only wait for each other
    if bug is not None and bug not in BUGS:
        close = " or ".join(get_close_matches(bug, BUGS, 3))
        meant = f"; is it {close}?" if close else ""
        raise UnusableImplementation(f"torch+{bug}: unknown bug, `kvspec bugs` lists them{meant}")
    system = BUGS[bug].system if bug else TorchKV
    if device != "counting":
        return system(device)
    from impl.torch_kv.counting_device import on_counting_device

    return on_counting_device(system)
