"""SPEC.md: what the code knows of the specification, collected. The prose is in templates/SPEC.md.j2.

Everything in here is read from code or comes out of runs of the reference. Same code, same text.
"""

import re
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

from ci import Data, templates
from ci.documents import state_diagrams, step_text
from impl.bugs import BUGS, Bug
from reference import model
from reference.blocks.clauses import BLOCK_CLAUSES
from reference.clauses.disaggregation import HANDED_OVER
from reference.clauses.progress import PROGRESS
from reference.blocks.commands import ENGINE_COMMANDS
from reference.tiers.clauses import TIER_CLAUSES
from reference.tiers.commands import (
    Arrive, Await, Backup, LastToken, Expire, FailPeer, Fetch, Greet, Load, Poll, Prefetch, Query,
    Reattach, Send, Tick,
)  # fmt: skip
from reference.clauses import CLAUSES, Clause
from reference.clauses.registry import CONCERNS
from reference.commands import (
    COMMANDS, Admit, CheckIdle, Chunk, Command, Done, Draft, Evict, EvictSwa, Extend, Finish, Insert, Match,
    Mode, Open, Piece, Reason, SpecDecode, Submit, Unlock,
)  # fmt: skip
from reference.cursors import Cursors
from reference.geometry import Geometry
from reference.system_kinds import KINDS, PAIRS, Kind
from reference.state import Phase, State, text_len
from reference.rules import RULES
from reference.rules.rule_definition import NOTHING, Rule, Span
from reference.rules.sessions import TURNS
from stateful_tests.generate.exploration_scope import Scope
from stateful_tests.coverage.situations import kind_name
from stateful_tests.explore import lifecycle as lives
from stateful_tests.lockstep import driven_kinds, text_drawings, replays
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.prove import window_theorem
from stateful_tests.prove.obligations import OBLIGATIONS
from stateful_tests.traces import trace_files as traces
from stateful_tests.traces.notation import format_command as describe

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures" / "regressions"
EXAMPLE = "three_turns_of_one_conversation"
# Small, and yet every change of phase occurs in it; tests compare it with larger ones.
LIVES = Scope(
    "lives",
    "",
    Geometry(page_size=1, window=1, full_pages=3, swa_pages=3, rows=1, width=3),
    sessions=1,
    ahead=1,
    late=True,
    invalid=False,
    marked=False,
    batches=False,
)
# Clauses by the first part of their ids.
FAMILIES = {
    "OUT": "outcomes", "LEN": "cursors", "FREE": "what is freed", "END": "what is left at the end",
    "OWN": "pages and rows", "MAP": "the mapping", "SWA": "the window", "READ": "contents", "SES": "sessions",
    "TREE": "the radix tree", "STA": "recurrent state", "CHK": "memory checks", "REF": "the backstop",
}  # fmt: skip
# Said once, above the clauses.
_USUAL_SCOPE = re.compile(r"^(?:Every step|Servers with a radix tree|Models with SWA)(?:\.|; ?) ?")
REFERENCE = "SPEC-REFERENCE.md"  # beside SPEC.md: what is only looked up
PULL = "https://github.com/sgl-project/sglang/pull"


class NotShown(Exception):
    """The document lacks a required part: one line names it."""


DECODE = Await, Greet, Arrive, FailPeer, Expire, LastToken


def text(full: bool = False) -> str:
    """Return SPEC.md as Markdown. Raises NotShown.

    full: the version for the page, with the drawing of every clause, the title of every bug and every
        rejection.
    """
    return _render("SPEC.md.j2", collect() | {"full": full, "reference": REFERENCE})


def reference_text() -> str:
    """Return SPEC-REFERENCE.md as Markdown: the details that SPEC.md has only by name. Raises NotShown."""
    text = _render(f"{REFERENCE}.j2", collect() | {"full": False})
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _render(template: str, data: Data) -> str:
    """Return a document, with links in the place of upstream's numbers."""
    environment = templates(escape=False, keep_trailing_newline=True)
    environment.filters |= {"span": span, "anchor": anchor, "families": families_of}
    markdown = environment.get_template(template).render(data)
    return re.sub(r"(?<!vllm)(?:sgl-project/sglang)?#(\d{5})\b", rf"[#\1]({PULL}/\1)", markdown)


