"""Actions of steps: what a round decodes, its results, counts, pages, and what the watcher itself says."""

from __future__ import annotations

from collections.abc import Sequence

from impl.sglang.server import events as log
from reference.commands import Decode, Draft, Reason, SpecDecode
from reference.state import IN_BATCH, Cursors, Phase, free, holders, state_lens
from stateful_tests.watched import deviations
from stateful_tests.watched.actions.sessions import closes_happen, given_up
from stateful_tests.watched.log_follower import LogFollower, Diverged, action
from stateful_tests.watched.violated_clauses import Shown
from stateful_tests.watched.log_facts import RoundSeen

_FREE = {pool: f"tokens of the {pool} pool free or the tree's" for pool in ("full", "SWA")}


def prepared(beside: LogFollower, names: Sequence[str]) -> None:
    """A round of these requests will be run; in a mixed batch beside those of the prefill."""
    step = beside.step
    result = beside.result
    result.reach("a mixed batch", bool(step.entries))
    step.entries.update(names)
    result.prepared = True
    result.parked = any(
        r.phase is Phase.EXTENDING and r.name not in step.entries for r in beside.state.requests
    )


def decodes(beside: LogFollower, entries: Sequence[log.Lane]) -> None:
    """A round of one token each."""
    prepared(beside, [name for name, *_ in entries])
    shown = {name: Cursors(*cells) for name, *cells in entries}
    for name in shown:
        beside.request(name)
    beside.do(Decode(tuple(shown)), shown=Shown(shown, {}))


def drafts(beside: LogFollower, entries: Sequence[log.Lane]) -> None:
    """Slots are taken for a verify round: A goes up, within the row."""
    prepared(beside, [name for name, *_ in entries])
    claims = beside.header.claims
    width = beside.header.width
    for name, *cells in entries:
        request = beside.request(name)
        got = Cursors(*cells)
        mine = request.cursors
        if request.phase is not Phase.RUNNING:
            want = f"refused: {Reason.WRONG_PHASE.value}"
            raise Diverged("OUT-1", want, f"runs a round of {name}")
        assert mine is not None
        beside.result.compared += 1
        least = max(mine.kv_allocated_len, mine.kv_committed_len + 1)
        taken = mine._replace(kv_allocated_len=got.kv_allocated_len)
        claimed = taken._replace(kv_committed_len=mine.kv_committed_len + claims)
        if got != claimed or not least <= got.kv_allocated_len <= width:
            want = f"{name}: {tuple(mine)} with kv_allocated_len from {least} to {width}"
            raise Diverged("LEN-4", want, f"shows {tuple(got)}")
        beside.moves(name, taken)
        if claims:
            draft = Draft(name, taken.kv_allocated_len - taken.kv_committed_len, claims)
            beside.do(SpecDecode((draft,)), shown=Shown({name: got}, {}))
            after = beside.request(name)  # the round ends with its result
            after = after._replace(processed_outputs=request.processed_outputs)
            beside.state = beside.state.with_request(after)


def launched(beside: LogFollower, decoding: Sequence[log.Lane]) -> None:
    """The round of a step is launched. Each earlier one has its result, but for one under overlap."""
    if not beside.tells_results:
        return
    header = beside.header
    names = {name for name, *_ in decoding}
    mixed = len(names) < len(beside.step.entries)
    for name in sorted(beside.step.entries):
        rounds = beside.of(name).rounds
        counted = int(beside.request(name).phase is Phase.RUNNING)
        if header.speculative and name in names:
            counted = header.claims
        rounds.append(RoundSeen(counted, mixed and name in names))
        if len(rounds) > 1 + header.overlap:
            want = f"a result of {name} before its next round"
            raise Diverged("OUT-1", want, f"{len(rounds)} rounds of it have none")


@action(
    log.Resulted,
    guard="a round of each is in flight",
    commands="spec_decode with what was accepted",
    compared="outputs and cursors of each",
)
def resulted(beside: LogFollower, e: log.Resulted) -> None:
    accepted: list[Draft] = []
    shown: dict[str, Cursors] = {}
    for name, _, cells, _ in e.lanes:
        draft = accepts(beside, name, Cursors(*cells))
        got = Cursors(*cells)
        if draft is not None:
            accepted.append(draft)
            shown[name] = got
        else:
            beside.stands(name, got)
    beside.result.reach("a verify round that accepts several", any(d.accept > 1 for d in accepted))
    if accepted:
        beside.do(SpecDecode(tuple(accepted)), shown=Shown(shown, {}))
    for name, outputs, _, new in e.lanes:
        rounds = beside.of(name).rounds
        if not rounds and beside.tells_results:
            raise Diverged(
                "OUT-1", f"no result of {name}: no round of it is in flight", "processes one"
            )
        del rounds[:1]
        counts_outputs(beside, name, outputs, rounds)
        beside.texts.says(name, new)


