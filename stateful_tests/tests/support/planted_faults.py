"""Planted faults: changes of a system's code that a test puts in, and what must catch each.

They are written in TOML, a table a fault, beside the tests that run them (`faults.toml`, `*_faults.toml`):

    system = "vllm==0.33.0"

    [preempt-keeps-blocks]
    caught_by = "PUB-3"
    sizes = "tight"
    commands = "add r1 a2 for 1; schedule; update drafts 0; reset_cache (running)"
    file = "vllm/v1/core/sched/scheduler.py"
    old = "        self._free_request_blocks(request)"
    new = "        pass"

What stands above the first table holds for every fault that does not say otherwise; what a fault says of its
file holds for each of its edits. `PlantedFault` and `Edit` have the fields. `fault_runs` runs them.
"""

import json
import os
import shutil
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from importlib.util import cache_from_source
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from impl.system_spec import SystemSpec, ways_in
from reference.blocks.config import EngineConfig, LayerGroup
from reference.commands import Mode
from reference.geometry import Geometry
from reference.system_kinds import BLOCKS, PAIRS, ROWS, TIERS, AnyConfig, Kind, kind_of_config
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.tests.support.patched_code import patch_function, replace_once
from stateful_tests.traces.notation import parse

TESTS = Path(__file__).parents[1]
_EDIT = ("file", "old", "new", "method", "release")
# Appended to a module, once: what a fault takes the place of is its first argument.
_GATE = """

def _at_page_size(size, kind, name, fault):
    right = getattr(kind, name)

    def run(this, *args, **kwargs):
        cache = getattr(this, "tree_core", None) or getattr(this, "tree_cache", None) or this
        if cache.page_size == size:
            return fault(right, this, *args, **kwargs)
        return right(this, *args, **kwargs)

    setattr(kind, name, run)
"""


class PlantedFaultError(ValueError):
    """A table of faults that cannot be read: the file, the fault, and why."""


class Edit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change of one file.

    file: below the root of the system's code, such as "sglang/srt/mem_cache/common.py".
    old: text that is there once.
    new: what stands there instead.
    method: instead of `old`, a `Class.method`; `new` is then `def fault(right, this, ...)`, whose `right` is
        what was there. It is called where pages have the size that the fault states.
    release: the one release that has the edit; "" for every one.
    """

    file: Annotated[str, Meta(min_length=1)]
    new: str
    old: str = ""
    method: str = ""
    release: str = ""

    def __post_init__(self) -> None:
        if bool(self.old) == bool(self.method):
            raise ValueError("an edit has one of `old` and `method`")

    @property
    def module(self) -> str:
        """The file, as it is imported."""
        return self.file.removesuffix(".py").replace("/", ".")

    def text(self, root: Path) -> str:
        """Return the text of its file with `new` in the one place of `old`."""
        return replace_once(root / self.file, self.old, self.new)


class PlantedFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault, and how it shows.

    system: what it is put into, as on the command line. way: how that is run, behind a plus sign.
    caught_by: what must catch it: clauses (the first is the headline), judges of a server or keys of their
        findings, proofs. Mends have none; of the example engines any clause will do.
    edits: what is changed; one edit can stand in the fault itself.

    A fault that commands show:
    sizes: a preset's name; or a preset and what differs from it, { preset = "tier", host_pages = 3 }; or
        those of an engine, { groups = [[1], [2, 4]], blocks = 8 }, where a group is its block size, window
        (0: none), true for recurrent state, for a drafter, for a ring; or page_size and window of SGLang,
        tree = false without one.
    commands: as reports print them, with semicolons between.
    presets: where random runs look for it.
    within: commands in which a check of tier smoke finds it with seed 0.

    In a server: server: settings that every run has. impatient: with clients that do not wait.
    In arithmetic: crosshair: the function whose contract CrossHair refutes. bugs: the same fault in torch.
    Of a mend: gone: known faults that it ends. cut: its file is not loaded, its function is cut out of it.
        mended: it is put in with every other fault of its file.
    """

    name: str
    edits: Annotated[tuple[Edit, ...], Meta(min_length=1)]
    caught_by: tuple[str, ...] = ()
    system: str = ""
    way: str = ""
    sizes: str | dict[str, Any] = ""
    commands: str = ""
    presets: tuple[str, ...] = ()
    within: int | None = None
    server: dict[str, int | bool] = {}
    impatient: bool = False
    crosshair: str | None = None
    bugs: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    cut: bool = False
    mended: bool = False

    @property
    def clause(self) -> str:
        """The clause that must see the fault first."""
        return self.caught_by[0]

    @property
    def file(self) -> str:
        """The file that is changed, or the first."""
        return self.edits[0].file

    @property
    def spec(self) -> SystemSpec:
        """The system that it is put into, in its way."""
        spec = SystemSpec.parse(self.system)
        return spec.in_way("+".join((*spec.ways, *ways_in(self.way))))

    @property
    def kind(self) -> Kind:
        """The kind of that system."""
        if "hicache" in self.spec.ways:
            return TIERS
        if "pair" in self.spec.ways:
            return PAIRS
        return ROWS if self.spec.engine == "sglang" else BLOCKS

    def edits_in(self, release: str) -> list[Edit]:
        """Its edits in a release."""
        return [edit for edit in self.edits if edit.release in ("", release)]

    def trace(self) -> Trace:
        """Its commands on its sizes."""
        return trace_of(
            self.kind, self.commands, self.sizes, self.clause if self.kind is ROWS else None
        )


