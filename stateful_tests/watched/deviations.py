"""Known faults of releases that a log can show.

A function `fault_of_...` returns the label of the known fault that explains an observation, if the release
has it. A known fault is reported by its id and does not affect the verdict. The validator goes on with the
state that the fault leads to; otherwise one known fault would hide the rest of a log.

Labels, sentences and releases of the faults are in fixtures/releases/known.toml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from impl.sglang.server.clients import POLICIES, Config
from impl.sglang.server.events import Released, WatchHeader
from impl.sglang.server.outcome import OUTDATED, UNSENT
from impl.sglang.server.pair.choices import NetworkChoice
from impl.sglang.server.server_leftovers import OF_A_ROOM
from impl.sglang.server.progress import StallKind
from reference.commands import Command, Finish, Retract
from reference.pairs.config import DECODE
from reference.state import Cursors, State
from stateful_tests.lockstep.known_faults import label
from stateful_tests.watched.violated_clauses import Shown
from stateful_tests.watched.validation_results import Validated
from stateful_tests.watched.log_facts import RequestSeen

_RESUMES_WITHOUT_KV = re.compile(
    "a reused row must carry allocated KV|reusing request must be chunked or have"
)
PREEMPTION = "a preemption by priority"  # a situation of `Validated.reached`
_SECOND_CHUNK = re.compile("AssertionError:  at srt/managers/scheduler.py")
# Raised by the tree's core in Python, and by that in Rust.
_VIRTUAL_NODE_IN_TREE = re.compile(
    r"KeyError: <sglang\.srt\.session\.streaming_session\._VirtualNode|TypeError: '_VirtualNode' object"
)
_OUT_OF_MEMORY = re.compile(
    r"ut of memory.* allocate (?P<wanted>\d+) tokens. Available full tokens: (?P<there>\d+)"
)
_NO_ROOM_TO_RECEIVE = re.compile(
    r"KV cache is full.* available=(\d+), evictable=(\d+), .*required_alloc=(\d+)"
)
MAX_OFF = 4096  # the most tokens by which the reference follows cursors that differ
# The key of a note of a pair's judge -> the fault that it shows.
_FAULT_OF_NOTE = {
    "PD-5 P keeps a room that late metadata revives": "late-metadata-revives-a-room",
    "PD-5 P keeps a room that an abort has ended": "aborted-prefill-leaves-its-room",
    "PD-5 P keeps deferred_ack_poisoned_rooms": "failed-room-stays-poisoned",
    "PD-5 P keeps staging_outstanding": "failed-room-stays-poisoned",
    "PD-4 P keeps KV of prompts that D has not admitted": "parked-prompt-keeps-the-room",
    "PD-4 P waits for a request that D gave up before it came": "early-notice-is-dropped",
    "PD-4 D waits for a prompt that P has refused": "refused-prefill-is-not-told",
    "PD-4 P waits for a prompt that D has refused": "refused-prompt-is-not-told",
    "PD-2 D keeps KV of a load that it does not send": "failed-restore-keeps-its-load",
    "PRO-1 D waits for a prompt that never fits": "received-prompt-never-fits",
    "PRO-1 P waits for a prompt that never fits": "prompt-a-page-below-the-pool-waits",
}
_PREFIX_IN_CHUNKS = re.compile("AssertionError: +at srt/managers/schedule_policy.py")


def fault_of_end(release: str, error: str, config: Config, result: Validated, pool: str = "") -> str:
    """Return the known fault by which a server ends with an error, "" for none.

    error: the error in one line.
    result: facts of its log.
    pool: the pool in which a granted allocation failed, "" for another error.
    """
    reached = result.reached
    slot_error = "already has a slot" in error or error.startswith(
        "AssertionError:  at srt/session/"
    )
    no_memory = pool in ("full", "SWA")
    leak = "Mem Leak Detected" in error
    writes_back = bool(config.storage) and POLICIES[config.policy] == "write_back"
    too_far = config.tree and _evicts_too_far(config.window, config.page_size)
    # The first fault whose condition holds explains the end.
    faults: dict[str, object] = {
        "rejection-takes-slot": slot_error and reached["a second turn that is rejected"],
        "nothing-to-resume": (
            _RESUMES_WITHOUT_KV.search(error) and reached["a retract before the first result"]
        ),
        "ignored-end-token-in-chunks": (
            _PREFIX_IN_CHUNKS.match(error) and not config.tree and reached["a turn that resumes"]
        ),
        "preempted-turn-keeps-its-row": (
            pool == "rows" and reached[PREEMPTION] and reached["a retract of a session's turn"]
        ),
        "preemption-admits-a-second-chunk": (
            _SECOND_CHUNK.match(error) and config.window and reached[PREEMPTION]
        ),
        "session-asks-the-storage": _VIRTUAL_NODE_IN_TREE.match(error) and config.storage,
        "stores-pin-every-state": pool == "states" and result.states_in_stores,
        "evictable-above-a-backup": _counts_enough_memory(error) and writes_back,
        "mixed-without-room": no_memory and config.mixed and result.prepared,
        "chunk-without-room": no_memory and config.mixed and not config.window and result.next_chunk,
        "parked-chunk": leak and result.parked,
        "swept-too-far": leak and too_far,
    }
    name = next((name for name, holds in faults.items() if holds), "")
    return (label(release, name) or "") if name else ""


def _counts_enough_memory(error: str) -> bool:
    """Return whether an error says out of memory although its own figures have enough free or evictable
    tokens."""
    if received := _NO_ROOM_TO_RECEIVE.search(error):
        free, evictable, wanted = map(int, received.groups())
        return wanted <= free + evictable
    match = _OUT_OF_MEMORY.search(error)
    return match is not None and int(match["wanted"]) <= int(match["there"])


def _evicts_too_far(window: int, page: int) -> bool:
    """Return whether window evictions with these sizes show swept-too-far (see known.toml)."""
    return window > page and 0 < window % page < page - 1


def fault_of_count(header: WatchHeader, offset: int, *, joined_late: bool) -> str | None:
    """Return the fault that explains a count of tokens or rows that does not add up.

    offset: free ones and those of the tree, beyond those that owners leave.
    joined_late: it is the first count after a snapshot, so that they may have been lost before.
    """
    if offset < 0:
        return label(header.release, "rejection-takes-slot") if joined_late else None
    if header.tree and _evicts_too_far(header.window or 0, header.page_size):
        return label(header.release, "swept-too-far")
    return None


def fault_of_cursors(
    header: WatchHeader, command: Command, was: State, now: State, shown: Shown
) -> str | None:
    """Return the fault that explains the cursors that the server shows after a command."""
    if isinstance(command, (Finish, Retract)):
        request = was.request(command.request)
        assert request is not None
        session = now.session(request.session)
        if session is None or session.slot is None:
            return None
        with_last_token = session.slot._replace(kv_committed_len=request.origin + request.output)
        # The page of the last token was allocated, with drafts.
        is_allocated = session.slot.kv_allocated_len == with_last_token.kv_committed_len
        if is_allocated and shown.slots[session.name] == with_last_token:
            return label(header.release, "last-token")
    return None


def fault_of_state_ahead(header: WatchHeader) -> str | None:
    """Return the fault by which a turn that was retracted with a result in flight resumes before the
    last token of its state."""
    return label(header.release, "retried-turn-folds-twice")


def fault_of_longer_state(header: WatchHeader) -> str | None:
    """Return the fault by which a turn ends, or is retracted, before tokens that its state has."""
    return label(header.release, "turn-goes-on-from-a-longer-state")


def fault_of_resumed_state(header: WatchHeader, more: int, hole: bool) -> str | None:
    """Return the fault by which a turn resumes at another position than that of its recurrent state.

    more: its position less that of the state (tokens). It is negative if the turn keeps less than its
        last verify round accepted.
    hole: the first token behind the state counts as committed and was never computed.
    """
    if more == 1 and hole:
        return label(header.release, "last-token")
    return fault_of_longer_state(header) if more < 0 and header.speculative else None


def fault_of_stale_state(header: WatchHeader, turn: RequestSeen, prefix: int) -> str | None:
    """Return the fault by which a session's first turn still has the state of a matched prefix that was
    evicted while it waited."""
    if turn.has_state and not prefix:
        return label(header.release, "waiting-turn-keeps-state")
    return None


def fault_of_flush(header: WatchHeader) -> str | None:
    """Return the fault by which the cache is emptied while a waiting turn has a slot of recurrent
    state."""
    return label(header.release, "flush-under-a-waiting-state")


def fault_of_state_within_page(header: WatchHeader, length: int) -> str | None:
    """Return the fault by which a node, which ends at a page, has a state after `length` tokens, which
    is within a page."""
    return label(header.release, "tracked-within-a-page") if length % header.page_size else None


def fault_of_queued_abort(header: WatchHeader) -> str | None:
    """Return the fault by which a queued turn that its client aborts counts as finished."""
    return label(header.release, "queued-abort-finishes-turn") if header.states else None


def fault_of_orphaned_turn(header: WatchHeader, turn: RequestSeen) -> str | None:
    """Return the fault by which a turn no longer counts as its session's: it was retracted, or another
    turn was rejected meanwhile."""
    known = None
    if turn.retracts or turn.joined_late:
        known = label(header.release, "retract-ends-turn")
    if turn.interrupted or turn.joined_late:
        known = known or label(header.release, "rejection-ends-turn")
    return known


def fault_of_orphaned_text(header: WatchHeader) -> str | None:
    """Return the fault by which a session keeps the text of a turn that no longer counts as its own."""
    return label(header.release, "retract-ends-turn") or label(
        header.release, "rejection-ends-turn"
    )


def fault_of_rejected_turn(header: WatchHeader) -> str | None:
    """Return the fault by which a rejected turn ends as its session's."""
    return label(header.release, "rejection-takes-slot")


