"""Arguments on the radix tree: nodes, locks, matches, evictions."""

from __future__ import annotations

from collections.abc import Callable

from ci.past import Past, some
from reference.caching import guests, key_of, path_text
from reference.clauses.contents import stamp_text
from reference.commands import Evict, Match
from reference.cursors import ceil_page
from reference.facts import NodeFacts
from reference.ledger import holders, text_tokens
from reference.tree import Key, Lock, nodes
from stateful_tests.results import Moment


def _node(m: Moment, path: Key) -> NodeFacts | None:
    tree = m.facts.tree
    return next((n for n in tree.nodes if n.path == path), None) if tree is not None else None


def _where(path: Key, start: int) -> str:
    return f"[{start}, {len(path)}) of {path_text(path)}"


def _locks(m: Moment) -> tuple[Lock, ...]:
    return m.state.tree.locks if m.state.tree is not None else ()


def _needs(lock: Lock, path: Key, swa: bool) -> bool:
    return lock.key[: len(path)] == path and (not swa or lock.swa_from < len(path))


def _lock_counts(past: Past) -> str | None:
    """TREE-6: a counter and the locks that it should count."""
    tree = past.now.facts.tree
    for node in tree.nodes if tree is not None else ():
        for swa in (False, True) if "swa" in past.now.facts.pools else (False,):
            want = [k.holder for k in _locks(past.now) if k.key and _needs(k, node.path, swa)]
            count = node.swa_locks if swa else node.full_locks
            if count == len(want) or (past.step.own_shape and swa and len(want) <= count <= node.full_locks):
                continue
            return _counted(past, node, swa, count, want)
    return None


def _counted(past: Past, node: NodeFacts, swa: bool, count: int, want: list[str]) -> str:
    path, kind = node.path, "SWA" if swa else "full"

    def counts(m: Moment) -> bool:
        n = _node(m, path)
        return n is not None and (n.swa_locks if swa else n.full_locks) == count

    def needed_by(holder: str) -> Callable[[Moment], bool]:
        return lambda m: any(k.holder == holder and _needs(k, path, swa) for k in _locks(m))

    where = f"node {_where(path, node.start)}"
    since = past.since(f"{where} counts {count} {kind}", counts)
    said = f"{where} counts {some(count, f'{kind} lock')} {since}"
    needs = [f"{h} {past.since(f'{h} needs {where}', needed_by(h))}" for h in want]
    only = "only " * (count > len(want))
    said += f"; it is needed {only}by {' and '.join(needs)}" if needs else "; nobody needs it"
    if count > len(want):
        gone = {
            k.holder: i
            for i, m in enumerate(past.run.history[:-1])
            for k in _locks(m)
            if k.key and _needs(k, path, swa) and k.holder not in want
        }
        for holder, last in gone.items():
            until = last + 1 + past.run.first
            said += f", and {holder} let go at {past.command(until)}"
        for lock in _locks(past.now) if swa else ():
            if lock.holder not in want and _needs(lock, path, False):
                said += f": {lock.holder} needs SWA KV from position {lock.swa_from} on"
    return said


def _pinned(past: Past) -> str | None:
    """TREE-8: a locked page that is gone, or has lost its SWA KV."""
    tree, size = past.now.facts.tree, past.page_size
    for lock in _locks(past.now) if tree is not None else ():
        for end in range(size, len(lock.key) + 1, size):
            assert tree is not None
            path = lock.key[:end]
            _, live = tree.pages.get(path, (None, False))
            gone = path not in tree.pages
            if not gone and (live or "swa" not in past.now.facts.pools or end <= lock.swa_from):
                continue
            since = past.since(f"lock of {lock.holder}", lambda m: lock in _locks(m))
            locked = f"{lock.holder} has [0, {len(lock.key)}) of {path_text(lock.key)} locked {since}"
            what = "takes" if gone else "takes the SWA KV of"
            at = f"[{end - size}, {end})"
            if past.before.facts.tree is not None and path not in past.before.facts.tree.pages:
                return f"{locked}, but {at} is not in the tree"
            return f"{locked}, but {past.here} {what} {at}"
    return None


