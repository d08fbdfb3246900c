"""Witnesses: a finding is new where the base, driven through the same trace, does not show it."""

import io
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from ci.report import check_text, text_output
from ci.report.check_data import check_data
from impl.adapter import UnusableImplementation
from reference.commands import Done, Reason, Refused
from reference.failures import Failure
from reference.system_kinds import BLOCKS
from stateful_tests.check.finder import Finder
from stateful_tests.check.known_faults import masks as masking
from stateful_tests.check.known_faults.masks import Standing, compare_with_base, do_the_same
from stateful_tests.lockstep.check_results import CheckResult
from stateful_tests.lockstep.known_faults import FOLDER
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Row, Run, Violation
from stateful_tests.tests.check.test_masks import KEEPS, KNOWN, PLAN, THREE
from stateful_tests.tests.support.closing import named_base
from stateful_tests.traces.trace_files import load


def failing_trace(clause, step, *also, observed="y"):
    failure = Failure("x", observed)
    return Violation(clause, step, failure, also, (failure,) * len(also))


def later_violation(clause, step, first):
    """Return a violation of a clause that is checked past another's."""
    return replace(failing_trace(clause, step), first_violation=failing_trace(first, step))


@pytest.mark.parametrize(
    ("shown", "seen", "stands", "under"),
    [
        (failing_trace("SES-2", 4), None, Standing.NEW, []),
        (failing_trace("SES-2", 4), failing_trace("SES-2", 4), Standing.KNOWN, KEEPS),
        (
            failing_trace("SES-2", 4),
            failing_trace("SES-2", 2, "LEN-4", observed="12"),
            Standing.KNOWN,
            KEEPS,
        ),
        (failing_trace("SES-2", 4), failing_trace("LEN-4", 2), Standing.KNOWN, KEEPS),
        (failing_trace("SES-2", 4), UnusableImplementation(), Standing.KNOWN, KEEPS),
        # No known fault violates the clause.
        (failing_trace("END-1", 4), None, Standing.NEW, []),
        (failing_trace("END-1", 4), failing_trace("END-1", 3), Standing.KNOWN, []),
        (failing_trace("END-1", 4), UnusableImplementation(), Standing.UNTOLD, []),
        # The base violates less.
        (failing_trace("SES-2", 4, "END-1"), failing_trace("SES-2", 4), Standing.NEW, KEEPS),
        (
            failing_trace("SES-2", 4, "END-1"),
            failing_trace("SES-2", 4, "MAP-1"),
            Standing.KNOWN,
            KEEPS,
        ),
        (later_violation("END-1", 4, "SES-2"), failing_trace("SES-2", 4), Standing.UNTOLD, KEEPS),
        (
            failing_trace("END-1", 4),
            failing_trace("SES-2", 4),
            Standing.KNOWN,
            KEEPS,
        ),  # the tree gets past it
        (failing_trace("END-1", 4), failing_trace("SES-2", 3), Standing.KNOWN, KEEPS),
        (
            failing_trace("END-1", 4),
            failing_trace("MAP-1", 3),
            Standing.UNTOLD,
            [],
        ),  # of no known fault
        # Another crash is no known one.
        (failing_trace("BROKEN", 4), failing_trace("BROKEN", 4), Standing.KNOWN, []),
        (failing_trace("BROKEN", 4), failing_trace("BROKEN", 4, observed="z"), Standing.UNTOLD, []),
        (failing_trace("BROKEN", 4), failing_trace("SES-2", 3), Standing.KNOWN, KEEPS),
    ],
)
def test_a_new_finding_has_a_witness(shown, seen, stands, under, monkeypatch):
    """Else it is counted where a known fault violates the clause, or shows in the trace."""
    questions = []

    def replayed(base, trace):
        questions.append(trace)
        if isinstance(seen, Exception):
            raise seen
        return SimpleNamespace(violation=seen, rows=[])

    monkeypatch.setattr(masking, "replay", replayed)
    trace = load(FOLDER / "sglang-0.5.11" / "a_turn_retracted_twice_loses_its_session.json")
    compared = compare_with_base(THREE, list(KNOWN), trace, shown, shown.clauses[-1])
    assert (compared.stands, [mask.fault.id for mask in compared.candidates]) == (stands, under)
    [part] = questions
    assert (len(part.commands), part.clause) == (5, shown.clauses[-1])


@pytest.mark.parametrize(
    "was, now, stands",
    [
        ("done done", "done done", Standing.NEW),
        ("refused done", "done done", Standing.KNOWN),
        ("done done", "refused done", Standing.NEW),
    ],
)
def test_a_base_that_did_something_else_before_is_no_witness(was, now, stands, monkeypatch):
    """A tree with a mend goes on where its base refuses a turn, and comes to another known fault."""
    outcomes = {"done": Done(), "refused": Refused(Reason.WRONG_PHASE)}
    violation = failing_trace("SES-2", 1)

    def replayed(system, trace):
        clauses = (now if system is THREE else was).split()
        rows = [SimpleNamespace(outcome=outcomes[word]) for word in clauses]
        return SimpleNamespace(violation=None, rows=rows, trace=trace)

    monkeypatch.setattr(masking, "replay", replayed)
    trace = load(FOLDER / "sglang-0.5.11" / "a_turn_retracted_twice_loses_its_session.json")
    base = SimpleNamespace(name="b")
    assert compare_with_base(base, list(KNOWN), trace, violation, "SES-2", THREE).stands is stands
    assert compare_with_base(base, [], trace, violation, "SES-2", THREE).stands is Standing.NEW


