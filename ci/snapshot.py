"""Both sides at one moment as plain data, by role and position, and where they differ.

A side is what the page draws and what `--json` gives. Differences are looked for here, once, by a key
for each fact; whoever draws marks what is in their list. Positions and lengths are tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ci.report import Data, describe, say
from reference import tree as radix
from reference.caching import guests, page_name, path_text
from reference.commands import Broken, Done, Outcome
from reference.cursors import lost_below, window_start
from reference.facts import Facts, TreeFacts
from reference.geometry import Geometry
from reference.ledger import (
    IN_BATCH, ZERO, Cursors, Request, State, free, full_pages, holders, swa_pages, text_tokens,
)  # fmt: skip
from reference.step import span
from stateful_tests.results import Moment, Run

CURSORS = {
    "C": "kv_committed_len", "A": "kv_allocated_len", "E": "swa_evicted_seqlen", "R": "cache_protected_len",
}  # fmt: skip
POOL = {"full": "full", "swa": "SWA"}  # how they are called in sentences


def snapshots(run: Run, last: int) -> list[Data]:
    """One for each row whose moment is known, of at most the `last` ones."""
    return [_snapshot(run, index) for index in range(max(0, run.first, len(run.rows) - last), len(run.rows))]


def moment_of(run: Run, index: int) -> Moment | None:
    """The moment after a row (-1: the start), if it was kept."""
    at = index - run.first
    return run.history[at] if 0 <= at < len(run.history) else None


def _snapshot(run: Run, index: int) -> Data:
    moment, row = moment_of(run, index), run.rows[index]
    assert moment is not None
    outcome: Outcome | None = moment.step.outcome if moment.step is not None else None
    if run.violation is not None and run.violation.clause == "BROKEN" and run.violation.step == index:
        outcome = Broken(run.violation.observed)
    reference, system = reference_side(moment), system_side(moment)
    made: Data = {
        "step": index,
        "command": describe(row.command),
        "reference": {"outcome": say(row.outcome), **reference},
        "system": {"outcome": say(outcome) if outcome is not None else "not asked", **system},
    }
    if isinstance(outcome, Broken):
        made["differences"] = [_difference(("outcome",), "outcome", say(row.outcome), say(outcome))]
    else:
        made["differences"] = list(_differences(moment, reference, system, run.waived))
    return made


# The two sides.


def reference_side(moment: Moment) -> Data:
    """The ledger: who owns which pages of its sequence, what is free."""
    state = moment.state
    geometry, left = state.scope.geometry, free(state)
    shown = {
        h.name: {
            "who": _who(h.request),
            "target": _target(h.request),
            "cursors": _cursors(h.cursors),
            "full": {at: None for at in full_pages(h.cursors, geometry.page_size)},
            "swa": {at: None for at in swa_pages(h.cursors, geometry.page_size)} if geometry.window else {},
        }
        for h in holders(state)
    }
    return {
        "holders": shown,
        "cursors": _named_cursors(
            state, {r.name: r.cursors for r in state.requests}, {s.name: s.slot for s in state.sessions}
        ),
        "requests": {
            r.name: {
                "session": r.session, "origin": r.origin, "tokens": r.origin + r.output,
                "phase": r.phase.value,
            }
            for r in state.requests
        },
        "sessions": {
            s.name: {"history": s.history[-1][1] if s.history else 0, "closing": s.closing}
            for s in state.sessions
        },
        "free": {"full": left.full} | ({"swa": left.swa} if geometry.window else {}) | {"rows": left.rows},
        "nodes": _reference_nodes(state),
        "guests": {name: len(key) for name, key in guests(state).items()},
        "counters": None,
        "accounts": _accounts(moment.step.expected if moment.step is not None else None),
    }  # fmt: skip


def system_side(moment: Moment) -> Data:
    """The physical view by role: the same facts, with the pages and rows that they lie in."""
    facts, view, state = moment.facts, moment.view, moment.state
    geometry = state.scope.geometry
    shown = {
        name: {
            "who": _who(_running(state, name)),
            "target": _target(_running(state, name)),
            "cursors": _cursors(h.cursors),
            "row": h.row,
            "full": {o.at: o.page for o in facts.pools["full"].owned if o.holder == name},
            "swa": {o.at: o.page for o in facts.pools["swa"].owned if o.holder == name}
            if "swa" in facts.pools
            else {},
            "prefix": [s // geometry.page_size for s in h.prefix[:: geometry.page_size]],
        }
        for name, h in facts.holders.items()
    }
    for name, wrong in wrong_reads(state, facts).items():
        shown[name]["wrong"] = wrong
    return {
        "holders": shown,
        "cursors": _named_cursors(
            state,
            {n: r.cursors for n, r in facts.requests.items()},
            {n: s.slot for n, s in facts.sessions.items()},
        ),
        "requests": {
            n: {"session": r.session, "origin": r.origin, "tokens": len(r.text)}
            for n, r in facts.requests.items()
        },
        "sessions": {
            n: {"history": len(s.history), "closing": s.closing} for n, s in facts.sessions.items()
        },
        "free": {name: len(pool.free) for name, pool in facts.pools.items()}
        | {"rows": len(facts.free_rows)},
        "nodes": _system_nodes(facts.tree, geometry),
        "guests": {n: len(slots) for n, slots in facts.tree.guests.items()} if facts.tree else {},
        "counters": _sizes(facts.tree.sizes) if facts.tree is not None and facts.tree.sizes else None,
        "accounts": _accounts(moment.step.outcome if moment.step is not None else None),
        "pools": {name: _pool(facts, name) for name in facts.pools},
        "free_rows": sorted(view.free_rows),
    }


def _cursors(c: Cursors) -> dict[str, int]:
    return dict(zip(CURSORS, c))


def _who(request: Request | None) -> str:
    return f"{request.name} {request.phase.value}" if request is not None else "idle"


def _running(state: State, holder: str) -> Request | None:
    session = state.session(holder)
    return state.request(session.turn or "") if session is not None else state.request(holder)


def _target(request: Request | None) -> int | None:
    """Where the turn would end if all of its outputs counted."""
    return request.origin + request.output if request is not None else None


def _named_cursors(
    state: State, requests: dict[str, Cursors | None], slots: dict[str, Cursors | None]
) -> dict[str, dict[str, int] | str]:
    """Of requests and slots. What a slot says while its turn runs is nobody's business (REF-1)."""
    named: dict[str, dict[str, int] | str] = {n: _cursors(c or ZERO) for n, c in sorted(requests.items())}
    for name, slot in sorted(slots.items()):
        session = state.session(name)
        turn = state.request(session.turn or "") if session is not None else None
        lent = turn is not None and turn.phase in IN_BATCH
        lent_to = f"lent to {turn.name}" if turn is not None else ""
        named[f"slot of {name}"] = lent_to if lent else _cursors(slot) if slot is not None else "none"
    return named


