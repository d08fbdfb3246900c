"""The case of a rule that a command met, in labels.

A function for each kind of command gives labels, or "" in their places. A kind without one has one case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from reference.commands import (
    Abort, Admit, CheckBusy, CheckIdle, Close, Command, Decode, Evict, EvictSwa, Extend, Finish, Insert,
    Launch, Match, Prompt, Reason, Retract, Settle, SpecDecode, Submit, Unlock, UnlockSwa,
)  # fmt: skip
from reference.cursors import floor_page
from reference.state import IN_BATCH, Cursors, Phase, Request, State, free
from reference.prefix_cache import key_of, lock_holders, shares_lock
from reference.remembered import remembered
from reference.radix_tree import Key, Node, Tree, nodes, path_of, shared, sizes, usable

Labels = tuple[str, ...]


def _request(state: State, name: str) -> Request:
    request = state.request(name)
    assert request is not None
    return request


def _cursors(request: Request) -> Cursors:
    assert request.cursors is not None
    return request.cursors


def _pages(length: int, page_size: int) -> int:
    return -(-length // page_size)


def _submit(was: State, command: Submit, _now: State) -> Labels:
    session = was.session(command.session)
    with_prompt = "for the tree, with a prompt" if command.prompt and was.tree is not None else ""
    if session is None:
        return "ordinary", with_prompt
    if session.slot is not None:
        return "later turn", with_prompt
    return "turn without a slot" if session.history else "first turn", with_prompt


def _admit(was: State, command: Admit, now: State) -> Labels:
    before, after = _request(was, command.request), _request(now, command.request)
    again = "again" if before.phase is Phase.ADMITTED else ""
    session = was.session(before.session)
    c, key = _cursors(after), before.origin + before.output - 1
    if session is None or session.slot is None:
        found = "slot wiped" if session is not None and session.history else "no slot"
        if not c.cache_protected_len:
            return again, found, ""
        whole = c.cache_protected_len == floor_page(key, was.config.geometry.page_size)
        return again, found, f"{'all' if whole else 'part'} of its key from the tree"
    slot, page_size = session.slot, was.config.geometry.page_size
    if c.kv_committed_len < min(slot.kv_committed_len, key):
        found = "from R, its window lost"
    elif slot.kv_committed_len > key:
        found = "commit past its key"
    else:
        found = "commit at its key" if slot.kv_committed_len == key else "commit below its key"
    return again, found, _tail(slot.kv_allocated_len, c.kv_allocated_len, page_size)


def _tail(allocated: int, kept: int, page_size: int) -> str:
    """What a cut gives back of what was allocated."""
    if _pages(allocated, page_size) > _pages(kept, page_size):
        return "frees pages"
    return "gives back within a page" if allocated > kept else "no tail"


def _grows(was: State, now: State, names: Iterable[str], room: bool) -> Labels:
    """Whether somebody opens a page; whether the radix tree had to make room."""
    page_size, opened = was.config.geometry.page_size, False
    for name in names:
        before, after = _cursors(_request(was, name)), _cursors(_request(now, name))
        opened |= _pages(after.kv_allocated_len, page_size) > _pages(before.kv_allocated_len, page_size)
    evicts = "tree evicts for room" if room else ""
    return "opens pages" if opened else "no page opened", evicts


def _evicts(was: State, now: State) -> bool:
    """Something of the radix tree has gone, or a node has lost its SWA KV."""
    if was.tree is now.tree or was.tree is None or now.tree is None:
        return False
    has = _ends(now.tree)
    return any(end not in has or (live and not has[end]) for end, live in _ends(was.tree).items())


@remembered
def _ends(tree: Tree) -> dict[Key, bool]:
    """Path to the end of each page -> whether it has SWA KV."""
    size = tree.page_size
    ends = ((p, end) for p in nodes(tree) for end in range(p.start + size, p.end + 1, size))
    return {p.path[:end]: p.node.live for p, end in ends}


def _extend(was: State, command: Extend, now: State) -> Labels:
    names = [lane.request for lane in command.lanes]
    grows = _grows(was, now, names, _evicts(was, now))
    last = [_request(now, name).phase is Phase.RUNNING for name in names]
    tails = [(_cursors(_request(was, n.request)), _cursors(_request(now, n.request)))
             for n in command.lanes if n.tail]  # fmt: skip
    less = any(c.swa_evicted_seqlen > had.cache_protected_len for had, c in tails)
    tail = "SWA KV of the last window alone" if less else ""
    if len(names) > 1:
        mixed = any(_request(was, name).phase is Phase.RUNNING for name in names)
        return "mixed batch" if mixed else "batch", "last chunks" if all(last) else "chunks", "", tail, *grows
    before, after = _request(was, names[0]), _request(now, names[0])
    session = was.session(before.session)
    slotless = session is None or session.slot is None
    start = "resumes a slot" if not slotless and before.phase is Phase.ADMITTED else (
        "takes a row" if before.phase is Phase.ADMITTED else "goes on"
    )  # fmt: skip
    kept = ""
    if was.tree is not None and slotless:
        r = _cursors(after).cache_protected_len
        if r > _cursors(before).cache_protected_len:
            kept = "into the tree"
        elif floor_page(_cursors(after).kv_committed_len, was.config.geometry.page_size) > r:
            kept = "kept out of the tree"
    return start, "last chunks" if last[0] else "chunks", kept, tail, *grows


def _decode(was: State, command: Decode, now: State) -> Labels:
    size = "batch" if len(command.requests) > 1 else ""
    return size, *_grows(was, now, command.requests, _evicts(was, now))


def _spec_decode(was: State, command: SpecDecode, now: State) -> Labels:
    size = "batch" if len(command.lanes) > 1 else ""
    names = [lane.request for lane in command.lanes]
    accepted = all(lane.accept == lane.allocate for lane in command.lanes)
    window, ahead = was.config.geometry.window, ""
    if window is not None:
        after = [_cursors(_request(now, name)) for name in names]
        most = max(c.kv_allocated_len - c.kv_committed_len for c in after)
        ahead = "ahead by a window" if most >= window else ""
    taken = "all accepted" if accepted else "some rejected"
    return size, taken, ahead, *_grows(was, now, names, _evicts(was, now))


def _launch(was: State, command: Launch, now: State) -> Labels:
    names = [lane.request for lane in command.lanes]
    behind = any(_request(was, name).in_flight for name in names)
    size = "batch" if len(names) > 1 else ""
    return size, "behind another" if behind else "", *_grows(was, now, names, _evicts(was, now))


def _settle(was: State, command: Settle, _now: State) -> Labels:
    oldest, *others = _request(was, command.request).in_flight
    taken = "all accepted" if oldest.accept == oldest.allocate else "some rejected"
    return taken, "another in flight" if others else ""


def late(was: State, command: Command) -> bool:
    """Results of whom the command is about are in flight."""
    names = [getattr(command, "request", None), *(n.request for n in getattr(command, "lanes", ()))]
    session = was.session(getattr(command, "session", None))
    names += [session.turn if session is not None else None, *getattr(command, "requests", ())]
    return any(r.in_flight and r.name in names for r in was.requests)


def _evict_swa(was: State, command: EvictSwa, now: State) -> Labels:
    request = _request(was, command.request)
    before, after = _cursors(request), _cursors(_request(now, command.request))
    reach = "past the commit" if command.length > request.settled_len else ""
    if after.swa_evicted_seqlen == before.swa_evicted_seqlen:
        return reach, "does not move"
    low = max(before.swa_evicted_seqlen, before.cache_protected_len)
    size = was.config.geometry.page_size
    freed = _pages(after.swa_evicted_seqlen, size) > _pages(low, size)
    return reach, "frees pages" if freed else "to the tree's prefix, frees nothing"


def _cut(was: State, c: Cursors, target: int) -> Labels:
    page_size = was.config.geometry.page_size
    evicted = c.swa_evicted_seqlen > max(target, c.cache_protected_len)
    below = _BELOW[1 + (c.cache_protected_len > 0)] if evicted else ""
    return (
        "commit past target" if c.kv_committed_len > target else "",
        below,
        "target inside a page" if target % page_size else "",
        _tail(c.kv_allocated_len, min(c.kv_allocated_len, target), page_size),
    )


def _finish(was: State, command: Finish, now: State) -> Labels:
    request = _request(was, command.request)
    session = was.session(request.session)
    *cut, tail = _cut(was, _cursors(request), request.origin + command.finished_len)
    if session is not None and not session.closing:
        return "turn", *cut, tail, ""
    if session is None and was.tree is not None and now.tree is not None:
        grew = _ends(now.tree).keys() - _ends(was.tree).keys()
        return "ordinary", *cut, "", "leaves pages in the tree" if grew else "leaves the tree as it is"
    return "ordinary" if session is None else "turn of a closing session", *_ALL_BACK, ""


def _retract(was: State, command: Retract, _now: State) -> Labels:
    request = _request(was, command.request)
    target = request.origin + request.output - command.in_flight
    in_flight = "one output in flight" if command.in_flight else ""
    if request.session is None:
        return "ordinary", in_flight, *_ALL_BACK
    return "turn", in_flight, *_cut(was, _cursors(request), target)


def _abort(was: State, command: Abort, _now: State) -> Labels:
    request = _request(was, command.request)
    session = was.session(request.session)
    if request.phase in IN_BATCH:
        where = "in a batch"
    elif request.started:
        where = "waits after a retract"
    else:
        where = "admitted" if request.phase is Phase.ADMITTED else "queued"
    if command.marked:
        where = "marked"
    who = "ordinary" if session is None else "slot" if session.slot is not None else "no slot"
    closing = "session closing" if session is not None and session.closing else ""
    held = request.cursors or (session.slot if session is not None else None)
    prefix = "with a prefix of the tree" if held is not None and held.cache_protected_len else ""
    return where, who, closing, prefix


def _close(was: State, command: Close, _now: State) -> Labels:
    session = was.session(command.session)
    assert session is not None
    if session.turn is not None:
        return "deferred", ""
    if session.slot is None:
        return "no slot", ""
    return "slot", "others lock its path in the tree" if shares_lock(was, session.name) else ""


def _accepted_fits(was: State, command: SpecDecode) -> bool:
    commits = [(_cursors(_request(was, n.request)).kv_committed_len, n.accept) for n in command.lanes]
    return all(committed + accept <= was.config.geometry.width for committed, accept in commits)


def _tree_could_give(was: State, _command: Decode | SpecDecode) -> bool:
    left = free(was)
    full = not left.full or (was.config.geometry.window is not None and not left.swa)
    return full and was.tree is not None and sizes(was.tree).full_evictable > 0


def _held(was: State) -> str:
    running = any(r.phase in IN_BATCH for r in was.requests)
    turns = {r.name for r in was.requests if r.phase in IN_BATCH}
    slots = any(s.slot is not None and s.turn not in turns for s in was.sessions)
    if running:
        return "slots and running" if slots else "running"
    return "slots" if slots else "nothing held"


def _check_busy(was: State, command: CheckBusy, _now: State) -> Labels:
    return f"level {command.level}", _held(was)


def _check_idle(was: State, _command: CheckIdle, _now: State) -> Labels:
    return (_held(was),)


def _in_tree(tree: Tree, key: Key) -> int:
    """How much of `key` is there, usable or not."""
    path = path_of(tree, key)
    if not path:
        return 0
    return path[-1].start + shared(path[-1].node.key, key[path[-1].start :], tree.page_size)


def _whole(state: State, prompt: Prompt) -> Key:
    key = key_of(prompt, state.config.geometry.bigram)
    return key[: floor_page(len(key), state.config.geometry.page_size)]


def _count(children: tuple[Node, ...]) -> int:
    return sum(1 + _count(node.children) for node in children)


def _match(was: State, command: Match, now: State) -> Labels:
    assert was.tree is not None and now.tree is not None
    key, found = _whole(was, command.prompt), len(lock_holders(now)[command.holder])
    there = _in_tree(was.tree, key)
    how = "nothing" if not found else "all of it" if found == len(key) else "part of it"
    split = _count(now.tree.children) > _count(was.tree.children)
    short, alone = found < there, "full KV alone" if command.full_only else ""
    over = command.full_only and found > usable(was.tree, key[:found])
    return (
        how, "tombstones keep it short" if short else "over a tombstone" if over else "",
        "splits a node" if split else "", alone,
    )  # fmt: skip


def _unlock_swa(was: State, command: UnlockSwa, now: State) -> Labels:
    request = was.request(command.holder)
    who = "lock holder" if request is None else "turn" if request.session is not None else "ordinary"
    return who, "has none" if was.tree == now.tree else ""


def _unlock(was: State, command: Unlock, _now: State) -> Labels:
    return ("pins some" if lock_holders(was)[command.holder] else "pins nothing",)


def _insert(was: State, command: Insert, now: State) -> Labels:
    assert was.tree is not None and now.tree is not None
    key, goes_on = _whole(was, command.prompt), "goes on" if command.chunked else "ends"
    if len(key) == len(lock_holders(was).get(command.holder, ())):
        return goes_on, "nothing new", "", "", ""
    there = _in_tree(was.tree, key)
    before, after = _ends(was.tree), _ends(now.tree)
    revived = fresh = False
    for end, live in after.items():
        if live:
            revived = revived or before.get(end) is False
        elif end not in before:
            fresh = True
    out = command.chunked and len(lock_holders(now).get(command.holder, ())) < len(key)
    what = "all there" if there == len(key) else "part there" if there else "nothing there"
    swa = "revives a tombstone" if revived else "brings a tombstone" if fresh else ""
    if fresh and not revived and command.evicted % was.tree.page_size and command.evicted < len(key):
        swa = "brings a tombstone, evicted to inside a page"
    room = "evicts for room" if _evicts(was, now) else ""
    return goes_on, what, swa, "kept out" if out else "", room


def _evict(was: State, command: Evict, now: State) -> Labels:
    assert was.tree is not None and now.tree is not None
    had, has = _ends(was.tree), _ends(now.tree)
    size = was.config.geometry.page_size
    full, swa = ((len(had) - len(has)) * size, (sum(had.values()) - sum(has.values())) * size)
    requested = "both pools" if command.full and command.swa else "full" if command.full else "window's pool"
    if not full and (not swa or was.tree.window is None):
        return requested, "nothing evictable", "", "", ""
    short = full < command.full or swa < command.swa
    gone = {p.node.live for p in nodes(was.tree) if p.node.children and p.path not in has}
    parent = "a parent after its child" if True in gone else ""
    above = "tombstones above go along" if False in gone else ""
    left = ((p.path, p.node) for p in nodes(now.tree) if not p.node.children)
    read = any(not node.live and had[path] for path, node in left)
    stays = "a leaf that is read becomes a tombstone" if read else ""
    return requested, "less than requested" if short else "the amount requested", parent, above, stays


_BELOW = ("", "target below evicted", "target below evicted, above a prefix of the tree")

_ALL_BACK = ("", "", "", "")  # everything is given back, whatever the target is

# Of these kinds it distinguishes whether results are in flight.
IN_FLIGHT = "results in flight"
MAY_BE_LATE = (EvictSwa, Finish, Retract, Abort, Close)

# What sets a refusal apart from others with its reason.
REFUSED: dict[tuple[type, Reason], tuple[str, Callable[[State, Any], bool]]] = {
    **{(kind, Reason.WRONG_PHASE): (IN_FLIGHT, late) for kind in (Extend, Decode, SpecDecode, Launch)},
    (SpecDecode, Reason.ROW_TOO_SHORT): ("what is accepted would fit", _accepted_fits),
    (Decode, Reason.WINDOW_LOST): ("and a page only from the tree", _tree_could_give),
    (SpecDecode, Reason.WINDOW_LOST): ("and a page only from the tree", _tree_could_give),
}

CASES: dict[type, Callable[[State, Any, State], Labels]] = {
    Submit: _submit, Admit: _admit, Extend: _extend, Decode: _decode, SpecDecode: _spec_decode,
    Launch: _launch, Settle: _settle, EvictSwa: _evict_swa, Finish: _finish, Retract: _retract,
    Abort: _abort, Close: _close, CheckBusy: _check_busy, CheckIdle: _check_idle, Match: _match,
    Unlock: _unlock, UnlockSwa: _unlock_swa, Insert: _insert, Evict: _evict,
}  # fmt: skip
