"""What an exported test asserts: the fact that the violated clause is about, in the release's own terms."""

from collections.abc import Iterator
from typing import NamedTuple

from ci.export import pool_assertions, tree_assertions
from ci.export.recorded_run import Asserts, NotExportable, RecordedRun
from impl.sglang.scheduler.call_log import ids_text, quoted, variable
from reference.clauses.checks import due
from reference.commands import CheckBusy, CheckIdle, Done, Submit
from reference.ledger import Cursors, Phase, free, text_tokens
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
    asked = _order(trace, run) if clause == "LEN-1" else where.asserted(run)
    differing = [(kind, fact) for kind, fact in _facts(trace, run) if fact.want != fact.got]
    shown = [fact for kind, fact in differing if clause.startswith(kind)]
    if asked is None and not shown and clause.startswith(("OWN", "READ", "TREE")):
        asked = pool_assertions.ownership(run)
    if asked is None and differing:
        # How far a sweep goes is policy, and another release may have another: that comes last.
        first = min(differing, key=lambda found: found[0] == "SWA")[0]
        shown = shown or [fact for kind, fact in differing if kind == first]
        asked = Asserts([fact.assertion for fact in shown])
    asked = asked or pool_assertions.ownership(run) or pool_assertions.renamed(run)
    if asked is None:
        raise NotExportable(f"{clause} shows in nothing that the release's classes can be asked for")
    return asked._replace(assertions=[f"alarm({check})", *asked.assertions]) if check else asked


# -- the memory checks ---------------------------------------------------------------------------------


def _terms(run: RecordedRun, check: str) -> list[str]:
    """The first pool of which a check counts other than it should."""
    step = run.after.step
    assert step is not None and isinstance(step.expected, Done) and isinstance(step.outcome, Done)
    want, got = step.expected.report, step.outcome.report
    if want is None or got is None:
        raise NotExportable("CHK-2: whether a check is switched on is for the server's settings to say")
    want = due(step)
    counted, lines = {account.pool: account for account in got.accounts}, []
    for account in want.accounts:
        if account.pool not in counted:
            return [f"self.assertIn({quoted(account.pool)}, terms(checks, {check}))"]
        for term in ("available", "evictable", "protected", "session_held", "uncached"):
            if getattr(counted[account.pool], term) != (right := getattr(account, term)):
                code = f"counted[{quoted(account.pool)}][{quoted(term)}]"
                code = "server.cache.session_held_req_count()" if account.pool == "rows" else code
                lines.append(f"self.assertEqual({code}, {right})")
    return [f"counted = terms(checks, {check})", *lines]


# -- cursors, sessions and sizes -------------------------------------------------------------------------


def _order(trace: Trace, run: RecordedRun) -> Asserts | None:
    """The first cursor that is past another, past the row or inside a page."""
    view, page, width = run.after.view, trace.geometry.page_size, trace.geometry.width
    shown = {name: request.cursors for name, request in view.requests.items()}
    shown |= {name: session.cursors for name, session in view.sessions.items()}
    for name, cursors in shown.items():
        lines, held = [f"slot = {run.slot(name)}"], "slot"
        if name in view.requests:
            lines, held = [], f"{variable(name)}{run.holder}"
        if cursors is None:
            continue
        committed, allocated, swept, protected = (
            (f"{held}.{run.cursor(name)}", getattr(cursors, name))
            for name in (*_CURSORS, "cache_protected_len")
        )
        pairs = (protected, committed), (committed, allocated), (swept, allocated)
        for (low, a), (high, b) in (*pairs, (allocated, (str(width), width))):
            if a > b:
                return Asserts([*lines, f"self.assertLessEqual({low}, {high})"])
        if protected[1] % page:
            return Asserts([*lines, f"self.assertEqual({protected[0]} % {page}, 0)"])
    return None


def _facts(trace: Trace, run: RecordedRun) -> Iterator[tuple[str, Equality]]:
    """What can be asked of the release's objects at the end, each with the kind of fact that it is."""
    state, view, page, last = run.after.state, run.after.view, trace.geometry.page_size, run.last
    if isinstance(last, Submit) and run.clause == "OUT-1":
        wanted = isinstance(run.steps[-1][1], Done)
        sent = variable(last.request)  # turned away, it may have run: then its mark has moved on
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
            yield "REQ", Equality(f"{name}{run.holder}.req_pool_idx is not None", str(want), str(got))
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
            code, which = f"{held}.{run.cursor(cursor)}", "SWA" if cursor == "swa_evicted_seqlen" else kind
            yield which, Equality(code, str(getattr(want, cursor)), str(getattr(got, cursor)))
