"""The scopes by name: small worlds whose every state is looked at. Data alone; engines are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from reference.commands import Mode
from reference.geometry import Geometry
from stateful_tests.generate.exploration_scope import Scope


def texts_in(texts: str, longest: int, block: int = 1) -> tuple[str, ...]:
    """Return every prompt up to `longest` tokens made of blocks of `block` tokens, each block in
    one of `texts`."""
    prompts = []
    for blocks in range(1, longest // block + 1):
        for letters in product(texts, repeat=blocks):
            runs: list[tuple[str, int]] = []
            for letter in letters:
                if runs and runs[-1][0] == letter:
                    runs[-1] = (letter, runs[-1][1] + block)
                else:
                    runs.append((letter, block))
            prompts.append("".join(f"{letter}{tokens}" for letter, tokens in runs))
    return tuple(prompts)


def _sizes(
    page_size: int, window: int | None, full: int, swa: int, rows: int, width: int
) -> Geometry:
    return Geometry(page_size, window, full, 0 if window is None else swa, rows, width)


def _cached(
    page_size: int, window: int | None, full: int, swa: int, rows: int, width: int
) -> Geometry:
    return replace(_sizes(page_size, window, full, swa, rows, width), tree=True)


def _recurrent(states: int, window: int | None, *sizes: int, tree: bool = True) -> Geometry:
    return replace(_sizes(1, window, *sizes), tree=tree, states=states)


def _both_modes(scope: Scope) -> tuple[Scope, Scope]:
    """Return the scope in free mode, and in faithful mode under a name that says so."""
    return scope, replace(scope, name=f"{scope.name}-faithful", mode=Mode.FAITHFUL)


_ALL: Sequence[Scope] = (
    # One session. The window is below, at and above a page; overshoot is below and above the window, and
    # far enough for a window eviction to pass a target (free mode).
    *_both_modes(Scope("session-tiny",
                       "one session, window 1, up to 4 ahead: the smallest with every kind of cut",
                       _sizes(1, 1, 5, 4, 1, 5), sessions=1, ahead=4, submits=(1,))),
    *_both_modes(Scope("session-page1", "one session, pages of one token, window 1, up to 4 ahead",
                       _sizes(1, 1, 6, 5, 1, 6), sessions=1, ahead=4)),
    Scope("session-page2", "one session, a window below a page, up to 6 ahead",
          _sizes(2, 1, 4, 4, 1, 8), sessions=1, ahead=6),
    Scope("session-page2-faithful", "one session, a window below a page, up to 5 ahead",
          _sizes(2, 1, 3, 3, 1, 6), Mode.FAITHFUL, sessions=1, ahead=5),
    Scope("session-page2-window2", "one session, a window of one page",
          _sizes(2, 2, 3, 3, 1, 6), sessions=1, ahead=3),
    Scope("session-page2-window3", "one session, a window above a page that ends inside one, up to 7 ahead",
          _sizes(2, 3, 5, 4, 1, 9), sessions=1, ahead=7),
    Scope("session-page4", "one session, a window below a page, overshoot past window and page",
          _sizes(4, 3, 3, 3, 1, 12), sessions=1, ahead=6, submits=(1, 5), takes="minutes"),
    Scope("session-no-window", "one session, one pool",
          _sizes(2, None, 3, 0, 1, 6), sessions=1, ahead=3),
    # Results that arrive later.
    *_both_modes(Scope("late", "one session, window 1, results in flight, up to 2 ahead",
                       _sizes(1, 1, 5, 4, 1, 5), sessions=1, ahead=2, late=True, submits=(1,))),
    Scope("late-page2", "one session, a window below a page, results in flight, up to 3 ahead",
          _sizes(2, 1, 4, 4, 1, 7), sessions=1, ahead=3, late=True, submits=(1,), marked=False),
    Scope("late-two", "two ordinary requests whose results are in flight, less room in the SWA pool",
          _sizes(1, 1, 7, 6, 2, 4), ordinary=2, ahead=2, late=True, submits=(1,), aborts=False,
          retracts=False, decode=False, window_evictions=False),
    *_both_modes(Scope("session-tails",
                       "one session, prompts whose SWA KV is received for the last window alone",
                       _sizes(1, 1, 5, 3, 1, 5), sessions=1, ahead=2, submits=(1, 4), marked=False,
                       tails=True)),
    # Several: batches, room, rows.
    Scope("checks", "a session and an ordinary request, with every memory check",
          _sizes(2, 1, 2, 2, 2, 3), sessions=1, ordinary=1, submits=(1,), ahead=2, checks=True),
    Scope("ordinary", "two ordinary requests", _sizes(1, 1, 3, 3, 2, 3), ordinary=2, ahead=2),
    Scope("batches", "two ordinary requests, pages and a window of two",
          _sizes(2, 2, 4, 4, 2, 4), ordinary=2, ahead=3, submits=(1,), aborts=False, retracts=False),
    Scope("batches-page2", "two ordinary requests that decode side by side, one further ahead than the other",
          _sizes(2, 1, 5, 5, 2, 5), ordinary=2, ahead=3, submits=(1,), aborts=False, retracts=False,
          window_evictions=False, decode=False, invalid=False),
    Scope("scarce", "three ordinary requests, two rows, less room in the SWA pool than in the full pool",
          _sizes(1, 1, 4, 2, 2, 3), ordinary=3, ahead=2, submits=(1,)),
    Scope("two-sessions", "two sessions, pages of two",
          _sizes(2, 1, 3, 3, 2, 4), sessions=2, ahead=3, submits=(1,)),
    Scope("two-sessions-faithful", "two sessions, pages of two, in faithful mode",
          _sizes(2, 1, 3, 3, 2, 4), Mode.FAITHFUL, sessions=2, ahead=3, submits=(1,), takes="minutes"),
    Scope("two-sessions-ordinary", "two sessions and an ordinary request, three rows",
          _sizes(1, 1, 4, 3, 3, 3), sessions=2, ordinary=1, ahead=2, submits=(1,), takes="minutes"),
    Scope("three-sessions", "three sessions, two rows",
          _sizes(1, 1, 4, 3, 2, 3), sessions=3, ahead=2, submits=(1,), takes="minutes"),
    Scope("two-sessions-page4", "two sessions, pages of four, overshoot past window and page",
          _sizes(4, 3, 3, 3, 2, 8), sessions=2, ahead=5, submits=(1, 5), takes="nightly"),
    Scope("two-sessions-long", "two sessions, window 2, up to 4 ahead",
          _sizes(1, 2, 7, 5, 2, 6), sessions=2, ahead=4, takes="nightly"),
    # The radix tree by itself.
    Scope("tree-tiny", "one lock holder, two texts, room for two pages",
          _cached(1, 1, 2, 2, 1, 2), lock_holders=1, texts="ab", prompts=texts_in("ab", 2)),
    Scope("tree-two-holders", "two lock holders, two texts, room for two pages",
          _cached(1, 1, 2, 2, 1, 2), lock_holders=2, texts="ab", prompts=texts_in("ab", 2)),
    Scope("tree-small-window-pool",
          "one lock holder, two texts, more room in the full pool than in the other",
          _cached(1, 1, 3, 2, 1, 2), lock_holders=1, texts="ab", prompts=texts_in("ab", 2)),
    Scope("tree-window2", "one lock holder, a window of two, prompts past it",
          _cached(1, 2, 3, 3, 1, 3), lock_holders=1, texts="ab", prompts=("a1", "a2", "a3", "b1", "a1b1")),
    Scope("tree-page2", "one lock holder, pages of two, prompts that end inside one",
          _cached(2, 1, 2, 2, 1, 4), lock_holders=1, texts="ab", prompts=("a1", "a3", *texts_in("ab", 4, 2))),
    Scope("tree-no-window", "two lock holders, pages of two, one pool",
          _cached(2, None, 3, 0, 1, 4), lock_holders=2, texts="ab", prompts=("a3", *texts_in("ab", 4, 2))),
    Scope("tree-two-holders-long", "two lock holders, one text, prompts of up to three, an SWA pool for two",
          _cached(1, 1, 3, 2, 1, 3), lock_holders=2, texts="a", prompts=("a1", "a2", "a3")),
    Scope("tree-page2-long", "one lock holder, one text, prompts of up to three pages of two",
          _cached(2, 1, 3, 3, 1, 6), lock_holders=1, texts="a", prompts=("a2", "a4", "a6")),
    Scope("tree-long", "one lock holder, window 1, prompts of up to three: fresh nodes outside of the window",
          _cached(1, 1, 3, 3, 1, 3), lock_holders=1, texts="ab", prompts=texts_in("ab", 3), takes="minutes"),
    Scope("tree-three-pages", "two lock holders, two texts, room for three pages",
          _cached(1, 1, 3, 3, 1, 2), lock_holders=2, texts="ab", prompts=texts_in("ab", 2), takes="minutes"),
    Scope("tree-parts", "two lock holders that give parts of their locks back, or have locked full KV alone",
          _cached(1, 1, 2, 2, 1, 2), lock_holders=2, texts="a", prompts=("a1", "a2"), parts=True),
    # Both together.
    *_both_modes(Scope("both-session",
                       "a session whose turns leave prompts in the tree, with every memory check",
                       _cached(1, 1, 3, 2, 1, 3), sessions=1, submits=(), prompts=("a1", "a2"), texts="a",
                       checks=True)),
    Scope("both-ordinary", "an ordinary request that meets what others have left in the tree",
          _cached(1, 1, 3, 2, 1, 3), ordinary=1, submits=(1,), prompts=("a1", "a2"), texts="a", ahead=2),
    Scope("both-page2", "a session, pages of two, prompts that end inside one",
          _cached(2, 1, 2, 2, 1, 4), sessions=1, submits=(1,), prompts=("a2", "a3"), texts="a", marked=False),
    Scope("both-holder", "an ordinary request and a lock holder of the tree",
          _cached(1, 1, 2, 2, 1, 2), ordinary=1, lock_holders=1, submits=(1,), prompts=("a1", "a2"),
          texts="a"),
    Scope("both-two", "two ordinary requests, batches that go into the tree together",
          _cached(1, 1, 2, 2, 2, 2), ordinary=2, submits=(), prompts=("a1", "a2"), texts="a"),
    Scope("both-holder-room", "an ordinary request and a lock holder of the tree, room for three pages",
          _cached(1, 1, 3, 3, 1, 2), ordinary=1, lock_holders=1, submits=(), prompts=("a1", "a2"), texts="a",
          decode=False, retracts=False),
    Scope("both-ordinary-page2", "an ordinary request over the tree, pages of two",
          _cached(2, 1, 3, 2, 1, 5), ordinary=1, submits=(1,), prompts=("a2",), texts="a", ahead=2,
          marked=False),
    Scope("both-ordinary-window2", "an ordinary request over the tree, a window of two, up to 3 ahead",
          _cached(1, 2, 3, 3, 1, 4), ordinary=1, submits=(1,), prompts=("a1",), texts="a", ahead=3,
          marked=False),
    Scope("both-ahead", "a session over the tree, pages of two, overshoot past window and target",
          _cached(2, 1, 4, 4, 1, 8), sessions=1, submits=(), prompts=("a2",), texts="a", ahead=5,
          marked=False, decode=False, evicts=False),
    Scope("both-tails", "an ordinary request over the tree, SWA KV received for the last window alone",
          _cached(1, 1, 4, 2, 1, 4), ordinary=1, submits=(1,), prompts=("a1", "a3"), texts="a", marked=False,
          aborts=False, tails=True),
    Scope("both-parts", "an ordinary request that gives the SWA part of its lock back",
          _cached(1, 1, 3, 2, 1, 3), ordinary=1, submits=(1,), prompts=("a1", "a2"), texts="a", parts=True),
    Scope("both-parts-faithful", "a session whose turns give the SWA part of its lock back",
          _cached(1, 1, 3, 2, 1, 3), Mode.FAITHFUL, sessions=1, submits=(1,), prompts=("a1",), texts="a",
          marked=False, parts=True),
    # Recurrent state.
    Scope("states-session", "one session on a recurrent model, up to 3 ahead: a cut cannot take a state back",
          _recurrent(1, None, 5, 0, 1, 5, tree=False), sessions=1, ahead=3, submits=(1,), late=True),
    Scope("states-tree", "two lock holders, two texts, fewer slots of recurrent state than prefixes",
          _recurrent(2, None, 3, 0, 1, 2), lock_holders=2, texts="ab", prompts=texts_in("ab", 2)),
    Scope("states-tree-window", "a lock holder, one text, a window of one and two slots of recurrent state",
          _recurrent(2, 1, 3, 3, 1, 3), lock_holders=1, texts="a", prompts=("a1", "a2", "a3"), parts=True,
          takes="minutes"),
    Scope("states-ordinary", "an ordinary request that continues from states which others have left",
          _recurrent(3, None, 3, 0, 1, 3), ordinary=1, submits=(1,), prompts=("a1", "a2"), texts="a",
          ahead=2),
    Scope("states-two", "two ordinary requests, batches whose states go into the tree together",
          _recurrent(3, None, 3, 0, 2, 3), ordinary=2, submits=(1,), prompts=("a1", "a2"), texts="a",
          takes="minutes"),
    *_both_modes(Scope("states-both", "a session whose first turns leave states in the tree, up to 2 ahead",
                       _recurrent(2, None, 4, 0, 1, 4), sessions=1, submits=(1,), prompts=("a1",), texts="a",
                       ahead=2)),
    Scope("both-longer", "a session, rows of three, room for three pages",
          _cached(1, 1, 3, 3, 1, 3), sessions=1, submits=(1,), prompts=("a1",), texts="a", takes="minutes"),
    Scope("both-session-ordinary", "a session and an ordinary request, one row, room for three pages",
          _cached(1, 1, 3, 3, 1, 2), sessions=1, ordinary=1, submits=(1,), prompts=("a1", "a2"), texts="a",
          takes="nightly"),
)  # fmt: skip

SCOPES: dict[str, Scope] = {scope.name: scope for scope in _ALL}
