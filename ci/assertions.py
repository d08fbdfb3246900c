"""What an exported test asserts: the fact that the violated clause is about, in the release's own terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from impl.adapter import View
from impl.sglang.calls import ids_text, quoted, variable
from reference.caching import guests
from reference.commands import CheckBusy, CheckIdle, Command, Done, Evict, Outcome, Submit
from reference.cursors import ceil_page
from reference.ledger import Phase, free, text_tokens
from stateful_tests.results import Moment, Trace, Violation

_CURSORS = ("kv_committed_len", "kv_allocated_len", "swa_evicted_seqlen")


class NotExportable(ValueError):
    """No test can be made of this trace: one line says why."""


class Played(NamedTuple):
    """A trace played on a release up to its violation: the calls of each command.

    clause: what to assert, of those that are violated. unified: the release keeps what a request holds in one
    record.
    """

    steps: list[tuple[str, Outcome, tuple[str, ...]]]
    last: Command
    violation: Violation
    clause: str
    before: Moment  # the last command
    after: Moment
    unified: bool

    @property
    def holder(self) -> str:
        """Where a request, or a session's slot, has its cursors and its row."""
        return ".kv" if self.unified else ""

    def slot(self, session: str) -> str:
        return f"server.cache.{'session.' if self.unified else ''}slots[{quoted(session)}]{self.holder}"

    def of_node(self, node: str, pool: str, what: str) -> str:
        """An attribute of a node of a tree with a window."""
        if self.unified:
            return f"{node}.component_data[ComponentType.{pool.upper()}].{what}"
        return f"{node}.{'' if what == 'value' else pool + '_'}{what}"


class Fact(NamedTuple):
    """An expression over the release's objects, what it must be, and what it is."""

    code: str
    want: str
    got: str

    @property
    def assertion(self) -> str:
        if self.want in ("True", "False"):
            return f"self.assert{self.want}({self.code})"
        return f"self.assertEqual({self.code}, {self.want})"


def asserted(trace: Trace, played: Played) -> tuple[list[str], list[str]]:
    """Lines before the last command, and the assertions after it. Raises NotExportable."""
    clause = played.clause
    if isinstance(played.last, (CheckBusy, CheckIdle)):
        if clause not in ("CHK-1", "BROKEN"):
            raise NotExportable(f"{clause}: the terms of a check are inside of it")
        check = "checks.self_check_during_busy"
        if isinstance(played.last, CheckIdle):
            check = "lambda: idle_check(checks)"
        return [], [f"self.assertIsNone(alarm({check}))"]
    if clause == "TREE-10":
        return _eviction(trace, played)
    if not clause.startswith("TREE-"):
        return [], [fact.assertion for fact in _telling(list(_facts(trace, played)), clause)]
    told = _TREE.get(clause)
    lines = told(played) if told is not None else []
    if not lines:
        raise NotExportable(f"{clause}: what to ask a release's tree for it is not known")
    return [], lines


# -- the radix tree ------------------------------------------------------------------------------------


def _half_dead(played: Played) -> list[str]:
    if played.unified:
        return []
    return [
        "for node, path in nodes(server.cache):",
        "    if not node.swa_tombstone:",
        "        self.assertTrue(server.allocator.full_to_swa_index_mapping[node.value].all(), path)",
    ]


