"""Steps of the reference, which every clause accepts, with facts that are spoilt by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from reference import model
from reference.clauses import CLAUSES
from reference.clauses.facts import Facts, NodeFacts, Owned, TreePage
from reference.clauses.step import Step
from reference.commands import Command, Reason, Refused
from reference.failures import AtState
from reference.geometry import Geometry
from reference.state import text_tokens
from reference.prefix_cache import key_of, page_name
from stateful_tests.lockstep.abstraction import facts_of
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.tests.support.commands import script
from stateful_tests.tests.support.places import in_words
from stateful_tests.traces.trace_files import prompt_of

TREE = Geometry(page_size=2, window=2, full_pages=12, swa_pages=12, rows=3, width=16, tree=True)
ONE = replace(TREE, page_size=1)
PLAIN = Geometry(page_size=2, window=2, full_pages=12, swa_pages=12, rows=3, width=16)


def step_of(geometry: Geometry, *commands: Command | str) -> Step:
    """Return the step of the last of these commands, some of them as text, on the reference as a system."""
    system = ReferenceSystem()
    state = model.initial(geometry)
    system.reset(geometry)
    scripts = (script(command) if isinstance(command, str) else (command,) for command in commands)
    for command in (command for commands_of_script in scripts for command in commands_of_script):
        before = facts_of(system.view(), geometry)
        was = state
        state, expected = model.step(was, command)
        outcome = system.apply(command)
        after = facts_of(system.view(), geometry)
    return Step(
        config=was.config,
        command=command,
        expected=expected,
        outcome=outcome,
        was=was,
        now=state,
        before=before,
        after=after,
        unchanged=False,
    )


def change_facts(step: Step, *, before: bool = False, **facts: Any) -> Step:
    """Return the step with other facts after it (or before it). A function is given what there is."""
    side = "before" if before else "after"
    old: Facts = getattr(step, side)
    new = {
        name: value(getattr(old, name)) if callable(value) else value
        for name, value in facts.items()
    }
    return replace(step, **{side: old._replace(**new)})


def change_tree(step: Step, *, before: bool = False, **parts: Any) -> Step:
    """Return the step with other parts of the tree, as `change_facts` does."""
    old = (step.before if before else step.after).tree
    new = {
        name: value(getattr(old, name)) if callable(value) else value
        for name, value in parts.items()
    }
    return change_facts(step, before=before, tree=old._replace(**new))


def node(step: Step, number: int, **parts: Any) -> Step:
    """Return the step with another node of the tree.

    number: of the node, in the order of paths.
    """

    def change(nodes: Any) -> list[NodeFacts]:
        return [n._replace(**parts) if i == number else n for i, n in enumerate(nodes)]

    return change_tree(step, nodes=change)


def pages(step: Step, pattern: str, *, before: bool = False) -> Step:
    """Return the step with other pages of the only path.

    pattern: a letter for each page: L live, T a tombstone, - not there.
    """
    tree = (step.before if before else step.after).tree
    marked = {
        path: TreePage(page.slots, has_swa=mark == "L")
        for (path, page), mark in zip(sorted(tree.pages.items()), pattern)
        if mark != "-"
    }
    return change_tree(step, before=before, pages=marked)


def with_cursors(name: str, **cursors: int) -> Callable[[dict], dict]:
    """Return a change of requests or sessions: other cursors for one of them."""

    def change(has: dict) -> dict:
        field = "slot" if hasattr(has[name], "slot") else "cursors"
        had = getattr(has[name], field)
        assert had is not None, f"{name} has no cursors: `{field}=zero` gives it some"
        return has | {name: has[name]._replace(**{field: had._replace(**cursors)})}

    return change


def cursors(step: Step, **values: int) -> Step:
    """Return the step with other cursors of r1."""
    return change_facts(step, requests=with_cursors("r1", **values))


def text(letters: str) -> Any:
    return prompt_of(letters)


def path(letters: str) -> tuple[int, ...]:
    return key_of(prompt_of(letters))


def as_refused(step: Step) -> Step:
    """Return the step as one that was refused."""
    return replace(step, outcome=Refused(Reason.OUT_OF_FULL))


def keep_freed_page(step: Step, pool: str) -> Step:
    """Return the step with a page that it freed still owned."""

    def change(pools: dict) -> dict:
        was = step.before.pools[pool]
        now = pools[pool]
        page = next(o for o in was.owned if o.page in now.free)
        free_pages = [p for p in now.free if p != page.page]
        return pools | {pool: now._replace(free=free_pages, owned=[*now.owned, page])}

    return change_facts(step, pools=change)


def add_owner(step: Step, pool: str, owned: Owned) -> Step:
    """Return the step with another owner of a page."""
    return change_facts(
        step, pools=lambda ps: ps | {pool: ps[pool]._replace(owned=[*ps[pool].owned, owned])}
    )


def replace_free_pages(step: Step, *pages: int, pool: str = "full") -> Step:
    """Return the step with other pages at the end of a free list."""
    free = step.after.pools[pool].free
    return change_facts(
        step, pools=lambda ps: ps | {pool: ps[pool]._replace(free=[*free[: -len(pages)], *pages])}
    )


def without(step: Step, pool: str, page: int) -> Step:
    """Return the step with a page that nobody has and that is not free."""

    def change(pools: dict) -> dict:
        now = pools[pool]
        free = [p for p in now.free if p != page]
        owned = [o for o in now.owned if o.page != page]
        return pools | {pool: now._replace(free=free, owned=owned)}

    return change_facts(step, pools=change)


def hand_to_tree(step: Step, holder: str, at: int) -> Step:
    """Return the step with a full page that it freed as the tree's."""
    page = next(o.page for o in step.before.pools["full"].owned if o[:2] == (holder, at))
    text = next(h.text for h in step.holders_before if h.name == holder)
    name = page_name(tuple(text_tokens(text))[: 2 * at + 2])
    return add_owner(without(step, "full", page), "full", Owned(name, at, page))


def lose_free_page(step: Step, pool: str) -> Step:
    """Return the step without one of the free pages."""
    return change_facts(step, pools=lambda ps: ps | {pool: ps[pool]._replace(free=ps[pool].free[1:])})


def double_free_page(step: Step, pool: str) -> Step:
    """Return the step without one of the free pages, and with another twice."""
    free = step.after.pools[pool].free
    return change_facts(
        step, pools=lambda ps: ps | {pool: ps[pool]._replace(free=[*free[1:], free[-1]])}
    )


def reads(step: Step, name: str, **reads: Any) -> Step:
    """Return the step with other reads of a holder."""
    return change_facts(step, holders=lambda hs: hs | {name: hs[name]._replace(**reads)})


def assert_clause(clause: str, step: Step, says: str | None, places: str = "") -> None:
    """Assert that the clause holds (says None), or fails with these words and, if some are given, places."""
    failure = CLAUSES[clause].check(step)
    if says is None:
        assert failure is None
    else:
        assert failure is not None
        assert says in f"{failure.expected}, not {failure.observed}; {failure.head}."
        assert places in ("", in_words(failure.at))
        assert not any(isinstance(at, AtState) and at.slot is None for at in failure.at)