@pytest.mark.parametrize("known, stands", [(KNOWN, Standing.KNOWN), ([], Standing.UNTOLD)])
def test_a_base_in_which_no_scheduler_runs_the_last_command_is_no_witness(known, stands, monkeypatch):
    """It has evicted a window further, and no finish keeps fewer tokens than that."""
    rows = [SimpleNamespace(outcome=Done()), SimpleNamespace(outcome=Refused(Reason.UNFAITHFUL))]
    monkeypatch.setattr(masking, "replay", lambda *_: SimpleNamespace(violation=None, rows=rows))
    trace = load(FOLDER / "sglang-0.5.11" / "a_turn_retracted_twice_loses_its_session.json")
    compared = compare_with_base(THREE, list(known), trace, failing_trace("SES-2", 1), "SES-2")
    assert compared.stands is stands and "no scheduler runs the last command" in compared.why


@pytest.mark.parametrize(
    "line, same",
    [
        ("store 3: blocks 3 to chunks 0", True),
        ("chunks forgotten: 0", True),
        ("D: store 3: blocks 3 to chunks 0", True),
        ("a message to P says that there is no more need of r2", True),
        ("P gives back what r2 left", True),
        ("forgotten: 3", False),
        ("D: forgotten: 3", False),
    ],
)
def test_stores_and_messages_are_no_schedule(line, same, monkeypatch):
    """An offer of a preempted request is stored too, or a peer gets no message: known faults of schedules do
    not explain it."""
    path = FOLDER / "vllm-0.33.0+offload" / "a_state_is_stored_from_a_block_that_holds_kv.json"
    trace = load(path)

    def replayed(system, trace):
        rows = tuple(Row(command, Done()) for command in trace.commands)
        further_lines = (line,) if system is tree else ()
        last_row = replace(rows[-1], tree=("r1 computes [0, 4)", *further_lines))
        return Run(trace, system.name, (*rows[:-1], last_row), None)

    monkeypatch.setattr(masking, "replay", replayed)
    can = SimpleNamespace(system_kind=BLOCKS)
    tree, base = (SimpleNamespace(name=name, capabilities=can) for name in "tb")
    assert do_the_same(tree, base, trace, failing_trace("XFER-1", 2)) is same


@pytest.mark.parametrize(
    "clauses, seen, old, says",
    [
        # The base violates MAP-1 there: a known fault's clause, or nobody's.
        (("MAP-1",), failing_trace("MAP-1", 0), None, "; where the base shows it, this tree violates SES-2"),
        (("MAP-2",), failing_trace("MAP-1", 0), True, "(no witness: b violates MAP-1 in the trace as well)"),
        (("MAP-2",), UnusableImplementation("no pool"), False, "none: b cannot be driven through the trace"),
    ],
)  # fmt: skip
def test_a_finding_without_a_witness_at_the_end_says_so(clauses, seen, old, says, monkeypatch):
    """It fails a check only where no base can be driven."""
    [mask] = [m for m in KNOWN if m.fault.id == KEEPS[0]]
    trace, _ = mask.there[0]
    mask = replace(mask, fault=msgspec.structs.replace(mask.fault, clauses=clauses))
    violation = replay(THREE, trace).violation
    if not isinstance(seen, Exception):
        seen = replace(seen, step=violation.step)

    def replayed(base, trace):
        if isinstance(seen, Exception):
            raise seen
        return SimpleNamespace(violation=seen, rows=[])

    monkeypatch.setattr(masking, "replay", replayed)
    finder = Finder(THREE, SimpleNamespace(name="b"), [mask])
    finder.take(replace(violation, first_violation=failing_trace("MAP-1", violation.step)), trace)
    assert finder.has_new == (old is False)
    result = CheckResult("tree", "smoke", 0, [], findings=finder.findings(), masked=finder.masked)
    findings = [(finding.clause, finding.old) for finding in result.findings if finding.clause == "SES-2"]
    assert findings == ([] if old is None else [("SES-2", old)])
    assert result.masked == ({((KEEPS[0],), "SES-2"): 1} if old is None else {})
    data = check_data(
        result, PLAN, capabilities=THREE.capabilities, base=named_base("b"), masks=[mask]
    )
    assert data["exit_code"] == (1 if old is False else 4)  # nothing was driven
    for each in data["findings"]:
        each["not_saved"] = "not saved"
    out = text_output.console(io.StringIO())
    check_text.check(out, data)
    assert says in " ".join(out.file.getvalue().split())
