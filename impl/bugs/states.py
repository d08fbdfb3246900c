"""Faults of recurrent state: slots that are read, kept, handed to the tree and given back."""

from __future__ import annotations

from impl.bugs.register import bug
from impl.torch_kv.nodes import NodeLock, TreeNode
from impl.torch_kv.radix_tree import RadixTree
from impl.torch_kv.requests import KVRequest, KVSession, Slot
from impl.torch_kv.state_slots import StateSlots
from impl.torch_kv.system import TorchKV
from reference.commands import Draft, Freed, SpecDecode
from reference.token_ids import token_id


# -- a request continues from a wrong state -------------------------------------------------------


@bug(
    "matched-state-is-not-copied",
    "STA-1",
    "a hit continues from what its slot held before",
    TorchKV.copy_matched,
    source="#34043",
)
def _(self: TorchKV, source: int, slot: int) -> None:
    """The answer goes on from another client's text. The copy of a matched state into the request's own slot
    is left out: the slot holds what its last owner has left. Visible at the first batch behind a cached
    prefix. Fix: copy before the forward pass."""


@bug(
    "new-slot-is-not-cleared",
    "STA-2",
    "a text begins with the state of another",
    TorchKV.clear_new,
    source="#31099",
)
def _(self: TorchKV, slot: int) -> None:
    """A prompt is answered as if another stood before it. A slot that is handed out again keeps its contents,
    and a recurrent layer reads them before it writes. Visible when a slot is used for the second time. Fix:
    clear the slot of whoever begins a text."""


@bug(
    "turn-resumes-past-its-state",
    "STA-2",
    "a turn resumes where its session's state is not",
    TorchKV.state_resumes,
)
def _(self: TorchKV, slot: Slot, prefix: int) -> bool:
    """The next turn answers as if tokens past the stop had been said. A turn is cut at its target, and its
    state is the one after all that it had computed. Visible when a turn ends before the last computed token.
    Fix: start again from a state that is kept."""
    return True


@bug(
    "state-is-not-rewound",
    "STA-2",
    "a turn that starts over keeps its old state",
    TorchKV.rewind_state,
)
def _(self: TorchKV, slot: Slot, prefix: int, lock: NodeLock | None) -> None:
    """The history is folded into the state twice. A turn that cannot resume computes its text again, into a
    state that has it already. Visible in the turn after a cut. Fix: restore the state where the prefix ends.
    """
    slot.state_len = prefix


@bug(
    "rejected-drafts-are-folded", "STA-5", "rejected drafts stay in the state", TorchKV.spec_decode
)
def _(self: TorchKV, command: SpecDecode) -> object:
    """The text goes on as if rejected drafts had been said. A verify round folds all drafted tokens into the
    state. Visible when a draft is rejected. Fix: keep the state after the last accepted one."""
    done = TorchKV.spec_decode(self, command)
    for draft in command.lanes:
        _fold_rejected(self, self.requests[draft.request], draft)
    return done


def _fold_rejected(self: TorchKV, request: KVRequest, draft: Draft) -> None:
    """Fold the tokens that the draft allocates and does not accept into the state of its request."""
    if self.states is not None and request.state is not None:
        start = request.state_len
        rejected = range(start, start + draft.allocate - draft.accept)
        self.states.fold(request.state, [token_id(request.serial, at) for at in rejected])


@bug("session-forgets-its-state", "STA-5", "a session keeps KV without the state", TorchKV.save)
def _(self: TorchKV, session: KVSession, request: KVRequest) -> None:
    """The next turn continues from an empty state. The session's slot takes row and cursors over, the state's
    slot is given back. Visible as soon as a turn has ended. Fix: keep both."""
    self.free_state(request)
    TorchKV.save(self, session, request)


# -- a tree node has a wrong state ----------------------------------------------------------------


@bug(
    "finish-donates-a-state-past-the-key",
    "STA-3",
    "a node's state is after more tokens than its path",
    TorchKV.brings_state,
    source="#37836",
)
def _(self: TorchKV, request: KVRequest, length: int) -> bool:
    """Every later hit answers as if the prompt had a token more. A finished request hands its text up to the
    stop to the tree, with the state after all that it has computed. Visible when a request ends before its
    last computed token. Fix: insert nothing that the state is not after."""
    return True