def collect() -> Data:
    """Return all data for the template."""
    fixtures = {p.stem: traces.load(p) for p in sorted(FIXTURES.glob("*.json"))}
    shown_by = {trace.bug: name for name, trace in fixtures.items() if trace.bug is not None}
    if missing := BUGS.keys() - shown_by.keys():
        raise NotShown(f"no fixture shows the bug {min(missing)}")
    requests, sessions = lives.edges(lives.transitions(LIVES))
    example = fixtures[EXAMPLE]
    cached = _draw_cached_row()
    families = _family_data()
    return {
        "version": model.SPEC_VERSION,
        "example": EXAMPLE,
        "sizes": example.geometry,
        "steps": _example_steps(example),
        "cached_row": cached,
        "legend": text_drawings.legend(cached),
        "request_diagram": state_diagrams.states(requests, Phase),
        "session_diagram": state_diagrams.states(sessions, lives.Life),
        "reasons": list(Reason),
        "turns": [
            {"command": kind_name(kind), "ends": ends, "mark": mark, "keeps": keeps}
            for kind, (ends, mark, keeps) in TURNS.items()
        ],
        "commands": [_command_data(RULES[kind], fixtures) for kind in COMMANDS],
        "tree": _tree_drawings(),
        "families": families,
        "clauses": [
            _clause_data(clause, shown_by, fixtures) for f in families for clause in f["clauses"]
        ],
        "asked": list(CLAUSES),
        "concerns": CONCERNS,
        "engine_clauses": [
            clause
            for clause in BLOCK_CLAUSES.values()
            if clause.id not in TIER_CLAUSES and clause.id not in PROGRESS
        ],
        "tier_clauses": [
            clause
            for clause in TIER_CLAUSES.values()
            if clause.id not in PROGRESS and clause.id not in HANDED_OVER
        ],
        "clauses_of": {name: _own_clauses(kind) for name, kind in KINDS.items()},
        "progress_clauses": [*PROGRESS.values()],
        "decode_commands": {kind_name(kind): _about_engine(kind) for kind in DECODE},
        "storage_commands": {
            kind_name(kind): _about_engine(kind) for kind in (Prefetch, Query, Fetch, Backup, Tick, Reattach)
        },
        "tier_commands": {kind_name(kind): _about_engine(kind) for kind in (Load, Send, Poll)},
        "engine_commands": {kind_name(kind): _about_engine(kind) for kind in ENGINE_COMMANDS},
        "story": {
            bug: {"clause": BUGS[bug].clause, "fixture": name} for bug, name in shown_by.items()
        },
        "window": {policy.name: policy for policy in window_theorem.POLICIES.values()},
        "theorem": window_theorem.PARAGRAPH,
        "obligations": [*OBLIGATIONS.values()],
    }


# -- words ----------------------------------------------------------------------------------------


def _own_clauses(kind: Kind) -> list[Clause]:
    """Return the clauses that no other kind of system has, by number; for pairs those on handed-over
    KV, too."""
    others = [driven_kinds.lockstep_of(other).clauses for other in KINDS.values() if other is not kind]
    own = [
        clause
        for name, clause in driven_kinds.lockstep_of(kind).clauses.items()
        if not any(name in clauses for clauses in others)
        or (kind is PAIRS and name in HANDED_OVER)
    ]
    return sorted(own, key=lambda clause: clause.id)


def _about_engine(kind: type) -> str:
    """Return a command's docstring; for one that earlier commands include as well, the text for both."""
    about = " ".join(str(kind.__doc__).split())
    return about.partition("`marked`")[0].strip() if kind in COMMANDS else about


def span(where: Span) -> str:
    """Return a range of positions, as a formula."""
    return "nothing" if where == NOTHING else f"`[{where[0]}, {where[1]})`"


