"""Since when something is so: a walk back through the moments of a run.

`History` gives words such as "since command 4 (finish s1 keep 3)" and notes each as a `Claim`, so that a test
can hold it against the moments again. Commands are counted as `kvspec replay` counts them.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from ci.compare.differences import CURSORS, POOL, spans
from reference.clauses.facts import Owned
from reference.clauses.step import Step
from stateful_tests.lockstep.results import Moment, Run, Violation
from stateful_tests.traces.notation import format_command as describe

Holds = Callable[[Any], bool]  # of a Moment, or an EngineMoment


class Claim(NamedTuple):
    """`holds` is so after every command from `since` on, and was not before it. -1: from the start.

    until: the claim is about what was so before this command; None where it is so still.
    """

    what: str
    since: int
    holds: Holds
    until: int | None = None


class Past:
    """A run that ended with a violation, at whose last moment one stands and looks back."""

    def __init__(self, run: Run, violation: Violation) -> None:
        self.run, self.violation = run, violation
        self.now, self.before = run.history[-1], run.history[-2]
        self.claims: list[Claim] = []

    def command(self, index: int) -> str:
        """A command by number, for `words`."""
        return f"\0{index}\0"

    def words(self, text: str) -> str:
        """The sentence with commands and cursors filled in: at first in full, then by number or letter."""
        told: set[str] = set()

        def fill(found: re.Match[str]) -> str:
            name = found[1]
            what = CURSORS[name] if name in CURSORS else describe(self.run.rows[int(name)].command)
            short = name if name in CURSORS else f"command {name}"
            full = short if name in told else f"{short} ({what})"
            told.add(name)
            return full

        return re.sub("\0(.*?)\0", fill, text)

    @property
    def here(self) -> str:
        """The command that was violated."""
        return self.command(self.violation.step)

    def first_step(self, what: str, holds: Callable[..., bool], *more: object) -> int:
        """Index of the command since which `holds` is so; it is so now. more: what `holds` takes besides."""
        return self._since(what, partial(_held, holds, more), len(self.run.history) - 1, None)

    def was_since(self, what: str, holds: Callable[..., bool], *more: object) -> str:
        """In words, since when `holds` was so until the last command."""
        last = len(self.run.history) - 2
        return self.at(self._since(what, partial(_held, holds, more), last, self.violation.step))

    def _since(self, what: str, fact: Holds, at: int, until: int | None) -> int:
        while at > 0 and fact(self.run.history[at - 1]):
            at -= 1
        since = at + self.run.first
        self.claims.append(Claim(what, since, fact, until))
        return since

    def first_since(self, what: str, holds: Callable[..., bool], *more: object) -> str:
        """`first` in words."""
        return self.at(self.first_step(what, holds, *more))

    def at(self, index: int) -> str:
        if index < 0:
            return "from the start"
        or_before = " or before" if index == self.run.first else ""  # what was before is not known any more
        return f"since {self.command(index)}{or_before}"

    def last_before(self, holds: Holds) -> Any:
        """The last earlier moment at which something was so."""
        return next((m for m in reversed(self.run.history[:-1]) if holds(m)), None)


class History(Past):
    """The past of pages, rows and trees."""

    def __init__(self, run: Run, violation: Violation, step: Step) -> None:
        super().__init__(run, violation)
        self.step, self.page_size = step, step.config.geometry.page_size

    def place(self, owned: Owned) -> tuple[str, str]:
        """Who has a page and for which positions, such as "s1", "[4, 8)"."""
        at = spans([owned.at], self.page_size)
        tree = owned.holder.removeprefix("tree ")
        return ("the tree", f"{at} of {tree}") if tree != owned.holder else (owned.holder, at)

    def page(self, pool: str, page: int) -> str:
        """The sentence on a page that is not free or owned, once."""
        facts = self.now.facts.pools[pool]
        owners = [o for o in facts.owned if o.page == page]
        times = list(facts.free).count(page)
        name = f"{POOL[pool]} page {page}"

        def free(m: Moment, least: int = 1) -> bool:
            return list(m.facts.pools[pool].free).count(page) >= least

        if not owners and 1 <= page <= facts.size:
            said = f"in the free list {times} times" if times else "neither free nor owned"
            holds = partial(free, least=2) if times else partial(lost, pool=pool, page=page)
            was = self.last_before(lambda m: not holds(m))
            then = self._was(was, pool, page) if was is not None else ""
            return f"{name} is {said} {self.first_since(f'{name} is {said}', holds)}{then}"
        having = " and ".join(self.having(pool, owned) for owned in owners)
        if not times:
            return f"{name} has {len(owners)} owners: {having}{self._twice(owners)}"
        since = self.first_since(f"{name} is free", free)
        if not 1 <= page <= facts.size:
            what = "the padding page" if page == 0 else "which does not exist"
            return f"{name}, {what}, is in the free list {since}"
        return f"{name} is in the free list {since}, and {having}"

    def _twice(self, owners: Iterable[Owned]) -> str:
        """Why a page is a row's and the tree's: the row's prefix ends before it."""
        for owned in owners:
            holder = self.now.facts.holders.get(owned.holder)
            if holder is not None and any(o.holder.startswith("tree ") and o.at == owned.at for o in owners):
                prefix = holder.cursors.cache_protected_len
                return f"; {owned.holder} owns its row from \0R\0 on, which is {prefix}"
        return ""

    def having(self, pool: str, owned: Owned) -> str:
        """Who has a page, for which positions and since when."""
        who, at = self.place(owned)
        since = self.first_since(f"{who} has {pool} page {owned.page} at {at}", has(pool, owned))
        return f"{who} has it at {at} {since}"

    def _was(self, was: Moment, pool: str, page: int) -> str:
        places = [self.place(o) for o in was.facts.pools[pool].owned if o.page == page]
        if places:
            return "; until then " + " and ".join(f"{who} had it at {at}" for who, at in places)
        return "; until then it was free" if page in was.facts.pools[pool].free else ""


def of(finder: Callable[[Step], Any], told: Callable[..., str | None]) -> Callable[[History], str | None]:
    """An explanation made from what the clause's own search finds."""

    def rule(past: History) -> str | None:
        found = finder(past.step)
        return None if found is None else told(past, found)

    return rule


def _held(holds: Callable[..., bool], more: tuple[object, ...], moment: Any) -> bool:
    return holds(moment, *more)


def lost(moment: Moment, pool: str, page: int) -> bool:
    """A page that is neither free nor owned."""
    facts = moment.facts.pools[pool]
    return page not in facts.free and all(o.page != page for o in facts.owned)


def has(pool: str, owned: Owned) -> Holds:
    """This owner has the page for this part of its sequence."""
    return lambda m: owned in m.facts.pools[pool].owned


def troubled(moment: Moment, pools: Iterable[str] = ("full", "swa")) -> list[tuple[str, int]]:
    """(pool, page) of every page that is not free or owned, once: what is had twice, then what is lost."""
    found: list[tuple[int, str, int]] = []
    for pool in pools:
        facts = moment.facts.pools.get(pool)
        if facts is None:
            continue
        times = Counter(o.page for o in facts.owned) + Counter(facts.free)
        for page in sorted({*times, *range(1, facts.size + 1)}):
            if not 1 <= page <= facts.size or times[page] != 1:
                found.append((int(not times[page]), pool, page))
    return [(pool, page) for _, pool, page in sorted(found, key=lambda f: f[0])]


def some(count: int, what: str) -> str:
    """A number of things, such as "1 page", "2 pages"."""
    return f"{count} {what}{'s' * (count != 1)}"