@bug(
    "checkpoint-is-not-written",
    "STA-3",
    "a prompt is cached with an unwritten state",
    TorchKV.checkpoint,
)
def _(self: TorchKV, request: KVRequest) -> int | None:
    """A hit continues from what another request has left. A prompt goes into the tree with a fresh slot, and
    its state is never copied there. Visible after the first prefill. Fix: copy the running state."""
    return self.states.take() if self.states is not None else None


@bug(
    "checkpoint-is-the-running-state", "STA-6", "request and tree share a slot", TorchKV.checkpoint
)
def _(self: TorchKV, request: KVRequest) -> int | None:
    """A cached state changes under whoever matches it. A prompt that goes into the tree hands its own slot
    over and goes on writing it. Visible after the first prefill. Fix: a slot for the copy."""
    return request.state


@bug("split-takes-the-state-up", "STA-3", "a split leaves the state on the upper half")
class _SplitTakesState(RadixTree):
    """A shorter prefix is answered with the state of a longer one. A node that is split gives its state to
    the new node above it. Visible when a prompt leaves the tree inside a node. Fix: the state is the one
    after the node's end, and stays there."""

    def _split(self, tail: TreeNode, count: int) -> TreeNode:
        head = super()._split(tail, count)
        if tail.state is not None:
            head.state = tail.state
            head.state_used = tail.state_used
            tail.state = None
            self.with_state.remove(tail)
            self.with_state.add(head)
        return head


@bug(
    "known-prefix-takes-no-state",
    "TREE-12",
    "a prefix without a state stays without one",
    RadixTree.take_state,
)
def _(self: RadixTree, node: TreeNode, slot: int) -> None:
    """A prompt is computed again and again. A node that has lost its state, or that a split has made, refuses
    the state of whoever inserts its path again. Visible when a prompt ends where a longer one was cached.
    Fix: take it."""
    if node.children or node.state is not None:
        self.duplicate_state(slot)
    else:
        RadixTree.take_state(self, node, slot)


@bug(
    "inner-states-serve-nobody",
    "TREE-5",
    "a match ends with a leaf or nowhere",
    RadixTree.ends_a_match,
)
def _(self: RadixTree, node: TreeNode) -> bool:
    """A conversation that has branched is computed from the start. A match accepts the state of a leaf alone.
    Visible when two prompts have a cached prefix in common. Fix: any node that has a state."""
    return self.states is None or (node.state is not None and not node.children)


# -- a slot is lost, or freed twice ---------------------------------------------------------------


@bug(
    "duplicate-state-is-not-freed",
    "STA-6",
    "a slot is lost with every prompt that is cached already",
    RadixTree.duplicate_state,
    source="#26941",
)
def _(self: RadixTree, slot: int) -> None:
    """The server runs out of slots. A prompt brings a state that the tree has, and nobody frees it. Visible
    at the second request with one prompt. Fix: give the duplicate back."""


@bug("evicted-state-is-not-freed", "STA-6", "eviction forgets the slot", RadixTree.free_node_state)
def _(self: RadixTree, node: TreeNode) -> int:
    """Evictions free nothing. A node loses its state, and the slot is in no list. Visible at the first
    eviction. Fix: free it."""
    if self.states is None or node.state is None:
        return 0
    node.state = None
    self.with_state.discard(node)
    return 1


@bug(
    "slot-is-freed-twice",
    "STA-6",
    "a slot is handed out twice",
    TorchKV.drop_retracted,
    source="#40250",
)
def _(self: TorchKV, request: KVRequest) -> None:
    """Two requests fold their tokens into one state. A retract gives the slot back, and so does the release
    of the row. Visible at a retract. Fix: once."""
    slot = request.state
    TorchKV.drop(self, request)
    if self.states is not None and slot is not None:
        self.states.give(slot)


