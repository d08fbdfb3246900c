"""Known faults of releases that a log can show, and which state follows from each.

Labels, sentences and releases of the faults are in fixtures/releases/known.toml.

Without them one known fault would hide the rest of a log. Each is reported by its id, and does not affect
the verdict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from impl.sglang.server.clients import POLICIES, Config
from impl.sglang.server.events import Released, WatchHeader
from impl.sglang.server.outcome import OUTDATED, UNSENT
from impl.sglang.server.pair.choices import NetworkChoice
from impl.sglang.server.kept import OF_A_ROOM
from reference.commands import Command, Finish, Retract
from reference.pairs.config import DECODE
from reference.state import Cursors, State
from stateful_tests.lockstep.known_faults import label
from stateful_tests.watched.judging import Shown
from stateful_tests.watched.results import Validated
from stateful_tests.watched.seen import RequestSeen

_WITHOUT_KV = re.compile(
    "a reused row must carry allocated KV|reusing request must be chunked or have"
)
PREEMPTION = "a preemption by priority"
_SECOND_CHUNK = re.compile("AssertionError:  at srt/managers/scheduler.py")
# of the tree's core in Python, and in Rust
_OF_A_SESSION = re.compile(
    r"KeyError: <sglang\.srt\.session\.streaming_session\._VirtualNode|TypeError: '_VirtualNode' object"
)
_OUT_OF_MEMORY = re.compile(
    r"ut of memory.* allocate (?P<wanted>\d+) tokens. Available full tokens: (?P<there>\d+)"
)
_NO_ROOM_TO_RECEIVE = re.compile(
    r"KV cache is full.* available=(\d+), evictable=(\d+), .*required_alloc=(\d+)"
)
MAX_OFF = 4096  # tokens by which cursors may be off and the reference goes on with them
_OF_A_PAIR = {
    "PD-5 P keeps a room that late metadata revives": "late-metadata-revives-a-room",
    "PD-5 P keeps a room that an abort has ended": "aborted-prefill-leaves-its-room",
    "PD-5 P keeps deferred_ack_poisoned_rooms": "failed-room-stays-poisoned",
    "PD-5 P keeps staging_outstanding": "failed-room-stays-poisoned",
    "PD-4 P keeps KV of prompts that D has not admitted": "parked-prompt-keeps-the-room",
    "PD-4 P waits for a request that D gave up before it came": "early-notice-is-dropped",
    "PD-4 D waits for a prompt that P has refused": "refused-prefill-is-not-told",
    "PD-4 P waits for a prompt that D has refused": "refused-prompt-is-not-told",
    "PRO-1 D waits for a prompt that never fits": "received-prompt-never-fits",
    "PRO-1 P waits for a prompt that never fits": "prompt-a-page-below-the-pool-waits",
}
_PREFIX_IN_CHUNKS = re.compile("AssertionError: +at srt/managers/schedule_policy.py")


def explains_end(release: str, error: str, config: Config, seen: Validated, pool: str = "") -> str:
    """The known fault by which a server ends with this error (one line), "" for none.

    seen: of its log. pool: in which an allocation that was granted has failed, "" where the error is another.
    """
    reached = seen.reached
    of_a_slot = "already has a slot" in error or error.startswith(
        "AssertionError:  at srt/session/"
    )
    no_memory, leak = pool in ("full", "SWA"), "Mem Leak Detected" in error
    writes_back = bool(config.storage) and POLICIES[config.policy] == "write_back"
    too_far = config.tree and _evicts_too_far(config.window, config.page_size)
    # The first that holds explains it.
    faults: dict[str, object] = {
        "rejection-takes-slot": of_a_slot and reached["a second turn that is rejected"],
        "nothing-to-resume": (
            _WITHOUT_KV.search(error) and reached["a retract before the first result"]
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
        "session-asks-the-storage": _OF_A_SESSION.match(error) and config.storage,
        "stores-pin-every-state": pool == "states" and seen.states_in_stores,
        "evictable-above-a-backup": _counts_enough(error) and writes_back,
        "mixed-without-room": no_memory and config.mixed and seen.prepared,
        "chunk-without-room": no_memory and config.mixed and not config.window and seen.next_chunk,
        "parked-chunk": leak and seen.parked,
        "swept-too-far": leak and too_far,
    }
    name = next((name for name, holds in faults.items() if holds), "")
    return (label(release, name) or "") if name else ""


def _counts_enough(error: str) -> bool:
    """It is out of memory, though by its own count enough is free or evictable."""
    if received := _NO_ROOM_TO_RECEIVE.search(error):
        free, evictable, wanted = map(int, received.groups())
        return wanted <= free + evictable
    found = _OUT_OF_MEMORY.search(error)
    return found is not None and int(found["wanted"]) <= int(found["there"])


def _evicts_too_far(window: int, page: int) -> bool:
    return window > page and 0 < window % page < page - 1


def miscounted(header: WatchHeader, offset: int, *, joined_late: bool) -> str | None:
    """So many more tokens or rows are free, or the tree's, than owners leave.

    joined_late: at the first count after a snapshot, so that they may have been lost before.
    """
    if offset < 0:
        return label(header.release, "rejection-takes-slot") if joined_late else None
    if header.tree and _evicts_too_far(header.window or 0, header.page_size):
        return label(header.release, "swept-too-far")
    return None


def explained(
    header: WatchHeader, command: Command, was: State, now: State, shown: Shown
) -> str | None:
    """The known fault that explains that the server shows this after a command."""
    if isinstance(command, (Finish, Retract)):
        request = was.request(command.request)
        assert request is not None
        session = now.session(request.session)
        if session is None or session.slot is None:
            return None
        all_of_it = session.slot._replace(kv_committed_len=request.origin + request.output)
        # the page of the last token was allocated, with drafts
        reaches = session.slot.kv_allocated_len == all_of_it.kv_committed_len
        if reaches and shown.slots[session.name] == all_of_it:
            return label(header.release, "last-token")
    return None


def state_ahead(header: WatchHeader) -> str | None:
    """A turn that was retracted with a result in flight resumes before the token that its state has last."""
    return label(header.release, "retried-turn-folds-twice")


def longer_state(header: WatchHeader) -> str | None:
    """A turn ends, or is retracted, before tokens that its state has."""
    return label(header.release, "turn-goes-on-from-a-longer-state")


def state_after_a_round(header: WatchHeader, more: int, hole: bool) -> str | None:
    """A turn resumes so many tokens behind those that its state has; fewer: it takes less than its last
    verify round has accepted. hole: the first of them counts as committed, and was never computed."""
    if more == 1 and hole:
        return label(header.release, "last-token")
    return longer_state(header) if more < 0 and header.speculative else None


def state_of_another(header: WatchHeader, turn: RequestSeen, prefix: int) -> str | None:
    """A session's first turn waited with a slot for a prefix that is gone: nobody cleared it."""
    return (
        label(header.release, "waiting-turn-keeps-state") if turn.has_state and not prefix else None
    )


