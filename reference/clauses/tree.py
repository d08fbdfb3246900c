"""The radix tree: its shape, its locks, what it hands out, takes over and gives back (TREE)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reference.caching import guests, key_of, pages_of, path_text
from reference.clauses.base import Failure, clause
from reference.commands import Admit, Decode, Evict, Extend, Finish, Insert, Match, SpecDecode
from reference.cursors import ceil_page, floor_page
from reference.facts import NodeFacts, TreeFacts
from reference.ledger import text_tokens
from reference.step import Step
from reference.tree import Key, Lock, Tree, nodes

_WITH_TREE = "Servers with a radix tree."


def _tree(step: Step) -> TreeFacts | None:
    return step.after.tree


def _where(node: NodeFacts) -> str:
    """A node in words, such as "[4, 8) of a8"."""
    return f"[{node.start}, {len(node.path)}) of {path_text(node.path)}"


def _grew(step: Step) -> bool:
    """The tree has nodes that it did not have."""
    before = {n.path for n in step.before.tree.nodes} if step.before.tree is not None else set()
    return step.after.tree is not None and any(n.path not in before for n in step.after.tree.nodes)


def _shrank(step: Step) -> bool:
    return bool(step.effects.gone["full"] or step.effects.gone["swa"])


def _locks(step: Step) -> tuple[Lock, ...]:
    """The locks that there are, as the reference keeps them: those that pin something."""
    return tuple(k for k in step.now.tree.locks if k.key) if step.now.tree is not None else ()


def _locked(step: Step) -> bool:
    return bool(_locks(step))


@clause(
    "TREE-1",
    "shape",
    "Every node is a run of whole pages, at least one; it hangs below a node that ends where it starts, and"
    " differs from its siblings in its first page.",
    why="A prefix must be found in one way only, and a page must not be shared by two nodes.",
    rule="tree.path_of, tree._split",
    source="kvspec",
    scope=_WITH_TREE,
    critical=_grew,
)
def _shape(step: Step) -> Failure | None:
    tree, size = _tree(step), step.scope.geometry.page_size
    if tree is None:
        return None
    ends = {n.path for n in tree.nodes}
    first: set[Key] = set()
    for node in tree.nodes:
        if not node.slots or node.start < 0 or node.start % size or len(node.path) % size:
            return f"nodes of whole pages, {size} tokens each", f"a node {_where(node)}"
        if node.start and node.path[: node.start] not in ends:
            return f"a node that ends at {node.start}, above {_where(node)}", "there is none"
        page = node.path[: node.start + size]
        if page in first:
            return f"one node that goes on with {path_text(page)}", "there are two"
        first.add(page)
    return None


@clause(
    "TREE-2",
    "live or tombstone",
    "A node has an SWA slot for each of its tokens, those that the mapping names, or is a tombstone and has"
    " none.",
    why="A window that is matched over a half-dead node reads padding.",
    settled="An insert that brings no SWA KV at all (its whole key was swept) leaves a tombstone; taken for"
    " live its slots are padding's, and SWA sizes go negative when they are evicted (#22470).",
    assumption="If every sweep stops a page short of the insert boundary, no key is swept altogether.",
    rule="tree._grown",
    source="#22470",
    scope=f"{_WITH_TREE} Models with SWA.",
    critical=lambda s: (t := s.after.tree) is not None and _grew(s) and any(not n.live for n in t.nodes)
    and "swa" in s.after.pools,
)  # fmt: skip
def _live_or_dead(step: Step) -> Failure | None:
    tree = _tree(step)
    if tree is None or "swa" not in step.after.pools:
        return None
    for node in tree.nodes:
        if node.live and (len(node.swa_slots) != len(node.slots) or not all(node.swa_slots)):
            have = sum(1 for slot in node.swa_slots if slot)
            return f"{len(node.slots)} SWA slots at {_where(node)}, or none", f"{have}"
        if node.live and list(node.swa_slots) != list(node.mapped):
            return f"SWA slots of {_where(node)} as mapped: {list(node.mapped)}", f"{list(node.swa_slots)}"
    return None


@clause(
    "TREE-3",
    "nodes hold what their path says",
    "The full KV of a node is that of the tokens that its path spells, and so is the SWA KV of a live one.",
    why="Whoever matches the prefix reads it.",
    rule="caching.page_name",
    source="kvspec",
    scope=_WITH_TREE,
    critical=_grew,
)
def _contents(step: Step) -> Failure | None:
    tree = _tree(step)
    for node in tree.nodes if tree is not None else ():
        want = list(node.path[node.start :])
        for pool, got in (("full", node.full_read), ("SWA", node.swa_read)):
            if got and list(got) != want:
                at = next(i for i, (a, b) in enumerate(zip(want, got)) if a != b)
                return (
                    f"{pool} KV of {path_text(node.path)} at position {node.start + at}",
                    f"its slot holds that of {path_text((got[at],)) if got[at] else 'no committed token'}",
                )
    return None


@clause(
    "TREE-12",
    "what was inserted is there",
    "After an insert every whole page of its key is in the tree; those for which it brought SWA KV have it,"
    " but for tombstones that a lock passes through.",
    why="The next request with this prompt computes it again, or worse, the pages are nobody's.",
    settled="A tombstone under a lock is not recovered: its full slots would change under the reader. Its"
    " inserter may have SWA KV that is then freed as a duplicate, so a request that goes on inserts only if"
    " it can match all of its prompt again; else it keeps its pages to itself. Smallest (P 1, W 1): insert a2"
    " and keep the lock, evict 1 SWA token, insert a1 and go on.",
    assumption="If every sweep stops a page short of the insert boundary and no lock passes through a"
    " tombstone, a request can always insert. The second cannot be had.",
    rule="tree.insert, tree.kept",
    source="#26919, kvspec",
    scope=f"{_WITH_TREE} Inserts that were carried out. Not of systems whose tree picks what it takes.",
    critical=lambda s: any(True for _ in _inserted(s)),
)
def _inserted_found(step: Step) -> Failure | None:
    keys = list(_inserted(step))
    if not keys or step.after.tree is None or step.own_shape:
        return None
    pages, size = step.after.tree.pages, step.scope.geometry.page_size
    should = _should_live(step.now.tree)
    if step.before.tree is not None and (_evicted(step) or _lost(step)):
        should -= step.before.tree.pages.keys()  # what was there and is evicted on the way: TREE-11
    for key in keys:
        for end in range(size, len(key) + 1, size):
            if key[:end] not in pages:
                return f"[{end - size}, {end}) of {path_text(key)} in the tree", "it is not"
            if key[:end] in should and "swa" in step.after.pools and not pages[key[:end]][1]:
                return f"[{end - size}, {end}) of {path_text(key)} live in the tree", "a tombstone"
    return None


def _should_live(tree: Tree | None) -> set[Key]:
    assert tree is not None
    return {
        p.path[:end]
        for p in nodes(tree)
        if p.node.live
        for end in range(p.start + tree.page_size, p.end + 1, tree.page_size)
    }


def _inserted(step: Step) -> Iterator[Key]:
    """The whole pages that the command has put into the tree."""
    if not step.done or step.now.tree is None:
        return
    size = step.scope.geometry.page_size
    if isinstance(step.command, Insert) and not step.command.chunked:
        key = key_of(step.command.prompt)
        yield key[: floor_page(len(key), size)]
    elif isinstance(step.command, Insert):
        yield guests(step.now).get(step.command.holder, ())
    elif isinstance(step.command, Finish) and (was := step.acted) is not None and was.session is None:
        assert was.cursors is not None
        length = min(was.cursors.kv_committed_len, was.origin + step.command.finished_len)
        yield tuple(text_tokens(was.text, floor_page(length, size)))
    elif isinstance(step.command, Extend):
        for name in step.progress:
            now = step.now.request(name)
            if now is not None and now.cursors is not None:
                yield tuple(text_tokens(now.text, now.cursors.cache_protected_len))


@clause(
    "TREE-7",
    "a fresh leaf pins one window",
    "No leaf that an insert makes has more live SWA KV than one window of whole pages; what is before that is"
    " a node of its own.",
    why="A lock pins nodes whole: over a leaf of thousands of tokens one request pins as much SWA pool, and"
    " others are retracted for want of it.",
    rule="tree._grown",
    source="#26919",
    scope=f"{_WITH_TREE} Models with SWA. A lock that ends in an inner node pins that whole.",
    critical=lambda s: _grew(s) and any(True for _ in _fresh(s)),
)
def _capped(step: Step) -> Failure | None:
    geometry = step.scope.geometry
    for node in _fresh(step):
        assert geometry.window is not None
        need = ceil_page(geometry.window, geometry.page_size)
        if len(node.slots) > need:
            size = geometry.page_size
            return (
                f"a lock on {_where(node)} pins {need // size} SWA pages, as one window needs",
                f"{len(node.slots) // size} SWA pages",
            )
    return None


def _fresh(step: Step) -> Iterator[NodeFacts]:
    """Live leaves whose tokens were not in the tree."""
    tree, size = step.after.tree, step.scope.geometry.page_size
    if tree is None or step.before.tree is None or step.scope.geometry.window is None or not step.done:
        return
    # A prompt may also come with the first round after its prefill.
    if isinstance(step.command, (Extend, Decode, SpecDecode, Finish, Insert)):
        known = step.before.tree.pages
        parents = {node.path[: node.start] for node in tree.nodes}
        for node in tree.nodes:
            if node.live and node.path not in parents and node.path[: node.start + size] not in known:
                yield node


@clause(
    "TREE-5",
    "a match can be resumed from",
    "A match hands out the longest prefix that ends with a node, or where the key leaves the tree, and has"
    " live SWA KV for one window behind its end, or for all of itself.",
    why="More, and the first token reads a window that is not there; less, and the cache is for nothing.",
    rule="tree.usable",
    source="#22470",
    scope=f"{_WITH_TREE} Admissions of requests without a slot, and Match.",
    critical=lambda s: (m := _matches(s)) is not None and m[2] > 0,
)
def _usable(step: Step) -> Failure | None:
    found = _matches(step)
    if found is None:
        return None
    holder, key, length = found
    want = usable_length(step, key)
    if length == want:
        return None
    return f"{holder}: {want} tokens of {path_text(key)} to resume from", f"{length}"


@clause(
    "TREE-8",
    "what is locked stays",
    "Every page of a locked prefix is in the tree, and has SWA KV from where its lock needs it.",
    why="It is read at this moment.",
    rule="tree.full_locked, tree.swa_locked",
    source="kvspec",
    scope=_WITH_TREE,
    critical=lambda s: _locked(s) and _shrank(s),
)
def _kept(step: Step) -> Failure | None:
    locks, size = _locks(step), step.scope.geometry.page_size
    if step.after.tree is None or not locks:
        return None
    pages, has_swa = step.after.tree.pages, "swa" in step.after.pools
    for lock in locks:
        for end in range(size, len(lock.key) + 1, size):
            _, live = pages.get(lock.key[:end], (None, False))
            where = f"[{end - size}, {end}) of {path_text(lock.key)}, locked by {lock.holder}"
            if lock.key[:end] not in pages:
                return f"{where}, is there", "it is not"
            if has_swa and end > lock.swa_from and not live:
                return f"{where}, has SWA KV", "it is a tombstone"
    return None


@clause(
    "TREE-4",
    "protected prefixes are the tree's",
    "The first cache_protected_len positions of a row, and what a guest has locked, name the slots that the"
    " tree has for these tokens.",
    why="A row that still names its own pages after the tree has freed them as duplicates reads what somebody"
    " else writes there.",
    rule="caching.matched, caching.prompt_kept",
    source="#20070",
    scope=_WITH_TREE,
    critical=_locked,
)
def _prefixes(step: Step) -> Failure | None:
    if step.after.tree is None:
        return None
    rows = {
        h.name: (tuple(text_tokens(h.text, h.cursors.cache_protected_len)), step.after.holders[h.name].prefix)
        for h in step.held
        if h.cursors.cache_protected_len and h.name in step.after.holders
    }
    named = {name: (key, step.after.tree.guests.get(name, ())) for name, key in guests(step.now).items()}
    if not rows and not named:
        return None
    pages, size = step.after.tree.pages, step.scope.geometry.page_size
    for name, (key, slots) in (rows | named).items():
        for end in range(size, len(key) + 1, size):
            want, _ = pages.get(key[:end], ((), False))
            got = tuple(slots[end - size : end])
            if want != got:
                return f"{name} at [{end - size}, {end}): the tree's slots {list(want)}", f"{list(got)}"
    return None


def usable_length(step: Step, key: Key) -> int:
    """How much of `key` could be handed out before this step: up to the end of a node, or where the key
    leaves the tree, with one window of live SWA KV behind it or no tombstone down to the root."""
    size, window = step.scope.geometry.page_size, step.scope.geometry.window
    assert step.before.tree is not None
    pages = step.before.tree.pages
    best, run, whole = 0, 0, True
    for end in range(size, len(key) + 1, size):
        if key[:end] not in pages:
            break
        live = pages[key[:end]][1] or window is None
        run, whole = (run + size, whole) if live else (0, False)
        if whole or window is None or run >= window:
            best = end
    return best


def _matches(step: Step) -> tuple[str, Key, int] | None:
    """(holder, key, length handed out) of a match."""
    if not step.done or step.before.tree is None or step.after.tree is None:
        return None
    if isinstance(step.command, Match):
        key = key_of(step.command.prompt)
        return step.command.holder, key, len(step.after.tree.guests.get(step.command.holder, ()))
    request = step.acted
    if isinstance(step.command, Admit) and request is not None:
        session = step.was.session(request.session)
        facts = step.after.requests.get(request.name)
        if (session is None or session.slot is None) and facts is not None and facts.cursors is not None:
            key = tuple(text_tokens(request.text, request.origin + request.output - 1))
            return request.name, key, facts.cursors.cache_protected_len
    return None


@clause(
    "TREE-6",
    "lock ledger",
    "A node's full counter is the number of locks whose prefix passes through it, its SWA counter the number"
    " of those that needed its SWA KV when they were taken, whatever was split since.",
    why="A count too few and pages go that are read; one too many and they never go.",
    settled="The lock remembers where it stopped. Walking up again at unlock until a window is covered, as"
    " lock did, stops a node too early where a pinned node was split.",
    assumption="If no pinned node is ever split, unlock may walk up again.",
    rule="tree.lock, tree.unlock",
    source="kvspec",
    scope=_WITH_TREE,
    critical=lambda s: len(_locks(s)) > 1,
)
def _ledger(step: Step) -> Failure | None:
    tree = _tree(step)
    if tree is None:
        return None
    locks, has_swa = _locks(step), "swa" in step.after.pools
    for node in tree.nodes:
        end = len(node.path)
        mine = [k for k in locks if k.key[:end] == node.path]
        deep = [k for k in mine if has_swa and k.swa_from < end]
        pinned = node.swa_locks if has_swa else 0
        # Where nodes are cut at other places a lock may reach further up than its window.
        most = len(mine) if step.own_shape and has_swa else len(deep)
        if node.full_locks != len(mine) or not len(deep) <= pinned <= most:
            return (
                f"{_where(node)}: {_names(mine)} full, {_names(deep)} SWA",
                f"counters {node.full_locks} full, {node.swa_locks} SWA",
            )
    return None


def _names(locks: list[Lock]) -> str:
    return f"{len(locks)} ({', '.join(k.holder for k in locks)})" if locks else "0"


@clause(
    "TREE-9",
    "counters are sums",
    "The counters of evictable and protected tokens equal what a walk over the nodes gives.",
    why="Admission and memory checks ask the counters, never the tree.",
    rule="tree.sizes",
    source="kvspec",
    scope=f"{_WITH_TREE} Systems that show their counters.",
    critical=_locked,
)
def _sums(step: Step) -> Failure | None:
    tree = _tree(step)
    if tree is None or tree.sizes is None:
        return None
    want = [0, 0, 0, 0]
    for node in tree.nodes:
        want[node.full_locks > 0] += len(node.slots)
        want[2 + (node.swa_locks > 0)] += len(node.swa_slots)
    if tuple(want) == tuple(tree.sizes):
        return None
    return _sizes_text(want), _sizes_text(tree.sizes)


def _sizes_text(amounts: Sequence[int]) -> str:
    names = ("full evictable", "full protected", "SWA evictable", "SWA protected")
    return ", ".join(f"{name} {amount}" for name, amount in zip(names, amounts))


@clause(
    "TREE-10",
    "eviction frees what was asked",
    "Evict frees at least so many tokens of each pool as were asked, or all that no lock pins, and reports"
    " what it freed.",
    why="Whoever asked allocates next; told too much it fails, told too little it gives up.",
    rule="tree.evict",
    source="kvspec",
    scope=f"{_WITH_TREE} Evict. That a batch gets the room that there is: OUT-1.",
    critical=lambda s: isinstance(s.command, Evict) and s.done and _shrank(s),
)
def _as_asked(step: Step) -> Failure | None:
    command = step.command
    if not isinstance(command, Evict) or not step.done or step.before.tree is None or step.after.tree is None:
        return None
    size = step.scope.geometry.page_size
    asked, said = {"full": command.full, "swa": command.swa}, getattr(step.outcome, "freed", None)
    for pool in step.after.pools:
        locks = [n.full_locks if pool == "full" else n.swa_locks for n in step.before.tree.nodes]
        held = [len(n.slots if pool == "full" else n.swa_slots) for n in step.before.tree.nodes]
        could = sum(tokens for tokens, lock in zip(held, locks) if not lock)
        freed = sum(len(p) for h, p in step.freed(pool).items() if h.startswith("tree ")) * size
        want = min(asked[pool], could)
        if freed < want:
            return f"{want} {pool} tokens freed, of {could} that are not locked", f"{freed}"
        if said is not None and getattr(said, pool) != freed:
            return f"{freed} {pool} tokens reported, as were freed", f"{getattr(said, pool)}"
    return None


@clause(
    "TREE-11",
    "least recently used first",
    "Eviction takes what was used longest ago, and no node more than is needed: for the full pool leaves"
    " that no lock passes through, with their SWA KV; for the SWA pool the SWA KV of any node that no lock"
    " needs, a leaf altogether. Full KV is used all along a path that is matched or inserted, SWA KV in the"
    " last window of it alone. Of nodes used at one moment the one nearer to the root goes first. A tombstone"
    " that has lost its last child goes too.",
    why="What the next request will ask for is what the last ones asked for.",
    rule="tree._used, tree._oldest",
    source="#26615",
    scope=f"{_WITH_TREE} Not of systems that pick by rules of their own.",
    critical=_shrank,
)
def _in_order(step: Step) -> Failure | None:
    if step.own_shape or step.now.tree is None or step.after.tree is None:
        return None
    if not _shrank(step) and not _lost(step):
        return None
    want = {(p.path, p.node.live) for p in nodes(step.now.tree)}
    got = {(n.path, n.live or "swa" not in step.after.pools) for n in step.after.tree.nodes}
    return _difference(want, got)


def _evicted(step: Step) -> bool:
    """The rules have evicted something. A recovery gives back full pages alone, and has others for them."""
    gone, tree = step.effects.gone, step.now.tree
    return bool(gone["swa"]) or (tree is not None and not gone["full"] <= pages_of(tree)["full"])


def _lost(step: Step) -> bool:
    """The system's tree has given up pages, or their SWA KV."""
    before, after = step.before.tree, step.after.tree
    assert after is not None
    if before is None or before.pages is after.pages:
        return False
    kept = after.pages
    return any(path not in kept or (live and not kept[path][1]) for path, (_, live) in before.pages.items())


