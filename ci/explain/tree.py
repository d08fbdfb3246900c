"""Arguments on the radix tree: nodes, locks, matches, evictions."""

from __future__ import annotations

from collections.abc import Callable

from ci.explain.history import Past, some
from reference.clauses.contents import stamp_text
from reference.clauses.facts import NodeFacts
from reference.clauses.locks import Locked
from reference.clauses.tree_evictions import SIZES, walked
from reference.commands import Evict, Match
from reference.cursors import ceil_page
from reference.ledger import holders, text_tokens
from reference.prefix_cache import key_of, lock_holders, path_text
from reference.tree import Key, nodes
from stateful_tests.lockstep.results import Moment


def _node(m: Moment, path: Key) -> NodeFacts | None:
    tree = m.facts.tree
    return next((n for n in tree.nodes if n.path == path), None) if tree is not None else None


def _where(node: NodeFacts) -> str:
    return f"[{node.start}, {len(node.path)}) of {path_text(node.path)}"


def _page(m: Moment, path: Key) -> tuple[tuple[int, ...], bool] | None:
    """Full slots of the page at the end of a path, and whether it has SWA KV."""
    return m.facts.tree.pages.get(path) if m.facts.tree is not None else None


# Locks.


def _needs(lock: Locked, path: Key, swa: bool) -> bool:
    return lock.key[: len(path)] == path and (not swa or lock.pinned_from < len(path))


def _needed_by(m: Moment, holder: str, path: Key, swa: bool) -> bool:
    return holder in m.locks and _needs(m.locks[holder], path, swa)


def _count(m: Moment, path: Key, swa: bool) -> int | None:
    node = _node(m, path)
    return None if node is None else node.swa_locks if swa else node.full_locks


def _lock_counts(past: Past) -> str | None:
    """TREE-6: a counter and the locks that it should count."""
    tree = past.now.facts.tree
    for node in tree.nodes if tree is not None else ():
        for swa in (False, True) if "swa" in past.now.facts.pools else (False,):
            want = [name for name in sorted(past.now.locks) if _needed_by(past.now, name, node.path, swa)]
            count = node.swa_locks if swa else node.full_locks
            most = node.full_locks if past.step.tree_policy_is_free and swa else len(want)
            if not len(want) <= count <= most:
                return _counted(past, node, swa, count, want)
    return None


def _counted(past: Past, node: NodeFacts, swa: bool, count: int, want: list[str]) -> str:
    path, kind = node.path, "SWA" if swa else "full"
    where = f"node {_where(node)}"
    needs = [f"{h} {past.since(f'{h} needs {where}', _needed_by, h, path, swa)}" for h in want]
    if count <= len(want):
        since = past.since(f"{where} counts {count} {kind}", lambda m: _count(m, path, swa) == count)
        said = f"{where} counts {some(count, f'{kind} lock')} {since}"
        return said + (f"; it is needed by {' and '.join(needs)}" if needs else "; nobody needs it")
    said = f"{where} still counts {some(count, f'{kind} lock')}"
    said += f"; now it is needed only by {' and '.join(needs)}" if needs else "; nobody needs it now"
    gone = {
        name: at
        for at, m in enumerate(past.run.history[:-1])
        for name, lock in m.locks.items()
        if _needs(lock, path, swa) and name not in want
    }
    for holder, last in gone.items():
        said += f", and {holder} let go at {past.command(last + 1 + past.run.first)}"
        taken = last
        while taken and _needed_by(past.run.history[taken - 1], holder, path, swa):
            taken -= 1
        split = past.first(f"{where} is a node", lambda m: _node(m, path) is not None)
        if taken + past.run.first < split:
            said += f", whose lock is older than the split of the node at {past.command(split)}"
    for name, lock in sorted(past.now.locks.items()) if swa else ():
        if name not in want and _needs(lock, path, False):
            said += f": {name} needs SWA KV from position {lock.pinned_from} on"
    return said


