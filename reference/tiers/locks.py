"""Locks on ranges of positions of a path. A split changes no range.

A user locks a range of positions of one path, which is fixed when it locks. On the device these are full KV
from the root on, SWA KV in the nodes that cover a window before its end, and the state of the last node. On
the host these are full KV of the last node, and SWA KV and state as on the device. Every node in the range
counts the user, however the path has been split since.

Older releases are looser (TierFacts.loose). "tombstones": an SWA lock leaves out what has no SWA KV when it
is taken. "host end": a FULL lock on the host stays with the last part of a node that is split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from reference.commands import Abort, Close, Insert, Match, Prompt, Unlock, prompt_len
from reference.tiers.commands import (
    Arrive, Await, Expire, FailPeer, Greet, Load, Poll, Prefetch, TierCommand,
)  # fmt: skip
from reference.tiers.config import TierConfig
from reference.tiers.facts import TierFacts, TierNode, TierUser
from reference.tiers.storage_waits import StorageWaits

Where = tuple[bool, str, int]  # on the host, pool, node
Spans = tuple[tuple[int, int], ...]  # positions, as (start, end)
NOWHERE = 1 << 30


class LockRange(NamedTuple):
    """A user's lock as ranges of positions.

    low: by pool, the position from which on it is locked, up to the end of its node.
    left_out: (start, end) within that where its SWA KV is not locked.
    """

    user: TierUser
    low: dict[str, int]
    left_out: Spans = ()


class TierUsers:
    """The users of a tree: the ranges that they lock, their prompts, and the requests that wait.

    ranges: by the number of the lock, and whether it is on the host.
    prompts: prompts of lock holders, by name.
    waiting: prompts of requests that have asked a storage, by name.
    waits: how long they have waited.
    sessions: open sessions on a decode server.
    seen: prompts of the last inserts.
    lengths: lengths of the last prompts awaited (tokens), by name.
    greeted, arrived: requests whose peer has answered or failed, or has sent everything.
    expired: the last command was an Expire.
    """

    def __init__(self, config: TierConfig) -> None:
        self.config = config
        self.ranges: dict[tuple[int, bool], LockRange] = {}
        self.prompts: dict[str, Prompt] = {}
        self.waiting: dict[str, Prompt] = {}
        self.waits = StorageWaits(config)
        self.sessions: set[str] = set()
        self.seen: list[Prompt] = []
        self.lengths: dict[str, int] = {}
        self.greeted: set[str] = set()
        self.arrived: set[str] = set()
        self.expired = False
        self._nodes: dict[int, TierNode] = {}
        self._locks_first = False  # the last command: a backup locks before what is inserted splits

    def note(self, command: TierCommand) -> None:
        """Record the texts of holders after a command that was carried out."""
        match command:
            case (
                Match(holder, prompt) | Load(holder, prompt) | Insert(holder, prompt, chunked=True)
            ):
                self.prompts[holder] = prompt
            case Insert(holder) | Unlock(holder):
                self.prompts.pop(holder, None)
            case Prefetch(holder, prompt):
                self.waiting[holder] = prompt
        match command:
            case Match(name) | Load(name) | Abort(name):
                self.waiting.pop(name, None)
            case Await(name, resumable=True):
                self.sessions.add(name)
            case Close(name):
                self.sessions.discard(name)
        self.expired = isinstance(command, Expire)
        if isinstance(command, Greet | FailPeer):
            self.greeted.add(command.holder)
        elif isinstance(command, Arrive):
            self.arrived.add(command.holder)
        elif isinstance(command, Await):
            self.greeted.discard(command.holder)
            self.arrived.discard(command.holder)
            self.lengths[command.holder] = prompt_len(command.prompt)
        self._locks_first = isinstance(command, Insert | Poll)
        if isinstance(command, Await | Insert):
            self.seen = [command.prompt, *self.seen[:5]]

    def take_lock(self, user: TierUser, nodes: dict[int, TierNode]) -> None:
        """Record the range of a lock on a path of these nodes, before any of them is split."""
        self.ranges[user.lock, user.host] = LockRange(user, self._range_starts(user, nodes, ()))

    def follow(self, facts: TierFacts) -> list[LockRange]:
        """Return the ranges of the present users."""
        users = {user.lock: user for user in facts.users}
        for taken in facts.taken:
            self.take_lock(users[taken.lock], {node.node: node for node in taken.path})
        nodes = {node.node: node for node in facts.nodes}
        ranges_before = self.ranges
        self.ranges = {}
        were = self._nodes
        self._nodes = nodes
        for user in facts.users:
            key = user.lock, user.host
            was = ranges_before.get(key)
            if was is not None:
                self.ranges[key] = was._replace(user=user)
                continue
            gaps = _ranges_without_swa(user, nodes) if "tombstones" in facts.loose else ()
            at = were if user.host and self._locks_first and user.node in were else nodes
            self.ranges[key] = LockRange(user, self._range_starts(user, at, gaps), gaps)
        return [*self.ranges.values()]

    def _range_starts(self, user: TierUser, nodes: dict[int, TierNode], gaps: Spans) -> dict[str, int]:
        last = nodes.get(user.node)
        if last is None:
            return dict.fromkeys(self.config.pools, NOWHERE)
        low = {"full": 0}
        if user.host:
            is_backed_up = last.host["full"] or self.config.policy == "write_back"
            low["full"] = last.start if is_backed_up else NOWHERE
        if self.config.window is not None:
            low["swa"] = _window_start_node(user.node, self.config.window, nodes, gaps)
        return low


def _window_start_node(node: int, window: int, nodes: dict[int, TierNode], gaps: Spans) -> int:
    """Return the start of the first node that covers a window before the end of `node`, without the
    gaps."""
    covered = 0
    for each in path(node, nodes):
        if (each.start, each.end) not in gaps:
            covered += len(each.stamps)
        if covered >= window:
            return each.start
    return 0


def _ranges_without_swa(user: TierUser, nodes: dict[int, TierNode]) -> Spans:
    """Return the ranges of a user's path that have no SWA KV."""
    passed = (
        n for n in path(user.node, nodes) if not (n.host if user.host else n.device).get("swa")
    )
    return tuple((n.start, n.end) for n in passed)


def path(node: int, nodes: dict[int, TierNode]) -> Iterator[TierNode]:
    """Yield a node and its ancestors, without the root."""
    while node in nodes:
        yield nodes[node]
        node = nodes[node].parent


def counts(facts: TierFacts, ranges: list[LockRange], pools: tuple[str, ...]) -> Counter[Where]:
    """Return the number of users that each node must count."""
    nodes = {node.node: node for node in facts.nodes}
    wanted: Counter[Where] = Counter()
    for user, low, left_out in ranges:
        locked_pools = pools[:1] if user.full_only else pools
        for pool in locked_pools:
            for node in path(user.node, nodes):
                if node.start < low.get(pool, 0):
                    break
                gap = pool == "swa" and any(start <= node.start < end for start, end in left_out)
                wanted[user.host, pool, node.node] += not gap
                of_the_end = pool == "full" and user.host and "host end" in facts.loose
                if of_the_end or pool == "state":
                    break
    return wanted
