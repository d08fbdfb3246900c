"""Actions of steps: what a round decodes, its results, counts, pages, and what the watcher itself says."""

from __future__ import annotations

from collections.abc import Sequence

from impl.sglang.server import events as log
from reference.commands import Decode, Draft, Reason, SpecDecode
from reference.state import IN_BATCH, Cursors, Phase, free, holders, state_lens
from stateful_tests.watched import deviations
from stateful_tests.watched.actions.sessions import check_due_closes, abort_given_up
from stateful_tests.watched.log_follower import LogFollower, Diverged, action
from stateful_tests.watched.violated_clauses import Shown
from stateful_tests.watched.log_facts import RoundSeen

_FREE = {pool: f"tokens of the {pool} pool free or the tree's" for pool in ("full", "SWA")}


def note_prepared_round(follower: LogFollower, names: Sequence[str]) -> None:
    """Record that a round of these requests will run; in a mixed batch next to those of the prefill."""
    step = follower.step
    result = follower.result
    result.reach("a mixed batch", bool(step.entries))
    step.entries.update(names)
    result.prepared = True
    result.parked = any(
        r.phase is Phase.EXTENDING and r.name not in step.entries for r in follower.state.requests
    )


def apply_decodes(follower: LogFollower, entries: Sequence[log.Lane]) -> None:
    """Carry out a round of one token each."""
    note_prepared_round(follower, [name for name, *_ in entries])
    shown_cursors = {name: Cursors(*cells) for name, *cells in entries}
    for name in shown_cursors:
        follower.request(name)
    follower.do(Decode(tuple(shown_cursors)), shown=Shown(shown_cursors, {}))


def apply_drafts(follower: LogFollower, entries: Sequence[log.Lane]) -> None:
    """Follow the slots that a verify round takes: A grows, within the row."""
    note_prepared_round(follower, [name for name, *_ in entries])
    claims = follower.header.claims
    width = follower.header.width
    for name, *cells in entries:
        request = follower.request(name)
        logged = Cursors(*cells)
        cursors = request.cursors
        if request.phase is not Phase.RUNNING:
            expected = f"refused: {Reason.WRONG_PHASE.value}"
            raise Diverged("OUT-1", expected, f"runs a round of {name}")
        assert cursors is not None
        follower.result.compared += 1
        least = max(cursors.kv_allocated_len, cursors.kv_committed_len + 1)
        after_commit = cursors._replace(kv_allocated_len=logged.kv_allocated_len)
        claimed = after_commit._replace(kv_committed_len=cursors.kv_committed_len + claims)
        if logged != claimed or not least <= logged.kv_allocated_len <= width:
            expected = f"{name}: {tuple(cursors)} with kv_allocated_len from {least} to {width}"
            raise Diverged("LEN-4", expected, f"shows {tuple(logged)}")
        follower.set_cursors(name, after_commit)
        if claims:
            draft = Draft(name, after_commit.kv_allocated_len - after_commit.kv_committed_len, claims)
            follower.do(SpecDecode((draft,)), shown=Shown({name: logged}, {}))
            after = follower.request(name)  # the round ends with its result
            after = after._replace(processed_outputs=request.processed_outputs)
            follower.state = follower.state.with_request(after)


def note_launch(follower: LogFollower, decoding: Sequence[log.Lane]) -> None:
    """Record the launch of a step's round. Each earlier round has its result, but for one under
    overlap."""
    if not follower.tells_results:
        return
    header = follower.header
    names = {name for name, *_ in decoding}
    mixed = len(names) < len(follower.step.entries)
    for name in sorted(follower.step.entries):
        rounds = follower.request_seen(name).rounds
        counted = int(follower.request(name).phase is Phase.RUNNING)
        if header.speculative and name in names:
            counted = header.claims
        rounds.append(RoundSeen(counted, mixed and name in names))
        if len(rounds) > 1 + header.overlap:
            expected = f"a result of {name} before its next round"
            raise Diverged("OUT-1", expected, f"{len(rounds)} rounds of it have none")


@action(
    log.Resulted,
    guard="a round of each is in flight",
    commands="spec_decode with what was accepted",
    compared="outputs and cursors of each",
)
def on_resulted(follower: LogFollower, event: log.Resulted) -> None:
    """Follow the results of a batch: verify rounds as SpecDecode, other entries unmoved. Raises Diverged for
    a result of no round in flight."""
    accepted: list[Draft] = []
    cursors_shown: dict[str, Cursors] = {}
    for name, _, cells, _ in event.lanes:
        draft = accepted_draft(follower, name, Cursors(*cells))
        logged = Cursors(*cells)
        if draft is not None:
            accepted.append(draft)
            cursors_shown[name] = logged
        else:
            follower.check_unmoved(name, logged)
    follower.result.reach("a verify round that accepts several", any(d.accept > 1 for d in accepted))
    if accepted:
        follower.do(SpecDecode(tuple(accepted)), shown=Shown(cursors_shown, {}))
    for name, outputs, _, new in event.lanes:
        rounds = follower.request_seen(name).rounds
        if not rounds and follower.tells_results:
            raise Diverged(
                "OUT-1", f"no result of {name}: no round of it is in flight", "processes one"
            )
        del rounds[:1]
        check_output_count(follower, name, outputs, rounds)
        follower.texts.note_outputs(name, new)


