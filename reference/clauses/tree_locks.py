"""The radix tree: what a match hands out, what locks keep, and their counters (TREE)."""

from __future__ import annotations

from reference.clauses.base import Failure, clause
from reference.clauses.locks import Locked
from reference.clauses.step import Step
from reference.clauses.tree import WITH_TREE, shrank, tree_of, where
from reference.commands import Admit, Match
from reference.ledger import text_tokens
from reference.prefix_cache import key_of, path_text
from reference.tree import Key


def locked(step: Step) -> bool:
    return bool(step.locks)


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
    if step.after.tree is None:
        return None
    pages, size, has_swa = step.after.tree.pages, step.config.geometry.page_size, "swa" in step.after.pools
    for holder, (key, pinned_from, _) in sorted(step.locks.items()):
        for end in range(size, len(key) + 1, size):
            page = pages.get(key[:end])
            if page is None or (has_swa and end > pinned_from and not page[1]):
                where = f"[{end - size}, {end}) of {path_text(key)}, locked by {holder}"
                return (f"{where}, is there", "it is not") if page is None else (
                    f"{where}, has SWA KV", "it is a tombstone")  # fmt: skip
    return None


@clause(
    "TREE-4",
    "protected prefixes are the tree's",
    "The first cache_protected_len positions of a row, and what a lock holder has locked, name the slots that"
    " the tree has for these tokens.",
    why="A row that still names its own pages after the tree has freed them as duplicates reads what somebody"
    " else writes there.",
    rule="prefix_cache.matched, prefix_cache.prompt_kept",
    source="#20070",
    scope=WITH_TREE,
    situation=locked,
)
def _prefixes(step: Step) -> Failure | None:
    if step.after.tree is None:
        return None
    pages, size = step.after.tree.pages, step.config.geometry.page_size
    named = {**{name: h.prefix for name, h in step.after.holders.items()}, **step.after.tree.lock_holders}
    for name, (key, *_) in sorted(step.locks.items()):
        slots = named.get(name, ())
        for end in range(size, len(key) + 1, size) if name in named else ():  # who has no row yet names none
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
    scope=f"{WITH_TREE} Locks follow from facts: who protects or has locked how much, and where nodes ended"
    " when the lock was taken. SWA counters are asked within bounds where prompts of one batch begin alike,"
    " and of systems whose tree splits by rules of its own. A step by itself (`kvspec explore`) starts from"
    " the reference's locks.",
    situation=lambda s: len(s.locks) > 1,
)
def _ledger(step: Step) -> Failure | None:
    tree = tree_of(step)
    if tree is None:
        return None
    locks, has_swa = sorted(step.locks.items()), "swa" in step.after.pools
    for node in tree.nodes:
        end = len(node.path)
        mine = [(name, k) for name, k in locks if k.key[:end] == node.path]
        deep = [(name, k) for name, k in mine if k.pinned_from < end]
        pinned = node.swa_locks if has_swa else 0
        most = sum(k.reaches < end for _, k in mine)
        if node.full_locks != len(mine) or not len(deep) <= pinned <= most:
            return (
                f"{where(node)}: {_names(mine)} full, {_names(deep)} SWA",
                f"counters {node.full_locks} full, {node.swa_locks} SWA",
            )
    return None


def _names(locks: list[tuple[str, Locked]]) -> str:
    return f"{len(locks)} ({', '.join(name for name, _ in locks)})" if locks else "0"
