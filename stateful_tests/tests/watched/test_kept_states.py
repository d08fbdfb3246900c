"""States that requests keep for the tree, as a log of level `pages` shows them."""

import pytest
from msgspec import convert
from msgspec.structs import replace

from impl.sglang.server.events import Extended, Paged, ShownStates, WatchHeader
from reference.commands import Submit
from stateful_tests.tests.support.watched_logs import header
from stateful_tests.watched.actions.prefill import on_extended
from stateful_tests.watched.log_follower import LogFollower
from stateful_tests.watched.kept_states import KeptStates
from stateful_tests.watched.violated_clauses import Verdict

# A turn of c1 began at 2 of pages of 4, so its state is after 6 tokens: of no node that ends with a page.
KEPT = {"free": [1], "held": {"c1": [2, 3], "c2": [4, 5]}, "tracked": {"c1": (3, 6)}, "nodes": []}
NODE = ([7, 7, 7, 7], [4, 5, 6, 7], [], 0, 0)


def head(release="9.9.9"):
    sizes = {"page_size": 4, "window": None, "swa_tokens": 0, "states": 8, "tracks": 1}
    return convert(header(release=release, **sizes), WatchHeader)


def steps_of(*shown, nodes=(), cells=(8, 8, 0, 0)):
    """Yield the pages of steps, of states as they are shown."""
    owners = {"c1": (1, cells, list(range(8)))}
    for states in shown:
        states = convert(KEPT | states, ShownStates)
        yield Paged(owners, [], [], nodes=list(nodes[: len(states.nodes)]), states=states)


@pytest.mark.parametrize("release, length, known", [
    ("0.5.23", 6, "tracked-within-a-page"), ("0.5.23", 8, None), ("9.9.9", 6, None),
])  # fmt: skip
def test_a_node_has_the_state_of_a_longer_text(release, length, known):
    """And whoever goes on from it does too, up to the step that shows another state there."""
    keeps = {"tracked": {"c1": (3, length)}}
    ends = {"tracked": {}, "nodes": [3]}
    other = {"tracked": {}, "nodes": [5]}
    states = KeptStates(head(release))
    for number, (step, verdicts, hits) in enumerate(zip(
        steps_of(keeps, ends, ends, other, other, nodes=[NODE]), (0, 1, 0, 0, 0), (0, 1, 1, 1, 0),
        strict=True,
    )):  # fmt: skip
        states.note_prefix("c3", NODE[0])
        said = list(states.judge(number, step, ()))
        assert [(one.clause, by) for one, by in said] == [("STA-3", known)] * verdicts
        assert list(states.wrong_hits(step)) == [("c3", 4, known or "")] * hits
        assert not list(states.wrong_hits(step))


def test_a_node_without_a_state_hides_none_behind_it():
    states = KeptStates(head())
    above = ([8, 8, 8, 8], *NODE[1:])
    below = NODE
    before, after = steps_of({}, {"tracked": {}, "nodes": [None, 3]}, nodes=[above, below])
    assert not list(states.judge(0, before, ()))
    expected = "the node of 4 tokens has the state after them"
    observed = "slot 3, in which c1 kept the state after 6"
    assert [one for one, _ in states.judge(1, after, ())] == [Verdict("STA-3", expected, observed)]


@pytest.mark.parametrize("tracks, text, has, known", [
    (0, NODE[0], 3, ["why"]), (1, NODE[0], 3, []), (0, [7] * 3, 3, []), (0, NODE[0], None, []),
])  # fmt: skip
def test_a_request_may_end_with_a_state_that_is_ahead(tracks, text, has, known):
    """The node that it leaves has that state, if it ends there, and the server tracks none."""
    [step] = steps_of({"tracked": {}, "nodes": [has]}, nodes=[NODE])
    states = KeptStates(replace(head(), tracks=tracks))
    states.note_end(text, "why")
    states.note_prefix("c3", NODE[0])
    assert not list(states.judge(0, step, ()))
    assert [reason for _, _, reason in states.wrong_hits(step)] == known


def test_a_log_without_pages_leaves_nothing_to_remember():
    """It has no token ids either."""
    follower = LogFollower(replace(head(), tree=True))
    follower.do(Submit("a", None, 8))
    follower.request_seen("a").matched = 4
    on_extended(follower, Extended([("a", 4, 4, (8, 8, 0, 4))]))
    assert follower.state.request("a").cursors and not follower.kept_states._hits


@pytest.mark.parametrize("path, at", [([7] * 8, 1), ([7] * 4, 2)])
def test_a_node_may_have_a_later_state_or_the_state_of_a_lost_step(path, at):
    states = KeptStates(head())
    before, after = steps_of({}, {"nodes": [3]}, nodes=[(path, *NODE[1:])])
    assert not [*states.judge(0, before, ()), *states.judge(at, after, ())]


OWN = "c1 keeps its last state for the tree in one of its slots [3]"
SHORT = "a state that c1 keeps for the tree is after 5 tokens at most"


@pytest.mark.parametrize("tracked, committed, expected, observed", [
    ((4, 6), 8, OWN, "in slot 4"), ((2, 6), 8, OWN, "in slot 2"), ((3, 6), 5, SHORT, "slot 3 after 6"),
])  # fmt: skip
def test_a_state_is_kept_in_an_own_slot_and_of_no_more_than_the_text(
    tracked, committed, expected, observed
):
    [step] = steps_of({"tracked": {"c1": tracked}}, cells=(committed, 8, 0, 0))
    found = [verdict for verdict, _ in KeptStates(head()).judge(0, step, ())]
    assert found == [Verdict("STA-8", expected, observed)]


def test_states_of_requests_without_a_row_are_not_judged():
    [step] = steps_of({"tracked": {"c2": (5, 6)}})
    assert not list(KeptStates(head()).judge(0, step, ()))


def test_a_session_may_track_drafts_that_its_turn_did_not_take():
    """On a server with drafts."""
    tracked = {"c2": (5, 6), **KEPT["tracked"]}
    long, ends = steps_of({"tracked": tracked}, {"nodes": [3]}, nodes=[NODE], cells=(5, 8, 0, 0))
    states = KeptStates(replace(head(), speculative=True))
    assert not [*states.judge(0, long, {"c1"}), *states.judge(1, ends, {"c1"})]
    for sessions, speculative in (({"c2"}, True), ({"c1"}, False)):
        states = KeptStates(replace(head(), speculative=speculative))
        assert [one.clause for one, _ in states.judge(0, long, sessions)] == ["STA-8"]
