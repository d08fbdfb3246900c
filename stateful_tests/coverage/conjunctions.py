"""Situations of several at once: locks on one node, nodes of one path, entries of one batch, conditions of
one request, a second retract, a session whose turns have tracked states, what goes for a state and what would
go next.

Faults that need two of a kind hide from the cases of one rule. A step meets none of these, or several; a
check counts them as it counts `situation`, and the corpus has a line for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from reference import radix_tree as radix
from reference.commands import (
    Abort, Admit, Close, Command, Decode, Evict, EvictSwa, Extend, Finish, Insert, Match, Outcome, Reason,
    Refused, Retract, Submit, Unlock, UnlockSwa, kind_name,
)  # fmt: skip
from reference.cursors import floor_page
from reference.prefix_cache import shares_lock
from reference.radix_tree import (
    Insertion, Key, Lock, Node, Placed, Tree, full_locked, lock_of, nodes, path_of, shared_len, state_paths,
)  # fmt: skip
from reference.rules.rule_definition import cursors_of
from reference.state import IN_BATCH, Phase, Request, Session, State, text_tokens
from reference.token_ids import tree_key
from stateful_tests.generate.commands.shared_cases import evicts, request_of, tail
from reference.tree_eviction import states_in_order
from stateful_tests.generate.enabled_commands import full_alone, slot_source


def conjunctions(was: State, command: Command, outcome: Outcome, now: State) -> set[str]:
    """Return the conjunctions of one step of the reference, such as "two locks, windowed goes over a cut:
    windowed"."""
    situations = set(_of_tracked(was, command, outcome))
    if isinstance(outcome, Refused):
        return situations
    situations |= {*_of_request(was, command, now), *_at_once(was, command)}
    if isinstance(command, Decode | Extend):
        situations |= set(_slots(was, command))
    if was.tree is None or now.tree is None:
        return situations
    if was.tree is not now.tree:
        if was.tree.locks:
            situations |= {*_cuts(was.tree, now.tree), *_unlocks(was.tree, now.tree)}
        situations |= {*_by_own_moment(was.tree, now.tree), *_passes(was.tree, now.tree, command)}
        situations |= set(_drops(was.tree, now.tree))
        if was.tree.states and not isinstance(command, Evict):
            situations |= set(_room_for_a_state(was.tree, now.tree, command))
        if isinstance(command, UnlockSwa):
            situations |= set(_second_swa_part(was, command))
    if isinstance(command, Extend) and len(command.lanes) > 1 and not evicts(was, now):
        situations |= set(_batch(was, command, now))
    return situations


def _of_request(was: State, command: Command, now: State) -> Iterator[str]:
    """Yield the conjunctions that a retraction or an admission reaches."""
    if isinstance(command, Retract):
        request = request_of(was, command.request)
        session = was.session(request.session)
        if (
            request.in_flight
            and session is not None
            and session.slot is not None
            and not session.history
        ):
            allocated = cursors_of(request).kv_allocated_len
            target = request.origin + request.output
            gives = tail(allocated, min(allocated, target), was.config.geometry.page_size)
            yield f"a turn is retracted again, results in flight: {gives}"
    if isinstance(command, Admit):
        request = request_of(was, command.request)
        session = was.session(request.session)
        cursors = cursors_of(request_of(now, command.request))
        if session is not None and session.slot is not None:
            r = cursors.cache_protected_len
            back = 0 < r == cursors.kv_committed_len < session.slot.kv_committed_len
            if back and session.slot.swa_evicted_seqlen > r:
                yield "a turn resumes from R above 0, its window lost"


# -- turns and ordinary requests in two conditions at once, as they end, or are evicted, or come back --


def _at_once(was: State, command: Command) -> Iterator[str]:
    name = getattr(command, "request", None)
    if isinstance(command, Close) and (session := was.session(command.session)) is not None:
        name = session.turn
    request = was.request(name) if name is not None else None
    if request is not None and isinstance(
        command, Abort | Admit | Close | EvictSwa | Finish | Retract
    ):
        for pair in combinations(_conditions(was, request), 2):
            yield f"at once, {kind_name(type(command))}: {' and '.join(pair)}"
    if isinstance(command, Insert | Unlock) and command.holder in full_alone(was):
        ends = isinstance(command, Insert) and not command.chunked
        yield f"at once, {kind_name(type(command))}{', ends' if ends else ''}: full KV alone"