def _reference_nodes(state: State) -> dict[str, Data]:
    tree = state.tree
    found: dict[str, Data] = {}
    for p in sorted(radix.nodes(tree), key=lambda p: p.path) if tree is not None else ():
        assert tree is not None
        through = [lock for lock in tree.locks if lock.key[: p.end] == p.path]
        found[path_text(p.path)] = {
            "parent": path_text(p.path[: p.start]),
            "start": p.start,
            "end": p.end,
            "live": p.node.live if tree.window is not None else None,
            "full_locks": len(through),
            "swa_locks": sum(k.swa_from < p.end for k in through) if tree.window is not None else 0,
            "full_locked_by": [k.holder for k in through],
            "swa_locked_by": [k.holder for k in through if k.swa_from < p.end] if tree.window else [],
        }
    return found


def _system_nodes(tree: TreeFacts | None, geometry: Geometry) -> dict[str, Data]:
    size = geometry.page_size
    found: dict[str, Data] = {}
    for n in tree.nodes if tree is not None else ():
        whole = len(n.swa_slots) == len(n.slots) and all(n.swa_slots)
        found[path_text(n.path)] = {
            "parent": path_text(n.path[: n.start]),
            "start": n.start,
            "end": len(n.path),
            "live": None if geometry.window is None else n.live,
            "full_locks": n.full_locks,
            "swa_locks": n.swa_locks if geometry.window is not None else 0,
            "full": [slot // size for slot in n.slots[::size]],
            "swa": [slot // size for slot in n.swa_slots[::size]],
            "wrong": not _right(n.path[n.start :], n.full_read, n.swa_read),
            "half": n.live and not whole,
        }
    return found


def _right(path: Sequence[int], full: Sequence[int], swa: Sequence[int]) -> bool:
    return all(not got or tuple(got) == tuple(path) for got in (full, swa))


def _sizes(sizes: Sequence[int]) -> dict[str, int]:
    names = ("full evictable", "full protected", "SWA evictable", "SWA protected")
    return dict(zip(names, sizes))


def _accounts(outcome: Outcome | None) -> dict[str, Data]:
    """What a memory check counted, a dictionary for each pool."""
    report = outcome.report if isinstance(outcome, Done) else None
    return {a.pool: {k: v for k, v in asdict(a).items() if k != "pool"} for a in report.accounts} if report else {}


def _pool(facts: Facts, name: str) -> dict[int, Data]:
    """Each page that exists, or that somebody takes for one: its owners, how often it is free."""
    pool = facts.pools[name]
    pages: dict[int, Data] = {p: {"owners": [], "free": 0} for p in range(1, pool.size + 1)}
    for page in pool.free:
        pages.setdefault(page, {"owners": [], "free": 0})["free"] += 1
    for owned in pool.owned:
        pages.setdefault(owned.page, {"owners": [], "free": 0})["owners"].append([owned.holder, owned.at])
    return dict(sorted(pages.items()))


def trouble(page: int, size: int, owners: int, free_times: int) -> str:
    """What is wrong with a page, in words; empty if it is free or owned, once."""
    if not 1 <= page <= size:
        return "the padding page" if page == 0 else "no such page"
    if owners + free_times == 1:
        return ""
    if not owners:
        return f"free {free_times} times" if free_times else "lost: neither free nor owned"
    return "owned and free" if free_times else f"{owners} owners"


def wrong_reads(state: State, facts: Facts) -> dict[str, dict[str, list[int]]]:
    """holder -> positions per pool whose KV is not that of the token that the text has there."""
    window = state.scope.geometry.window
    found: dict[str, dict[str, list[int]]] = {}
    for h in holders(state):
        seen, c = facts.holders.get(h.name), h.cursors
        if seen is None:
            continue
        want = text_tokens(h.text, c.kv_committed_len)
        full = [p for p, (a, b) in enumerate(zip(want, seen.full_read)) if a != b]
        swa: list[int] = []
        if window is not None:
            first = max(lost_below(c), min(c.cache_protected_len, window_start(len(want), window)))
            swa = [p for p, (a, b) in enumerate(zip(want, seen.swa_read)) if p >= first and a != b]
        if full or swa:
            found[h.name] = {"full": full, "swa": swa}
    return found


# Where they differ.


def _difference(key: tuple[str, ...], about: str, reference: object, system: object) -> Data:
    """key: where it is to be marked, such as ("cursors", "slot of s1", "E")."""
    return {"key": list(key), "about": about, "reference": str(reference), "system": str(system)}


def _differences(moment: Moment, ref: Data, got: Data, waived: frozenset[str]) -> Iterator[Data]:
    """In the order in which one would tell them."""
    step, facts = moment.step, moment.facts
    if step is not None:
        want, said = say(step.expected), say(step.outcome)
        reported = getattr(step.expected, "freed", None), getattr(step.outcome, "freed", None)
        if type(step.expected) is not type(step.outcome) or (not step.done and want != said):
            yield _difference(("outcome",), "outcome", want, said)
        elif reported[0] != reported[1] and not step.own_shape and "TREE-10" not in waived:
            yield _difference(("outcome",), "reported as freed", want, said)
    for kind in ("requests", "sessions"):
        yield from _named_differences(kind, ref[kind], got[kind])
    for name in [*ref["cursors"], *(n for n in got["cursors"] if n not in ref["cursors"])]:
        a, b = ref["cursors"].get(name, "none"), got["cursors"].get(name, "none")
        if isinstance(a, dict) and isinstance(b, dict):
            for letter in CURSORS:
                if a[letter] != b[letter]:
                    about = f"{name}: {letter} {CURSORS[letter]}"
                    yield _difference(("cursors", name, letter), about, a[letter], b[letter])
        elif a != b:
            yield _difference(("cursors", name), name, _short(a), _short(b))
    if "CHK-2" not in waived:
        for pool, account in ref["accounts"].items():
            for term, count in account.items():
                other = got["accounts"].get(pool, {}).get(term, 0)
                if other != count:
                    yield _difference(("accounts", pool, term), f"{POOL.get(pool, pool)} {term}, by the check", count, other)
    yield from _tree_differences(moment, ref, got)
    size = moment.state.scope.geometry.page_size
    for name in sorted({*ref["holders"], *got["holders"]}):
        a, b = ref["holders"].get(name), got["holders"].get(name)
        for pool in facts.pools:
            x, y = (set(side[pool]) if side is not None else set() for side in (a, b))
            if x != y:
                about = f"{POOL[pool]} pages of {name}, by position"
                yield _difference(("holders", name, pool), about, spans(x, size), spans(y, size))
    for pool, count in ref["free"].items():
        if got["free"][pool] != count:
            yield _difference(("free", pool), f"free {_pages(pool)}", count, got["free"][pool])
    for name, shared_pool in facts.pools.items():
        for page, cell in got["pools"][name].items():
            if wrong := trouble(page, shared_pool.size, len(cell["owners"]), cell["free"]):
                yield _difference(("pools", name, page), f"{POOL[name]} page {page}", "free or owned, once", wrong)
    yield from _mapping_differences(facts, waived)
    for name, holder in got["holders"].items():
        for pool, positions in holder.get("wrong", {}).items():
            if positions:
                about = f"what {name} reads at position {positions[0]} ({POOL[pool]})"
                yield _difference(("wrong", name, pool), about, "its own token", "something else")


def _named_differences(kind: str, ref: Data, got: Data) -> Iterator[Data]:
    one = kind[:-1]
    for name in sorted({*ref, *got}):
        a, b = ref.get(name), got.get(name)
        if a is None or b is None:
            there = ["there" if side is not None else "not there" for side in (a, b)]
            yield _difference((kind, name), f"{one} {name}", *there)
            continue
        for field, value in b.items():
            if a[field] != value:
                yield _difference((kind, name, field), f"{field} of {one} {name}", a[field], value)


def _tree_differences(moment: Moment, ref: Data, got: Data) -> Iterator[Data]:
    own_shape = moment.step is not None and moment.step.own_shape
    for path in sorted({*ref["nodes"], *got["nodes"]}, key=lambda p: (len(p), p)):
        a, b = ref["nodes"].get(path), got["nodes"].get(path)
        if a is None or b is None:
            there = ["there" if side is not None else "not there" for side in (a, b)]
            yield _difference(("nodes", path), f"node that ends {path}", *there)
            continue
        name = f"node [{b['start']}, {b['end']}) of {path}"
        if a["live"] != b["live"]:
            kinds = ["live" if side["live"] else "tombstone" for side in (a, b)]
            yield _difference(("nodes", path, "live"), name, *kinds)
        elif b["half"]:
            yield _difference(("nodes", path, "live"), name, "SWA KV of all its tokens", "of a part, or padding's")
        for pool in ("full", "swa"):
            locks = f"{pool}_locks"
            most = a["full_locks"] if own_shape else a[locks]
            if not a[locks] <= b[locks] <= most:
                yield _difference(
                    ("nodes", path, locks), f"{name}, {POOL[pool]} locks counted", a[locks], b[locks]
                )
        if b["wrong"]:
            yield _difference(("nodes", path, "wrong"), f"{name} holds the KV of", "its path", "others")
    for name in sorted({*ref["guests"], *got["guests"]}):
        locked = [side["guests"].get(name, "nothing") for side in (ref, got)]
        if locked[0] != locked[1]:
            yield _difference(("guests", name), f"tokens that guest {name} has locked", *locked)
    tree = moment.facts.tree
    if tree is not None and tree.sizes is not None:
        walk = [0, 0, 0, 0]
        for node in tree.nodes:
            walk[node.full_locks > 0] += len(node.slots)
            walk[2 + (node.swa_locks > 0)] += len(node.swa_slots)
        for name, count in _sizes(walk).items():
            if got["counters"][name] != count:
                yield _difference(("counters", name), f"{name} tokens, by counter", count, got["counters"][name])
    pages = {page_name(path): slots for path, (slots, _) in tree.pages.items()} if tree is not None else {}
    size = moment.state.scope.geometry.page_size
    for h in holders(moment.state) if tree is not None else ():
        seen = moment.facts.holders.get(h.name)
        path = tuple(text_tokens(h.text, h.cursors.cache_protected_len))
        for end in range(size, len(path) + 1, size):
            want = pages.get(page_name(path[:end]))
            if seen is not None and want is not None and tuple(seen.prefix[end - size : end]) != want:
                about = f"slots of {h.name} at [{end - size}, {end})"
                row = f"{list(seen.prefix[end - size : end])}"
                yield _difference(("holders", h.name, "prefix"), about, f"the tree's {list(want)}", row)
                break


def _mapping_differences(facts: Facts, waived: frozenset[str]) -> Iterator[Data]:
    for name, position in facts.unmapped:
        yield _difference(("holders", name, "swa"), f"SWA slot of {name} at {position}", "there", "none")
    for clause, entries in (("MAP-3", facts.swept_mapped), ("MAP-4", facts.unused_mapped)):
        for full, swa in entries if clause not in waived else ():
            yield _difference(("mapping",), f"mapping entry of full slot {full}", 0, f"SWA slot {swa}")
    for slot in facts.shared:
        yield _difference(("mapping",), f"SWA slot {slot}", "mapped from one full slot", "from several")
    for sentence in (*facts.torn, *facts.torn_swa):
        yield _difference(("torn",), sentence.split(":")[0], "whole pages, in order", sentence.split(": ")[1])


def _pages(pool: str) -> str:
    return "rows" if pool == "rows" else f"{POOL[pool]} pages"


def _short(value: Any) -> str:
    return " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def spans(pages: Iterable[int], page_size: int) -> str:
    """Page indices as token ranges."""
    return span(sorted(pages), page_size)