def flushed(header: WatchHeader) -> str | None:
    """The cache is emptied while a waiting turn has a slot of recurrent state."""
    return label(header.release, "flush-under-a-waiting-state")


def within_a_page(header: WatchHeader, length: int) -> str | None:
    """A node that ends with whole pages has the state after so many tokens."""
    return label(header.release, "tracked-within-a-page") if length % header.page_size else None


def queued_abort_finishes(header: WatchHeader) -> str | None:
    """A queued turn that its client gives up counts as finished."""
    return label(header.release, "queued-abort-finishes-turn") if header.states else None


def orphaned(header: WatchHeader, turn: RequestSeen) -> str | None:
    """A turn that was retracted no longer counts as its session's, nor one while another was rejected."""
    known = None
    if turn.retracts or turn.joined_late:
        known = label(header.release, "retract-ends-turn")
    if turn.interrupted or turn.joined_late:
        known = known or label(header.release, "rejection-ends-turn")
    return known


def text_of_orphan(header: WatchHeader) -> str | None:
    """A session has the text of a turn that no longer counts as its own."""
    return label(header.release, "retract-ends-turn") or label(
        header.release, "rejection-ends-turn"
    )


def rejected_as_turn(header: WatchHeader) -> str | None:
    """A rejected turn ends as its session's."""
    return label(header.release, "rejection-takes-slot")


def ends_in_mixed_batch(header: WatchHeader) -> str | None:
    """kv_committed_len stays behind by the token of a mixed batch that was a request's last."""
    return label(header.release, "mixed-round-not-counted")


def first_output_lost(header: WatchHeader) -> str | None:
    """The first output of a prompt is dropped as if it were that of a chunk in its middle."""
    return label(header.release, "passed-over-chunk-counts")


def stays_busy(header: WatchHeader, *, retracted: bool) -> str | None:
    """After an abort in the queue a session is never closed, and may take no turn."""
    return label(header.release, "retract-ends-turn" if retracted else "queue-abort-keeps-turn")


def stalls(release: str, kind: str, config: Config, preemptions: int) -> str:
    """Idle sessions keep what others wait for; or they have given it back, and the server does not look; or
    a prompt is larger than a pool, less a page; or a request was preempted, and is gone."""
    swa = ["prompt-above-the-swa-pool-waits"] if config.window else []
    swa += ["own-prefix-is-waited-for"] if config.window and config.tree else []
    faults = {
        "lost": ["preempted-request-is-lost"] if preemptions else [],
        "sessions": ["idle-sessions-keep-all"],
        "room": ["admission-stays-shut"],
        "chunks": swa,
        "margin": [*swa, "prompt-a-page-below-the-pool-waits"],
    }
    return next(filter(None, (label(release, name) for name in faults.get(kind, ()))), "")