def trace_of(
    kind: Kind, commands: str, sizes: str | dict[str, Any], clause: str | None = None
) -> Trace:
    """Return a trace from text: commands with semicolons between, sizes as a fault states them."""
    lines = (line for line in commands.split(";") if line.strip())
    parsed = tuple(parse(line, kind) for line in lines)
    return Trace(config_of(kind, sizes), Mode.FAITHFUL, parsed, clause=clause)


def config_of(kind: Kind, sizes: str | dict[str, Any]) -> AnyConfig:
    """Return the sizes that a fault states."""
    if isinstance(sizes, str):
        config: AnyConfig = kind.presets[sizes]
        return config
    fields = dict(sizes)
    if "preset" in fields:
        return replace(kind.presets[fields.pop("preset")], **fields)
    if kind is BLOCKS:
        return EngineConfig(tuple(_group(*group) for group in fields.pop("groups")), **fields)
    return _geometry(**fields)


def _group(
    size: int, window: int = 0, state: bool = False, drafter: bool = False, ring: bool = False
) -> LayerGroup:
    return LayerGroup(size, window or None, state, drafter, ring)


def _geometry(page_size: int, window: int | None = None, tree: bool = True) -> Geometry:
    """Pools of eight pages, three rows of four. Each round evicts what has left the window."""
    always = (("SGLANG_SWA_EVICTION_INTERVAL", "1"),)
    swa_pages = 8 if window else 0
    return Geometry(page_size, window, 8, swa_pages, 3, 4 * page_size, tree, always)


def stated_sizes(config: AnyConfig) -> str:
    """Sizes as a fault states them: `config_of` reads them again."""
    presets = kind_of_config(config).presets
    if same := [name for name, preset in presets.items() if preset == config]:
        return json.dumps(same[0])
    if isinstance(config, EngineConfig):
        stated = {"groups": [_group_stated(group) for group in config.groups]}
        stated |= {
            field.name: getattr(config, field.name)
            for field in fields(config)
            if field.name != "groups" and getattr(config, field.name) != field.default
        }
    else:
        other = {name: _differences(config, preset) for name, preset in presets.items()}
        nearest = min(other, key=lambda name: len(other[name]))
        stated = {"preset": nearest, **other[nearest]}
    return "{ " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in stated.items()) + " }"


