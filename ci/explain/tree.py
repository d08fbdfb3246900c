"""Explanations for the radix tree: nodes, locks, matches, evictions."""

from collections.abc import Callable

from ci.explain.history import History, of, some
from reference.clauses.contents import stamp_text
from reference.clauses.facts import NodeFacts
from reference.clauses.tree import half_dead, long_leaf, where, wrong_token
from reference.clauses.tree_evictions import SIZES, walked
from reference.clauses.tree_locks import match_of, miscounted_locks, other_slots, unpinned, usable_length
from reference.commands import Evict, token_of
from reference.failures import AtNode
from reference.prefix_cache import path_text
from reference.tree import Key, nodes
from stateful_tests.lockstep.results import Moment


def _node(m: Moment, path: Key) -> NodeFacts | None:
    tree = m.facts.tree
    return next((n for n in tree.nodes if n.path == path), None) if tree is not None else None


def _page(m: Moment, path: Key) -> tuple[tuple[int, ...], bool] | None:
    """Full slots of the page at the end of a path, and whether it has SWA KV."""
    return m.facts.tree.pages.get(path) if m.facts.tree is not None else None


def _needed_by(m: Moment, holder: str, path: Key, swa: bool) -> bool:
    lock = m.locks.get(holder)
    return lock is not None and lock.key[: len(path)] == path and (not swa or lock.pinned_from < len(path))


def _count(m: Moment, path: Key, swa: bool) -> int | None:
    node = _node(m, path)
    return None if node is None else node.swa_locks if swa else node.full_locks


def _lock_counts(past: History, found: tuple[NodeFacts, list[str], list[str]]) -> str:
    """TREE-6: a counter and the locks that it should count."""
    node, full, swa = found
    is_swa = node.full_locks == len(full)
    path, kind, want = node.path, "SWA" if is_swa else "full", swa if is_swa else full
    count, name = node.swa_locks if is_swa else node.full_locks, f"node {where(node)}"
    needs = [f"{h} {past.first_since(f'{h} needs {name}', _needed_by, h, path, is_swa)}" for h in want]
    if count <= len(want):
        since = past.first_since(f"{name} counts {count} {kind}", lambda m: _count(m, path, is_swa) == count)
        said = f"{name} counts {some(count, f'{kind} lock')} {since}"
        return said + (f"; it is needed by {' and '.join(needs)}" if needs else "; nobody needs it")
    said = f"{name} still counts {some(count, f'{kind} lock')}"
    said += f"; now it is needed only by {' and '.join(needs)}" if needs else "; nobody needs it now"
    holders = dict.fromkeys(holder for m in past.run.history for holder in m.locks if holder not in want)
    for holder in holders:
        held = past.last_time(f"{holder} needed {name}", _needed_by, holder, path, is_swa)
        if held is None:
            continue
        taken, let_go = held
        said += f", and {holder} let go at {past.command(let_go)}"
        split = past.first_step(f"{name} is a node", lambda m: _node(m, path) is not None)
        if taken < split:
            said += f", whose lock is older than the split of the node at {past.command(split)}"
    for holder in full if is_swa else ():
        if holder not in want:
            said += f": {holder} needs SWA KV from position {past.now.locks[holder].pinned_from} on"
    return said


def _pinned(past: History, found: tuple[str, Key, int, bool]) -> str:
    """TREE-8: a locked page that is gone, or has no SWA KV."""
    name, key, end, there = found
    lock, before = past.now.locks[name], _page(past.before, key[:end])
    since = past.first_since(f"lock of {name}", lambda m: m.locks.get(name) == lock)
    locked = f"{name} has [0, {len(key)}) of {path_text(key)} locked {since}"
    at = f"[{end - past.page_size}, {end})"
    if before is None or (there and not before[1]):
        return f"{locked}, but {at} {'has no SWA KV' if there else 'is not in the tree'}"
    return f"{locked}, but {past.here} takes {'the SWA KV of ' if there else ''}{at}"


# What rows and lock holders name, and what a match hands out.


def _named(m: Moment, name: str, start: int, size: int) -> tuple[int, ...]:
    """The full slots that a row or a lock holder names for a page of its prefix."""
    row, tree = m.facts.holders.get(name), m.facts.tree
    slots = row.prefix if row is not None else tree.lock_holders.get(name, ()) if tree is not None else ()
    return tuple(slots[start : start + size])


def _in_tree(m: Moment, path: Key) -> tuple[int, ...]:
    page = _page(m, path)
    return page[0] if page is not None else ()