def _prefixes(played: Played) -> list[str]:
    """Who has other slots at the start of its row than the tree has for the same tokens."""
    view = played.after.view
    assert view.tree is not None
    for name, request in view.requests.items():
        if request.row is not None and request.cursors is not None:
            length = request.cursors.cache_protected_len
            if list(view.rows[request.row][:length]) != _slots(view, request.text[:length]):
                var = variable(name)
                held = var + played.holder
                where = f"{held}.req_pool_idx, : {held}.cache_protected_len"
                return [
                    f"row = server.rows.req_to_token[{where}].tolist()",
                    f"tokens = [*{var}.origin_input_ids, *{var}.output_ids][: len(row)]",
                    "self.assertEqual(row, tree_slots(server.cache, tokens))",
                ]
    for name, session in view.sessions.items():
        if session.row is not None and session.cursors is not None:
            length = session.cursors.cache_protected_len
            if list(view.rows[session.row][:length]) != _slots(view, session.history[:length]):
                return [
                    f"slot = {played.slot(name)}",
                    "row = server.rows.req_to_token[slot.req_pool_idx, : slot.cache_protected_len].tolist()",
                    f"tokens = history(server.sessions.get({quoted(name)}))[: len(row)]",
                    "self.assertEqual(row, tree_slots(server.cache, tokens))",
                ]
    for name, key in guests(played.after.state).items():
        if list(view.tree.guests[name].slots) != _slots(view, key):
            locked = f"{variable(name)}.prefix_indices.tolist()"
            return [f"self.assertEqual({locked}, tree_slots(server.cache, {ids_text(key)}))"]
    return []


def _slots(view: View, tokens: Sequence[int]) -> list[int | None]:
    slots: dict[int, int] = {}
    for node in view.tree.nodes if view.tree is not None else ():
        for at, slot in enumerate(node.slots, len(node.path) - len(node.slots)):
            if list(node.path[: at + 1]) == list(tokens[: at + 1]):
                slots[at] = slot
    return [slots.get(at) for at in range(len(tokens))]


def _locks(played: Played) -> list[str]:
    """The first node whose counters are not those of the locks that there are."""
    state, view = played.after.state, played.after.view
    assert state.tree is not None
    assert view.tree is not None
    locks = [lock for lock in state.tree.locks if lock.key]
    for node in view.tree.nodes:
        end = len(node.path)
        mine = [lock for lock in locks if tuple(lock.key[:end]) == tuple(node.path)]
        found = f"node_at(server.cache, {ids_text(node.path)})"
        two = state.scope.geometry.window is not None
        if node.full_locks != len(mine):
            one = f"{found}.lock_ref"
            full = played.of_node(found, "full", "lock_ref") if two or played.unified else one
            return [f"self.assertEqual({full}, {len(mine)})"]
        swa, deep = played.of_node(found, "swa", "lock_ref"), sum(lock.swa_from < end for lock in mine)
        if two and node.swa_locks < deep:
            return [f"self.assertGreaterEqual({swa}, {deep})"]
        if two and node.swa_locks > len(mine):
            return [f"self.assertLessEqual({swa}, {len(mine)})"]
    return []


def _one_window(played: Played) -> list[str]:
    """The longest live leaf that was not there before."""
    geometry = played.after.state.scope.geometry
    before, after = played.before.view.tree, played.after.view.tree
    assert geometry.window is not None
    assert before is not None
    assert after is not None
    known = {tuple(node.path) for node in before.nodes}
    leaf = max(
        (node for node in after.nodes if node.swa_slots and tuple(node.path) not in known),
        key=lambda node: len(node.slots),
    )
    found = played.of_node(f"node_at(server.cache, {ids_text(leaf.path)})", "full", "value")
    return [f"self.assertLessEqual(len({found}), {ceil_page(geometry.window, geometry.page_size)})"]


_TREE: dict[str, Callable[[Played], list[str]]] = {
    "TREE-2": _half_dead, "TREE-4": _prefixes, "TREE-6": _locks, "TREE-7": _one_window,
}  # fmt: skip


def _eviction(trace: Trace, played: Played) -> tuple[list[str], list[str]]:
    """What an eviction reports, against what has become free."""
    assert isinstance(played.last, Evict)
    before, after, two = played.before.view, played.after.view, trace.geometry.window is not None
    step = played.after.step
    assert step is not None
    said = getattr(step.outcome, "freed", None)
    freed = (len(after.free_full) - len(before.free_full)) * trace.geometry.page_size
    if said is not None and said.full != freed:
        pool, field = "full_available_size" if two else "available_size", "num_tokens_evicted"
    elif two:
        pool, field = "swa_available_size", "swa_num_tokens_evicted"
    else:
        raise NotExportable("TREE-10: how much an eviction can free shows in nothing that it reports")
    size = f"server.allocator.{pool}()"
    return [f"before = {size}"], [f"self.assertEqual(evicted.{field}, {size} - before)"]


