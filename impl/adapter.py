"""The interface of a system under test: four methods and a statement of what it can do.

A system is driven by `apply`, one command at a time, and looked into by `view`. Both speak of
physical facts only; whether they are right is decided elsewhere. An engine of yours plugs in by
giving a factory that returns a `System` (`kvspec check --impl your_package.module:factory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from reference.blocks.commands import SOURCE_FIELDS, Add, EngineCommand
from reference.blocks.config import EngineConfig
from reference.blocks.facts import BlockFacts
from reference.commands import COMMANDS, Command, Mode, Outcome, Reason
from reference.geometry import Geometry
from reference.system_kinds import KINDS, AnyCommand, Kind, kind_by_commands
from reference.pairs.commands import PairCommand
from reference.pairs.config import PairConfig
from reference.pairs.facts import PairFacts
from reference.state import Cursors as Cursors
from reference.tiers.commands import TierCommand
from reference.tiers.config import TierConfig
from reference.tiers.facts import TierFacts

_Config = TypeVar("_Config", contravariant=True)
_Command = TypeVar("_Command", contravariant=True)
_Facts = TypeVar("_Facts", covariant=True)


class UnusableImplementation(Exception):
    """The requested implementation is unavailable (exit code 2): one line says why."""


class Misfit(UnusableImplementation):
    """The adapter does not fit the files that it drives, which says nothing about them. The check ends: a
    configuration, a line of the corpus or a trace on which it shows is not left out."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a system: `apply` gets no other command.

    kind: the name of its kind of system (reference/system_kinds.py). "" derives the kind from the commands:
        adapters that were written before kinds were declared need that.
    commands: names of the command classes it understands. Engines that schedule by themselves: a first turn
        of a session (Add.resumable) comes where More and End are among them.
    mixed_decode: Decode and SpecDecode may meet in one run (else a run has one kind).
    mixed_batches: an Extend may have entries of requests that run, each a decode of one token.
    swa_tail: an Extend may have entries that take SWA slots only for the last window (Chunk.tail).
    answers: a turn may answer with a shared text (Submit.answers), as another turn does.
    swa: it can be built with a window.
    full_only: without one.
    tree: with a radix tree.
    no_tree: without.
    bigram: its tree can know each token together with the one that follows it (Geometry.bigram); paths of
        NodeView are of `tree_key` then.
    tree_policy_is_free: its tree splits nodes and picks what it evicts by rules of its own. The reference
        then takes the shape of the tree over from the view after each command, and no order is checked.
    modes: in which it is driven by default. A server's own scheduler is faithful, so what only free mode
        reaches says nothing about it.
    exact_reasons: refusals carry the specification's first reason; otherwise only done or refused is
        compared.
    may_refuse: reasons for which the system may refuse what the specification would do: policy (a reserve of
        pages), or something that its own scheduler never does.
    uncounted: pools ("full", "swa", "rows") that its busy check has no account of.
    lists_holders: its busy check at level 2 has an entry for whoever holds something (Report.entries).
    waived: clause id -> why a violation of it is harmless in this system. It is not looked for: the run goes
        on past it.
    known: clause id -> which known fault of this system violates it, and the trace that shows it. A check
        goes on past it too, or it would find nothing else; a trace that names the clause is checked for it.
    settings: names of switches that it has -> the values, besides its default, that a check tries. `reset` is
        given them with the sizes (Geometry.settings).
    recurrent: it can be built with recurrent state (Geometry.states, LayerGroup.state).
    tracks: the same, with a tree that gets states inside a text (Geometry.tracks).
    lazy: the same, with a second slot for them on demand (Geometry.lazy).
    storage: of a tree with a host tier: a storage behind the host can be attached (TierConfig.storage).
    receives: of a tree with a host tier: it can be a server that only decodes (TierConfig.decode).
    sends: of a tree with a host tier: it can be a server that only prefills (TierConfig.prefill).
    sources: fields of Add that requests of an engine that schedules by itself may have: "adapter", "salt".
    encodes: prompts of an engine that schedules by itself may have images (EngineConfig.image).
    drafter: its batch entries say what the layers of a drafter read and write (Lane.draft).
    forks: requests of an engine that schedules by itself may have children (Add.children).
    rings: its windows are rings (LayerGroup.ring).
    first_token: a pair whose decode server takes over the token that the prefill server has sampled
        (PairConfig.first_token).
    swaps: it swaps requests to host memory (EngineConfig.swap).
    new_views: each view is made of new lists, tuples and dictionaries, so nobody has to copy it.
    """

    kind: str = ""
    commands: frozenset[str] = frozenset(c.__name__ for c in COMMANDS)
    mixed_decode: bool = True
    mixed_batches: bool = False
    swa_tail: bool = False
    answers: bool = False
    swa: bool = True
    full_only: bool = True
    tree: bool = True
    no_tree: bool = True
    bigram: bool = False
    tree_policy_is_free: bool = False
    modes: tuple[Mode, ...] = (Mode.FREE, Mode.FAITHFUL)
    exact_reasons: bool = True
    may_refuse: frozenset[Reason] = frozenset()
    uncounted: frozenset[str] = frozenset()
    lists_holders: bool = True
    waived: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    recurrent: bool = False
    tracks: bool = False
    lazy: bool = False
    storage: bool = False
    receives: bool = False
    sends: bool = False
    sources: frozenset[str] = frozenset()
    encodes: bool = False
    drafter: bool = False
    forks: bool = False
    rings: bool = False
    first_token: bool = False
    swaps: bool = False
    new_views: bool = False

    @property
    def system_kind(self) -> Kind:
        """The kind that it declares, or that its commands tell."""
        return KINDS[self.kind] if self.kind else kind_by_commands(self.commands)

    @property
    def sessions(self) -> bool:
        """It is an EngineSystem with sessions."""
        return self.commands >= {"More", "End"}

    @property
    def connects(self) -> bool:
        """It is an EngineSystem with a KV connector."""
        return "Copy" in self.commands

    def offers(self, command: AnyCommand) -> bool:
        """Return whether an EngineSystem takes this command."""
        if isinstance(command, Add) and command.resumable and not self.sessions:
            return False
        if isinstance(command, Add) and command.children and not self.forks:
            return False
        if isinstance(command, Add) and any(
            getattr(command, field) and field not in self.sources for field in SOURCE_FIELDS
        ):
            return False
        return type(command).__name__ in self.commands

    def keeps_states(self, geometry: Geometry) -> bool:
        """Return whether the system can be built with the slots of recurrent state of a geometry."""
        if geometry.lazy:
            return self.lazy
        return not geometry.states or (self.tracks if geometry.tracks else self.recurrent)

    def on(self, geometry: Geometry) -> Capabilities:
        """Return the capabilities on a geometry. Where states are tracked, a server decides how many slots
        a request takes and which of its states the tree gets."""
        if not geometry.tracks:
            return self
        reasons = self.may_refuse | {Reason.OUT_OF_STATES}
        return replace(self, tree_policy_is_free=True, may_refuse=reasons)


class RequestView(msgspec.Struct):
    """A request that has not ended. `row` and `cursors` are None while it holds no row.

    text: tokens of its input and of the outputs so far.
    origin: how many of them are input.
    """

    session: str | None
    origin: int
    text: Sequence[int]
    row: int | None = None
    cursors: Cursors | None = None


class SessionView(msgspec.Struct):
    """An open session. `row` and `cursors` are those of its slot, None while it has no slot.

    history: tokens that the next turn's input will start with.
    closing: close was deferred.
    """

    history: Sequence[int]
    closing: bool = False
    row: int | None = None
    cursors: Cursors | None = None


class NodeView(msgspec.Struct):
    """A node of the radix tree, without the root.

    path: tokens from the root to its end.
    slots: full slots of the node's own tokens, which are the last len(slots) of the path.
    swa_slots: their SWA slots, none for a tombstone or without SWA.
    full_locks, swa_locks, state_locks: how many locks pin it.
    state: the slot of the recurrent state at its end.
    """

    path: Sequence[int]
    slots: Sequence[int]
    swa_slots: Sequence[int]
    full_locks: int
    swa_locks: int
    state: int | None = None
    state_locks: int = 0


class LockHolderView(msgspec.Struct):
    """A lock owner of the tree (Match, Insert): the full slots of the prefix that it has locked."""

    slots: Sequence[int]


class TreeSizes(NamedTuple):
    """Tokens in the tree by the system's own counters: what may be evicted, what locks pin."""

    full_evictable: int
    full_protected: int
    swa_evictable: int
    swa_protected: int


