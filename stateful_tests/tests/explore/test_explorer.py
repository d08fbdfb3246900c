"""Explorations: counts, states modulo symmetry, bounds, that clauses find faults."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from impl.adapter import View
from impl.choices import RandomChoices, pick
from reference import clauses, model
from reference.clauses import CLAUSES, about
from reference.clauses.step import Step
from reference.failures import failure
from reference.commands import (
    Abort, Close, Decode, Done, Evict, Finish, Insert, Match, Mode, Piece, Retract, SpecDecode, Submit,
)  # fmt: skip
from reference.geometry import Geometry
from stateful_tests.check import corpus
from stateful_tests.check.executors import Processes
from stateful_tests.coverage.scopes import SCOPES, texts_in
from stateful_tests.generate.exploration_scope import Scope
from stateful_tests.coverage.situations import situation
from stateful_tests.explore import inductive_check, search
from stateful_tests.explore.representative import Representatives, relabel
from stateful_tests.explore.inductive_check import ReferenceInState
from stateful_tests.explore.search import Exploration, Explorer
from stateful_tests.lockstep.abstraction import facts_of
from stateful_tests.tests.support.accepted import accepted_values, read
from stateful_tests.tests.support.night import some_at_night

README = Path(__file__).parents[3] / "ci" / "README.md"

# Scope -> states, transitions, refused commands, depth. A changed rule shows here, so does a changed scope:
# --accept writes them.
COUNTS = {name: tuple(counts) for name, counts in read("explore_counts").items()}

SMALL = Scope(
    "small",
    "",
    Geometry(page_size=1, window=1, full_pages=3, swa_pages=3, rows=2, width=3),
    sessions=1,
    ordinary=1,
    submits=(1,),
    ahead=2,
    chunks=1,
)
TREE = Scope(
    "small-tree",
    "",
    Geometry(page_size=1, window=2, full_pages=2, swa_pages=2, rows=1, width=2, tree=True),
    lock_holders=1,
    texts="ab",
    prompts=texts_in("ab", 2),
    evicts=False,
)
BOTH = Scope(
    "small-both",
    "",
    Geometry(page_size=1, window=1, full_pages=2, swa_pages=2, rows=1, width=2, tree=True),
    Mode.FAITHFUL,
    sessions=1,
    ordinary=1,
    lock_holders=1,
    submits=(1,),
    prompts=("a1", "b1"),
    texts="ab",
    retracts=False,
)
HOLDERS = replace(
    TREE,
    name="small-holders",
    lock_holders=2,
    texts="a",
    prompts=("a1", "a2"),
    geometry=Geometry(page_size=1, window=1, full_pages=2, swa_pages=2, rows=1, width=2, tree=True),
)


def test_the_table_of_scopes_has_these_counts(request):
    rows = 0
    text = README.read_text(encoding="utf-8")

    def row(found):
        nonlocal rows
        rows += 1
        return f"| {found[1]} | {' | '.join(f'{count:,}' for count in COUNTS[found[1]])} |"

    renewed = re.sub(r"^\| ([a-z0-9-]+) \| [\d, |]+ \|$", row, text, flags=re.MULTILINE)
    if request.config.getoption("accept"):
        README.write_text(renewed, encoding="utf-8")
    assert renewed == text, "--accept"
    assert rows == 5


# Above 5,000 transitions a scope takes a second and more.
@pytest.mark.parametrize("name", some_at_night(COUNTS, lambda name: COUNTS[name][1] > 5_000))
def test_a_scope_has_as_many_states_as_accepted(name):
    result = search.run(SCOPES[name])
    assert result.complete
    counts = {name: [result.states, result.transitions, result.refused, result.depth]}
    assert accepted_values("explore_counts", counts) == counts
    assert result.situations.keys() <= corpus.situations(), "python -m ci.corpus"


@pytest.mark.parametrize("name", ["ordinary", "both-session", "tree-page2-long"])
def test_clauses_hold_where_they_are_not_checked(name, monkeypatch):
    """Of other commands than they are about, without a tree or a window: and no trigger comes up."""
    skipped = set()

    def step_of(**parts):
        step = Step(**parts)
        for clause in {*CLAUSES.values()}.difference(about(step)) if step.done else ():
            assert clause.check(step) is None and not clause.trigger(step), clause.id
            skipped.add(clause.id)
        return step

    monkeypatch.setattr(inductive_check, "Step", step_of)
    assert search.run(SCOPES[name], states=120).transitions
    assert skipped >= {
        "LEN-2",
        "LEN-3",
        "SES-3",
        "SWA-1",
        "CHK-3",
        "TREE-5",
        "TREE-7",
        "TREE-10",
        "TREE-12",
    }


@pytest.mark.parametrize(
    "scope",
    [SMALL, replace(SMALL, name="faithful", mode=Mode.FAITHFUL), TREE, BOTH],
    ids=lambda s: s.name,
)
def test_states_lead_where_their_representatives_lead(scope):
    """Every command, in states as runs leave them (names as they came, serials and moments that only grow),
    leads where it leads in the representative."""
    explorer = Explorer(scope, clauses=False)
    choices = RandomChoices(0)
    states = explorer.states
    for _ in range(5):
        state = states.initial
        for _ in range(20):
            stands = states.of(state)
            assert states.of(stands) == stands
            real = [
                relabel(command, states.renaming(state), state)
                for command in states.commands(stands)
            ]
            leads = list(explorer.moves(stands))
            for number in {choices.upto(len(leads) - 1) for _ in range(16)}:
                command, same, alone = leads[number]
                now, outcome = model.step(state, real[number])
                assert type(outcome) is type(same) and states.of(now) == states.of(alone), real[
                    number
                ]
                assert situation(stands, command, same, alone) == situation(
                    state, real[number], outcome, now
                )
            done = [index for index, (_, outcome, _) in enumerate(leads) if isinstance(outcome, Done)]
            state, _ = model.step(state, real[pick(choices, done)])


def test_letters_are_alike():
    """Two nodes were never used at one moment unless one is above the other: no letter decides."""
    geometry = Geometry(page_size=1, window=1, full_pages=6, swa_pages=6, rows=1, width=3, tree=True)
    scope = Scope("letters", "", geometry, lock_holders=1, texts="ab", prompts=texts_in("ab", 3))
    states = Representatives(scope)
    keys = []
    for first, then in ("ab", "ba"):
        state = states.initial
        for command in (
            Insert("h1", (Piece(first, 2),)),
            Insert("h1", (Piece(then, 3),)),
            Evict(0, 2),
        ):
            state, outcome = model.step(state, command)
            assert isinstance(outcome, Done)
        keys.append(states.of(state))
    assert keys[0] == keys[1]


def test_letters_are_not_alike_where_prompts_tell_them_apart():
    for prompts, alike in ((("a1", "b1"), True), (("a1", "a2", "b1"), False)):
        states = Representatives(replace(TREE, prompts=prompts))
        keys = {
            states.of(model.step(states.initial, Insert("h1", (Piece(t, 1),)))[0]) for t in "ab"
        }
        assert (len(keys) == 1) == alike


@pytest.mark.parametrize("scope", [SMALL, TREE], ids=lambda s: s.name)
def test_every_way_leads_there(scope):
    explorer = Explorer(scope)
    explorer.run(states=300)
    for index in range(0, len(explorer.queue), 17):
        state = explorer.states.initial
        commands = explorer.path(index)
        for command in commands:
            state, outcome = model.step(state, command)
            assert isinstance(outcome, Done)
        assert explorer.states.of(state) == explorer.queue[index]
        assert explorer.levels[len(commands)] <= index, "a shortest way"


def test_bounds_are_reported():
    by_depth = search.run(SMALL, depth=4)
    assert (by_depth.stopped, by_depth.depth, by_depth.complete) == ("depth 4", 4, False)
    by_states = search.run(SMALL, states=50)
    assert by_states.stopped == "50 states" and by_states.states >= 50 > by_states.expanded
    assert search.run(SMALL, memory_mb=1).stopped == "1 MB of memory"


def test_a_violation_is_reported_by_a_shortest_trace(monkeypatch):
    """A clause that nothing keeps: finishes with all outputs are violations. It is found wherever it runs."""

    def never(step):
        return (
            failure("no finish", "one") if isinstance(step.command, Finish) and step.done else None
        )

    monkeypatch.setitem(CLAUSES, "LEN-2", replace(CLAUSES["LEN-2"], check=never))
    monkeypatch.setattr(clauses, "clauses_of", clauses.clauses_of.__wrapped__)
    monkeypatch.setattr(search, "SPREAD", 1)
    processes = Processes(2)
    try:
        results = [search.run(SMALL), search.run(SMALL, executor=processes)]
    finally:
        processes.close()
    for result in results:
        assert result.stopped == "a clause was violated"
        assert result.finding is not None and result.finding.clause == "LEN-2"
        trace = result.finding.run.trace
        assert trace.origin == "exhaustive"
        assert [type(c).__name__ for c in trace.commands] == ["Submit", "Admit", "Extend", "Finish"]
    assert visited_states(results[0]) == visited_states(results[1])


def visited_states(result: Exploration) -> tuple[object, ...]:
    finding = result.finding.run.trace if result.finding is not None else None
    return (
        result.states, result.expanded, result.transitions, result.refused, result.depth, result.stopped,
        result.situations, result.reached, finding,
    )  # fmt: skip


@pytest.mark.parametrize(("scope", "bound"), [(SCOPES["batches"], None), (TREE, 60)])
def test_several_processes_agree_with_one(scope, bound, monkeypatch):
    monkeypatch.setattr(search, "SPREAD", 1)
    processes = Processes(3)
    try:
        one = search.run(scope, states=bound)
        assert visited_states(search.run(scope, states=bound, executor=processes)) == visited_states(one)
    finally:
        processes.close()


# -- faults in the system: what is physical goes wrong after some commands, the rules are right ---


class Faulty(ReferenceInState):
    """Does something wrong after each command of a kind, given the full pages that this gave back, or shows
    something wrong then."""

    after = False

    def __init__(self, kind, does, shows):
        self.kind = kind
        self.does = does
        self.shows = shows

    def carry_out(self, kind, now, effects):
        before = [*self.free["full"]]
        super().carry_out(kind, now, effects)
        self.after = kind is self.kind
        if self.after and self.does is not None:
            self.does(self, [page for page in self.free["full"] if page not in before])

    def view(self):
        view = super().view()
        return self.shows(view) if self.after and self.shows is not None else view


def forgets_to_free(system: Faulty, freed: list[int]) -> None:
    system.free["full"] = [page for page in system.free["full"] if page not in freed]


def writes_another_stamp(system: Faulty, _: list[int]) -> None:
    system.stamps["full"] = [stamp and stamp + 1 for stamp in system.stamps["full"]]


def keeps_a_mapping(view: View) -> View:
    mapping = [1 if slot in view.free_full else to for slot, to in enumerate(view.full_to_swa)]
    return structs.replace(view, full_to_swa=mapping)


def counts_one_lock(view: View) -> View:
    nodes = [structs.replace(node, full_locks=min(node.full_locks, 1)) for node in view.tree.nodes]
    return structs.replace(view, tree=structs.replace(view.tree, nodes=nodes))


def moves_a_cursor(view: View) -> View:
    cursors = {n: r.cursors for n, r in view.requests.items() if r.cursors is not None}
    further = {n: c._replace(kv_committed_len=c.kv_committed_len + 1) for n, c in cursors.items()}
    requests = {n: structs.replace(r, cursors=further.get(n)) for n, r in view.requests.items()}
    return structs.replace(view, requests=requests)


@pytest.mark.parametrize(
    ("kind", "does", "shows", "clauses"),
    [
        (Finish, lambda system, freed: system.free["full"].extend(freed), None, {"OWN-2"}),
        (Retract, forgets_to_free, None, {"FREE-1", "OWN-3", "END-1"}),
        (Submit, lambda system, _: system.free["swa"].extend([*system.pages["swa"].values()][:1]), None,
         {"FREE-2", "OWN-1"}),
        (Decode, writes_another_stamp, None, {"READ-1"}),
        (Close, lambda system, _: system.free_rows.__delitem__(slice(1, None)), None, {"END-1", "OWN-4"}),
        (Abort, None, keeps_a_mapping, {"MAP-4"}),
        (Match, None, counts_one_lock, {"TREE-6", "TREE-9"}),
        (SpecDecode, None, moves_a_cursor, {"LEN-1", "LEN-4", "REF-1"}),
    ],
)  # fmt: skip
def test_faults_of_the_system_are_found(kind, does, shows, clauses):
    system = Faulty(kind, does, shows)
    explorer = Explorer(HOLDERS if kind is Match else SMALL, system=system)
    stopped = explorer.run(states=2000)
    finding = explorer.result(stopped).finding
    assert finding is not None and finding.run.violation is not None, stopped
    assert set(finding.run.violation.clauses) & clauses, finding.run.violation


WITH_FACTS = [SMALL, BOTH, SCOPES["late-two"], SCOPES["tree-parts"], SCOPES["both-session"]]


@pytest.mark.parametrize("scope", WITH_FACTS, ids=lambda s: s.name)
def test_facts_that_are_remembered_are_those_of_every_step(scope, monkeypatch):
    """The system is put into the state before each step, and carries it out."""
    system = ReferenceInState()
    checked = 0

    def step_of(**parts):
        nonlocal checked
        step = Step(**parts)
        if step.done:
            system.start_in(step.was)
            assert facts_of(system.view(), scope.geometry) == step.before
            now, _, effects = model.step_with_effects(step.was, step.command)
            system.carry_out(type(step.command), now, effects)
            assert facts_of(system.view(), scope.geometry) == step.after, step.command
            checked += 1
        return step

    monkeypatch.setattr(inductive_check, "Step", step_of)
    search.run(scope, states=100)
    assert checked > 300