def _conditions(was: State, request: Request) -> Iterator[str]:
    """Yield the conditions that hold for a request before a command, such as "retracted"."""
    session = was.session(request.session)
    slot = session.slot if session is not None else None
    if session is not None and session.closing:
        yield "session closing"
    if slot is not None:
        yield "slot"
    if request.started and request.phase not in IN_BATCH:
        yield "retracted"
    if request.in_flight:
        yield "results in flight"
    c = request.cursors or slot
    if c is not None and max(c.swa_evicted_seqlen, c.cache_protected_len) > 0:
        if c.swa_evicted_seqlen < c.cache_protected_len:
            yield "E below R"
        else:
            yield "E from R on" if c.cache_protected_len else "E alone"
        if c.cache_protected_len and shares_lock(was, request.holder):
            yield "others lock its path"
        if request.holder in full_alone(was):
            yield "full KV alone"


# Tracked states. A session has slots for those of its turns, from the first row on until it is closed.

_ENDS: dict[type, str] = {Finish: "finishes", Retract: "is retracted", Abort: "is aborted"}


def _of_tracked(was: State, command: Command, outcome: Outcome) -> Iterator[str]:
    """Yield the conjunctions that a command reaches with tracked states; none without a tree that tracks
    them."""
    if was.tree is None or not was.config.geometry.tracks:
        return
    refused = outcome.reason if isinstance(outcome, Refused) else None
    if isinstance(command, Submit) and refused is Reason.TURN_IN_FLIGHT:
        if _has_row(was, was.session(command.session)):
            yield "tracked states, a turn is rejected"
    if refused is not None:
        return
    if isinstance(command, Close):
        session = was.session(command.session)
        if _has_row(was, session):
            beside = "" if session is None or session.turn is None else " beside its turn"
            yield f"tracked states, a session is closed{beside}"
    if isinstance(command, Finish | Retract | Abort):
        request = request_of(was, command.request)
        session = was.session(request.session)
        if request.phase in IN_BATCH and session is not None:
            closing = ", its session closing" if session.closing else ""
            turn = "a turn" if session.slot is None else "a later turn"
            yield f"tracked states, {turn} {_ENDS[type(command)]}{closing}"
    if isinstance(command, Finish) and _falls_back(was, command):
        yield "tracked states, a finish falls back to the boundary before the last"


def _falls_back(was: State, command: Finish) -> bool:
    """Return whether rounds of a request without session have passed a boundary behind its end and one
    before."""
    request = request_of(was, command.request)
    size = was.config.geometry.page_size
    end = request.origin + command.finished_len
    computed = request.origin + request.output - 1
    return request.session is None and request.origin // size < end // size < computed // size


def _has_row(state: State, session: Session | None) -> bool:
    """Return whether a session has a slot, or a turn that has a row."""
    if session is None:
        return False
    turn = state.request(session.turn) if session.turn is not None else None
    return session.slot is not None or (turn is not None and turn.phase in IN_BATCH)


# Locks. One is windowed at a node whose SWA KV it pins, else it reads full KV alone there.


def _over(tree: Tree, placed: Placed) -> list[Lock]:
    return [lock for lock in tree.locks if lock.key[: placed.end] == placed.path]


def _in_full(tree: Tree, lock: Lock) -> int:
    """Return the start of a lock's window, of which any fresh lock pins the SWA KV."""
    return len(lock.key) - (tree.window or 0)


def _cuts(was: Tree, now: Tree) -> Iterator[str]:
    """Yield the situations in which a node is split that one has locked, or two."""
    paths = {placed_node.path for placed_node in nodes(was)}
    new = [placed_node for placed_node in nodes(now) if placed_node.path not in paths]
    if not new:
        return
    for placed_node in nodes(was):
        for head in new:
            if placed_node.start < head.end and head.path == placed_node.path[: head.end]:
                kinds = [_beside(was, lock, placed_node, head.end) for lock in _over(was, placed_node)]
                for kind in kinds:
                    yield f"a locked node is cut: {kind}, {_upper_half(placed_node.node, head.node)}"
                for pair in combinations(sorted(kinds), 2):
                    yield f"two locks, a node is cut: {' and '.join(pair)}"