def _differences(config: AnyConfig, preset: AnyConfig) -> dict[str, Any]:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value for name, value in values.items() if value != getattr(preset, name)}


def _group_stated(group: LayerGroup) -> list[int | bool]:
    if group.ring:
        return [group.block_size, group.window or 0, False, False, True]
    if group.drafter:
        return [group.block_size, group.window or 0, group.state, True]
    window: list[int | bool] = [group.window or 0] if group.window or group.state else []
    return [group.block_size, *window, *([True] if group.state else [])]


def planted_faults(name: str) -> dict[str, PlantedFault]:
    """Return the faults of a file below the folder of the tests, by name. Raises PlantedFaultError."""
    return read_faults(TESTS / name)


def read_faults(path: Path) -> dict[str, PlantedFault]:
    """Return the faults of a file, by name. Raises PlantedFaultError."""
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise PlantedFaultError(f"{path}: {error}") from None
    tables = {name: table for name, table in said.items() if isinstance(table, dict)}
    shared = {name: value for name, value in said.items() if name not in tables}
    return {name: _fault(path, name, {**shared, **table}) for name, table in tables.items()}


def _fault(path: Path, name: str, table: dict[str, Any]) -> PlantedFault:
    own = {field: table.pop(field) for field in _EDIT if field in table}
    edits = table.pop("edits", [{}])
    caught_by = table.pop("caught_by", [])
    names = [caught_by] if isinstance(caught_by, str) else caught_by
    more = {"name": name, "caught_by": names, "edits": [{**own, **edit} for edit in edits]}
    try:
        fault = msgspec.convert({**table, **more}, PlantedFault)
        if fault.commands:
            fault.trace()
    except (KeyError, TypeError, ValueError) as error:
        raise PlantedFaultError(f"{path}: {name}: {error}") from None
    return fault


@contextmanager
def plant_fault(root: Path, edits: Iterable[Edit]) -> Iterator[None]:
    """Put these edits into the code below `root` that this process has loaded, for the time of a
    block."""
    with ExitStack() as stack:
        for edit in edits:
            stack.enter_context(patch_function(root / edit.file, edit.module, edit.old, edit.new))
        yield


def checkout_with(
    root: Path, folder: Path, *faults: PlantedFault, release: str = "", package: str = ""
) -> Path:
    """Return a checkout of the code below `root`, or of one package of it, with faults in it. Files
    that have none are links."""
    # `_link_files` brings the bytecode of each file, into a folder that copytree would not make again.
    bytecode = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / package, folder / package, copy_function=_link_files, ignore=bytecode)
    for fault in faults:
        for edit in fault.edits_in(release):
            text = _with_method(folder, fault, edit) if edit.method else edit.text(folder)
            (folder / edit.file).unlink()  # a link to the release's own
            (folder / edit.file).write_text(text, encoding="utf-8")
    return folder


def _link_files(source: str, target: str) -> None:
    """A file of the copy; with its bytecode, which is valid for a file of the same time and size."""
    try:
        os.link(source, target)
    except OSError:  # on another disk
        shutil.copy2(source, target)
    if source.endswith(".py"):
        compiled, own = (Path(cache_from_source(file)) for file in (source, target))
        if compiled.is_file():
            own.parent.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):  # on another disk
                os.link(compiled, own)


def _with_method(root: Path, fault: PlantedFault, edit: Edit) -> str:
    """Return the text of a file at whose end a method is replaced."""
    text = (root / edit.file).read_text(encoding="utf-8")
    assert isinstance(fault.sizes, dict), f"{fault.name}: a fault in a method states its page_size"
    size = fault.sizes["page_size"]
    (kind, _, method) = edit.method.partition(".")
    gate = "" if _GATE in text else _GATE
    put = f"_at_page_size({size}, {kind}, {method!r}, fault)"
    return f"{text}{gate}\n\n{edit.new}\n\n\n{put}\n"
