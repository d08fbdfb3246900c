"""The differences between the system and the reference at one moment.

Each difference has a key, which says where reports mark it, and a text. Positions and lengths are in tokens.
Waived clauses, which are not checked on the system, cause no difference.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from ci import Data
from reference.clauses.attention_reads import POOL as POOL
from reference.clauses.facts import Facts, TreeFacts
from reference.clauses.step import Step, span
from reference.clauses.tree_evictions import sizes_by_walk
from reference.failures import (
    AtCounter, AtCursor, AtEntry, AtLock, AtNamed, AtNode, AtPage, AtPosition, AtRow, AtText, AtTreePage,
    Place,
)  # fmt: skip
from reference.state import Holder, holders, text_tokens
from reference.prefix_cache import path_text
from reference.radix_tree import nodes
from reference.token_ids import tree_key
from stateful_tests.traces.notation import format_outcome as say
from stateful_tests.lockstep.run_moments import Moment

CURSORS = {
    "C": "kv_committed_len",
    "A": "kv_allocated_len",
    "E": "swa_evicted_seqlen",
    "R": "cache_protected_len",
}


def page_spans(pages: Iterable[int], page_size: int) -> str:
    """Return page indices as token ranges."""
    return span(sorted(pages), page_size)


def page_fault(page: int, size: int, owners: int, free_times: int) -> str:
    """Return the fault of a page in words, "" if it is free once or owned once."""
    if not 1 <= page <= size:
        return "the padding page" if page == 0 else "no such page"
    if owners + free_times == 1:
        return ""
    if not owners:
        return f"free {free_times} times" if free_times else "lost: neither free nor owned"
    return "owned and free" if free_times else f"{owners} owners"


def difference(key: tuple[str, ...], about: str, reference: object, system: object) -> Data:
    """Return a difference.

    key: the place where it is marked, such as ("cursors", "slot of s1", "E").
    """
    return {"key": list(key), "about": about, "reference": str(reference), "system": str(system)}


def differences(moment: Moment, reference: Data, system: Data, waived: frozenset[str]) -> Iterator[Data]:
    """Yield the differences in the order of a report.

    reference, system: the data of reference and system.
    """
    if moment.step is not None:
        yield from _outcome_differences(moment.step, waived)
    for kind in ("requests", "sessions"):
        yield from _named_differences(kind, reference[kind], system[kind])
    yield from _cursor_differences(reference["cursors"], system["cursors"])
    if "CHK-2" not in waived:
        yield from _account_differences(reference["accounts"], system["accounts"])
    yield from _node_differences(moment, reference["nodes"], system["nodes"])
    yield from _tree_differences(moment, reference, system)
    yield from _pool_differences(moment, reference, system)
    yield from _mapping_differences(moment.facts, waived)
    for name, holder in system["holders"].items():
        for pool, positions in holder.get("wrong", {}).items():
            if positions:
                about = f"what {name} reads at position {positions[0]} ({POOL[pool]})"
                yield difference(("wrong", name, pool), about, "its own token", "something else")


def by_place(differing: Iterable[Data], places: Iterable[Place], moment: Moment) -> list[Data]:
    """Return the differences in the order of a report, those at the places of a violation first."""
    about = [key for place in places for key in _key_prefixes(place, moment)]
    return sorted(differing, key=lambda d: not any(tuple(d["key"])[: len(key)] == key for key in about))


def _key_prefixes(place: Place, moment: Moment) -> Iterator[tuple[str, ...]]:
    """Yield the prefixes of the keys of differences at a place."""
    match place:
        case AtPage(pool, page):
            yield "pools", pool, str(page)
        case AtRow():
            yield "free", "rows"
        case AtCursor(owner, field):
            letter = next(letter for letter, name in CURSORS.items() if name == field)
            yield "cursors", owner, letter
        case AtPosition(owner, pool):
            yield ("torn",)
            yield "wrong", owner, pool
            yield "holders", owner, pool
            yield "holders", owner, "prefix"
        case AtNode(path):
            yield "nodes", path_text(path)
        case AtTreePage(path):
            tree = moment.facts.tree
            ours = moment.state.tree
            paths = [n.path for n in tree.nodes] if tree is not None else []
            paths += [p.path for p in nodes(ours)] if ours is not None else []
            yield from (("nodes", path_text(p)) for p in paths if p[: len(path)] == path)
        case AtLock(owner):
            yield "lock_holders", owner
        case AtNamed("slot", name):
            yield "cursors", f"slot of {name}"
        case AtNamed(kind, name):
            yield f"{kind}s", name
        case AtEntry():
            yield ("mapping",)
        case AtCounter(pool, name):
            yield "accounts", pool, name
            yield "counters", f"{POOL.get(pool, pool)} {name}"
        case AtText(owner):
            yield "sessions", owner
            yield "requests", owner


def _outcome_differences(step: Step, waived: frozenset[str]) -> Iterator[Data]:
    expected = say(step.expected)
    actual = say(step.outcome)
    reported = getattr(step.expected, "freed", None), getattr(step.outcome, "freed", None)
    if type(step.expected) is not type(step.outcome) or (not step.done and expected != actual):
        yield difference(("outcome",), "outcome", expected, actual)
    elif reported[0] != reported[1] and not step.tree_policy_is_free and "TREE-10" not in waived:
        yield difference(("outcome",), "reported as freed", expected, actual)
    if step.overreach:
        yield difference(("outcome",), "choice", "within bounds", step.overreach)


def _cursor_differences(reference: Data, system: Data) -> Iterator[Data]:
    for name in [*reference, *(n for n in system if n not in reference)]:
        expected = reference.get(name, "none")
        actual = system.get(name, "none")
        if not (isinstance(expected, dict) and isinstance(actual, dict)):
            if expected != actual:
                yield difference(("cursors", name), name, _short_text(expected), _short_text(actual))
            continue
        for letter in CURSORS:
            if expected[letter] != actual[letter]:
                about = f"{name}: {letter} {CURSORS[letter]}"
                yield difference(("cursors", name, letter), about, expected[letter], actual[letter])


def _account_differences(reference: Data, system: Data) -> Iterator[Data]:
    for pool, account in reference.items():
        for term, count in account.items():
            other = system.get(pool, {}).get(term, 0)
            if other != count:
                about = f"{POOL.get(pool, pool)} {term}, by the check"
                yield difference(("accounts", pool, term), about, count, other)


def _pool_differences(moment: Moment, reference: Data, system: Data) -> Iterator[Data]:
    """Yield the pages with no owner or with several, the pages of each holder by position, and the numbers
    of free pages."""
    pools = moment.facts.pools
    size = moment.state.config.geometry.page_size
    for pool, pages in pools.items():
        for page, cell in system["pools"][pool].items():
            if wrong := page_fault(page, pages.size, len(cell["owners"]), cell["free"]):
                about = f"{POOL[pool]} page {page}"
                yield difference(("pools", pool, str(page)), about, "free or owned, once", wrong)
    for name in sorted({*reference["holders"], *system["holders"]}):
        expected = reference["holders"].get(name, {})
        actual = system["holders"].get(name, {})
        for pool in pools:
            expected_pages = set(expected.get(pool, ()))
            actual_pages = set(actual.get(pool, ()))
            if expected_pages != actual_pages:
                about = f"{POOL[pool]} pages of {name}, by position"
                spans = page_spans(expected_pages, size), page_spans(actual_pages, size)
                yield difference(("holders", name, pool), about, *spans)
    for name, count in reference["free"].items():
        if count is not None and system["free"][name] != count:
            yield difference(("free", name), f"free {_page_list(name)}", count, system["free"][name])


def _named_differences(kind: str, reference: Data, system: Data) -> Iterator[Data]:
    one = kind[:-1]
    for name in sorted({*reference, *system}):
        expected = reference.get(name)
        actual = system.get(name)
        if expected is None or actual is None:
            presence = ["there" if side is not None else "not there" for side in (expected, actual)]
            yield difference((kind, name), f"{one} {name}", *presence)
            continue
        for field, value in actual.items():
            if expected[field] != value:
                yield difference((kind, name, field), f"{field} of {one} {name}", expected[field], value)


def _node_differences(moment: Moment, reference: Data, system: Data) -> Iterator[Data]:
    """Yield the differences of tree nodes: missing and further ones, tombstones, lock counts, contents.

    reference, system: the nodes of the reference and of the system, by path.
    """
    tree_policy_is_free = moment.step is not None and moment.step.tree_policy_is_free
    for path in sorted({*reference, *system}, key=lambda p: (len(p), p)):
        expected = reference.get(path)
        actual = system.get(path)
        if expected is None or actual is None:
            presence = ["there" if side is not None else "not there" for side in (expected, actual)]
            yield difference(("nodes", path), f"node that ends {path}", *presence)
            continue
        name = f"node [{actual['start']}, {actual['end']}) of {path}"
        if expected["live"] != actual["live"]:
            kinds = ["live" if side["live"] else "tombstone" for side in (expected, actual)]
            yield difference(("nodes", path, "live"), name, *kinds)
        elif actual["half"]:
            whole = "SWA KV of all its tokens"
            yield difference(("nodes", path, "live"), name, whole, "of a part, or padding's")
        for pool in ("full", "swa"):
            locks = f"{pool}_locks"
            most = expected["full_locks"] if tree_policy_is_free else expected[locks]
            if not expected[locks] <= actual[locks] <= most:
                about = f"{name}, {POOL[pool]} locks counted"
                yield difference(("nodes", path, locks), about, expected[locks], actual[locks])
        if actual["wrong"]:
            yield difference(
                ("nodes", path, "wrong"), f"{name} holds the KV of", "its path", "others"
            )


def _tree_differences(moment: Moment, reference: Data, system: Data) -> Iterator[Data]:
    """Yield the differences of locks and counters, and of rows with other slots than the tree for their
    prefix."""
    for name in sorted({*reference["lock_holders"], *system["lock_holders"]}):
        locked = [side["lock_holders"].get(name, "nothing") for side in (reference, system)]
        if locked[0] != locked[1]:
            yield difference(
                ("lock_holders", name), f"tokens that lock owner {name} has locked", *locked
            )
    tree = moment.facts.tree
    if tree is None:
        return
    if tree.sizes is not None:
        for name, count in zip(system["counters"], sizes_by_walk(tree)):
            if system["counters"][name] != count:
                about = f"{name} tokens, by counter"
                yield difference(("counters", name), about, count, system["counters"][name])
    for holder in holders(moment.state):
        yield from _prefix_difference(moment, tree, holder)


def _prefix_difference(moment: Moment, tree: TreeFacts, holder: Holder) -> Iterator[Data]:
    """Yield the first page of a holder's prefix that differs from the tree's page."""
    geometry = moment.state.config.geometry
    facts = moment.facts.holders.get(holder.name)
    if facts is None:
        return
    size = geometry.page_size
    path = tree_key(text_tokens(holder.text), geometry.bigram)[: holder.cursors.cache_protected_len]
    for end in range(size, len(path) + 1, size):
        page = tree.pages.get(path[:end])
        row = list(facts.prefix[end - size : end])
        if page is not None and tuple(row) != page.slots:
            about = f"slots of {holder.name} at [{end - size}, {end})"
            key = ("holders", holder.name, "prefix", str(end // size - 1))
            yield difference(key, about, f"the tree's {list(page.slots)}", row)
            return


def _mapping_differences(facts: Facts, waived: frozenset[str]) -> Iterator[Data]:
    for name in dict.fromkeys(name for name, _ in facts.unmapped):
        at = page_spans([p for n, p in facts.unmapped if n == name], 1)
        yield difference(("holders", name, "swa"), f"SWA slots of {name} at {at}", "there", "none")
    for clause, entries in (("MAP-3", facts.evicted_mapped), ("MAP-4", facts.unused_mapped)):
        if clause in waived:
            continue
        for full, swa in entries:
            yield difference(
                ("mapping",), f"mapping entry of full slot {full}", 0, f"SWA slot {swa}"
            )
    for slot in sorted({swa for _, swa in facts.shared}):
        yield difference(
            ("mapping",), f"SWA slot {slot}", "mapped from one full slot", "from several"
        )
    for torn in (*facts.torn, *facts.torn_swa):
        yield difference(("torn",), torn.slots_text, "whole pages, in order", list(torn.slots))


def _page_list(pool: str) -> str:
    return "rows" if pool == "rows" else f"{POOL[pool]} pages"


def _short_text(value: Any) -> str:
    return " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
