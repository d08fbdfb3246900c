"""Situations of several at once: locks on one node, entries of one batch, a second retract, a session whose
turns have tracked states.

Faults that need two of a kind hide from the cases of one rule. A step meets none of these, or several; a
check counts them as it counts `situation`, and the corpus has a line for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from reference import radix_tree as radix
from reference.commands import (
    Abort, Admit, Close, Command, Extend, Finish, Outcome, Reason, Refused, Retract, Submit, tree_key,
)  # fmt: skip
from reference.cursors import floor_page
from reference.radix_tree import Insertion, Key, Lock, Placed, Tree, nodes, path_of, shared
from reference.rules.base import cursors_of
from reference.state import IN_BATCH, Phase, Session, State, text_tokens
from stateful_tests.generate.commands.cases import evicts, request_of, tail


def conjunctions(was: State, command: Command, outcome: Outcome, now: State) -> set[str]:
    """What meets in one step of the reference, such as "two locks, windowed goes over a cut: windowed"."""
    found = set(_of_tracked(was, command, outcome))
    if isinstance(outcome, Refused):
        return found
    found |= set(_of_request(was, command, now))
    if was.tree is not None and now.tree is not None and was.tree is not now.tree:
        if len(was.tree.locks) > 1:
            found |= {*_cuts(was.tree, now.tree), *_unlocks(was.tree, now.tree)}
        if isinstance(command, Extend) and len(command.lanes) > 1 and not evicts(was, now):
            found |= set(_batch(was, command, now))
    return found


def _of_request(was: State, command: Command, now: State) -> Iterator[str]:
    if isinstance(command, Retract):
        request = request_of(was, command.request)
        session = was.session(request.session)
        if (
            request.in_flight
            and session is not None
            and session.slot is not None
            and not session.history
        ):
            allocated, target = (
                cursors_of(request).kv_allocated_len,
                request.origin + request.output,
            )
            gives = tail(allocated, min(allocated, target), was.config.geometry.page_size)
            yield f"a turn is retracted again, results in flight: {gives}"
    if isinstance(command, Admit):
        request = request_of(was, command.request)
        session, at = was.session(request.session), cursors_of(request_of(now, command.request))
        if session is not None and session.slot is not None:
            r = at.cache_protected_len
            back = 0 < r == at.kv_committed_len < session.slot.kv_committed_len
            if back and session.slot.swa_evicted_seqlen > r:
                yield "a turn resumes from R above 0, its window lost"


# Tracked states. A session has slots for those of its turns, from the first row on until it is closed.

_ENDS: dict[type, str] = {Finish: "finishes", Retract: "is retracted", Abort: "is aborted"}


def _of_tracked(was: State, command: Command, outcome: Outcome) -> Iterator[str]:
    if was.tree is None or not was.config.geometry.tracks:
        return
    refused = outcome.reason if isinstance(outcome, Refused) else None
    if isinstance(command, Submit) and refused is Reason.TURN_IN_FLIGHT:
        if _has_row(was, was.session(command.session)):
            yield "tracked states, a turn is rejected"
    if refused is not None:
        return
    if isinstance(command, Close) and _has_row(was, session := was.session(command.session)):
        beside = "" if session is None or session.turn is None else " beside its turn"
        yield f"tracked states, a session is closed{beside}"
    if isinstance(command, Finish | Retract | Abort):
        request = request_of(was, command.request)
        session = was.session(request.session)
        if request.phase in IN_BATCH and session is not None:
            closing = ", its session closing" if session.closing else ""
            turn = "a turn" if session.slot is None else "a later turn"
            yield f"tracked states, {turn} {_ENDS[type(command)]}{closing}"
    if isinstance(command, Finish) and _falls_back(was, command):
        yield "tracked states, a finish falls back to the boundary before the last"


def _falls_back(was: State, command: Finish) -> bool:
    """Of an ordinary request: its rounds have passed a boundary behind its end, and one in front of that."""
    request, size = request_of(was, command.request), was.config.geometry.page_size
    end, computed = request.origin + command.finished_len, request.origin + request.output - 1
    return request.session is None and request.origin // size < end // size < computed // size


def _has_row(state: State, session: Session | None) -> bool:
    """A session has a slot, or a turn that has a row."""
    if session is None:
        return False
    turn = state.request(session.turn) if session.turn is not None else None
    return session.slot is not None or (turn is not None and turn.phase in IN_BATCH)


# Locks. One is windowed at a node whose SWA KV it pins, else it reads full KV alone there.


def _over(tree: Tree, placed: Placed) -> list[Lock]:
    return [lock for lock in tree.locks if lock.key[: placed.end] == placed.path]


def _in_full(tree: Tree, lock: Lock) -> int:
    """Where the window of a lock begins, of which any fresh lock pins the SWA KV."""
    return len(lock.key) - (tree.window or 0)


def _cuts(was: Tree, now: Tree) -> Iterator[str]:
    """A node is split that two have locked."""
    there = {placed.path for placed in nodes(was)}
    new = [placed.path for placed in nodes(now) if placed.path not in there]
    for placed in nodes(was) if new else ():
        inside = (
            path for path in new if placed.start < len(path) and path == placed.path[: len(path)]
        )
        for at in {len(path) for path in inside}:
            kinds = [_beside(was, lock, placed, at) for lock in _over(was, placed)]
            for pair in combinations(sorted(kinds), 2):
                yield f"two locks, a node is cut: {' and '.join(pair)}"


def _beside(tree: Tree, lock: Lock, placed: Placed, at: int) -> str:
    if lock.swa_from >= placed.end:
        return "full KV alone"
    return "windowed above its window" if at <= _in_full(tree, lock) else "windowed in its window"


def _unlocks(was: Tree, now: Tree) -> Iterator[str]:
    """One of two locks goes, over a node that was cut since: a fresh lock would pin less SWA KV."""
    stay = [lock for lock in was.locks if lock in now.locks]
    for gone in was.locks if len(stay) < len(was.locks) else ():
        for other in stay if gone not in stay else ():
            common = [
                p
                for p in path_of(was, gone.key)
                if p.path == gone.key[: p.end] == other.key[: p.end]
            ]
            if any(_cut_since(was, lock, common) for lock in (gone, other)):
                end = common[-1].end
                goes, stays = (
                    "windowed" if k.swa_from < end else "full KV alone" for k in (gone, other)
                )
                yield f"two locks, {goes} goes over a cut: {stays} stays"


def _cut_since(tree: Tree, lock: Lock, path: list[Placed]) -> bool:
    return any(lock.swa_from < placed.end <= _in_full(tree, lock) for placed in path)


# Batches.


def _batch(was: State, command: Extend, now: State) -> Iterator[str]:
    """Two entries of a batch bring the same pages to the tree, one after the other."""
    assert was.tree is not None
    tree, brought = was.tree, list[tuple[Key, int, str]]()
    for lane in command.lanes:
        before, request = request_of(was, lane.request), request_of(now, lane.request)
        session, bigram = was.session(request.session), was.config.geometry.bigram
        prefix = before.cursors.cache_protected_len if before.cursors is not None else 0
        end = floor_page(max(0, cursors_of(request).kv_committed_len - bigram), tree.page_size)
        outside = before.phase is Phase.RUNNING or (
            session is not None and session.slot is not None
        )
        if outside or end <= prefix:
            continue
        key = tree_key(text_tokens(request.text, end + bigram), bigram)
        evicted = max(cursors_of(request).swa_evicted_seqlen, prefix)
        done = radix.insert_and_continue(tree, request.holder, key, evicted)
        says = "is kept out" if done is None else _says(done[1], prefix, evicted)
        tree = tree if done is None else done[0]
        for other, r, said in brought:
            if shared(other, key, tree.page_size) > max(r, prefix):
                yield f"two of a batch, the same pages: one {said}, the next {says}"
        brought.append((key, prefix, says))


def _says(insertion: Insertion, prefix: int, evicted: int) -> str:
    words = ["recovers"] * bool(insertion.recovered) + ["duplicates"] * (insertion.matched > prefix)
    if insertion.end > insertion.matched:
        words.append("adds a tombstone" if evicted > insertion.matched else "adds")
    return " and ".join(words)