def fault_of_mixed_batch(header: WatchHeader) -> str | None:
    """Return the fault by which kv_committed_len omits the token of a mixed batch that was a request's
    last."""
    return label(header.release, "mixed-round-not-counted")


def fault_of_lost_output(header: WatchHeader) -> str | None:
    """Return the fault by which the first output of a prompt is dropped as if it were that of a chunk
    in its middle."""
    return label(header.release, "passed-over-chunk-counts")


def fault_of_busy_session(header: WatchHeader, *, retracted: bool) -> str | None:
    """Return the fault by which, after an abort in the queue, a session is never closed and accepts no
    turn."""
    return label(header.release, "retract-ends-turn" if retracted else "queue-abort-keeps-turn")


def fault_of_stall(release: str, kind: StallKind, config: Config, preemptions: int) -> str:
    """Return the known fault by which a server stops to make progress, "" for none.

    preemptions: number of requests preempted so far.
    """
    swa = []
    if config.window:
        swa.append("prompt-above-the-swa-pool-waits")
        if config.tree:
            swa.append("own-prefix-is-waited-for")
    faults = {
        StallKind.LOST: ["preempted-request-is-lost"] if preemptions else [],
        StallKind.SESSIONS: ["idle-sessions-keep-all"],
        StallKind.ROOM: ["admission-stays-shut"],
        StallKind.CHUNKS: swa,
        StallKind.MARGIN: [*swa, "prompt-a-page-below-the-pool-waits"],
    }
    return next(filter(None, (label(release, name) for name in faults.get(kind, ()))), "")