def _prefix(past: History, found: tuple[str, Key, tuple[int, ...], tuple[int, ...]]) -> str:
    """TREE-4: a row or a lock holder that names other slots than the tree has."""
    (name, path, want, got), size = found, past.page_size
    start = len(path) - size
    mine = past.first_since(f"{name} names {list(got)}", lambda m: _named(m, name, start, size) == got)
    names = f"{name} names {_slots(got)} at [{start}, {start + size}) {mine}"
    if not want:
        return f"{names}; the tree has nothing there"
    since = past.first_since(f"the tree has {list(want)}", lambda m: _in_tree(m, path) == want)
    return f"{names}, but what the tree has there is {_slots(want)} {since}"


def _slots(slots: tuple[int, ...]) -> str:
    if not slots:
        return "no full slots"
    return f"full slot{'s' * (len(slots) > 1)} {', '.join(map(str, slots))}"


def _match(past: History, found: tuple[str, Key, int]) -> str:
    """TREE-5: a match that hands out too much, or too little."""
    step, window, size = past.step, past.step.config.geometry.window, past.page_size
    (name, key, got), request = found, step.acted
    want = usable_length(step, key)
    told = f"{past.here} hands {some(got, 'token')} to {name}, by the rules it is {want}"
    if got < want:
        path = key[:want]
        since = past.first_since(f"{path_text(path)} is in the tree", lambda m: _page(m, path) is not None)
        live = ", with the SWA KV that the next token reads" if window is not None else ""
        return f"{told}: [0, {want}) of {path_text(path)} is in the tree {since}{live}"
    if request is not None and got > len(key):
        return f"{told}: the last of its {request.origin + request.output} tokens must be computed again"
    for end in range(size, got + 1, size):
        page = _page(past.before, key[:end])
        if window is not None and end > got - window and page is not None and not page[1]:
            since = past.first_since(f"{path_text(key[:end])} is a tombstone", _is_tombstone, key[:end])
            return (
                f"{told}: the window of {window} behind position {got} reaches into [{end - size}, {end}),"
                f" which has no SWA KV {since}"
            )
    return told


def _is_tombstone(m: Moment, path: Key) -> bool:
    page = _page(m, path)
    return page is not None and not page[1]


# Which nodes there are.


def _shape(past: History) -> str | None:
    """TREE-11, TREE-13: nodes that stand, went or end elsewhere than by the rules."""
    tree, state, before = past.now.facts.tree, past.now.state, past.before.state
    if tree is None or state.tree is None or before.tree is None:
        return None
    ours = {p.path: p.node.live for p in nodes(state.tree)}
    theirs = {n.path: n.live or "swa" not in past.now.facts.pools for n in tree.nodes}
    was = sorted(p.path for p in nodes(before.tree))
    said = []
    for verb, spares, must, a, b in (
        ("keeps", "leaves", "must go", theirs, ours), ("takes", "takes", "must stay", ours, theirs),
    ):  # fmt: skip
        for path in was:
            if path in a and path not in b:
                said.append(f"{verb} {_used(past, path)}, which {must}")
            elif a.get(path) and not b[path]:
                said.append(f"{spares} the SWA KV of {_used(past, path)}, which {must}")
    for path in sorted({*ours, *theirs} - {*was}):
        if path not in theirs:
            said.append(f"makes no node that ends {path_text(path)}, where the rules end one")
        elif path not in ours:
            said.append(f"ends a node at {path_text(path)}, where the rules end none")
    return f"{past.here} {', and '.join(said[:2])}" if said else None


def _used(past: History, path: Key) -> str:
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


def _leaf(past: History, found: tuple[NodeFacts, int]) -> str:
    """TREE-7: a fresh leaf that is longer than a window of whole pages."""
    (node, need), window = found, past.step.config.geometry.window
    return (
        f"{past.here} makes {where(node)} one leaf, and a lock pins leaves whole: SWA KV of"
        f" {len(node.slots)} tokens for a window of {window}, which needs {need}"
    )


# What nodes hold, and what is counted of them.


def _swa_slots(m: Moment, path: Key) -> int | None:
    """How many SWA slots a node has, live or not."""
    node = _node(m, path)
    return sum(1 for slot in node.swa_slots if slot) if node is not None else None


def _is_live(m: Moment, path: Key) -> bool:
    node = _node(m, path)
    return node is not None and node.live


