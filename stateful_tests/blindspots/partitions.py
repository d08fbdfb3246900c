"""Wrong partitions of a pool whose sums balance: what no memory check that only adds up can see.

One pool, pages 1 to n. Places: the free list, rows of running requests (uncached) and idle slots
(session_held); each owner has as many entries as its cursors claim. Entry 0 names no page: padding in
the free list, a claim that no page stands behind elsewhere. A partition is right when every page is in
exactly one place exactly once; its sums balance when free entries and claims add up to n.

Balanced sums mean n entries for n pages. So a wrong one leaves a page nowhere, and an entry names
either no page or one that another entry names too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, product
from typing import NamedTuple

from reference.clauses import CLAUSES
from reference.clauses.facts import Facts, Owned, Pool
from reference.clauses.step import Step
from reference.commands import CheckIdle, Done
from reference.cursors import counted_full, counted_swa
from reference.geometry import Geometry
from reference.ledger import Cursors
from reference.model import initial

FREE, ROW, SLOT = "free list", "row", "slot"

# What is wrong: one page in two places (or twice in one), or an entry that names no page.
KINDS = (
    "free list twice", "free list & row", "free list & slot",
    "row & row", "row twice", "row & slot", "slot & slot", "slot twice",
    "free list has padding", "row without page", "slot without page",
)  # fmt: skip


class Place(NamedTuple):
    """The free list or an owner, with the pages it names in order."""

    kind: str
    pages: tuple[int, ...]


class Partition(NamedTuple):
    """Pages 1 to `size` and the places that name them; the free list comes first."""

    size: int
    places: tuple[Place, ...]

    @property
    def entries(self) -> list[int]:
        return [page for place in self.places for page in place.pages]

    @property
    def balanced(self) -> bool:
        """What a sum sees."""
        return len(self.entries) == self.size

    @property
    def right(self) -> bool:
        return sorted(self.entries) == list(range(1, self.size + 1))

    @property
    def nowhere(self) -> list[int]:
        """Pages that no place names."""
        return sorted(set(range(1, self.size + 1)).difference(self.entries))

    def text(self) -> str:
        """Such as "free list [1], row [1], page 2 nowhere"."""
        shown = [f"{kind} {list(pages)}" for kind, pages in self.places if pages or kind == FREE]
        lost = self.nowhere
        if lost:
            shown.append(f"page{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} nowhere")
        return ", ".join(shown)


def kinds(partition: Partition) -> frozenset[str]:
    """Everything that is wrong with it, apart from pages that are nowhere."""
    found = set()
    at: dict[int, list[int]] = {}
    for number, place in enumerate(partition.places):
        for page in place.pages:
            if not 1 <= page <= partition.size:
                found.add("free list has padding" if place.kind == FREE else f"{place.kind} without page")
            else:
                at.setdefault(page, []).append(number)
    for numbers in at.values():
        for i, one in enumerate(numbers):
            for other in numbers[i + 1 :]:
                a, b = sorted((partition.places[one].kind, partition.places[other].kind), key=_order)
                found.add(f"{a} twice" if one == other else f"{a} & {b}")
    return frozenset(found)


def _order(kind: str) -> int:
    return (FREE, ROW, SLOT).index(kind)


def shapes(size: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """All balanced shapes, (kind, entries) of each place: the fewest owners first."""
    owner = [(kind, count) for kind in (ROW, SLOT) for count in range(1, size + 1)]
    for owners in range(size + 1):
        for named in combinations_with_replacement(owner, owners):
            left = size - sum(n for _, n in named)
            if left >= 0:
                yield ((FREE, left), *named)


def balanced(size: int) -> Iterator[Partition]:
    """Every partition of `size` pages whose sums balance, right and wrong, free lists in any order."""
    for shape in shapes(size):
        for entries in product(range(size + 1), repeat=size):
            rest = list(entries)
            places = []
            for kind, count in shape:
                places.append(Place(kind, tuple(rest[:count])))
                del rest[:count]
            yield Partition(size, tuple(places))


def smallest(up_to: int = 3) -> dict[str, Partition]:
    """For each kind of wrongness the smallest partition that has it alone, and balances."""
    found: dict[str, Partition] = {}
    for size in range(1, up_to + 1):
        for partition in balanced(size):
            seen = kinds(partition)
            if len(seen) == 1:
                found.setdefault(min(seen), partition)
    return {kind: found[kind] for kind in KINDS if kind in found}


def seen_by(partition: Partition) -> tuple[str, ...]:
    """The clauses about owners that do not hold for it."""
    owned = [
        Owned(f"{place.kind} {number}", at, page)
        for number, place in enumerate(partition.places)
        for at, page in enumerate(place.pages)
        if place.kind != FREE and page
    ]
    pool = Pool(partition.size, partition.places[0].pages, owned)
    facts = Facts({}, {}, {}, {"full": pool}, rows=1, free_rows=[0])
    state = initial(Geometry(1, None, partition.size, 0, 1, 1))
    step = Step(state.config, CheckIdle(), Done(), Done(), state, state, facts, facts, unchanged=True)
    return tuple(c for c in ("OWN-1", "OWN-2", "OWN-3") if CLAUSES[c].check(step) is not None)


def claims(facts: Facts) -> list[tuple[str, str, Cursors]]:
    """(kind, holder, cursors) of everything that a system's sums count, from its own facts.

    A lent slot counts once, as a row when its turn has moved on from it.
    """
    found, lent = [], set()
    for name, request in facts.requests.items():
        session = facts.sessions.get(request.session) if request.session is not None else None
        slot = session.slot if session is not None else None
        if request.cursors is None:
            continue
        apart = f"{request.session}/{name}"
        if apart in facts.holders:
            found.append((ROW, apart, request.cursors))
            continue
        lent.add(request.session)
        kind = SLOT if request.cursors == slot else ROW
        found.append((kind, request.session or name, request.cursors))
    for name, session in facts.sessions.items():
        if session.slot is not None and name not in lent:
            found.append((SLOT, name, session.slot))
    return found


def partitions(facts: Facts, page_size: int) -> Iterator[tuple[str, Partition]]:
    """(pool, its partition) as the facts show it: claims that no page stands behind are entries 0."""
    held = claims(facts)
    for name, pool in facts.pools.items():
        places = [Place(FREE, tuple(pool.free))]
        amount = counted_full if name == "full" else counted_swa
        for kind, holder, cursors in held:
            mine = [o.page for o in pool.owned if o.holder == holder]
            claimed = max(0, amount(cursors, page_size)) // page_size
            twice = sum(h == holder for _, h, _ in held)
            if twice > 1:  # two turns on one row: both name its pages
                mine = mine[:claimed]
            places.append(Place(kind, tuple(mine + [0] * (claimed - len(mine)))))
        yield name, Partition(pool.size, tuple(places))
