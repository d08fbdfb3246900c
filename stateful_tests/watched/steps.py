"""Actions of steps: counts, pages, and what the watcher itself says."""

from __future__ import annotations

from impl.sglang.server import events as log
from reference.ledger import Phase, free, holders
from stateful_tests.watched import deviations
from stateful_tests.watched.beside import Beside, Diverged
from stateful_tests.watched.mapping import action
from stateful_tests.watched.rounds import decodes, drafts, launched
from stateful_tests.watched.turns import closes_happen, given_up

_FREE = {pool: f"tokens of the {pool} pool free or the tree's" for pool in ("full", "SWA")}


@action(
    log.Stepped,
    guard="the batch is the prepared one; window evictions and closes before it have happened",
    commands="decode, or spec_decode of what a round claims; abort of the last resort",
    compared="cursors of each entry; counts: free, rows, waiting, open, locked",
)
def stepped(beside: Beside, e: log.Stepped) -> None:
    result, step = beside.result, beside.step
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
    result.prepared = False
    _counts(beside, e)


def notes_gaps(beside: Beside, e: log.Event) -> None:
    """Say which lines are missing, also while nothing is compared. The pages of a step follow it."""
    step, skipped = beside.step, beside.result.skipped
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
        missing = f"steps {step.number + 1} to {e.number - 1} are missing"
        skipped[missing if e.number > step.number else f"step {e.number} comes again"] += 1
    step.number, step.unpaged = e.number, beside.header.level == "pages"


def _counts(beside: Beside, e: log.Stepped) -> None:
    state, size = beside.state, beside.header.page_size
    left, swa = free(state), 0
    if beside.geometry.window:
        swa = left.swa * size
    waiting = sum(r.phase in (Phase.QUEUED, Phase.ADMITTED) for r in state.requests)
    _counted(beside, "OWN-3", _FREE["full"], left.full * size, e.full + e.tree_full)
    _counted(beside, "OWN-3", _FREE["SWA"], swa, e.swa + e.tree_swa)
    _counted(beside, "OWN-4", "rows free", left.rows, e.rows)
    _counted(beside, "SES-2", "requests wait", waiting, e.queued)
    _counted(beside, "SES-2", "sessions are open", len(state.sessions), e.sessions)
    if e.tree_locked:
        protected = [owner.cursors.cache_protected_len for owner in holders(state)]
        allowed = min(max(e.tree_locked, max(protected, default=0)), sum(protected))
        _counted(beside, "TREE-6", "tokens of the tree locked", allowed, e.tree_locked)
    beside.step.joined_late = False


def _counted(beside: Beside, clause: str, what: str, want: int, got: int) -> None:
    """Compare a count. One that is off is reported when its offset changes, not again at every step."""
    offsets = beside.reported_offsets
    beside.result.compared += 1
    if got - want == offsets[what]:
        return
    before = f", {offsets[what]:+} before" if offsets[what] else ""
    offsets[what] = got - want
    known = None
    if clause in ("OWN-3", "OWN-4"):
        known = deviations.miscounted(beside.header, got - want, joined_late=beside.step.joined_late)
    beside.report(Diverged(clause, f"{want} {what}", f"{got} ({got - want:+}{before})", known=known))


@action(log.Paged, compared="rows, free lists, mapping, tree")
def paged(beside: Beside, e: log.Paged) -> None:
    for found in beside.pages.judge(beside.state, e):
        beside.report(Diverged(*found))


@action(log.HookFailed)
def failed(beside: Beside, e: log.HookFailed) -> None:
    beside.result.skipped[f"the watcher's hook {e.where} failed: {e.error}"[:120]] += 1
