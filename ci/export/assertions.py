"""What an exported test asserts: the fact that the violated clause is about, in the release's own terms."""

from collections.abc import Iterator
from typing import NamedTuple

from ci.export import pool_assertions, tree_assertions
from ci.export.recorded_run import Asserts, NotExportable, RecordedRun
from impl.sglang.scheduler.call_log import ids_text, quoted, variable
from reference.commands import CheckBusy, CheckIdle, Done, Submit
from reference.failures import AtCounter, AtCursor
from reference.state import Cursors, Phase, free, text_tokens
from stateful_tests.lockstep.results import Trace

_CURSORS = ("kv_committed_len", "kv_allocated_len", "swa_evicted_seqlen")


class Equality(NamedTuple):
    """An expression over the release's objects, what it must be, and what it is."""

    code: str
    want: str
    got: str

    @property
    def assertion(self) -> str:
        if self.want in ("True", "False"):
            return f"self.assert{self.want}({self.code})"
        return f"self.assertEqual({self.code}, {self.want})"


def asserted(trace: Trace, run: RecordedRun) -> Asserts:
    """What shows the clause that is violated. Raises NotExportable where nothing of the release does."""
    clause, last, check = run.clause, run.last, ""
    if isinstance(last, (CheckBusy, CheckIdle)):
        busy = isinstance(last, CheckBusy)
        check = "checks.self_check_during_busy" if busy else "lambda: idle_check(checks)"
        if clause in ("CHK-1", "BROKEN"):
            return Asserts([f"self.assertIsNone(alarm({check}))"])
        if clause == "CHK-2":
            return Asserts(_terms(run, check))
    where = tree_assertions if clause.startswith("TREE-") else pool_assertions
    asserts = _order(trace, run) if clause == "LEN-1" else where.asserted(run)
    differing = [(kind, fact) for kind, fact in _facts(trace, run) if fact.want != fact.got]
    shown = [fact for kind, fact in differing if clause.startswith(kind)]
    if asserts is None and not shown and clause.startswith(("OWN", "READ", "TREE")):
        asserts = pool_assertions.ownership(run)
    if asserts is None and differing:
        # How far a window eviction goes is policy, and another release may have another: that comes last.
        first = min(differing, key=lambda found: found[0] == "SWA")[0]
        shown = shown or [fact for kind, fact in differing if kind == first]
        asserts = Asserts([fact.assertion for fact in shown])
    asserts = asserts or pool_assertions.ownership(run) or pool_assertions.renamed(run)
    if asserts is None:
        raise NotExportable(f"{clause} shows in nothing that the release's classes offer")
    return asserts._replace(assertions=[f"alarm({check})", *asserts.assertions]) if check else asserts


# -- the memory checks ---------------------------------------------------------------------------------


def _terms(run: RecordedRun, check: str) -> list[str]:
    """The terms that a check counts other than it should."""
    step = run.step
    assert isinstance(step.expected, Done) and isinstance(step.outcome, Done)
    want, got = step.expected.report, step.outcome.report
    if want is None or got is None:
        raise NotExportable("CHK-2: whether a check is switched on is for the server's settings to say")
    counted = {account.pool for account in got.accounts}
    missing = next((account.pool for account in want.accounts if account.pool not in counted), None)
    if missing is not None:
        return [f"self.assertIn({quoted(missing)}, terms(checks, {check}))"]
    lines = [f"counted = terms(checks, {check})"]
    for term in run.at:
        if isinstance(term, AtCounter) and term.name != "total":
            code = f"counted[{quoted(term.pool)}][{quoted(term.name)}]"
            code = "server.cache.session_held_req_count()" if term.pool == "rows" else code
            lines.append(f"self.assertEqual({code}, {term.must})")
    return lines


# -- cursors, sessions and sizes -------------------------------------------------------------------------


