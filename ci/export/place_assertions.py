"""Assertions of an exported test: what must hold at the places of a failure, in the release's own terms.

A function for each kind of place. What a failure without such places is about, the reference's state shows.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ci.export.page_assertions import (
    entry_place, odd_page, page_place, position_place, renamed_row, row_place,
)  # fmt: skip
from ci.export.recorded_run import Asserts, NotExportable, RecordedRun, tokens_of_release
from ci.export.tree_assertions import assert_counter, assert_node, assert_tree_page
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.scheduler.call_log import ids_text, quote, variable
from reference.clauses.sliding_window import evicted_too_far
from reference.commands import CheckBusy, CheckIdle, Done, Evict, Submit
from reference.failures import (
    AtCounter, AtCursor, AtEntry, AtLock, AtNamed, AtNode, AtPage, AtPosition, AtRow, AtText, AtTreePage,
)  # fmt: skip
from reference.geometry import Geometry
from reference.state import Phase, free, text_tokens

HOOK = "impl.sglang.process.testing:hook"


def device_sizes(geometry: Geometry) -> Geometry:
    """Return the sizes of the server."""
    return geometry


def host_arguments(_: Geometry) -> list[str]:
    """Return no arguments: there is no host memory."""
    return []


def is_unified(release: Release0510, geometry: Geometry) -> bool:
    """Return whether the release has its one tree for all kinds of KV at these sizes."""
    return release.is_unified(geometry)


def assert_violation(run: RecordedRun) -> Asserts:
    """Return the assertion that shows the violated clause. Raises NotExportable where no object of the
    release shows it."""
    check = ""
    if isinstance(run.last, (CheckBusy, CheckIdle)):
        busy = isinstance(run.last, CheckBusy)
        check = "checks.self_check_during_busy" if busy else "lambda: idle_check(checks)"
        if run.clause in ("CHK-1", "BROKEN"):
            return Asserts([f"self.assertIsNone(alarm({check}))"])
        if run.clause == "CHK-2":
            return Asserts(_term_assertions(run, check))
    for assertion in _candidate_assertions(run):
        if assertion is not None:
            return (
                assertion._replace(assertions=[f"alarm({check})", *assertion.assertions])
                if check
                else assertion
            )
    raise NotExportable(f"{run.clause} shows in nothing that the release's classes offer")


def _candidate_assertions(run: RecordedRun) -> Iterator[Asserts | None]:
    """Yield the assertions that may show it, best first."""
    for place in run.at:
        yield _OF[type(place)](run, place)
    yield _state_difference(run)
    yield _freed_tokens(run)
    yield odd_page(run)
    yield renamed_row(run)


# -- cursors, sessions, requests ---------------------------------------------------------------------


def _cursor_assertions(run: RecordedRun, place: AtCursor) -> Asserts | None:
    """Assert that cursors have a value, or keep to a bound: another cursor, the row, whole pages, a
    window."""
    lines, cursors_lookup = run.cursors_expression(place.owner)
    code = run.cursor(cursors_lookup, place.field)
    if place.must is not None:
        request_view = run.after.view.requests.get(place.owner)
        if request_view is not None and request_view.row is None:
            return _named_assertions(run, AtNamed("request", place.owner))
        off = [p for p in run.at if isinstance(p, AtCursor) and p.must is not None]
        # How far a window eviction goes is policy, and another release may have another.
        fixed = [p for p in off if p.field != "swa_evicted_seqlen"] or off
        codes = [(run.cursor(run.of_cursors(p.owner), p.field), p.must) for p in fixed]
        return Asserts([f"self.assertEqual({code}, {must})" for code, must in codes])
    others = [
        p.field for p in run.at if isinstance(p, AtCursor) and p.owner == place.owner and p != place
    ]
    if others:
        return Asserts([*lines, f"self.assertLessEqual({code}, {run.cursor(cursors_lookup, others[0])})"])
    if place.field == "swa_evicted_seqlen":
        return _eviction_assertions(run)
    if place.field == "cache_protected_len":
        return Asserts([*lines, f"self.assertEqual({code} % {run.page_size}, 0)"])
    width = run.after.state.config.geometry.width
    return Asserts([*lines, f"self.assertIn({code}, range({width + 1}))"])


def _eviction_assertions(run: RecordedRun) -> Asserts | None:
    """Assert the end of a window eviction."""
    eviction = evicted_too_far(run.step)
    if eviction is None:
        return None
    was, _, low, high, evicted_to = eviction
    code = run.cursor(run.holder_cursors(was.name, run.after), "swa_evicted_seqlen")
    if low <= evicted_to <= high:
        return Asserts([f"self.assertEqual({code} % {run.page_size}, 0)"])
    bound = f"LessEqual({code}, {high})" if evicted_to > high else f"GreaterEqual({code}, {low})"
    return Asserts([f"self.assert{bound}"])


class _Fact(NamedTuple):
    """An expression over the release's objects, with its expected and its observed value.

    of: its kind and owner.
    """

    of: tuple[str, str]
    code: str
    want: object
    got: object

    @property
    def assertion(self) -> str:
        if isinstance(self.want, bool):
            return f"self.assert{self.want}({self.code})"
        expected = ids_text(self.want) if isinstance(self.want, tuple) else self.want
        return f"self.assertEqual({self.code}, {expected})"


def _named_assertions(run: RecordedRun, place: AtNamed | AtText) -> Asserts | None:
    """Assert a session, a slot, a request or a text that differs from the reference."""
    kind = place.kind if isinstance(place, AtNamed) else "text"
    name = place.name if isinstance(place, AtNamed) else place.owner
    off = [
        fact.assertion for fact in _state_facts(run) if fact.of == (kind, name) and fact.want != fact.got
    ]
    return Asserts(off) if off else None


def _state_difference(run: RecordedRun) -> Asserts | None:
    """Assert a difference between the release's objects and the reference's state, of the first owner that
    has one; how far a window eviction goes comes last."""
    off = [fact for fact in _state_facts(run) if fact.want != fact.got]
    off.sort(key=lambda fact: fact.of[0] == "swa")
    return Asserts([fact.assertion for fact in off if fact.of == off[0].of]) if off else None


def _state_facts(run: RecordedRun) -> Iterator[_Fact]:
    """Yield the values that the release's objects show at the end."""
    state = run.after.state
    view = run.after.view
    page = run.page_size
    last = run.last
    if isinstance(last, Submit):
        sent = variable(last.request)  # rejected, it may have run: then its mark has moved on
        done = [isinstance(outcome, Done) for outcome in (run.step.expected, run.step.outcome)]
        yield _Fact(("outcome", ""), f"({sent}.to_finish or {sent}.finished_reason) is None", *done)
    for name in sorted({s.name for s in state.sessions} | set(view.sessions)):
        known = state.session(name) is not None, name in view.sessions
        yield _Fact(("session", name), f"{quote(name)} in server.sessions", *known)
    for session in state.sessions:
        session_view = view.sessions.get(session.name)
        turn = state.request(session.turn)
        name = session.name
        if session_view is None:
            continue
        lookup = f"server.sessions.get({quote(name)})"
        code = f'getattr({lookup}, "close_on_finish", False)'
        yield _Fact(("session", name), code, session.closing, session_view.closing)
        if turn is None or turn.phase in (Phase.QUEUED, Phase.ADMITTED):
            keeps = session.slot is not None, session_view.cursors is not None
            yield _Fact(("slot", name), f"holds_kv(server, {quote(name)})", *keeps)
            yield from _cursor_facts(run, f"slot of {name}", session.slot, session_view.cursors)
        if turn is None:
            both = text_tokens(session.history), session_view.history
            texts = (tokens_of_release(run.geometry, text) for text in both)
            yield _Fact(("text", name), f"history({lookup})", *texts)
    for request in state.requests:
        ours = view.requests.get(request.name)
        if ours is None:
            continue
        slot = (own := state.session(request.session)) is not None and own.slot is not None
        if request.phase is not Phase.ADMITTED or slot:  # else it has no row, or a lock alone
            row = run.cursor(run.of_cursors(request.name), "req_pool_idx")
            has = request.cursors is not None, ours.row is not None
            yield _Fact(("request", request.name), f"{row} is not None", *has)
        if ours.row is not None:  # its prefix is the tree's
            yield from _cursor_facts(
                run, request.name, request.cursors, ours.cursors, "cache_protected_len"
            )
    full, swa, rows, _ = free(state)
    two = "full_" if run.window is not None else ""
    sizes = full * page, len(view.free_full) * page
    yield _Fact(("full", ""), f"server.allocator.{two}available_size()", *sizes)
    if two:
        sizes = swa * page, len(view.free_swa) * page
        yield _Fact(("swa", ""), "server.allocator.swa_available_size()", *sizes)
    yield _Fact(("rows", ""), "len(server.rows.free_slots)", rows, len(view.free_rows))