def fault_of_pair(release: str, key: str, config: Config, choices: Sequence[NetworkChoice]) -> str:
    """Return the known fault that a judge's note on a pair shows, "" for none.

    key: the key of the note.
    """
    name = _FAULT_OF_NOTE.get(key, "")
    if config.prefill_complete and key == "PD-5 D keeps deferred_abort_ack_tracker":
        name = "unnamed-pages-wait-for-acknowledgement"
    abort_fails = any(choice.what == "abort" and choice.side == DECODE and choice.fails for choice in choices)
    if config.host_backup and config.decode_tree and not config.decode_hicache:
        if key.startswith(("PD-2 D", "PD-4", "PRO-1")):  # all these wait for the room that it keeps
            name = "retraction-pool-locks-the-tree"
    if key == "PD-1 full page of P is replaced before it is sent" and _sends_draft_kv(config):
        name = "sent-page-is-replaced"
    if config.storage and key == "PD-1 D loses a prefix of its host tier":
        name = "prefix-of-a-storage-is-lost"
    if key == "XFER-2 another pool" and _drafts_as_deep(config):
        name = "draft-as-deep-as-the-model"
    if not name and abort_fails and key.startswith(("PD-4", "PD-2")):
        name = "aborted-prefill-is-not-told"
    return (label(release, name) or "") if name else ""


