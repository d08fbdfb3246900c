"""The directed corpus: for each situation of the rules a short way there, so that every check covers all.

A line of `corpus.txt` is "situation | sizes | mode | origin | commands", in the notation of reports. origin:
the scope of `kvspec explore` that gave the shortest way, "random" (a run of the generator, shrunk) or "hand".
`python -m ci.corpus` brings the file up to date and keeps the lines by hand. The traces of known faults in
`fixtures` are lines as well.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from reference import model
from reference.commands import TREE_COMMANDS, Mode
from reference.geometry import Geometry
from reference.system_kinds import AnyCommand, AnyConfig, kind_of_config
from stateful_tests.coverage import situations as coverage
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.traces.trace_files import load as load_trace
from stateful_tests.traces.notation import format_command, parse

FILE = Path(__file__).with_name("corpus.txt")
FIXTURES = Path(__file__).parents[2] / "fixtures"
FIXTURE = "fixture"  # the origin of a trace of a known fault
_SIZES = ("page", "window", "full", "swa", "rows", "width")


class CorpusLine(NamedTuple):
    """A way to a situation.

    situation: its name; the name of the trace, where the line is the trace of a known fault.
    """

    situation: str
    geometry: AnyConfig
    mode: Mode
    origin: str
    commands: tuple[AnyCommand, ...]

    @property
    def trace(self) -> Trace:
        """Return the line as a trace."""
        return Trace(self.geometry, self.mode, self.commands)

    @property
    def machine(self) -> str:
        """The machine that drives its commands: sessions, tree or both."""
        if machine := kind_of_config(self.geometry).machine:
            return machine
        if not self.trace.sizes(Geometry).tree:
            return "sessions"
        return (
            "tree"
            if all(isinstance(command, TREE_COMMANDS) for command in self.commands)
            else "both"
        )


def line_text(line: CorpusLine) -> str:
    """Return the line as text."""
    g = line.trace.sizes(Geometry)
    sizes = zip(_SIZES, (g.page_size, g.window or 0, g.full_pages, g.swa_pages, g.rows, g.width))
    sizes_text = (f"{name} {size}" for name, size in sizes)
    states = [f"states {g.states}"] if g.states else []
    words = [name for name in ("tree", "bigram", "tracks", "lazy") if getattr(g, name)]
    config = " ".join([*sizes_text, *words, *states])
    commands = "; ".join(map(format_command, line.commands))
    return f"{line.situation} | {config} | {line.mode.value} | {line.origin} | {commands}"


def read(text: str) -> CorpusLine:
    """Return the line that a text stands for. Raises ValueError."""
    name, config, mode, origin, commands = text.split(" | ")
    words = config.split()
    page, window, full, swa, rows, width = map(int, words[1:12:2])
    states = int(words[-1]) if "states" in words else 0
    geometry = Geometry(
        page_size=page,
        window=window or None,
        full_pages=full,
        swa_pages=swa,
        rows=rows,
        width=width,
        tree="tree" in words,
        settings=(),
        bigram="bigram" in words,
        states=states,
        tracks="tracks" in words,
        lazy="lazy" in words,
    )
    return CorpusLine(name, geometry, Mode(mode), origin, tuple(map(parse, commands.split("; "))))


@lru_cache(maxsize=1)
def load() -> tuple[CorpusLine, ...]:
    """Return the lines of the file."""
    return tuple(map(read, FILE.read_text(encoding="utf-8").splitlines()))


def situations() -> set[str]:
    """Return the situations of the file."""
    return {line.situation for line in load()}


@lru_cache(maxsize=1)
def fault_lines() -> tuple[CorpusLine, ...]:
    """Return the traces of named bugs and of faults of releases."""
    paths = sorted([*FIXTURES.glob("regressions/*.json"), *FIXTURES.glob("releases/*/*.json")])
    traces = [(path.stem, load_trace(path)) for path in paths]
    return tuple(CorpusLine(name, t.geometry, t.mode, FIXTURE, t.commands) for name, t in traces)


def step_of_situation(line: CorpusLine) -> int | None:
    """Return the command at which the line meets its situation on the reference; None if it does not."""
    trace = line.trace
    state = model.initial(trace.sizes(Geometry), line.mode)
    for index, command in enumerate(trace.row_commands):
        was = state
        state, outcome = model.step(was, command)
        if line.situation in coverage.situations(was, command, outcome, state):
            return index
    return None


def select_lines(
    machines: tuple[str, ...],
    modes: tuple[Mode, ...],
    mode: Mode,
    first: frozenset[CorpusLine] = frozenset(),
) -> list[CorpusLine]:
    """Return the lines that these machines drive in `mode`, one of `modes`.

    After `first` come known faults, then lines by hand, then the shortest. A line of faithful mode runs
    in free mode where that is the only mode.
    """
    lines = *fault_lines(), *sorted(load(), key=lambda n: (n.origin != "hand", len(n.commands)))
    return [
        line
        for line in sorted(lines, key=lambda each: each not in first)
        if line.machine in machines and mode is (line.mode if line.mode in modes else Mode.FREE)
    ]


@lru_cache(maxsize=16)
def beginnings(machine: str, mode: Mode) -> list[CorpusLine]:
    """Return the lines in the sizes of the presets that a machine may drive in `mode`."""
    of_machine = [n for n in load() if n.machine == machine and n.origin in ("random", "hand")]
    return [line for line in of_machine if mode in (line.mode, Mode.FREE)]
