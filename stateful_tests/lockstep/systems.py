"""Names of systems under test: what `--impl` means, on the command line and in pytest."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from impl.adapter import System, UnusableImplementation
from impl.process.remote_system import LIMITS, Limits, StrangerSystem
from impl.process.worker import made
from reference.blocks.clauses import EVERY_CLAUSE
from stateful_tests.lockstep.known_faults import passed_over


class Spec(NamedTuple):
    """What `--impl` and the options beside it say. ways: to run, behind + signs, in order."""

    text: str
    version: str | None
    ways: list[str]
    device: str
    checkout: str | None
    calls: bool
    limits: Limits


def resolve(
    spec: str,
    *,
    device: str = "cpu",
    checkout: str | None = None,
    calls: bool = False,
    limits: Limits = LIMITS,
    in_process: bool = True,
) -> Any:
    """The system that `spec` names: a System, or an EngineSystem.

    reference | torch | torch+BUG | module:factory | sglang==VERSION | vllm==VERSION | transformers==VERSION
    lmdeploy==VERSION
    sglang | vllm | transformers | lmdeploy, with a `checkout` of it
    After either sglang `+unified` or `+rust`: with that radix tree, where a release has the choice (see
    impl.sglang.releases.variants); and `+overlap`: with overlap scheduling; or `+hicache`, after `+rust` too:
    its tree with its host tier. After vllm `+async` for overlap scheduling, `+v2` for model runner V2 and
    `+offload` for its OffloadingConnector.
    calls: it notes them (see SGLangSystem). limits: of a worker process. in_process: false drives a factory's
    system in one. Raises UnusableImplementation with a one-line reason.
    """
    package, *ways = spec.split("+")
    engine, _, version = package.partition("==")
    if checkout is not None and package not in ENGINES:
        raise UnusableImplementation(
            f"--sglang-path goes with --impl sglang, and so on, not {spec!r}"
        )
    if spec == "reference":
        from stateful_tests.lockstep.reference_system import ReferenceSystem

        return ReferenceSystem()
    if engine in ("torch", *ENGINES) and importlib.util.find_spec("torch") is None:
        raise UnusableImplementation(f"--impl {spec} needs torch: pip install 'kvspec[torch]'")
    if spec == "torch":
        return _torch(None, device)
    if spec.startswith("torch+"):
        return _torch(spec.removeprefix("torch+"), device)
    if engine in ENGINES:
        if device != "cpu" and (engine, device) != ("sglang", "cuda"):
            raise UnusableImplementation(
                f"--device: releases of {engine} are not driven on {device}"
            )
        if not version and checkout is None:
            raise UnusableImplementation(
                f"--impl {engine} needs --{engine}-path DIR or {engine}==VERSION"
            )
        return ENGINES[engine](Spec(spec, version or None, ways, device, checkout, calls, limits))
    if ":" in spec:
        return _stranger(spec, limits, in_process)
    raise UnusableImplementation(
        f"--impl {spec!r}: not one of reference, torch, torch+BUG, sglang==VERSION, sglang,"
        " vllm==VERSION, vllm, transformers==VERSION, lmdeploy==VERSION, module:factory"
    )


def _stranger(spec: str, limits: Limits, in_process: bool) -> Any:
    stranger: Any = made(spec) if in_process else StrangerSystem(spec, limits)
    excused = {*stranger.capabilities.waived, *stranger.capabilities.known}
    if unknown := sorted(excused - EVERY_CLAUSE.keys()):
        raise UnusableImplementation(
            f"--impl {spec}: waives {', '.join(unknown)}, which is no clause"
        )
    return stranger


def _sglang(spec: Spec) -> Any:
    from impl.sglang.process.system import SGLangSystem
    from impl.sglang.releases.variants import VARIANTS

    ways = spec.ways
    if ways[-1:] == ["hicache"] and ways[:-1] in ([], ["rust"]):
        from impl.sglang.tiers.system import TierSystem

        if spec.device != "cpu":
            raise UnusableImplementation(f"--device: {spec.text} is not driven on {spec.device}")
        core = "".join(ways[:-1])
        return TierSystem(
            spec.version, spec.checkout, core=core, calls=spec.calls, limits=spec.limits
        )
    tree = ways[0] if ways and ways[0] in VARIANTS else None
    overlap = ways[tree is not None :]
    if overlap not in ([], ["overlap"]):
        trees = " or ".join(f"+{name}" for name in VARIANTS)
        after = f"after a release goes {trees}, then +overlap; or +hicache, behind +rust too"
        raise UnusableImplementation(f"--impl {spec.text!r}: {after}")
    system = SGLangSystem(
        version=spec.version,
        path=spec.checkout,
        tree=tree,
        gpu=spec.device == "cuda",
        overlap=bool(overlap),
        calls=spec.calls,
        limits=spec.limits,
    )
    known = passed_over("sglang", system.release, tree)
    system.capabilities = replace(system.capabilities, known=known)
    return system


def _vllm(spec: Spec) -> Any:
    from impl.vllm.api import WAYS
    from impl.vllm.system import VLLMSystem

    given = {way: word in spec.ways for way, word in WAYS.items()}
    if spec.ways != [WAYS[way] for way in WAYS if given[way]]:
        order = ", then +".join(WAYS.values())
        raise UnusableImplementation(f"--impl {spec.text!r}: after a release goes +{order}")
    return VLLMSystem(version=spec.version, path=spec.checkout, **given, limits=spec.limits)


def _transformers(spec: Spec) -> Any:
    from impl.transformers_paging.loading import TransformersSystem

    if spec.ways:
        raise UnusableImplementation(
            f"--impl {spec.text!r}: nothing goes after a release of transformers"
        )
    return TransformersSystem(spec.version, spec.checkout, spec.limits)


def _lmdeploy(spec: Spec) -> Any:
    from impl.lmdeploy.loading import LMDeploySystem

    if spec.ways:
        raise UnusableImplementation(
            f"--impl {spec.text!r}: nothing goes after a release of lmdeploy"
        )
    return LMDeploySystem(spec.version, spec.checkout, spec.limits)


# Whose releases and checkouts are driven.
ENGINES: dict[str, Callable[[Spec], Any]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "transformers": _transformers,
    "lmdeploy": _lmdeploy,
}


def as_base(base: str, spec: str) -> str:
    """The base of a system that `spec` names, driven in the same ways: beside `vllm+async` the base
    `vllm==0.33.0` is `vllm==0.33.0+async`. Raises UnusableImplementation where it names another way."""
    (release, _, given), (package, _, ways) = (each.partition("+") for each in (base, spec))
    engine = package.partition("==")[0]
    if engine not in ENGINES or release.partition("==")[0] != engine:
        return base
    if given not in ("", ways):
        advice = "without it the base runs as --impl"
        raise UnusableImplementation(f"--impl {spec} does not run as +{given}; {advice}")
    return f"{release}+{ways}" if ways else release


def _torch(bug: str | None, device: str) -> System:
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
    from impl.counting_device import counted

    return counted(system)