def _cursor_facts(
    run: RecordedRun, owner: str, expected: Any, observed: Any, without: str = ""
) -> Iterator[_Fact]:
    if expected is None or observed is None:
        return
    for field, must, has in zip(expected._fields, expected, observed, strict=True):
        if field != without:
            kind = "swa" if field == "swa_evicted_seqlen" else "cursors"
            yield _Fact((kind, owner), run.cursor(run.of_cursors(owner), field), must, has)


# -- memory checks and evictions -----------------------------------------------------------------------


def _term_assertions(run: RecordedRun, check: str) -> list[str]:
    """Assert the terms that a check counts wrongly."""
    expected = run.step.expected
    outcome = run.step.outcome
    assert isinstance(expected, Done) and isinstance(outcome, Done)
    if expected.report is None or outcome.report is None:
        raise NotExportable(
            "CHK-2: whether a check is switched on is for the server's settings to say"
        )
    counted = {account.pool for account in outcome.report.accounts}
    if missing := [a.pool for a in expected.report.accounts if a.pool not in counted]:
        return [f"self.assertIn({quote(missing[0])}, terms(checks, {check}))"]
    lines = [f"counted = terms(checks, {check})"]
    for term in run.at:
        if isinstance(term, AtCounter) and term.name != "total":
            code = f"counted[{quote(term.pool)}][{quote(term.name)}]"
            if term.pool == "rows":
                code = "server.cache.session_held_req_count()"
            lines.append(f"self.assertEqual({code}, {term.must})")
    return lines