class TreeView(msgspec.Struct):
    """The radix tree.

    sizes: None of systems that do not count.
    """

    nodes: Sequence[NodeView]
    lock_holders: Mapping[str, LockHolderView]
    sizes: TreeSizes | None = None


class StatesView(msgspec.Struct):
    """Slots of recurrent state, slot 0 being the padding's.

    free: as they stand in the free list.
    stamps: of each slot, the `chain` of the tokens that were folded into what it holds
        (reference.recurrent_states), 0 for none.
    requests, sessions: the slot of each holder; a session has its slot also while it is lent.
    read: of each request of the last batch the stamp of the state it went on from, 0 of an empty one.
    buffers: more slots of who has one, for states that are kept for the tree while its own goes on.
    tracked: which of them hold such a state now, each with the tokens after which it is.
    reached: of each running request the tokens that it has computed, those whose results are processed and
        those of all launched batches.
    verifies: decode rounds are verify rounds.
    """

    free: Sequence[int]
    stamps: Sequence[int]
    requests: Mapping[str, int]
    sessions: Mapping[str, int]
    read: Mapping[str, int]
    buffers: Mapping[str, Sequence[int]] = {}
    tracked: Mapping[str, Sequence[tuple[int, int]]] = {}
    reached: Mapping[str, tuple[int, int]] = {}
    verifies: bool = False