def accepted_draft(follower: LogFollower, name: str, logged: Cursors) -> Draft | None:
    """Return the entry of a verify round whose result moved the commit to what the server shows; None
    if nothing moved."""
    request = follower.request(name)
    if not follower.header.speculative or request.phase is not Phase.RUNNING:
        return None
    cursors = request.cursors
    assert cursors is not None
    accept = logged.kv_committed_len - cursors.kv_committed_len
    if accept <= 0:
        return None
    if not follower.request_seen(name).rounds:
        expected = f"no result of {name}: no round of it is in flight"
        raise Diverged("OUT-1", expected, f"{accept} tokens are accepted")
    return Draft(name, cursors.kv_allocated_len - cursors.kv_committed_len, accept)


def apply_unlogged_result(follower: LogFollower, name: str, logged: Cursors) -> int:
    """Apply a verify round whose result is not logged yet, and return the number of accepted tokens."""
    draft = accepted_draft(follower, name, logged)
    if draft is None:
        return 0
    cursors = follower.request(name).cursors
    assert cursors is not None
    moved = cursors._replace(kv_committed_len=logged.kv_committed_len)
    follower.do(SpecDecode((draft,)), shown=Shown({name: moved}, {}))
    return draft.accept


def check_output_count(
    follower: LogFollower, name: str, outputs: int, in_flight: Sequence[RoundSeen]
) -> None:
    """Compare the number of outputs that the server counts: all but those of rounds in flight. Raises
    Diverged."""
    request = follower.request(name)
    if request.phase not in IN_BATCH:
        return
    follower.result.compared += 1
    most = request.output - sum(batch.counted for batch in in_flight)
    least = most
    if not follower.tells_results:
        least -= follower.header.overlap  # one round may be in flight
    if not least <= outputs <= most:
        expected = f"{name} has {most} outputs, and {len(in_flight)} rounds in flight"
        lost = outputs == least - 1 and follower.request_seen(name).passed_over
        known = deviations.fault_of_lost_output(follower.header) if lost else None
        raise Diverged("SES-1", expected, f"counts {outputs}", known=known)


@action(
    log.Stepped,
    guard="the batch is the prepared one; window evictions and closes before it have happened",
    commands="decode, or spec_decode of what a round claims; abort of the last resort",
    compared="cursors of each entry; counts: free, rows, waiting, open, locked",
)
def on_stepped(follower: LogFollower, event: log.Stepped) -> None:
    result = follower.result
    step = follower.step
    result.steps += 1
    abort_given_up(follower)
    if event.lanes:
        apply_round = apply_drafts if follower.header.speculative else apply_decodes
        apply_round(follower, event.lanes)
    check_due_closes(follower)
    for name in step.evictions:
        raise Diverged("OUT-1", f"no window eviction of {name}: it waits", "evicts")
    if len(step.entries) != event.batch:
        expected = f"a batch of {len(step.entries)}, as the round was prepared"
        raise Diverged("OUT-1", expected, f"runs one of {event.batch}")
    note_launch(follower, event.lanes)
    step.entries.clear()
    step.admits = step.evicts = False
    result.prepared = result.next_chunk = False
    _compare_counts(follower, event)


# What may come in a step after admission has looked at who waits, and after a window eviction: all of this is
# in one call of get_next_batch_to_run, clients and results come before it.
_AFTER_EVICTION = (log.Swept, log.Extended, log.Stepped, log.Snapshot, log.Paged, log.HookFailed)
_AFTER_ADMISSION = (*_AFTER_EVICTION, log.Admitted, log.Requeued)


def check_event_order(follower: LogFollower, event: log.Event) -> None:
    """Raise Diverged for an event that cannot come while the server decides on a batch. A retract can,
    and the queue may have no place for the retracted request."""
    step = follower.step
    tag = type(event).__struct_config__.tag
    if step.evicts and not isinstance(event, _AFTER_EVICTION):
        raise Diverged("OUT-1", f"no {tag} between a window eviction and its step", f"shows {tag}")
    retracts = isinstance(event, log.Released) and event.reason is None
    rejects = isinstance(event, log.QueueAborted) and step.requeues
    step.requeues = isinstance(event, log.Requeued)
    if step.admits and not (retracts or rejects) and not isinstance(event, _AFTER_ADMISSION):
        raise Diverged("OUT-1", f"no {tag} between admission and its step", f"shows {tag}")
    step.admits |= isinstance(event, log.Admitted)
    step.evicts |= isinstance(event, log.Swept)