def _difference(want: set[tuple[Key, bool]], got: set[tuple[Key, bool]]) -> Failure | None:
    """The first node that differs, told as which should be there and which is."""
    for path, live in sorted(want ^ got):
        name, kind = path_text(path), "live" if live else "a tombstone"
        if (path, live) in want:
            others = [is_live for p, is_live in got if p == path]
            other = "not there" if not others else "live" if others[0] else "a tombstone"
            return f"the node that ends {name} is {kind}", f"it is {other}"
        if not any(p == path for p, _ in want):
            return f"no node ends {name}", f"one does, {kind}"
    return None


@clause(
    "TREE-13",
    "nodes end where they must",
    "A node ends where a key that was matched or inserted left it or ended, where an insert's SWA KV begins,"
    " and one window of whole pages before the end of a fresh leaf; nowhere else.",
    why="A lock pins nodes whole and eviction takes them whole: where they end decides how much.",
    rule="tree._entered, tree._grown",
    source="#26919",
    scope=f"{_WITH_TREE} Not of systems whose tree splits by rules of its own.",
    critical=_grew,
)
def _ends(step: Step) -> Failure | None:
    if step.own_shape or step.now.tree is None or step.after.tree is None:
        return None
    want = {p.path for p in nodes(step.now.tree)}
    got = {n.path for n in step.after.tree.nodes}
    for path in sorted(want ^ got):
        told = f"a node ends {path_text(path)}", "none does"
        return told if path in want else told[::-1]
    return None