def accepts(beside: LogFollower, name: str, got: Cursors) -> Draft | None:
    """The entry of a verify round whose result moved the commit to what the server shows."""
    request = beside.request(name)
    if not beside.header.speculative or request.phase is not Phase.RUNNING:
        return None
    mine = request.cursors
    assert mine is not None
    accept = got.kv_committed_len - mine.kv_committed_len
    if accept <= 0:
        return None
    if not beside.of(name).rounds:
        want = f"no result of {name}: no round of it is in flight"
        raise Diverged("OUT-1", want, f"{accept} tokens are accepted")
    return Draft(name, mine.kv_allocated_len - mine.kv_committed_len, accept)


def catches_up(beside: LogFollower, name: str, got: Cursors) -> int:
    """The result of a verify round that is not written yet has moved this request's commit by so much."""
    draft = accepts(beside, name, got)
    if draft is None:
        return 0
    mine = beside.request(name).cursors
    assert mine is not None
    moved = mine._replace(kv_committed_len=got.kv_committed_len)
    beside.do(SpecDecode((draft,)), shown=Shown({name: moved}, {}))
    return draft.accept


def counts_outputs(beside: LogFollower, name: str, outputs: int, in_flight: Sequence[RoundSeen]) -> None:
    """How many outputs the server counts: all but those of rounds in flight."""
    request = beside.request(name)
    if request.phase not in IN_BATCH:
        return
    beside.result.compared += 1
    most = request.output - sum(each.counted for each in in_flight)
    least = most
    if not beside.tells_results:
        least -= beside.header.overlap  # one round may be in flight
    if not least <= outputs <= most:
        want = f"{name} has {most} outputs, and {len(in_flight)} rounds in flight"
        lost = outputs == least - 1 and beside.of(name).passed_over
        known = deviations.fault_of_lost_output(beside.header) if lost else None
        raise Diverged("SES-1", want, f"counts {outputs}", known=known)


@action(
    log.Stepped,
    guard="the batch is the prepared one; window evictions and closes before it have happened",
    commands="decode, or spec_decode of what a round claims; abort of the last resort",
    compared="cursors of each entry; counts: free, rows, waiting, open, locked",
)
def stepped(beside: LogFollower, e: log.Stepped) -> None:
    result = beside.result
    step = beside.step
    result.steps += 1
    given_up(beside)
    if e.lanes:
        (drafts if beside.header.speculative else decodes)(beside, e.lanes)
    closes_happen(beside)
    for name in step.evictions:
        raise Diverged("OUT-1", f"no window eviction of {name}: it waits", "evicts")
    if len(step.entries) != e.batch:
        want = f"a batch of {len(step.entries)}, as the round was prepared"
        raise Diverged("OUT-1", want, f"runs one of {e.batch}")
    launched(beside, e.lanes)
    step.entries.clear()
    step.admits = step.evicts = False
    result.prepared = result.next_chunk = False
    _counts(beside, e)


# What may come in a step after admission has looked at who waits, and after a window eviction: all of this is
# in one call of get_next_batch_to_run, clients and results come before it.
_AFTER_EVICTION = (log.Swept, log.Extended, log.Stepped, log.Snapshot, log.Paged, log.HookFailed)
_AFTER_ADMISSION = (*_AFTER_EVICTION, log.Admitted, log.Requeued)


def in_its_place(beside: LogFollower, e: log.Event) -> None:
    """Raises Diverged for what cannot come while the server decides on a batch. A retract can, and for what
    it has retracted the queue may have no place."""
    step = beside.step
    tag = type(e).__struct_config__.tag
    if step.evicts and not isinstance(e, _AFTER_EVICTION):
        raise Diverged("OUT-1", f"no {tag} between a window eviction and its step", f"shows {tag}")
    retracts = isinstance(e, log.Released) and e.reason is None
    rejects = isinstance(e, log.QueueAborted) and step.requeues
    step.requeues = isinstance(e, log.Requeued)
    if step.admits and not (retracts or rejects) and not isinstance(e, _AFTER_ADMISSION):
        raise Diverged("OUT-1", f"no {tag} between admission and its step", f"shows {tag}")
    step.admits |= isinstance(e, log.Admitted)
    step.evicts |= isinstance(e, log.Swept)