def _pinned(past: Past) -> str | None:
    """TREE-8: a locked page that is gone, or has lost its SWA KV."""
    size, has_swa = past.page_size, "swa" in past.now.facts.pools
    for name, lock in sorted(past.now.locks.items()):
        for end in range(size, len(lock.key) + 1, size):
            page, before = _page(past.now, lock.key[:end]), _page(past.before, lock.key[:end])
            if page is not None and (page[1] or not has_swa or end <= lock.pinned_from):
                continue
            since = past.since(f"lock of {name}", lambda m, n, mine: m.locks.get(n) == mine, name, lock)
            locked = f"{name} has [0, {len(lock.key)}) of {path_text(lock.key)} locked {since}"
            at = f"[{end - size}, {end})"
            if before is None or page == before:
                return f"{locked}, but {at} {'is not in the tree' if page is None else 'has no SWA KV'}"
            return f"{locked}, but {past.here} takes {'' if page is None else 'the SWA KV of '}{at}"
    return None


# What rows and lock holders name, and what a match hands out.


def _named(m: Moment, name: str, start: int, size: int) -> tuple[int, ...]:
    """The full slots that a row or a lock holder names for a page of its prefix."""
    row, tree = m.facts.holders.get(name), m.facts.tree
    slots = row.prefix if row is not None else tree.lock_holders.get(name, ()) if tree is not None else ()
    return tuple(slots[start : start + size])


def _in_tree(m: Moment, path: Key) -> tuple[int, ...]:
    page = _page(m, path)
    return page[0] if page is not None else ()


def _prefix(past: Past) -> str | None:
    """TREE-4: a row or a lock holder that names other slots than the tree has."""
    size, state = past.page_size, past.now.state
    rows = {h.name: tuple(text_tokens(h.text, h.cursors.cache_protected_len)) for h in holders(state)}
    for name, key in (rows | lock_holders(state)).items():
        for start in range(0, len(key), size):
            path = key[: start + size]
            if _in_tree(past.now, path) != _named(past.now, name, start, size):
                return _other_slots(past, name, path, start)
    return None


def _other_slots(past: Past, name: str, path: Key, start: int) -> str:
    size = past.page_size
    want, got = _in_tree(past.now, path), _named(past.now, name, start, size)
    mine = past.since(f"{name} names {list(got)}", lambda m: _named(m, name, start, size) == got)
    names = f"{name} names {_slots(got)} at [{start}, {start + size}) {mine}"
    if not want:
        return f"{names}; the tree has nothing there"
    since = past.since(f"the tree has {list(want)}", lambda m: _in_tree(m, path) == want)
    return f"{names}, but what the tree has there is {_slots(want)} {since}"


def _slots(slots: tuple[int, ...]) -> str:
    if not slots:
        return "no full slots"
    return f"full slot{'s' * (len(slots) > 1)} {', '.join(map(str, slots))}"


def _match(past: Past) -> str | None:
    """TREE-5: a match that hands out too much, or too little."""
    step, window, size = past.step, past.step.config.geometry.window, past.page_size
    tree, request = past.now.facts.tree, step.acted
    assert tree is not None
    if isinstance(step.command, Match):
        name, key = step.command.holder, key_of(step.command.prompt)
        got, want = len(tree.lock_holders.get(name, ())), len(lock_holders(past.now.state).get(name, ()))
    else:
        assert request is not None
        name, key = request.name, tuple(text_tokens(request.text, request.origin + request.output))
        ours, theirs = past.now.state.request(name), past.now.facts.requests[name].cursors
        got = theirs.cache_protected_len if theirs is not None else 0
        want = ours.cursors.cache_protected_len if ours is not None and ours.cursors is not None else 0
    told = f"{past.here} hands {some(got, 'token')} to {name}, by the rules it is {want}"
    if got < want:
        path = key[:want]
        since = past.since(f"{path_text(path)} is in the tree", lambda m: _page(m, path) is not None)
        live = ", with the SWA KV that the next token reads" if window is not None else ""
        return f"{told}: [0, {want}) of {path_text(path)} is in the tree {since}{live}"
    if request is not None and got >= request.origin + request.output:
        return f"{told}: the last of its {request.origin + request.output} tokens must be computed again"
    for end in range(size, got + 1, size):
        page = _page(past.before, key[:end])
        if window is not None and end > got - window and page is not None and not page[1]:
            since = past.since(f"{path_text(key[:end])} is a tombstone", _is_tombstone, key[:end])
            return (
                f"{told}: the window of {window} behind position {got} reaches into [{end - size}, {end}),"
                f" which has no SWA KV {since}"
            )
    return told