def _names(m: Moment, path: Key, slot: int, full: bool) -> bool:
    node = _node(m, path)
    return node is not None and slot in (node.slots if full else node.swa_slots)


def _half(past: History, node: NodeFacts) -> str:
    """TREE-2: a live node without all of its SWA KV, or with slots that the mapping does not name."""
    path, have = node.path, _swa_slots(past.now, node.path)
    if len(node.swa_slots) != len(node.slots) or have != len(node.slots):
        live = past.first_since(f"{where(node)} is live", _is_live, path)
        few = past.first_since(f"{have} slots", lambda m: _swa_slots(m, path) == have)
        return (
            f"node {where(node)} counts as live {live}, but has {some(have or 0, 'SWA slot')} for its"
            f" {some(len(node.slots), 'token')} {few}; it must have all of them or be a tombstone"
        )
    at = next(i for i, (slot, to) in enumerate(zip(node.swa_slots, node.mapped)) if slot != to)
    slot, mapped = node.swa_slots[at], node.mapped[at]
    named = past.first_since(f"{where(node)} names SWA slot {slot}", _names, path, slot, False)
    leads = past.first_since(f"mapped to {mapped}", _mapped, path, at, mapped)
    return (
        f"node {where(node)} names SWA slot {slot} for position {node.start + at} {named}, but"
        f" the mapping has {f'slot {mapped}' if mapped else 'none'} for it {leads}"
    )


def _mapped(m: Moment, path: Key, at: int, slot: int) -> bool:
    node = _node(m, path)
    return node is not None and at < len(node.mapped) and node.mapped[at] == slot


def _orphan(past: History) -> str | None:
    """TREE-1: a node below none that ends where it starts."""
    place = past.violation.failure.at[0]
    node = _node(past.now, place.path) if isinstance(place, AtNode) else None
    if node is None or not node.start or _node(past.now, node.path[: node.start]) is not None:
        return None
    since = past.first_since(f"{where(node)} is a node", lambda m: _node(m, node.path) is not None)
    return f"node {where(node)} is there {since}, and no node ends at {node.start}, where it begins"


def _contents(past: History, found: tuple[NodeFacts, str, int]) -> str:
    """TREE-3: a node that holds the KV of other tokens."""
    node, pool, at = found
    full = pool == "full"
    slot, stamp = (node.slots[at], node.full_read[at]) if full else (node.swa_slots[at], node.swa_read[at])
    since = past.first_since(f"{where(node)} names {pool} slot {slot}", _names, node.path, slot, full)
    position = node.start + at
    return (
        f"node {where(node)} names {pool} slot {slot} for position {position} {since}, which holds"
        f" {stamp_text(stamp) if stamp else 'no committed token'}; it must be"
        f" {stamp_text(token_of(node.path[position]))}"
    )


def _sizes(past: History) -> str | None:
    """TREE-9: counters that are not what a walk over the nodes gives."""
    tree = past.now.facts.tree
    if tree is None or tree.sizes is None:
        return None
    for at, (name, says, walk) in enumerate(zip(SIZES, tree.sizes, walked(tree))):
        if says != walk:
            since = past.first_since(f"{name} {says}", _says, at, says)
            return (
                f"the counter says {says} {name} tokens {since}, but after {past.here} the nodes of"
                f" the tree have {walk}"
            )
    return None


def _says(m: Moment, at: int, amount: int) -> bool:
    tree = m.facts.tree
    return tree is not None and tree.sizes is not None and tree.sizes[at] == amount


def _amount(past: History) -> str:
    """TREE-10."""
    expected, observed = past.violation.expected, past.violation.observed
    return f"by the rules {past.here} ends with {expected}; in the system it is {observed}"


def _inserted(past: History) -> str:
    """TREE-12, TREE-14."""
    return f"{past.here} must leave {past.violation.expected}; {past.violation.observed}"


RULES: dict[str, Callable[[History], str | None]] = {
    "TREE-1": _orphan, "TREE-2": of(half_dead, _half), "TREE-3": of(wrong_token, _contents),
    "TREE-4": of(other_slots, _prefix), "TREE-5": of(match_of, _match),
    "TREE-6": of(miscounted_locks, _lock_counts), "TREE-7": of(long_leaf, _leaf),
    "TREE-8": of(unpinned, _pinned), "TREE-9": _sizes, "TREE-10": _amount,
    "TREE-11": _shape, "TREE-12": _inserted, "TREE-13": _shape, "TREE-14": _inserted,
}  # fmt: skip