def families_of(clauses: Iterable[Clause]) -> list[str]:
    """Return the first parts of the ids of clauses, each once."""
    return list(dict.fromkeys(clause.id.partition("-")[0] for clause in clauses))


def anchor(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# -- commands and clauses -------------------------------------------------------------------------


def _command_data(rule: Rule, fixtures: dict[str, Trace]) -> Data:
    kind = rule.command
    assert kind.__doc__ is not None
    return {
        "name": kind_name(kind),
        "about": " ".join(kind.__doc__.split()),
        "fields": [_field_data(f.name, str(f.type)) for f in fields(kind)],
        "rule": rule,
        "shared": {when: reason for reason, when in rule.refused.items() if _is_usual_reason(reason, when)},
        "example": _example_step(kind, fixtures),
    }


def _is_usual_reason(reason: Reason, when: str) -> bool:
    """Return whether several commands are rejected for the reason in the same words."""
    return sum(rule.refused.get(reason) == when for rule in RULES.values()) > 1


def _example_step(kind: type[Command], fixtures: dict[str, Trace]) -> Data | None:
    """Return the first step of this kind in a fixture that frees something, or else changes something,
    or is done.

    CheckIdle, which no fixture has, is done at the end of the worked example (at: none).
    """
    candidates = [
        ((not step.frees, not step.changes, at, len(step.draw()), name), step)
        for name, trace in fixtures.items()
        for at, step in enumerate(step_text.steps(trace))
        if isinstance(step.command, kind) and isinstance(step.outcome, Done)
    ]
    if not candidates:
        if kind is not CheckIdle:
            return None  # a new command, of which no fault is named yet
        longer = (*fixtures[EXAMPLE].commands, CheckIdle())
        *_, last = step_text.steps(replace(fixtures[EXAMPLE], commands=longer))
        return {"fixture": EXAMPLE, "at": None, "drawn": last.draw(), "frees": False}
    (_, _, at, _, name), step = min(candidates, key=lambda hit: hit[0])
    return {"fixture": name, "at": at, "drawn": step.draw(), "frees": step.frees}


def _field_data(name: str, kind: str) -> str:
    """Return a field of a command; for a batch, the fields of its entries."""
    lane = {"tuple[Chunk, ...]": Chunk, "tuple[Draft, ...]": Draft}.get(kind)
    return name if lane is None else f"{name}: ({', '.join(f.name for f in fields(lane))}), ..."


def _family_data() -> list[Data]:
    clauses_of: dict[str, list[Clause]] = {family: [] for family in FAMILIES}
    for clause in CLAUSES.values():
        clauses_of[clause.id.partition("-")[0]].append(clause)
    for clauses in clauses_of.values():
        clauses.sort(key=lambda c: int(c.id.partition("-")[2]))
    return [{"about": FAMILIES[family], "clauses": clauses} for family, clauses in clauses_of.items()]


def _clause_data(clause: Clause, shown_by: dict[str, str], fixtures: dict[str, Trace]) -> Data:
    """Return the data of a clause.

    killed: the bugs whose first violated clause it is, each with its fixture.
    drawn: the step that shows the first of them, the last of its fixture, on the reference.
    """
    bugs = [bug for bug in BUGS.values() if bug.clause == clause.id]
    last = None
    if bugs:
        *_, last = step_text.steps(fixtures[shown_by[bugs[0].id]])
    return {
        "clause": clause,
        "scope": _USUAL_SCOPE.sub("", clause.scope),
        "drawn": last.draw() if last is not None else "",
        "rules": [_code_link(f"reference.{name}") for name in clause.rule.split(", ")],
        "property": _code_link(f"{clause.check.__module__}.{clause.check.__name__}"),
        "killed": [{"bug": bug, "fixture": shown_by[bug.id], "modes": _bug_modes(bug)} for bug in bugs],
    }


def _code_link(path: str) -> Data:
    """Return a name in a module, and its file."""
    module, _, name = path.removeprefix("kvspec.").rpartition(".")
    return {"name": f"{module.rpartition('.')[2]}.{name}", "file": f"{module.replace('.', '/')}.py"}


def _bug_modes(bug: Bug) -> str:
    return "" if Mode.FAITHFUL in bug.modes else "free mode only"


# -- runs of the reference ------------------------------------------------------------------------


def _example_steps(trace: Trace) -> list[Data]:
    """Return the worked example, command by command: cursors after, freed ranges, the row as a picture."""
    freed = [row.freed for row in replays.replay(ReferenceSystem(), trace).rows]
    state = model.initial(trace.sizes(Geometry), trace.mode)
    steps = list[Data]()
    target = None
    for command, freed_ranges, following in zip(
        trace.row_commands, freed, (*trace.row_commands[1:], None), strict=True
    ):
        cut = target
        state, _ = model.step(state, command)
        target = _target(state, following)
        row_owner, cursors = _held_row(state)
        session = state.sessions[0] if state.sessions else None
        steps.append(
            {
                "command": describe(command),
                "whose": row_owner,
                "cursors": cursors,
                "history": text_len(session.history) if session is not None else 0,
                "target": cut,
                "freed": "; ".join(f"{pool} [{start}, {end})" for _, pool, start, end in freed_ranges),
                "row": _draw_row(trace.sizes(Geometry), cursors, target),
            }
        )
    return steps


def _tree_drawings() -> dict[str, Data]:
    """Return the drawings of the chapter on the radix tree, from one run: page_size 2, window 3."""
    state = model.initial(
        Geometry(page_size=2, window=3, full_pages=12, swa_pages=12, rows=2, width=16, tree=True),
        Mode.FAITHFUL,
    )
    run: tuple[tuple[str, Command], ...] = (
        ("insert", Insert("h1", (Piece("a", 8),))),
        ("lock", Match("h2", (Piece("a", 9),))),
        ("split", Insert("h3", (Piece("a", 6), Piece("b", 2)))),
        ("unlock", Unlock("h2")),
        ("tombstone", Evict(0, 6)),
        ("recovery", Insert("h4", (Piece("a", 8),))),
    )
    drawings = {}
    for name, command in run:
        before = state
        state, outcome = model.step(state, command)
        assert isinstance(outcome, Done), (command, outcome)
        drawings[name] = {"drawn": step_text.DrawnStep(command, before, state, outcome).draw()}
    return drawings


def _target(state: State, command: Command | None) -> int | None:
    """Return the length to which a finish would cut."""
    if not isinstance(command, Finish):
        return None
    request = state.request(command.request)
    return request.origin + command.finished_len if request is not None else None


def _held_row(state: State) -> tuple[str, Cursors | None]:
    """Return the only row: its turn's, or the slot's."""
    for request in state.requests:
        if request.cursors is not None:
            return request.name, request.cursors
    return next((("slot", s.slot) for s in state.sessions if s.slot is not None), ("", None))


def _draw_row(geometry: Geometry, cursors: Cursors | None, target: int | None) -> str:
    if cursors is None or geometry.window is None:
        return ""
    return text_drawings.row(cursors, geometry.page_size, geometry.window, target)


def _draw_cached_row() -> str:
    """Draw a row with everything in it, before its turn finishes: the tree's part, evicted, ahead, a
    target."""
    geometry = Geometry(
        page_size=4, window=6, full_pages=16, swa_pages=16, rows=2, width=40, tree=True
    )
    state = model.initial(geometry, Mode.FAITHFUL)
    for command in (
        Open("s1"), Submit("r1", "s1", 2, prompt=(Piece("a", 12),)), Admit("r1"), Extend((Chunk("r1", 14),)),
        Finish("r1", 1),
        Submit("r2", "s1", 9), Admit("r2"), Extend((Chunk("r2", 10),)), SpecDecode((Draft("r2", 4, 3),)),
        EvictSwa("r2", 27), SpecDecode((Draft("r2", 6, 2),)),
    ):  # fmt: skip
        state, outcome = model.step(state, command)
        assert isinstance(outcome, Done), (command, outcome)
    _, cursors = _held_row(state)
    return _draw_row(geometry, cursors, state.requests[0].origin + 3)