# -- sessions and pools --------------------------------------------------------------------------------


def _facts(trace: Trace, played: Played) -> Iterator[tuple[str, Fact]]:
    """What can be asked of the release's objects at the end, each with the kind of fact that it is."""
    state, view, page, last = played.after.state, played.after.view, trace.geometry.page_size, played.last
    if isinstance(last, Submit) and played.clause == "OUT-1":
        wanted = isinstance(played.steps[-1][1], Done)
        yield "OUT", Fact(f"{variable(last.request)}.to_finish is None", str(wanted), str(not wanted))
    for name in sorted({s.name for s in state.sessions} | set(view.sessions)):
        want, got = state.session(name) is not None, name in view.sessions
        yield "SES", Fact(f"{quoted(name)} in server.sessions", str(want), str(got))
    for session in state.sessions:
        seen = view.sessions.get(session.name)
        turn = state.request(session.turn) if session.turn is not None else None
        if seen is None:
            continue
        if turn is None or turn.phase in (Phase.QUEUED, Phase.ADMITTED):
            code = f"holds_kv(server, {quoted(session.name)})"
            yield "SES", Fact(code, str(session.slot is not None), str(seen.cursors is not None))
            if session.slot is not None and seen.cursors is not None:
                for cursor in _CURSORS:
                    code = f"{played.slot(session.name)}.{_attribute(played, cursor)}"
                    want_, got_ = getattr(session.slot, cursor), getattr(seen.cursors, cursor)
                    yield _kind("LEN", cursor), Fact(code, str(want_), str(got_))
        if turn is None:
            code = f"history(server.sessions.get({quoted(session.name)}))"
            yield "SES-1", Fact(code, ids_text(text_tokens(session.history)), ids_text(seen.history))
    for request in state.requests:
        ours = view.requests.get(request.name)
        if ours is None:
            continue
        name = variable(request.name)
        slot = (own := state.session(request.session)) is not None and own.slot is not None
        if request.phase is not Phase.ADMITTED or slot or not trace.geometry.tree:  # else it has a lock alone
            want, got = request.cursors is not None, ours.row is not None
            yield "REQ", Fact(f"{name}{played.holder}.req_pool_idx is not None", str(want), str(got))
        if request.cursors is not None and ours.row is not None and ours.cursors is not None:
            for cursor in _CURSORS:
                want_, got_ = getattr(request.cursors, cursor), getattr(ours.cursors, cursor)
                code = f"{name}{played.holder}.{_attribute(played, cursor)}"
                yield _kind("REQ", cursor), Fact(code, str(want_), str(got_))
    full, swa, rows = free(state)
    pool = "available_size" if trace.geometry.window is None else "full_available_size"
    yield "OWN", Fact(f"server.allocator.{pool}()", str(full * page), str(len(view.free_full) * page))
    if trace.geometry.window is not None:
        left = len(view.free_swa) * page
        yield "SWA", Fact("server.allocator.swa_available_size()", str(swa * page), str(left))
    yield "OWN", Fact("len(server.rows.free_slots)", str(rows), str(len(view.free_rows)))


def _attribute(played: Played, cursor: str) -> str:
    return "max_evicted_seqlen" if played.unified and cursor == "swa_evicted_seqlen" else cursor


def _kind(usual: str, cursor: str) -> str:
    return "SWA" if cursor == "swa_evicted_seqlen" else usual


def _telling(facts: Sequence[tuple[str, Fact]], clause: str) -> list[Fact]:
    """The facts that differ, of the kind that the clause is about if there are such.

    What is kept of SWA KV tells last: how far a sweep goes is policy, and another release may have another.
    """
    differing = [(kind, fact) for kind, fact in facts if fact.want != fact.got]
    if not differing:
        raise NotExportable(f"{clause} shows in nothing that the release's classes can be asked for")
    differing.sort(key=lambda found: found[0] == "SWA")
    kind = next((k for k, _ in differing if clause.startswith(k)), differing[0][0])
    return [fact for k, fact in differing if k == kind]