def _order(trace: Trace, run: RecordedRun) -> Asserts | None:
    """A cursor that is past another, past the row or inside a page."""
    cursors = [place for place in run.at if isinstance(place, AtCursor)]
    if not cursors:
        return None
    (owner, field, _), *bounds = cursors
    session = owner.removeprefix("slot of ")
    lines, held = [], f"{variable(owner)}{run.holder}"
    if session != owner:
        lines, held = [f"slot = {run.slot(session)}"], "slot"
    code = run.cursor(held, field)
    if bounds:
        return Asserts([*lines, f"self.assertLessEqual({code}, {run.cursor(held, bounds[0].field)})"])
    if field == "cache_protected_len":
        return Asserts([*lines, f"self.assertEqual({code} % {trace.geometry.page_size}, 0)"])
    return Asserts([*lines, f"self.assertIn({code}, range({trace.geometry.width + 1}))"])


def _facts(trace: Trace, run: RecordedRun) -> Iterator[tuple[str, Equality]]:
    """What the release's objects show at the end, each with the kind of fact that it is."""
    state, view, page, last = run.after.state, run.after.view, trace.geometry.page_size, run.last
    if isinstance(last, Submit) and run.clause == "OUT-1":
        wanted = isinstance(run.steps[-1][1], Done)
        sent = variable(last.request)  # rejected, it may have run: then its mark has moved on
        fact = f"({sent}.to_finish or {sent}.finished_reason) is None"
        yield "OUT", Equality(fact, str(wanted), str(not wanted))
    for name in sorted({s.name for s in state.sessions} | set(view.sessions)):
        want, got = state.session(name) is not None, name in view.sessions
        yield "SES", Equality(f"{quoted(name)} in server.sessions", str(want), str(got))
    for session in state.sessions:
        seen = view.sessions.get(session.name)
        if seen is not None:
            code = f"getattr(server.sessions.get({quoted(session.name)}), \"close_on_finish\", False)"
            yield "SES", Equality(code, str(session.closing), str(seen.closing))
        turn = state.request(session.turn)
        if seen is None:
            continue
        if turn is None or turn.phase in (Phase.QUEUED, Phase.ADMITTED):
            code = f"holds_kv(server, {quoted(session.name)})"
            yield "SES", Equality(code, str(session.slot is not None), str(seen.cursors is not None))
            yield from _cursors(run, run.slot(session.name), session.slot, seen.cursors, "LEN")
        if turn is None:
            code = f"history(server.sessions.get({quoted(session.name)}))"
            yield "SES-1", Equality(code, ids_text(text_tokens(session.history)), ids_text(seen.history))
    for request in state.requests:
        ours = view.requests.get(request.name)
        if ours is None:
            continue
        name = variable(request.name)
        slot = (own := state.session(request.session)) is not None and own.slot is not None
        if request.phase is not Phase.ADMITTED or slot:  # else it has no row, or a lock alone
            want, got = request.cursors is not None, ours.row is not None
            row = run.cursor(f"{name}{run.holder}", "req_pool_idx")
            yield "REQ", Equality(f"{row} is not None", str(want), str(got))
        if ours.row is not None:
            yield from _cursors(run, f"{name}{run.holder}", request.cursors, ours.cursors, "REQ")
    full, swa, rows = free(state)
    pool = "available_size" if trace.geometry.window is None else "full_available_size"
    yield "OWN", Equality(f"server.allocator.{pool}()", str(full * page), str(len(view.free_full) * page))
    if trace.geometry.window is not None:
        left = len(view.free_swa) * page
        yield "SWA", Equality("server.allocator.swa_available_size()", str(swa * page), str(left))
    yield "OWN", Equality("len(server.rows.free_slots)", str(rows), str(len(view.free_rows)))


def _cursors(
    run: RecordedRun, held: str, want: Cursors | None, got: Cursors | None, kind: str
) -> Iterator[tuple[str, Equality]]:
    """The cursors of a slot, or of a running request (which has its prefix from the tree)."""
    for cursor in (*_CURSORS, "cache_protected_len") if kind == "LEN" else _CURSORS:
        if want is not None and got is not None:
            which = "SWA" if cursor == "swa_evicted_seqlen" else kind
            code = run.cursor(held, cursor)
            yield which, Equality(code, str(getattr(want, cursor)), str(getattr(got, cursor)))