def notes_gaps(beside: LogFollower, e: log.Event) -> None:
    """Say which lines are missing, also while nothing is compared. The pages of a step follow it."""
    step = beside.step
    skipped = beside.result.skipped
    if isinstance(e, log.Paged):
        if not step.unpaged:
            skipped["pages that follow no step"] += 1
        step.unpaged = False
    elif step.unpaged:
        skipped[f"the pages of step {step.number} are missing"] += 1
        step.unpaged = False
    if not isinstance(e, log.Stepped):
        return
    if step.number is not None and e.number != step.number + 1:
        first, last = step.number + 1, e.number - 1
        if e.number > step.number:
            beside.loses(
                f"steps {first} to {last} are missing"
                if last > first
                else f"step {first} is missing"
            )
        else:
            skipped[f"step {e.number} comes again"] += 1
    step.at, step.judged = e.at, len(beside.result.mismatches)
    step.number = e.number
    step.unpaged = beside.header.level == "pages"


def _counts(beside: LogFollower, e: log.Stepped) -> None:
    state = beside.state
    size = beside.header.page_size
    beside.step.last = e
    left = free(state)
    waiting = sum(r.phase in (Phase.QUEUED, Phase.ADMITTED) for r in state.requests)
    _counted(beside, "OWN-3", _FREE["full"], left.full * size, e.full + e.tree_full)
    _counted(beside, "OWN-3", _FREE["SWA"], left.swa * size, e.swa + e.tree_swa)
    _counted(beside, "OWN-4", "rows free", left.rows, e.rows)
    if beside.header.states or e.states:
        bearers = len(state_lens(state))
        held = bearers * (1 + beside.header.tracks)
        matched = sum(seen.has_state for seen in beside.requests.values())
        want = beside.header.states - held - matched
        if (
            beside.header.tier is not None
        ):  # who matches a state on the host gets its slot when it is loaded
            want = max(want, min(e.states, want + matched))
        if beside.header.lazy:
            want = max(want - bearers, min(e.states, want))
        _counted(beside, "STA-6", "slots of recurrent state free or the tree's", want, e.states)
    _counted(beside, "SES-2", "requests wait", waiting, e.queued)
    _counted(beside, "SES-2", "sessions are open", len(state.sessions), e.sessions)
    # transfers have locks, too
    if (beside.header.tree or e.tree_locked) and beside.header.tier is None:
        protected = [owner.cursors.cache_protected_len for owner in holders(state)]
        allowed = min(max([e.tree_locked, *protected]), sum(protected))
        _counted(beside, "TREE-6", "tokens of the tree locked", allowed, e.tree_locked)
    beside.step.joined_late = False


def _counted(beside: LogFollower, clause: str, what: str, want: int, got: int) -> None:
    """Compare a count. One that is off is reported when its offset changes, not again at every step."""
    offsets = beside.reported_offsets
    beside.result.compared += 1
    if got - want == offsets[what]:
        return
    before = f", {offsets[what]:+} at the step before" if offsets[what] else ""
    offsets[what] = got - want
    known = None
    if clause in ("OWN-3", "OWN-4"):
        known = deviations.fault_of_count(
            beside.header, got - want, joined_late=beside.step.joined_late
        )
    beside.report(
        Diverged(clause, f"{want} {what}", f"{got} ({got - want:+}{before})", known=known)
    )


@action(log.Paged, compared="rows, free lists, mapping, tree, slots of recurrent state")
def paged(beside: LogFollower, e: log.Paged) -> None:
    owners = {owner.name for owner in holders(beside.state)}
    # A rejected turn may be shown as its session's. "": its log does not say whose.
    rejected = {name: by for name in owners if (by := beside.of(name).rejected_by) is not None}
    unknown = () if "" in rejected.values() else e.owners.keys() - owners - {*rejected.values()}
    for name in sorted(unknown):
        beside.report(Diverged("OWN-4", f"{name} has no row", "has one"))
    for name in sorted(owners - rejected.keys() - e.owners.keys()):
        beside.report(Diverged("OWN-4", f"{name} has a row", "has none"))
    for found in beside.pages.judge(beside.state, e):
        beside.report(Diverged(*found))
    kept = {session.name for session in beside.state.sessions if session.slot is not None}
    for found, known in beside.kept_states.judge(beside.step.number, e, kept):
        beside.report(Diverged(*found, known=known))
    for name, position, why in beside.kept_states.wrong_hits(e):
        beside.result.wrong_states[name, position] = why


@action(log.HookFailed)
def failed(beside: LogFollower, e: log.HookFailed) -> None:
    beside.result.skipped[f"the watcher's hook {e.where} failed: {e.error}"[:120]] += 1