def _upper_half(was: Node, now: Node) -> str:
    """Name the part of a split node that the command used."""
    if not was.live:
        return "its upper half recovered" if now.live else "a tombstone"
    if now.full_used == was.full_used:
        return "its upper half not used"
    both = now.swa_used != was.swa_used
    return f"its upper half used {'in its window' if both else 'above its window'}"


def _beside(tree: Tree, lock: Lock, placed: Placed, index: int) -> str:
    if lock.swa_from >= placed.end:
        return "full KV alone"
    return "windowed above its window" if index <= _in_full(tree, lock) else "windowed in its window"


def _unlocks(was: Tree, now: Tree) -> Iterator[str]:
    """Yield that one of two locks goes, over a node that was cut since: a fresh lock would pin less SWA
    KV."""
    stay = [lock for lock in was.locks if lock in now.locks]
    if len(stay) >= len(was.locks):
        return
    for gone in was.locks:
        if gone in stay:
            continue
        for other in stay:
            common = [
                p
                for p in path_of(was, gone.key)
                if p.path == gone.key[: p.end] == other.key[: p.end]
            ]
            if any(_cut_since(was, lock, common) for lock in (gone, other)):
                end = common[-1].end
                goes, stays = (
                    "windowed" if k.swa_from < end else "full KV alone" for k in (gone, other)
                )
                yield f"two locks, {goes} goes over a cut: {stays} stays"


def _cut_since(tree: Tree, lock: Lock, path: list[Placed]) -> bool:
    return any(lock.swa_from < placed.end <= _in_full(tree, lock) for placed in path)


# -- what goes by its own moment, where the moment of the full KV would choose another ------------


def _by_own_moment(was: Tree, now: Tree) -> Iterator[str]:
    after = {placed.path: placed.node for placed in nodes(now)}
    stays = [(placed, after[placed.path]) for placed in nodes(was) if placed.path in after]
    for part in ("live", "state_used"):
        had = [(p, bool(getattr(left, part))) for p, left in stays if getattr(p.node, part)]
        gone, staying = ([p for p, has in had if has is still] for still in (False, True))
        used = "swa_used" if part == "live" else part
        for one in gone:
            for other in staying:
                sooner = getattr(one.node, used) < getattr(other.node, used)
                if sooner and one.node.full_used > other.node.full_used:
                    content = "SWA KV" if part == "live" else "a state"
                    read = ("read" if full_locked(was, p) else "unread" for p in (one, other))
                    yield f"{content} goes by its own moment: {' before '.join(read)}"


# -- what goes for a state that a command needs, and what would go next ---------------------------


def _room_for_a_state(was: Tree, now: Tree, command: Command) -> Iterator[str]:
    gone = state_paths(was) - state_paths(now)
    if not gone:
        return
    order = states_in_order(was)
    for placed, after in zip(order, [*order[1:], None]):
        if placed.path in gone:
            victim = "one of an inner node" if placed.node.children else "one of a leaf"
            after_it = "nothing"
            if after is not None:
                after_it = "an inner node" if after.node.children else "a leaf"
            yield f"a state goes for room, {kind_name(type(command))}: {victim}, and next is {after_it}"
            return


def _second_swa_part(was: State, command: UnlockSwa) -> Iterator[str]:
    """Name the holder that gives its SWA part back, where another has done so on the same path."""
    assert was.tree is not None
    request = was.request(command.holder)
    own = lock_of(was.tree, command.holder if request is None else request.holder)
    if own is None:
        return
    for name in full_alone(was):
        other = lock_of(was.tree, name)
        if own is None or other is None or other is own:
            continue
        path = path_of(was.tree, own.key)
        common = sum(p.path == own.key[: p.end] == other.key[: p.end] for p in path)
        if common:
            over = "one node" if common == 1 else "several nodes"
            yield f"a second SWA part is given back over {over}"


# -- nodes one below the other --------------------------------------------------------------------


def _passes(was: Tree, now: Tree, command: Command) -> Iterator[str]:
    """Name the nodes that a match or an insert passes."""
    passes = dict[Key, str]()
    if now.clock <= was.clock:
        return
    for placed in nodes(now):
        if placed.node.full_used == now.clock:
            passes[placed.path] = passed = _came_across(was, placed)
            if above := passes.get(placed.path[: placed.start]):
                who = "a match" if isinstance(command, Admit | Match) else "an insert"
                yield f"{who} passes: {above} and {passed}"