def _freed_tokens(run: RecordedRun) -> Asserts | None:
    """Assert the tokens that an eviction frees, against those it was to free and those it reports."""
    if not isinstance(run.last, Evict) or run.before.view.tree is None:
        return None
    before = run.before.view
    after = run.after.view
    reported = getattr(run.step.outcome, "freed", None)
    two = run.window is not None
    tree = run.before.view.tree
    slots_and_locks = {"full": [(n.slots, n.full_locks) for n in tree.nodes], "swa": []}
    pools = [("full", before.free_full, after.free_full, "num_tokens_evicted")]
    if two:
        slots_and_locks["swa"] = [(n.swa_slots, n.swa_locks) for n in tree.nodes]
        pools.append(("swa", before.free_swa, after.free_swa, "swa_num_tokens_evicted"))
    for pool, had, has, field in pools:
        freed = (len(has) - len(had)) * run.page_size
        first_owed = min(
            getattr(run.last, pool), sum(len(slots) for slots, locks in slots_and_locks[pool] if not locks)
        )
        size = f"server.allocator.{f'{pool}_' if two else ''}available_size()"
        if freed < first_owed:
            return Asserts(
                [f"self.assertGreaterEqual({size} - before, {first_owed})"], [f"before = {size}"]
            )
        if reported is not None and getattr(reported, pool) != freed:
            return Asserts(
                [f"self.assertEqual(evicted.{field}, {size} - before)"], [f"before = {size}"]
            )
    return None


_OF: dict[type, Callable[[RecordedRun, Any], Asserts | None]] = {
    AtCounter: assert_counter,
    AtCursor: _cursor_assertions,
    AtEntry: entry_place,
    AtLock: lambda *_: None,
    AtNamed: _named_assertions,
    AtNode: assert_node,
    AtPage: page_place,
    AtPosition: position_place,
    AtRow: row_place,
    AtText: _named_assertions,
    AtTreePage: assert_tree_page,
}