def fault_of_kept_tokens(header: WatchHeader, part: str, *, sent: bool) -> str | None:
    """Return the fault by which a server of a pair keeps tokens, or an entry of a table, that nobody
    needs.

    sent: the room had KV on its way.
    """
    if header.role == "decode":
        waits = part == "_deferred_abort_ack_tracker"
        name = "unnamed-pages-wait-for-acknowledgement" if waits else ""
    elif part in OF_A_ROOM:
        name = "late-metadata-revives-a-room" if sent else "aborted-prefill-leaves-its-room"
    else:
        name = _FAULT_OF_NOTE.get(f"PD-5 P keeps {part.lstrip('_')}", "")
    return label(header.release, name) if name else None


def fault_of_replaced_page(header: WatchHeader) -> str | None:
    """Return the fault by which a page that was sent is no longer the request's: the tree holds less
    than a chunk, as its keys are pairs of tokens, or it ends where a recurrent state is kept."""
    holds_less = header.speculative or header.tracks
    return label(header.release, "sent-page-is-replaced") if holds_less else None


def _sends_draft_kv(config: Config) -> bool:
    """Return whether P drafts, so that the keys of its tree are pairs of tokens."""
    return bool(config.draft) and config.prefill_draft


def _drafts_as_deep(config: Config) -> bool:
    """Return whether D's draft model has as many full layers as its model, and P has no draft model."""
    return bool(config.draft and config.window) and not config.prefill_draft


def fault_of_pair_read(release: str, observed: str, pool: str, config: Config) -> str:
    """Return the known fault by which a server of a pair reads wrong KV, "" for none.

    observed: UNSENT for a page in the window of a received prompt that the decode server did not ask for;
        OUTDATED for a page that was sent too late.
    pool: the pool and server that it reads, such as "full of D".
    """
    name = "unreceived-window-is-published" if observed == UNSENT else ""
    if observed == OUTDATED and _sends_draft_kv(config):
        name = "sent-page-is-replaced"
    if pool == "full of D" and _drafts_as_deep(config):
        name = "draft-as-deep-as-the-model"
    return (label(release, name) or "") if name else ""


def uncomputed_positions(header: WatchHeader, e: Released) -> Iterator[tuple[str, int]]:
    """Yield (session, position) for positions that a turn's end commits though they were never computed."""
    if e.session is not None and e.after is not None and label(header.release, "last-token"):
        yield from ((e.session, index) for index in range(e.before[0], e.after[0]))


def are_row_cursors(logged: Cursors, expected: Cursors) -> bool:
    """Return whether the server's cursors are possible for a row, so that the reference can go on with
    them.

    logged: cursors of the server.
    expected: cursors that the reference expects.
    """
    committed, allocated, evicted, protected = logged
    return (
        0 <= protected <= committed <= allocated
        and evicted <= allocated
        and allocated <= expected.kv_allocated_len + MAX_OFF
    )


def adopt_shown_cursors(state: State, shown: Shown) -> State | None:
    """Return the state with the cursors that the server shows, to go on after a mismatch that nothing
    explains.

    Returns None if no state can have them.
    """
    for name, cursors in shown.requests.items():
        request = state.request(name)
        if request is None or request.cursors is None or not are_row_cursors(cursors, request.cursors):
            return None
        state = state.with_request(request._replace(cursors=cursors))
    for name, slot in shown.slots.items():
        session = state.session(name)
        if session is None or (session.slot is None) != (slot is None):
            return None
        if slot is not None and session.slot is not None and not are_row_cursors(slot, session.slot):
            return None
        state = state.with_session(session._replace(slot=slot))
    return state


def adopt_shown_slots(state: State, shown: Shown) -> State:
    """Return the state with the sessions' slots that the server shows. A known fault explains each."""
    for name, slot in shown.slots.items():
        session = state.session(name)
        assert session is not None
        state = state.with_session(session._replace(slot=slot))
    return state