def _is_tombstone(m: Moment, path: Key) -> bool:
    page = _page(m, path)
    return page is not None and not page[1]


# Which nodes there are.


def _shape(past: Past) -> str | None:
    """TREE-11, TREE-13: nodes that stand, went or end elsewhere than by the rules."""
    tree, state, before = past.now.facts.tree, past.now.state, past.before.state
    if tree is None or state.tree is None or before.tree is None:
        return None
    ours = {p.path: p.node.live for p in nodes(state.tree)}
    theirs = {n.path: n.live or "swa" not in past.now.facts.pools for n in tree.nodes}
    was = sorted(p.path for p in nodes(before.tree))
    said = []
    for path in was:
        if path in theirs and path not in ours:
            said.append(f"keeps {_used(past, path)}, which must go")
        elif path in theirs and theirs[path] and not ours[path]:
            said.append(f"leaves the SWA KV of {_used(past, path)}, which must go")
    for path in was:
        if path in ours and path not in theirs:
            said.append(f"takes {_used(past, path)}, which must stay")
        elif path in ours and ours[path] and not theirs[path]:
            said.append(f"takes the SWA KV of {_used(past, path)}, which must stay")
    for path in sorted({*ours, *theirs} - {*was}):
        if path not in theirs:
            said.append(f"makes no node that ends {path_text(path)}, where the rules end one")
        elif path not in ours:
            said.append(f"ends a node at {path_text(path)}, where the rules end none")
    return f"{past.here} {', and '.join(said[:2])}" if said else None


def _used(past: Past, path: Key) -> str:
    """A node, and when it was last used by the rules: its SWA KV, if that alone is asked for."""
    swa = isinstance(past.step.command, Evict) and not past.step.command.full
    before = past.before.state.tree
    node = next((p.node for p in nodes(before) if p.path == path), None) if before is not None else None
    if node is None:
        return path_text(path)
    if swa and not node.live:
        return f"{path_text(path)} (a tombstone)"
    moment = node.swa_used if swa else node.full_used
    at = len(past.run.history) - 2
    while at > 0 and _clock(past.run.history[at - 1]) >= moment:
        at -= 1
    index = at + past.run.first
    kind = "SWA" if swa else "full"
    used = f" ({kind} KV last used by {past.command(index)})" if at > 0 else ""
    return f"{path_text(path)}{used}"


def _clock(m: Moment) -> int:
    return m.state.tree.clock if m.state.tree is not None else 0


def _leaf(past: Past) -> str | None:
    """TREE-7: a fresh leaf that is longer than a window of whole pages."""
    geometry, tree = past.step.config.geometry, past.now.facts.tree
    assert tree is not None and geometry.window is not None
    need = ceil_page(geometry.window, past.page_size)
    parents = {n.path[: n.start] for n in tree.nodes}
    for node in tree.nodes:
        fresh = node.live and node.path not in parents and _page(past.before, node.path) is None
        if fresh and len(node.slots) > need:
            return (
                f"{past.here} makes {_where(node)} one leaf, and a lock pins leaves whole: SWA KV of"
                f" {len(node.slots)} tokens for a window of {geometry.window}, which needs {need}"
            )
    return None


# What nodes hold, and what is counted of them.


def _live(m: Moment, path: Key) -> bool:
    node = _node(m, path)
    return node is not None and node.live


def _swa_slots(m: Moment, path: Key) -> int:
    node = _node(m, path)
    return sum(1 for slot in node.swa_slots if slot) if node is not None else 0


def _live_with(m: Moment, path: Key, swa_slots: int) -> bool:
    return _live(m, path) and _swa_slots(m, path) == swa_slots


def _names(m: Moment, path: Key, slot: int, full: bool) -> bool:
    node = _node(m, path)
    return node is not None and slot in (node.slots if full else node.swa_slots)