def _prefix(past: Past) -> str | None:
    """TREE-4: a row or a guest that names other slots than the tree has."""
    tree, size = past.now.facts.tree, past.page_size
    assert tree is not None

    def slots_of(m: Moment, name: str, start: int) -> tuple[int, ...]:
        seen = m.facts.holders.get(name)
        here = m.facts.tree
        slots = seen.prefix if seen is not None else here.guests.get(name, ()) if here is not None else ()
        return tuple(slots[start : start + size])

    def tree_has(m: Moment, path: Key) -> tuple[int, ...]:
        return m.facts.tree.pages.get(path, ((), False))[0] if m.facts.tree is not None else ()

    named = {h.name: tuple(text_tokens(h.text, h.cursors.cache_protected_len)) for h in holders(past.now.state)}
    for name, key in (named | guests(past.now.state)).items():
        for start in range(0, len(key), size):
            path = key[: start + size]
            want, got = tree_has(past.now, path), slots_of(past.now, name, start)
            if want == got:
                continue
            mine = past.since(f"{name} names {list(got)}", lambda m: slots_of(m, name, start) == got)
            names = f"{name} names {_slots(got)} at [{start}, {start + size}) {mine}"
            if not want:
                return f"{names}; the tree has nothing there"
            since = past.since(f"the tree has {list(want)}", lambda m: tree_has(m, path) == want)
            return f"{names}, but what the tree has there is {_slots(want)} {since}"
    return None


def _slots(slots: tuple[int, ...]) -> str:
    if not slots:
        return "no full slots"
    return f"full slot{'s' * (len(slots) > 1)} {', '.join(map(str, slots))}"


def _match(past: Past) -> str | None:
    """TREE-5: a match that hands out too much, or too little."""
    step, window, size = past.step, past.step.scope.geometry.window, past.page_size
    before, tree, request = step.before.tree, past.now.facts.tree, step.acted
    assert before is not None and tree is not None
    if isinstance(step.command, Match):
        name, key = step.command.holder, key_of(step.command.prompt)
        got, want = len(tree.guests.get(name, ())), len(guests(past.now.state).get(name, ()))
    else:
        assert request is not None
        name, key = request.name, tuple(text_tokens(request.text, request.origin + request.output))
        ours, theirs = past.now.state.request(name), past.now.facts.requests[name].cursors
        got = theirs.cache_protected_len if theirs is not None else 0
        want = ours.cursors.cache_protected_len if ours is not None and ours.cursors is not None else 0
    told = f"{past.here} hands {some(got, 'token')} to {name}, by the rules it is {want}"
    if got > want and request is not None and got >= request.origin + request.output:
        return f"{told}: the last of its {request.origin + request.output} tokens must be computed again"
    dead = [
        e for e in range(size, got + 1, size)
        if window is not None and e > got - window and not before.pages.get(key[:e], ((), True))[1]
    ]  # fmt: skip
    if got > want and dead:
        end, path = dead[0], key[: dead[0]]

        def tombstone(m: Moment) -> bool:
            return m.facts.tree is not None and m.facts.tree.pages.get(path, ((), True))[1] is False

        since = past.since(f"{path_text(path)} is a tombstone", tombstone)
        return (
            f"{told}: the window of {window} behind position {got} reaches into [{end - size}, {end}), which has no"
            f" SWA KV {since}"
        )
    if got < want:
        path = key[:want]

        def there(m: Moment) -> bool:
            return m.facts.tree is not None and path in m.facts.tree.pages

        since = past.since(f"{path_text(path)} is in the tree", there)
        return f"{told}: [0, {want}) of {path_text(path)} is in the tree {since}, with the SWA KV that the next token reads"
    return told


def _shape(past: Past) -> str | None:
    """TREE-11, TREE-13: nodes that stand, went or end elsewhere than by the rules."""
    tree, state = past.now.facts.tree, past.now.state
    if tree is None or state.tree is None:
        return None
    ours = {p.path: p.node.live for p in nodes(state.tree)}
    theirs = {n.path: n.live or "swa" not in past.now.facts.pools for n in tree.nodes}
    was = {p.path for p in nodes(past.before.state.tree)} if past.before.state.tree is not None else set()
    said = []
    for path in sorted(was):
        if path in theirs and path not in ours:
            said.append(f"keeps {_used(past, path)}, which must go")
        elif path in theirs and theirs[path] and not ours[path]:
            said.append(f"leaves the SWA KV of {_used(past, path)}, which must go")
    for path in sorted(was):
        if path in ours and path not in theirs:
            said.append(f"takes {_used(past, path)}, which must stay")
        elif path in ours and ours[path] and not theirs[path]:
            said.append(f"takes the SWA KV of {_used(past, path)}, which must stay")
    for path in sorted({*ours, *theirs} - was):
        if path not in theirs:
            said.append(f"makes no node that ends {path_text(path)}, where the rules end one")
        elif path not in ours:
            said.append(f"ends a node at {path_text(path)}, where the rules end none")
    return f"{past.here} {', and '.join(said[:2])}" if said else None