def note_gaps(follower: LogFollower, event: log.Event) -> None:
    """Record missing lines, also while nothing is compared. The pages of a step follow it."""
    step = follower.step
    skipped = follower.result.skipped
    if isinstance(event, log.Paged):
        if not step.unpaged:
            skipped["pages that follow no step"] += 1
        step.unpaged = False
    elif step.unpaged:
        skipped[f"the pages of step {step.number} are missing"] += 1
        step.unpaged = False
    if not isinstance(event, log.Stepped):
        return
    if step.number is not None and event.number != step.number + 1:
        first = step.number + 1
        last = event.number - 1
        if event.number > step.number:
            missing = f"steps {first} to {last} are" if last > first else f"step {first} is"
            follower.lose_steps(f"{missing} missing")
        else:
            skipped[f"step {event.number} comes again"] += 1
    step.at = event.at
    step.judged = len(follower.result.mismatches)
    step.number = event.number
    step.unpaged = follower.header.level == "pages"


def _compare_counts(follower: LogFollower, event: log.Stepped) -> None:
    """Compare the counts that the server logs after a step with the reference's: free and locked tokens,
    rows, states, waiting requests, sessions."""
    state = follower.state
    size = follower.header.page_size
    follower.step.last = event
    left = free(state)
    waiting = sum(r.phase in (Phase.QUEUED, Phase.ADMITTED) for r in state.requests)
    _compare_count(follower, "OWN-3", _FREE["full"], left.full * size, event.full + event.tree_full)
    _compare_count(follower, "OWN-3", _FREE["SWA"], left.swa * size, event.swa + event.tree_swa)
    _compare_count(follower, "OWN-4", "rows free", left.rows, event.rows)
    if follower.header.states or event.states:
        bearers = len(state_lens(state))
        held = bearers * (1 + follower.header.tracks)
        matched = sum(request_seen.has_state for request_seen in follower.requests.values())
        due_states = follower.header.states - held - matched
        if follower.header.tier is not None:
            # A request that matches a state on the host gets its slot when the state is loaded.
            due_states = max(due_states, min(event.states, due_states + matched))
        if follower.header.lazy:
            due_states = max(due_states - bearers, min(event.states, due_states))
        _compare_count(
            follower,
            "STA-6",
            "slots of recurrent state free or the tree's",
            due_states,
            event.states,
        )
    _compare_count(follower, "SES-2", "requests wait", waiting, event.queued)
    _compare_count(follower, "SES-2", "sessions are open", len(state.sessions), event.sessions)
    # transfers have locks, too
    if (follower.header.tree or event.tree_locked) and follower.header.tier is None:
        protected = [owner.cursors.cache_protected_len for owner in holders(state)]
        allowed = min(max([event.tree_locked, *protected]), sum(protected))
        _compare_count(follower, "TREE-6", "tokens of the tree locked", allowed, event.tree_locked)
    follower.step.joined_late = False


def _compare_count(follower: LogFollower, clause: str, noun: str, expected: int, observed: int) -> None:
    """Compare a count. A wrong one is reported when its offset changes, not again at every step."""
    offsets = follower.reported_offsets
    follower.result.compared += 1
    if observed - expected == offsets[noun]:
        return
    before = f", {offsets[noun]:+} at the step before" if offsets[noun] else ""
    offsets[noun] = observed - expected
    known_fault = None
    if clause in ("OWN-3", "OWN-4"):
        known_fault = deviations.fault_of_count(
            follower.header, observed - expected, joined_late=follower.step.joined_late
        )
    follower.report(
        Diverged(
            clause,
            f"{expected} {noun}",
            f"{observed} ({observed - expected:+}{before})",
            known=known_fault,
        )
    )


@action(log.Paged, compared="rows, free lists, mapping, tree, slots of recurrent state")
def on_paged(follower: LogFollower, event: log.Paged) -> None:
    owners = {owner.name for owner in holders(follower.state)}
    # A rejected turn may be shown as its session's. "": its log does not say whose.
    rejected = {name: by for name in owners if (by := follower.request_seen(name).rejected_by) is not None}
    unknown = () if "" in rejected.values() else event.owners.keys() - owners - {*rejected.values()}
    for name in sorted(unknown):
        follower.report(Diverged("OWN-4", f"{name} has no row", "has one"))
    for name in sorted(owners - rejected.keys() - event.owners.keys()):
        follower.report(Diverged("OWN-4", f"{name} has a row", "has none"))
    for found in follower.pages.judge(follower.state, event):
        follower.report(Diverged(*found))
    names_with_slot = {session.name for session in follower.state.sessions if session.slot is not None}
    for found, known in follower.kept_states.judge(follower.step.number, event, names_with_slot):
        follower.report(Diverged(*found, known=known))
    for name, position, reason in follower.kept_states.wrong_hits(event):
        follower.result.wrong_states[name, position] = reason


@action(log.HookFailed)
def on_hook_failed(follower: LogFollower, event: log.HookFailed) -> None:
    follower.result.skipped[f"the watcher's hook {event.where} failed: {event.error}"[:120]] += 1