def _half(past: Past) -> str | None:
    """TREE-2: a live node without all of its SWA KV, or with slots that the mapping does not name."""
    tree = past.now.facts.tree
    for node in tree.nodes if tree is not None else ():
        have = _swa_slots(past.now, node.path)
        if node.live and (len(node.swa_slots) != len(node.slots) or have < len(node.slots)):
            live = past.since(f"{_where(node)} is live", _live, node.path)
            few = past.since(f"{have} slots", _live_with, node.path, have)
            return (
                f"node {_where(node)} counts as live {live}, but has {some(have, 'SWA slot')} for its"
                f" {some(len(node.slots), 'token')} {few}; it must have all of them or be a tombstone"
            )
        for at, (slot, mapped) in enumerate(zip(node.swa_slots, node.mapped)):
            if slot != mapped:
                named = past.since(f"{_where(node)} names SWA slot {slot}", _names, node.path, slot, False)
                leads = past.since(f"mapped to {mapped}", _mapped, node.path, at, mapped)
                return (
                    f"node {_where(node)} names SWA slot {slot} for position {node.start + at} {named}, but"
                    f" the mapping has {f'slot {mapped}' if mapped else 'none'} for it {leads}"
                )
    return None


def _mapped(m: Moment, path: Key, at: int, slot: int) -> bool:
    node = _node(m, path)
    return node is not None and at < len(node.mapped) and node.mapped[at] == slot


def _contents(past: Past) -> str | None:
    """TREE-3: a node that holds the KV of other tokens."""
    tree = past.now.facts.tree
    for node in tree.nodes if tree is not None else ():
        want = node.path[node.start :]
        for pool, slots, stamps in (
            ("full", node.slots, node.full_read), ("SWA", node.swa_slots, node.swa_read),
        ):  # fmt: skip
            if not stamps or tuple(stamps) == want:
                continue
            at = next(i for i, (a, b) in enumerate(zip(want, stamps)) if a != b)
            named = f"{_where(node)} names {pool} slot {slots[at]}"
            since = past.since(named, _names, node.path, slots[at], pool == "full")
            holds = stamp_text(stamps[at]) if stamps[at] else "no committed token"
            return (
                f"node {_where(node)} names {pool} slot {slots[at]} for position {node.start + at} {since},"
                f" which holds {holds}; it must be {stamp_text(want[at])}"
            )
    return None


def _sizes(past: Past) -> str | None:
    """TREE-9: counters that are not what a walk over the nodes gives."""
    tree = past.now.facts.tree
    if tree is None or tree.sizes is None:
        return None
    walk = walked(tree)
    for at, name in enumerate(SIZES):
        if tree.sizes[at] != walk[at]:
            since = past.since(f"{name} {tree.sizes[at]}", _says, at, tree.sizes[at])
            return (
                f"the counter says {tree.sizes[at]} {name} tokens {since}, but after {past.here} the nodes of"
                f" the tree have {walk[at]}"
            )
    return None


def _says(m: Moment, at: int, amount: int) -> bool:
    tree = m.facts.tree
    return tree is not None and tree.sizes is not None and tree.sizes[at] == amount


def _amount(past: Past) -> str:
    """TREE-10."""
    verb = "reports" if "reported" in past.violation.expected else "frees"
    expected = past.violation.expected.replace(" swa ", " SWA ")
    return f"by the rules {past.here} ends with {expected}; the system {verb} {past.violation.observed}"


def _inserted(past: Past) -> str:
    """TREE-12."""
    return f"{past.here} must leave {past.violation.expected}; {past.violation.observed}"


RULES: dict[str, Callable[[Past], str | None]] = {
    "TREE-2": _half, "TREE-3": _contents, "TREE-4": _prefix, "TREE-5": _match, "TREE-6": _lock_counts,
    "TREE-7": _leaf, "TREE-8": _pinned, "TREE-9": _sizes, "TREE-10": _amount, "TREE-11": _shape,
    "TREE-12": _inserted, "TREE-13": _shape,
}  # fmt: skip