def _used(past: Past, path: Key) -> str:
    """A node, and when it was last used by the rules: its SWA KV, if that alone is asked for."""
    command = past.step.command
    swa = isinstance(command, Evict) and not command.full
    here = nodes(past.before.state.tree) if past.before.state.tree is not None else ()
    node = next((p.node for p in here if p.path == path), None)
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
    return f"{path_text(path)} ({kind} KV last used by {past.command(index)})" if index >= 0 else path_text(path)


def _clock(m: Moment) -> int:
    return m.state.tree.clock if m.state.tree is not None else 0


def _leaf(past: Past) -> str | None:
    """TREE-7: a fresh leaf that is longer than a window of whole pages."""
    geometry, tree, before = past.step.scope.geometry, past.now.facts.tree, past.before.facts.tree
    assert tree is not None and before is not None and geometry.window is not None
    need = ceil_page(geometry.window, past.page_size)
    parents = {n.path[: n.start] for n in tree.nodes}
    for node in tree.nodes:
        fresh = node.live and node.path not in parents and node.path not in before.pages
        if fresh and len(node.slots) > need:
            return (
                f"{past.here} makes {_where(node.path, node.start)} one leaf, and a lock pins leaves whole: SWA KV of"
                f" {len(node.slots)} tokens for a window of {geometry.window}, which needs {need}"
            )
    return None


def _sizes(past: Past) -> str | None:
    """TREE-9: counters that are not what a walk over the nodes gives."""
    tree = past.now.facts.tree
    if tree is None or tree.sizes is None:
        return None
    walk = [0, 0, 0, 0]
    for node in tree.nodes:
        walk[node.full_locks > 0] += len(node.slots)
        walk[2 + (node.swa_locks > 0)] += len(node.swa_slots)
    names = ("full evictable", "full protected", "SWA evictable", "SWA protected")
    for at, name in enumerate(names):
        if tree.sizes[at] != walk[at]:
            value = tree.sizes[at]

            def same(m: Moment, at: int = at, value: int = value) -> bool:
                t = m.facts.tree
                return t is not None and t.sizes is not None and t.sizes[at] == value

            since = past.since(f"{name} {value}", same)
            return f"the counter says {value} {name} tokens {since}, but the nodes of the tree have {walk[at]}"
    return None


def _contents(past: Past) -> str | None:
    """TREE-2, TREE-3: a node that does not hold what it says."""
    tree = past.now.facts.tree
    for node in tree.nodes if tree is not None else ():
        where, path = _where(node.path, node.start), node.path
        if node.live and "swa" in past.now.facts.pools:
            have = sum(1 for slot in node.swa_slots if slot)
            if len(node.swa_slots) != len(node.slots) or have < len(node.slots):
                live = past.since(f"{where} live", lambda m: (n := _node(m, path)) is not None and n.live)
                return (
                    f"node {where} counts as live {live}, but has {some(have, 'SWA slot')} for its"
                    f" {some(len(node.slots), 'token')};"
                    f" it must have all of them or be a tombstone"
                )
        for pool, stamps in (("full", node.full_read), ("SWA", node.swa_read)):
            want = path[node.start :]
            if stamps and tuple(stamps) != want and past.violation.clause == "TREE-3":
                at = next(i for i, (a, b) in enumerate(zip(want, stamps)) if a != b)
                slot = (node.slots if pool == "full" else node.swa_slots)[at]
                since = past.since(
                    f"{where} names slot {slot}",
                    lambda m: (n := _node(m, path)) is not None and slot in (*n.slots, *n.swa_slots),
                )
                holds = stamp_text(stamps[at]) if stamps[at] else "no committed token"
                return (
                    f"node {where} names {pool} slot {slot} for position {node.start + at} {since}, which holds"
                    f" {holds}; it must be {stamp_text(want[at])}"
                )
    return None


def _amount(past: Past) -> str:
    """TREE-10."""
    verb = "reports" if "reported" in past.violation.expected else "frees"
    expected = past.violation.expected.replace(" swa ", " SWA ")
    return f"by the rules {past.here} ends with {expected}; the system {verb} {past.violation.observed}"


def _inserted(past: Past) -> str:
    return f"{past.here} must leave {past.violation.expected}; {past.violation.observed}"


TREE: dict[str, Callable[[Past], str | None]] = {
    "TREE-2": _contents, "TREE-3": _contents, "TREE-4": _prefix, "TREE-5": _match, "TREE-6": _lock_counts,
    "TREE-7": _leaf, "TREE-8": _pinned, "TREE-9": _sizes, "TREE-10": _amount, "TREE-11": _shape,
    "TREE-12": _inserted, "TREE-13": _shape,
}  # fmt: skip
