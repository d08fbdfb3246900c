"""Cases that several rules have, in labels of situations."""

from __future__ import annotations

from collections.abc import Iterable

from reference.commands import Command
from reference.radix_tree import Key, Tree, nodes
from reference.memoization import memoized
from reference.rules.rule_definition import cursors_of
from reference.state import Cursors, Request, State
from stateful_tests.generate.commands.harness import Labels, RefusalCase

ALL_BACK = ("", "", "", "")  # everything is given back, whatever the target is


def request_of(state: State, name: str) -> Request:
    """Return a request that the state has."""
    request = state.request(name)
    assert request is not None
    return request


def pages(length: int, page_size: int) -> int:
    """Return the number of pages for a number of tokens."""
    return -(-length // page_size)


def late(was: State, command: Command) -> bool:
    """Return whether results of the command's requests are in flight."""
    names = [getattr(command, "request", None), *(n.request for n in getattr(command, "lanes", ()))]
    session = was.session(getattr(command, "session", None))
    names += [session.turn if session is not None else None, *getattr(command, "requests", ())]
    return any(r.in_flight and r.name in names for r in was.requests)


LATE = RefusalCase("results in flight", late)


def tail(allocated: int, kept: int, page_size: int) -> str:
    """Name the part of the allocation that a cut frees."""
    if pages(allocated, page_size) > pages(kept, page_size):
        return "frees pages"
    return "gives back within a page" if allocated > kept else "no tail"


def cut(was: State, c: Cursors, target: int) -> Labels:
    """Label what the end of a turn takes back, to keep `target` tokens at most."""
    page_size = was.config.geometry.page_size
    below = ""
    if c.swa_evicted_seqlen > max(target, c.cache_protected_len):
        below = "target below evicted"
        if c.cache_protected_len > 0:
            below += ", above a prefix of the tree"
    return (
        "commit past target" if c.kv_committed_len > target else "",
        below,
        "target inside a page" if target % page_size else "",
        tail(c.kv_allocated_len, min(c.kv_allocated_len, target), page_size),
    )


def grows(was: State, now: State, names: Iterable[str]) -> Labels:
    """Label whether a request opens a page, and whether the radix tree had to make room."""
    page_size = was.config.geometry.page_size
    opened = False
    for name in names:
        before = cursors_of(request_of(was, name))
        after = cursors_of(request_of(now, name))
        opened |= pages(after.kv_allocated_len, page_size) > pages(
            before.kv_allocated_len, page_size
        )
    return "opens pages" if opened else "no page opened", "tree evicts for room" if evicts(
        was, now
    ) else ""


def evicts(was: State, now: State) -> bool:
    """Return whether a part of the radix tree has gone, or a node has lost its SWA KV."""
    if was.tree is now.tree or was.tree is None or now.tree is None:
        return False
    has = page_ends(now.tree)
    return any(
        end not in has or (live and not has[end]) for end, live in page_ends(was.tree).items()
    )


@memoized
def page_ends(tree: Tree) -> dict[Key, bool]:
    """Return path to the end of each page -> whether it has SWA KV."""
    size = tree.page_size
    ends = ((p, end) for p in nodes(tree) for end in range(p.start + size, p.end + 1, size))
    return {p.path[:end]: p.node.live for p, end in ends}
