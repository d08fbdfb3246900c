"""The radix tree: what a match hands out, what locks keep, and their counters (TREE)."""

from __future__ import annotations

from reference.clauses.base import Failure, clause
from reference.clauses.step import Step
from reference.clauses.tree import WITH_TREE, shrank, tree_of, where
from reference.commands import Admit, Match
from reference.ledger import text_tokens
from reference.prefix_cache import lock_holders, key_of, path_text
from reference.tree import Key, Lock


def _locks(step: Step) -> tuple[Lock, ...]:
    """The locks that there are, as the reference keeps them: those that pin something."""
    return tuple(k for k in step.now.tree.locks if k.key) if step.now.tree is not None else ()


def locked(step: Step) -> bool:
    return bool(_locks(step))


@clause(
    "TREE-5",
    "a match can be resumed from",
    "A match hands out the longest prefix that ends with a node, or where the key leaves the tree, and has"
    " live SWA KV for one window behind its end, or for all of itself.",
    why="More, and the first token reads a window that is not there; less, and the cache is for nothing.",
    rule="tree.usable",
    source="#22470",
    scope=f"{WITH_TREE} Admissions of requests without a slot, and Match.",
    situation=lambda s: (m := match_of(s)) is not None and m[2] > 0,
)
def _usable(step: Step) -> Failure | None:
    found = match_of(step)
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
    scope=WITH_TREE,
    situation=lambda s: locked(s) and shrank(s),
)
def _kept(step: Step) -> Failure | None:
    locks, size = _locks(step), step.config.geometry.page_size
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
    "The first cache_protected_len positions of a row, and what a lock holder has locked, name the slots that"
    " the tree has for these tokens.",
    why="A row that still names its own pages after the tree has freed them as duplicates reads what somebody"
    " else writes there.",
    rule="prefix_cache.matched, handover.insert_prompt",
    source="#20070",
    scope=WITH_TREE,
    situation=locked,
)
def _prefixes(step: Step) -> Failure | None:
    if step.after.tree is None:
        return None
    rows = {
        h.name: (tuple(text_tokens(h.text, h.cursors.cache_protected_len)), step.after.holders[h.name].prefix)
        for h in step.held
        if h.cursors.cache_protected_len and h.name in step.after.holders
    }
    named = {
        name: (key, step.after.tree.lock_holders.get(name, ()))
        for name, key in lock_holders(step.now).items()
    }
    if not rows and not named:
        return None
    pages, size = step.after.tree.pages, step.config.geometry.page_size
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
    size, window = step.config.geometry.page_size, step.config.geometry.window
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


def match_of(step: Step) -> tuple[str, Key, int] | None:
    """(holder, key, length handed out) of a match."""
    if not step.done or step.before.tree is None or step.after.tree is None:
        return None
    if isinstance(step.command, Match):
        key = key_of(step.command.prompt)
        return step.command.holder, key, len(step.after.tree.lock_holders.get(step.command.holder, ()))
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
    scope=WITH_TREE,
    situation=lambda s: len(_locks(s)) > 1,
)
def _ledger(step: Step) -> Failure | None:
    tree = tree_of(step)
    if tree is None:
        return None
    locks, has_swa = _locks(step), "swa" in step.after.pools
    for node in tree.nodes:
        end = len(node.path)
        mine = [k for k in locks if k.key[:end] == node.path]
        deep = [k for k in mine if has_swa and k.swa_from < end]
        pinned = node.swa_locks if has_swa else 0
        # Where nodes are cut at other places a lock may reach further up than its window.
        most = len(mine) if step.tree_policy_is_free and has_swa else len(deep)
        if node.full_locks != len(mine) or not len(deep) <= pinned <= most:
            return (
                f"{where(node)}: {_names(mine)} full, {_names(deep)} SWA",
                f"counters {node.full_locks} full, {node.swa_locks} SWA",
            )
    return None


def _names(locks: list[Lock]) -> str:
    return f"{len(locks)} ({', '.join(k.holder for k in locks)})" if locks else "0"