@bug("padding-slot-is-handed-out", "STA-6", "slot 0 is somebody's")
class _PaddingSlot(StateSlots):
    """Padded entries of every batch write over a request's state. The free list begins at 0. Visible at once.
    Fix: begin at 1."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.free = list(range(size - 1, -1, -1))


@bug(
    "retract-keeps-its-slot",
    "STA-7",
    "a retracted request holds a slot while it waits",
    TorchKV.drop_retracted,
)
def _(self: TorchKV, request: KVRequest) -> None:
    """Others wait for slots that nobody uses. A retract frees the row and not the state. Visible at a
    retract. Fix: an ordinary request keeps neither."""
    if request.row is not None:
        self.release(request)
    self.detach(request)
    self.let_go(request.name)


@bug(
    "aborted-admission-loses-its-slot",
    "STA-7",
    "an abort in the queue loses the slot of its match",
    TorchKV.drop,
    source="#23327",
)
def _(self: TorchKV, request: KVRequest) -> None:
    """Slots run out while clients give up. An abort of a request that waits behind its match frees its lock
    and no slot. Visible at an abort after an admission. Fix: the slot as well."""
    if request.row is None:
        request.state = None
    TorchKV.drop(self, request)


@bug(
    "closed-session-keeps-its-slot",
    "STA-7",
    "a closed session's slot is lost",
    TorchKV.close_now,
    source="#20182",
)
def _(self: TorchKV, session: KVSession) -> None:
    """Slots run out with every conversation. A close frees the row of the session and not its state. Visible
    at a close. Fix: both."""
    if session.slot is not None:
        session.slot.state = None
    TorchKV.close_now(self, session)


@bug(
    "second-admission-takes-another-slot",
    "STA-6",
    "each admission takes a slot",
    TorchKV.match_state,
    source="#16067",
)
def _(self: TorchKV, request: KVRequest, node: TreeNode) -> None:
    """A request that is admitted again and again empties the pool. The slot of an admission that came to
    nothing is not given back. Visible at the second admission. Fix: give it back, or keep it."""
    request.state = None
    TorchKV.match_state(self, request, node)


# -- eviction goes wrong --------------------------------------------------------------------------


@bug(
    "state-eviction-ignores-locks",
    "TREE-8",
    "the state behind a lock is evicted",
    RadixTree.state_candidate,
)
def _(self: RadixTree, node: TreeNode) -> bool:
    """A request starts again from a state that is gone. State pressure takes any state. Visible under
    pressure while a prefix is locked. Fix: not the one at the end of a lock."""
    return True


@bug("state-lock-is-never-released", "TREE-6", "states stay pinned", RadixTree.unpin_state)
def _(self: RadixTree, lock: NodeLock) -> None:
    """No state is evictable any more. An unlock releases KV and not the state. Visible at the first unlock.
    Fix: release both."""


@bug(
    "state-eviction-stops-after-one",
    "TREE-10",
    "eviction frees one state, however many are missing",
)
class _OneState(RadixTree):
    """A batch runs out of slots although states could be freed. Evict frees a single state. Visible when two
    are missing. Fix: as many as requested."""

    def evict(self, full: int, swa: int, states: int = 0) -> Freed:
        return super().evict(full, swa, min(states, 1))


@bug("eviction-does-not-report-states", "TREE-10", "evicted states are not counted")
class _NoReport(RadixTree):
    """The caller takes the eviction for failed. Evict reports tokens alone. Visible when a state is evicted.
    Fix: count states."""

    def evict(self, full: int, swa: int, states: int = 0) -> Freed:
        freed = super().evict(full, swa, states)
        return Freed(freed.full, freed.swa)


@bug(
    "match-refreshes-states-all-along", "TREE-11", "a match counts as a use of every state above it"
)
class _RefreshesAll(RadixTree):
    """States that nobody matches outlive those in use. A match refreshes the states of its whole path.
    Visible when states are under pressure after a long match. Fix: only the one at its end is used."""

    def refresh(self, path: list[TreeNode]) -> None:
        super().refresh(path)
        for node in path:
            node.state_used = self.clock


@bug(
    "leaf-outlives-its-state", "TREE-11", "KV stays that serves no match", RadixTree.outlives_state
)
def _(self: RadixTree, node: TreeNode) -> bool:
    """KV fills the pool and no match ends there. State pressure takes the state of a leaf and leaves its KV.
    Visible at the first eviction of a state. Fix: a leaf goes whole."""
    return True


@bug(
    "turn-always-starts-over",
    "LEN-3",
    "no turn resumes from its session's state",
    TorchKV.state_resumes,
)
def _(self: TorchKV, slot: Slot, prefix: int) -> bool:
    """Every turn computes its history again. The state of a session's slot is never used. Visible in the
    second turn. Fix: use it where it is the one after the prefix."""
    return self.states is None


@bug(
    "states-are-not-evicted-for-a-batch",
    "OUT-1",
    "a batch is refused for slots that could be evicted",
    TorchKV.evictable_states,
)
def _(self: TorchKV) -> int:
    """Nothing runs although the tree is full of states that nobody uses. Room for a batch counts free slots
    alone. Visible when all free slots are cached states. Fix: evict what is missing."""
    return 0
