"""Situations: kind of command, outcome, and the case of its rule, in words.

`situation` is a pure function of one step and cheap, so that exhaustive and random runs count the same
things. `catalogue` lists every combination that could be thought of: what a fixed point does not have is
proved unreachable in its scope.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any

from reference.caching import guests, key_of
from reference.commands import (
    Abort, Admit, CheckBusy, CheckIdle, Close, Command, Decode, Evict, EvictSwa, Extend, Finish,
    Insert, Match, Open, Outcome, Prompt, Reason, Refused, Retract, SpecDecode, Submit, Unlock,
)  # fmt: skip
from reference.cursors import floor_page
from reference.geometry import Geometry
from reference.ledger import IN_BATCH, Cursors, Phase, Request, State
from reference.rules import RULES
from reference.tree import Key, Tree, nodes, path_of, shared

Labels = tuple[str, ...]


def situation(was: State, command: Command, outcome: Outcome, now: State) -> str:
    """The situation of one step of the reference, such as "finish, turn, target inside a page"."""
    kind = type(command)
    if isinstance(outcome, Refused):
        return _refused(kind, outcome.reason)
    return _said(kind, _CASES[kind][0](was, command, now))


def catalogue(geometry: Geometry, kinds: Iterable[type], absent: Container[str] = ()) -> list[str]:
    """Every situation of these kinds of commands that could be thought of with these sizes.

    absent: labels and reasons that are out of the question, such as "batch" where there is one request.
    """
    found: list[str] = []
    for kind in kinds:
        found += dict.fromkeys(_said(kind, labels) for labels in _combinations(kind, geometry, absent))
        reasons = [reason for reason in RULES[kind].refused if reason.value not in absent]
        found += [_refused(kind, reason) for reason in reasons if _fits(geometry, reason)]
    return found


def _fits(geometry: Geometry, reason: Reason) -> bool:
    """Whether these sizes can be a reason at all."""
    if reason in (Reason.NO_SWA, Reason.OUT_OF_SWA):
        return (geometry.window is None) == (reason is Reason.NO_SWA)
    return reason is not Reason.NO_TREE or not geometry.tree


def _combinations(kind: type, geometry: Geometry, absent: Container[str]) -> Iterator[Labels]:
    no_window = ("window", "evicted", "tombstone", "both pools")
    for labels in product(*_CASES[kind][1]):
        text = " ".join(labels)
        if not geometry.tree and "tree" in text:
            continue
        if geometry.window is None and any(word in text for word in no_window):
            continue
        if geometry.page_size == 1 and ("inside" in text or "within" in text):
            continue
        if _sense(kind, labels, geometry) and not any(label in absent for label in labels):
            yield labels


def _sense(kind: type, labels: Labels, geometry: Geometry) -> bool:
    """Whether these labels go together by what they mean."""
    if kind is Admit:
        return (labels[1] == "no slot") == (labels[2] not in _TAILS)
    if kind is Extend:
        return not labels[2] or labels[0] in ("takes a row", "goes on")
    if kind is Finish:
        return bool(labels[-1]) == (labels[0] == "ordinary" and geometry.tree)
    if kind is Abort:
        return labels[1] != "ordinary" or not labels[2]
    return kind is not Insert or "ends" not in labels or "kept out" not in labels


_NAMES: dict[type, str] = {}
_TEXTS: dict[object, str] = {}


def kind_name(kind: type) -> str:
    """A kind of command as it is called in files, such as "spec_decode"."""
    if kind not in _NAMES:
        _NAMES[kind] = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
    return _NAMES[kind]


def _refused(kind: type, reason: Reason) -> str:
    key = (kind, reason)
    if key not in _TEXTS:
        _TEXTS[key] = f"{kind_name(kind)}, refused: {reason.value}"
    return _TEXTS[key]


def _said(kind: type, labels: Labels) -> str:
    key = (kind, labels)
    if key not in _TEXTS:
        _TEXTS[key] = ", ".join([kind_name(kind), *(label for label in labels if label)])
    return _TEXTS[key]


# One function for each kind: its labels, one of each row of its table below, "" where nothing is to be said.


def _request(state: State, name: str) -> Request:
    request = state.request(name)
    assert request is not None
    return request


def _cursors(request: Request) -> Cursors:
    assert request.cursors is not None
    return request.cursors


def _pages(length: int, page_size: int) -> int:
    return -(-length // page_size)


def _open(_was: State, _command: Open, _now: State) -> Labels:
    return ()


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
        if not c.cache_protected_len:
            return again, "no slot", ""
        whole = c.cache_protected_len == floor_page(key, was.scope.geometry.page_size)
        return again, "no slot", f"{'all' if whole else 'part'} of its key from the tree"
    slot, page_size = session.slot, was.scope.geometry.page_size
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
    page_size, opened = was.scope.geometry.page_size, False
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


@lru_cache(maxsize=64)  # commands are tried on one tree after the other
def _ends(tree: Tree) -> dict[Key, bool]:
    """Path to the end of each page -> whether it has SWA KV."""
    size = tree.page_size
    return {
        placed.path[:end]: placed.node.live
        for placed in nodes(tree)
        for end in range(placed.start + size, placed.end + 1, size)
    }


def _extend(was: State, command: Extend, now: State) -> Labels:
    names = [lane.request for lane in command.lanes]
    grows = _grows(was, now, names, _evicts(was, now))
    last = [_request(now, name).phase is Phase.RUNNING for name in names]
    if len(names) > 1:
        return "batch", "last chunks" if all(last) else "chunks", "", *grows
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
        elif floor_page(_cursors(after).kv_committed_len, was.scope.geometry.page_size) > r:
            kept = "kept out of the tree"
    return start, "last chunks" if last[0] else "chunks", kept, *grows


def _decode(was: State, command: Decode, now: State) -> Labels:
    size = "batch" if len(command.requests) > 1 else ""
    return size, *_grows(was, now, command.requests, _evicts(was, now))


def _spec_decode(was: State, command: SpecDecode, now: State) -> Labels:
    size = "batch" if len(command.lanes) > 1 else ""
    names = [lane.request for lane in command.lanes]
    accepted = all(lane.accept == lane.allocate for lane in command.lanes)
    window, ahead = was.scope.geometry.window, ""
    if window is not None:
        after = [_cursors(_request(now, name)) for name in names]
        most = max(c.kv_allocated_len - c.kv_committed_len for c in after)
        ahead = "ahead by a window" if most >= window else ""
    taken = "all accepted" if accepted else "some rejected"
    return size, taken, ahead, *_grows(was, now, names, _evicts(was, now))


def _evict_swa(was: State, command: EvictSwa, now: State) -> Labels:
    before, after = _cursors(_request(was, command.request)), _cursors(_request(now, command.request))
    reach = "past the commit" if command.length > before.kv_committed_len else ""
    if after.swa_evicted_seqlen == before.swa_evicted_seqlen:
        return reach, "does not move"
    low = max(before.swa_evicted_seqlen, before.cache_protected_len)
    size = was.scope.geometry.page_size
    freed = _pages(after.swa_evicted_seqlen, size) > _pages(low, size)
    return reach, "frees pages" if freed else "to the tree's prefix, frees nothing"


def _cut(was: State, c: Cursors, target: int) -> Labels:
    page_size = was.scope.geometry.page_size
    return (
        "commit past target" if c.kv_committed_len > target else "",
        "target below evicted" if c.swa_evicted_seqlen > target else "",
        "target inside a page" if target % page_size else "",
        _tail(c.kv_allocated_len, min(c.kv_allocated_len, target), page_size),
    )


def _finish(was: State, command: Finish, now: State) -> Labels:
    request = _request(was, command.request)
    session = was.session(request.session)
    left = ""
    if session is None:
        who = "ordinary"
        if was.tree is not None and now.tree is not None:
            grew = _ends(now.tree).keys() - _ends(was.tree).keys()
            left = "leaves pages in the tree" if grew else "leaves the tree as it is"
    else:
        who = "turn of a closing session" if session.closing else "turn"
    return who, *_cut(was, _cursors(request), request.origin + command.finished_len), left


def _retract(was: State, command: Retract, _now: State) -> Labels:
    request = _request(was, command.request)
    target = request.origin + request.output - command.in_flight
    who = "ordinary" if request.session is None else "turn"
    in_flight = "one output in flight" if command.in_flight else ""
    return who, in_flight, *_cut(was, _cursors(request), target)


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
    return where, who, "session closing" if session is not None and session.closing else ""


def _close(was: State, command: Close, _now: State) -> Labels:
    session = was.session(command.session)
    assert session is not None
    if session.turn is not None:
        return ("deferred",)
    return ("slot",) if session.slot is not None else ("no slot",)


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
    key = key_of(prompt)
    return key[: floor_page(len(key), state.scope.geometry.page_size)]


def _match(was: State, command: Match, now: State) -> Labels:
    assert was.tree is not None and now.tree is not None
    key, found = _whole(was, command.prompt), len(guests(now)[command.holder])
    there = _in_tree(was.tree, key)
    how = "all of it" if found == len(key) else "part of it" if found else "nothing"
    split = len(list(nodes(now.tree))) > len(list(nodes(was.tree)))
    return how, "tombstones keep it short" if found < there else "", "splits a node" if split else ""


def _unlock(was: State, command: Unlock, _now: State) -> Labels:
    return ("pins some" if guests(was)[command.holder] else "pins nothing",)


def _insert(was: State, command: Insert, now: State) -> Labels:
    assert was.tree is not None and now.tree is not None
    key = _whole(was, command.prompt)
    there = _in_tree(was.tree, key)
    before, after = _ends(was.tree), _ends(now.tree).items()
    revived = any(live and before.get(end) is False for end, live in after)
    fresh = any(not live and end not in before for end, live in after)
    out = command.chunked and len(guests(now).get(command.holder, ())) < len(key)
    what = "all there" if there == len(key) else "part there" if there else "nothing there"
    swa = "revives a tombstone" if revived else "brings a tombstone" if fresh else ""
    room = "evicts for room" if _evicts(was, now) else ""
    return "goes on" if command.chunked else "ends", what, swa, "kept out" if out else "", room


def _evict(was: State, command: Evict, now: State) -> Labels:
    assert was.tree is not None and now.tree is not None
    had, has = _ends(was.tree).values(), _ends(now.tree).values()
    size = was.scope.geometry.page_size
    full, swa = ((len(had) - len(has)) * size, (sum(had) - sum(has)) * size)
    asked = "both pools" if command.full and command.swa else "full" if command.full else "window's pool"
    if not full and (not swa or was.tree.window is None):
        return asked, "nothing to be had"
    short = full < command.full or swa < command.swa
    return asked, "less than asked" if short else "what was asked"


_ROOM: tuple[Labels, Labels] = (("no page opened", "opens pages"), ("", "tree evicts for room"))
_TAILS = ("no tail", "gives back within a page", "frees pages")
_CUT: tuple[Labels, ...] = (
    ("", "commit past target"), ("", "target below evicted"), ("", "target inside a page"), _TAILS,
)  # fmt: skip
_HELD = ("nothing held", "slots", "running", "slots and running")
_TREE_TEXT = ("", "for the tree, with a prompt")

# Kind -> its function, and the labels that it may give, row by row.
_CASES: dict[type, tuple[Callable[[State, Any, State], Labels], tuple[Labels, ...]]] = {
    Open: (_open, ()),
    Submit: (_submit, (("ordinary", "first turn", "later turn", "turn without a slot"), _TREE_TEXT)),
    Admit: (_admit, (
        ("", "again"),
        ("no slot", "commit past its key", "commit at its key", "commit below its key",
         "from R, its window lost"),
        ("", "part of its key from the tree", "all of its key from the tree", *_TAILS),
    )),
    Extend: (_extend, (
        ("takes a row", "resumes a slot", "goes on", "batch"), ("chunks", "last chunks"),
        ("", "into the tree", "kept out of the tree"), *_ROOM,
    )),
    Decode: (_decode, (("", "batch"), *_ROOM)),
    SpecDecode: (_spec_decode, (
        ("", "batch"), ("all accepted", "some rejected"), ("", "ahead by a window"), *_ROOM,
    )),
    EvictSwa: (_evict_swa, (
        ("", "past the commit"), ("does not move", "frees pages", "to the tree's prefix, frees nothing"),
    )),
    Finish: (_finish, (
        ("ordinary", "turn", "turn of a closing session"), *_CUT,
        ("", "leaves pages in the tree", "leaves the tree as it is"),
    )),
    Retract: (_retract, (("ordinary", "turn"), ("", "one output in flight"), *_CUT)),
    Abort: (_abort, (
        ("queued", "admitted", "in a batch", "waits after a retract", "marked"),
        ("ordinary", "slot", "no slot"), ("", "session closing"),
    )),
    Close: (_close, (("no slot", "slot", "deferred"),)),
    CheckBusy: (_check_busy, (("level 0", "level 1", "level 2"), _HELD)),
    CheckIdle: (_check_idle, (_HELD[:2],)),
    Match: (_match, (
        ("nothing", "part of it", "all of it"), ("", "tombstones keep it short"), ("", "splits a node"),
    )),
    Unlock: (_unlock, (("pins nothing", "pins some"),)),
    Insert: (_insert, (
        ("ends", "goes on"), ("nothing there", "part there", "all there"),
        ("", "revives a tombstone", "brings a tombstone"), ("", "kept out"), ("", "evicts for room"),
    )),
    Evict: (_evict, (
        ("full", "window's pool", "both pools"), ("what was asked", "less than asked", "nothing to be had"),
    )),
}  # fmt: skip