def _came_across(was: Tree, placed: Placed) -> str:
    path = path_of(was, placed.path)
    if not path or path[-1].path[: placed.end] != placed.path:
        return "new"
    if path[-1].node.live:
        return "live"
    if placed.node.live:
        return "recovered"
    return "a tombstone that is read" if full_locked(was, path[-1]) else "a tombstone"


def _drops(was: Tree, now: Tree) -> Iterator[str]:
    """Yield the situations in which a node goes, with what becomes of the one above it."""
    nodes_before, nodes_after = ({placed.path: placed for placed in nodes(tree)} for tree in (was, now))
    if nodes_after.keys() > nodes_before.keys():
        return
    for path in nodes_before.keys() - nodes_after.keys():
        above = nodes_before.get(path[: nodes_before[path].start])
        if above is not None:
            fate = "goes too" if above.path not in nodes_after else "stays"
            if fate == "stays" and full_locked(was, above):
                fate = "is read"
            elif fate == "stays" and len(above.node.children) > 1:
                fate = "has another child"
            one, two = ("live" if p.node.live else "a tombstone" for p in (nodes_before[path], above))
            yield f"a node goes: {one}, and above it {two} {fate}"


# -- batches --------------------------------------------------------------------------------------


def _slots(was: State, command: Decode | Extend) -> Iterator[str]:
    """Name the sources of the slots of entries that decode together."""
    names = command.requests if isinstance(command, Decode) else [n.request for n in command.lanes]
    if len(names) < 2:
        return
    requests = [request_of(was, name) for name in names]
    running = [r for r in requests if r.phase is Phase.RUNNING]
    size = was.config.geometry.page_size
    sources = Counter(slot_source(cursors_of(r), size) for r in running)
    batch = "decode" if len(running) == len(requests) else "mixed batch"
    if len(sources) > 1:
        yield f"slots of a {batch}: {', '.join(sorted(sources))}"
    elif size > 1 and sources["a fresh page"] > 1:
        yield f"slots of a {batch}: several need a page"


def _batch(was: State, command: Extend, now: State) -> Iterator[str]:
    """Yield for two entries of a batch what each brings to the tree, one after the other, and of the same
    pages what becomes of them."""
    assert was.tree is not None
    tree = was.tree
    brought = list[tuple[Key, int, str]]()
    parts = list[tuple[int, str]]()
    for lane in command.lanes:
        before = request_of(was, lane.request)
        request = request_of(now, lane.request)
        session = was.session(request.session)
        bigram = was.config.geometry.bigram
        prefix = before.cursors.cache_protected_len if before.cursors is not None else 0
        end = floor_page(max(0, cursors_of(request).kv_committed_len - bigram), tree.page_size)
        later = session is not None and session.slot is not None
        if before.phase is Phase.RUNNING or later or end <= prefix:
            part = "is a later turn" if later else "brings no page"
            if before.phase is Phase.RUNNING:
                part = "decodes"
            yield from (f"two of a batch: one {one}, the next {part}" for e, one in parts if e)
            parts.append((0, part))
            continue
        key = tree_key(text_tokens(request.text, end + bigram), bigram)
        evicted = max(cursors_of(request).swa_evicted_seqlen, prefix)
        done = radix.insert_and_continue(tree, request.holder, key, evicted)
        says = "is kept out" if done is None else _says(done[1], prefix, evicted)
        if done is not None:
            tree = done[0]
        part = says if done is None else "goes in"
        for length, one in parts:
            than = ""
            if end < length:
                than = ", shorter"
            elif end > length > 0:
                than = ", longer"
            yield f"two of a batch: one {one}, the next {part}{than}"
        parts.append((end, part))
        for other, r, said in brought:
            if shared_len(other, key, tree.page_size) > max(r, prefix):
                yield f"two of a batch, the same pages: one {said}, the next {says}"
        brought.append((key, prefix, says))


def _says(insertion: Insertion, prefix: int, evicted: int) -> str:
    words = []
    if insertion.recovered:
        words.append("recovers")
    if insertion.matched > prefix:
        words.append("duplicates")
    if insertion.end > insertion.matched:
        words.append("adds a tombstone" if evicted > insertion.matched else "adds")
    return " and ".join(words)