def of_a_pair(release: str, key: str, config: Config, choices: Sequence[NetworkChoice]) -> str:
    """The known fault of a pair that a judge's note shows by its key, "" for none."""
    name = _OF_A_PAIR.get(key, "")
    if config.prefill_complete and key == "PD-5 D keeps deferred_abort_ack_tracker":
        name = "unnamed-pages-wait-for-acknowledgement"
    alone = any(each.what == "abort" and each.side == DECODE and each.fails for each in choices)
    if config.host_backup and config.decode_tree and not config.decode_hicache:
        if key.startswith(("PD-2 D", "PD-4", "PRO-1")):  # whoever waits, waits for this room
            name = "retraction-pool-locks-the-tree"
    if key == "PD-1 full page of P is replaced before it is sent" and _sends_drafts(config):
        name = "sent-page-is-replaced"
    if config.storage and key == "PD-1 D loses a prefix of its host tier":
        name = "prefix-of-a-storage-is-lost"
    if key == "XFER-2 another pool" and _as_deep(config):
        name = "draft-as-deep-as-the-model"
    if not name and alone and key.startswith(("PD-4", "PD-2")):
        name = "aborted-prefill-is-not-told"
    return (label(release, name) or "") if name else ""


def kept_for_a_peer(header: WatchHeader, what: str, *, sent: bool) -> str | None:
    """A server of a pair keeps something for nobody: tokens, or an entry of a table. sent: the room had KV
    on its way."""
    if header.role == "decode":
        waits = what == "_deferred_abort_ack_tracker"
        name = "unnamed-pages-wait-for-acknowledgement" if waits else ""
    elif what in OF_A_ROOM:
        name = "late-metadata-revives-a-room" if sent else "aborted-prefill-leaves-its-room"
    else:
        name = _OF_A_PAIR.get(f"PD-5 P keeps {what.lstrip('_')}", "")
    return label(header.release, name) if name else None


def replaced_before_sent(header: WatchHeader) -> str | None:
    """A page that was sent is no longer the request's: its tree's keys are pairs of tokens."""
    return label(header.release, "sent-page-is-replaced") if header.speculative else None


def _sends_drafts(config: Config) -> bool:
    """P drafts, so that the keys of its tree are pairs of tokens."""
    return bool(config.draft) and config.prefill_draft


def _as_deep(config: Config) -> bool:
    """D's draft model has as many full layers as its model, and P has none."""
    return bool(config.draft and config.window) and not config.prefill_draft


def read_in_a_pair(release: str, found: str, pool: str, config: Config) -> str:
    """The known fault by which a server of a pair reads wrong KV, "" for none. found: UNSENT, of a page of
    the window of a received prompt that the decode server did not ask for; OUTDATED, of a
    page that was sent too late."""
    name = "unreceived-window-is-published" if found == UNSENT else ""
    if found == OUTDATED and _sends_drafts(config):
        name = "sent-page-is-replaced"
    if pool == "full of D" and _as_deep(config):
        name = "draft-as-deep-as-the-model"
    return (label(release, name) or "") if name else ""


def holes(header: WatchHeader, e: Released) -> Iterator[tuple[str, int]]:
    """Positions of a session that count as committed when its turn ends, and that were never computed."""
    if e.session is not None and e.after is not None and label(header.release, "last-token"):
        yield from ((e.session, at) for at in range(e.before[0], e.after[0]))


def in_order(got: Cursors, mine: Cursors) -> bool:
    """The server's cursors are those of a row: the reference can go on with them. mine: those it expects."""
    committed, allocated, evicted, protected = got
    return (
        0 <= protected <= committed <= allocated
        and evicted <= allocated
        and allocated <= mine.kv_allocated_len + MAX_OFF
    )


def as_shown(state: State, shown: Shown) -> State | None:
    """The state with the cursors that the server shows, after a mismatch that nothing explains; None where no
    state has them."""
    for name, got in shown.requests.items():
        request = state.request(name)
        if request is None or request.cursors is None or not in_order(got, request.cursors):
            return None
        state = state.with_request(request._replace(cursors=got))
    for name, kept in shown.slots.items():
        session = state.session(name)
        if session is None or (session.slot is None) != (kept is None):
            return None
        if kept is not None and session.slot is not None and not in_order(kept, session.slot):
            return None
        state = state.with_session(session._replace(slot=kept))
    return state


def with_slots(state: State, shown: Shown) -> State:
    """The sessions' slots as the server has them; a known fault explains each."""
    for name, kept in shown.slots.items():
        session = state.session(name)
        assert session is not None
        state = state.with_session(session._replace(slot=kept))
    return state