class View(msgspec.Struct):
    """Physical facts of a system at rest. Slots and pages are the system's own ids.

    free_full, free_swa: free pages, as they stand in the free lists, duplicates and all.
    free_rows: free rows of req_to_token.
    rows: row id -> its full slots by position, for every row that a session or request names, at least
        kv_allocated_len long.
    full_to_swa: for every full slot (page 0 included) its SWA slot, 0 for none; empty without SWA.
    full_stamps, swa_stamps: token id last written to each slot, 0 for none.
    tree: None without one.
    states: None of a model without recurrent layers.
    """

    sessions: Mapping[str, SessionView]
    requests: Mapping[str, RequestView]
    free_full: Sequence[int]
    free_rows: Sequence[int]
    rows: Mapping[int, Sequence[int]]
    full_stamps: Sequence[int]
    free_swa: Sequence[int] = ()
    full_to_swa: Sequence[int] = ()
    swa_stamps: Sequence[int] = ()
    tree: TreeView | None = None
    states: StatesView | None = None


class System(Protocol):
    """A system under test. One instance serves many runs, each started by `reset`."""

    @property
    def name(self) -> str:
        """How reports and traces call it, such as "torch+pr22900"."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def reset(self, geometry: Geometry) -> None:
        """Start empty with these sizes."""
        ...

    def apply(self, command: Command) -> Outcome:
        """Carry a command out, or refuse it and change nothing.

        May raise anything: an exception counts as Broken.
        """
        ...

    def view(self) -> View:
        """Return the physical facts now. Must not change anything."""
        ...

    def close(self) -> None:
        """Give back what the system holds outside this process (workers, devices)."""
        ...


class JudgedSystem(Protocol[_Config, _Command, _Facts]):
    """A system that no reference stands beside: the same with the configuration, commands and facts of its
    kind."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def reset(self, geometry: _Config) -> None:
        """Start empty. Raises UnusableImplementation for a configuration that the system refuses."""
        ...

    def apply(self, command: _Command) -> Outcome: ...

    def view(self) -> _Facts: ...

    def close(self) -> None: ...


class EngineSystem(JudgedSystem[EngineConfig, EngineCommand, BlockFacts], Protocol):
    """An engine that schedules by itself."""


TieredSystem = JudgedSystem[TierConfig, TierCommand, TierFacts]
PairedSystem = JudgedSystem[PairConfig, PairCommand, PairFacts]
AnySystem = System | EngineSystem | TieredSystem | PairedSystem
