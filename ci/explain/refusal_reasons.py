"""Reasons that are no places: why a command is refused, and what an eviction should have taken."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ci.compare.differences import POOL
from ci.explain.fact_history import History, cursors_of
from reference.clauses.step import Step, swa_start
from reference.commands import (
    Abort,
    Admit,
    Chunk,
    Command,
    Evict,
    EvictSwa,
    Extend,
    Finish,
    Reason,
    Refused,
    Submit,
)
from reference.failures import Failure, count_text
from reference.state import IN_BATCH, Phase, Request, free
from reference.prefix_cache import path_text
from reference.rules import RULES as RULES_OF
from reference.radix_tree import Key, nodes, sizes
from stateful_tests.lockstep.tree_adoption import requests_of_batch
from stateful_tests.lockstep.run_moments import Moment
from stateful_tests.lockstep.run_results import Run, Violation
from stateful_tests.traces.notation import format_command as describe


def reason(past: History) -> str | None:
    """Return the sentence on a clause of this module; None for the others."""
    reason = _REASONS.get(past.violation.clause)
    return reason(past) if reason is not None else None


def _outcome_reason(past: History) -> str | None:
    """Return the sentence on OUT-1: a command that is done or refused, and should not be."""
    got = past.step.outcome
    want = past.step.expected
    does = f"refuses ({got.reason.value})" if isinstance(got, Refused) else "carries out"
    should = (
        f"must refuse it as {want.reason.value}"
        if isinstance(want, Refused)
        else "must carry it out"
    )
    return f"the system {does} {past.here} and {should}{_refusal_reason(past)}"


def refusal(run: Run, index: int) -> str:
    """Return why the rules refuse a command of a replayed trace, in words; "" where they do not, and
    for commands without a text."""
    row = run.rows[index]
    moment_index = index - run.history_start
    if not isinstance(row.outcome, Refused) or type(row.command) not in RULES_OF:
        return ""
    step = run.history[moment_index].step if moment_index > 0 else None
    # Too long ago, or not run by the system; or no model stands beside it.
    if not isinstance(step, Step) or not isinstance(step.expected, Refused):
        if moment_index > 0 and isinstance(row.command, Finish) and row.outcome.reason is Reason.UNFAITHFUL:
            return _excess_taken_back(run.moments(Moment)[moment_index - 1], row.command)
        return RULES_OF[type(row.command)].refused.get(row.outcome.reason, "")
    until = replace(run, rows=run.rows[: index + 1], history=run.history[: moment_index + 1])
    past = History(until, Violation("OUT-1", index, Failure("", "")), step)
    condition, fact = _condition_and_fact(past)
    missing = row.outcome.reason is Reason.WRONG_PHASE and _missing_step(step)
    if fact and (missing or row.outcome.reason is Reason.UNKNOWN_REQUEST):
        condition = ""  # the fact says it all
    sentence = past.words("; ".join(filter(None, (condition, fact))))
    return f"{sentence}: {missing} comes first" if missing else sentence


def _refusal_reason(past: History) -> str:
    """Return the fact behind a refusal: the reference's, or the system's message."""
    condition, fact = _condition_and_fact(past)
    return (f" ({condition})" if condition else "") + (f", for {fact}" if fact else "")


def _condition_and_fact(past: History) -> tuple[str, str]:
    """Return the condition of a refusal, where that adds to the fact, and the fact here; or ""."""
    step = past.step
    was = past.before.state
    ours = isinstance(step.expected, Refused)
    refusal = step.expected if ours else step.outcome
    if not isinstance(refusal, Refused):
        return "", ""
    reason = refusal.reason
    request = step.named_request
    if reason is Reason.TURN_IN_FLIGHT and (fact := _turn_in_flight(past)):
        return "", fact
    if reason is Reason.WINDOW_LOST:
        return "", _lost_window(past, ours)
    if reason in (Reason.OUT_OF_FULL, Reason.OUT_OF_SWA) and not ours:
        return "", _missing_room(past, "full" if reason is Reason.OUT_OF_FULL else "swa")
    # "": the system's own
    condition = RULES_OF[type(step.command)].refused.get(reason, "") if ours else ""
    if ours and reason is Reason.UNKNOWN_REQUEST:
        unknown = [name for name in _requests_named(step.command) if was.request(name) is None]
        return condition, _missing_request(past, unknown[0]) if unknown else ""
    if ours and reason is Reason.BAD_LENGTH:
        return condition, _request_lengths(past)
    request = next(iter(_not_ready(step)), request)
    if request is not None and reason is (Reason.WRONG_PHASE if ours else Reason.UNKNOWN_REQUEST):
        name = request.name
        phase = request.phase
        again = " again" if phase is Phase.QUEUED and request.started else ""
        phase_text = f"{name} is {phase.value}{again}"
        since = past.first_since(
            phase_text, lambda m: getattr(m.state.request(name), "phase", None) is phase
        )
        return condition, f"{phase_text} {since}" if ours else phase_text
    return condition, ""


def _turn_in_flight(past: History) -> str:
    """Return the turn that runs in the session of a submit, and since when; "" where none does."""
    command = past.step.command
    session = past.before.state.session(command.session) if isinstance(command, Submit) else None
    if session is None or session.turn is None:
        return ""
    name = session.name
    turn = session.turn
    since = past.first_since(
        f"{turn} is the turn of {name}",
        lambda m: getattr(m.state.session(name), "turn", "") == turn,
    )
    return f"{turn} is in flight in {name} {since}"


def _missing_room(past: History, pool: str) -> str:
    """Return the pages that a pool has for a command, and how many it takes; "" where the count makes
    no sense."""
    was = past.before.state
    first_counter = {"full": 0, "swa": 2}[pool]
    free_sizes = free(was)
    evictable = sizes(was.tree)[first_counter] if was.tree is not None else 0
    if min(free_sizes.full, free_sizes.swa) < 0:
        return ""  # row and tree, each with pages of its own, had more than there are
    pages = count_text(getattr(free_sizes, pool), f"{POOL[pool]} page")
    has = f"the pool has {pages} free and {evictable // past.page_size} more evictable"
    if was.tree is not None:
        return has  # what the command takes is not what is free behind it
    takes = getattr(free_sizes, pool) - getattr(free(past.step.now), pool)
    return f"{has}, and the command takes {takes or 'none'}"


_READY = {Extend: (Phase.ADMITTED, Phase.EXTENDING), EvictSwa: IN_BATCH, Admit: (Phase.QUEUED,)}


def _not_ready(step: Step) -> list[Request]:
    """Return the requests of a command that are in a phase which the command does not take."""
    ready = _READY.get(type(step.command), (Phase.RUNNING,))
    requests = [one for name in _requests_named(step.command) if (one := step.was.request(name)) is not None]
    return [request for request in requests if request.phase not in ready]


def _missing_step(step: Step) -> str:
    """Return the command that has to come before; "" where none is missing."""
    unready = [] if isinstance(step.command, (Abort, Admit)) else _not_ready(step)
    if not unready or unready[0].phase is Phase.RUNNING:
        return ""
    request = unready[0]
    if request.phase is Phase.QUEUED:
        return describe(Admit(request.name))
    return describe(Extend((Chunk(request.name, _uncomputed_tokens(request)),)))


def _uncomputed_tokens(request: Request) -> int:
    """Return the number of tokens of its text without KV."""
    computed = request.cursors.kv_committed_len if request.cursors is not None else 0
    return request.origin + request.output - computed


def _requests_named(command: Command) -> Sequence[str]:
    """Return the requests of a command."""
    named_request = getattr(command, "request", None)
    return requests_of_batch(command) if named_request is None else [named_request]


def _missing_request(past: History, name: str) -> str:
    """Return why there is no request of that name: its submit was refused, it has ended, or it never
    came."""
    for index in reversed(range(past.run.history_start + 1, len(past.run.rows) - 1)):
        row = past.run.rows[index]
        if isinstance(row.command, Submit) and row.command.request == name:
            if isinstance(row.outcome, Refused):
                return f"{past.command(index)} was refused"
            ended = past.first_step(f"{name} has ended", lambda m: m.state.request(name) is None)
            return f"{name} has ended with {past.command(ended)}"
    return f"no command submits {name}"


def _request_lengths(past: History) -> str:
    """Return the lengths of a request that a command exceeds; "" for a batch of several."""
    names = _requests_named(past.step.command)
    request = past.before.state.request(names[0]) if len(names) == 1 else None
    if request is None:
        return ""
    text = f"{request.name} has {count_text(request.origin, 'token')} of input and {request.output} of output"
    return f"{text}; {_uncomputed_tokens(request)} of them without KV"


def _excess_taken_back(before: Moment, command: Finish) -> str:
    """Describe what a finish would take back that no scheduler does."""
    request = before.state.request(command.request)
    assert request is not None  # else the refusal has another reason
    target = request.origin + command.finished_len
    processed = request.processed_outputs[0]
    if target < request.evicted:
        evicted = count_text(request.evicted, "token")
        return f"window eviction has counted {evicted}, and the finish keeps {target}"
    finished_len = command.finished_len
    older = count_text(processed, "output")
    return f"a stop within the last two rounds keeps more than {older}, and the finish keeps {finished_len}"


def _lost_window(past: History, ours: bool) -> str:
    window = past.step.config.geometry.window
    request = past.step.named_request
    names = requests_of_batch(past.step.command) if request is None else (request.name,)
    for name in names:
        was = past.before.state.request(name)
        if was is None or was.cursors is None or window is None:
            continue
        c = was.cursors
        start = max(0, c.kv_committed_len - window)
        window_text = f"the window of {name} at {c.kv_committed_len}"
        if not ours:
            return f"{window_text} is there: it starts at {start}"
        if swa_start(c) > start:
            since = past.first_since(f"E of {name}", _eviction_end, name, c.swa_evicted_seqlen)
            lost = f"its SWA KV below {c.swa_evicted_seqlen} is gone {since}"
            return f"{window_text} starts at {start} and {lost}"
    return ""


def _eviction_end(m: Moment, name: str, value: int) -> bool:
    cursors = cursors_of(m, name)
    return cursors is not None and cursors.swa_evicted_seqlen == value


def _eviction_order_reason(past: History) -> str | None:
    """Return the sentence on TREE-11: nodes that remain or were evicted, and when each was last used."""
    tree = past.now.facts.tree
    state = past.now.state
    before = past.before.state
    if tree is None or state.tree is None or before.tree is None:
        return None
    reference_live = {p.path: p.node.live for p in nodes(state.tree)}
    system_live = {n.path: n.live or "swa" not in past.now.facts.pools for n in tree.nodes}
    was = sorted(p.path for p in nodes(before.tree))
    parts = []
    for verb, spares, must, a, b in (
        ("keeps", "leaves", "must go", system_live, reference_live),
        ("takes", "takes", "must stay", reference_live, system_live),
    ):
        for path in was:
            if path in a and path not in b:
                parts.append(f"{verb} {_last_use(past, path)}, which {must}")
            elif a.get(path) and not b[path]:
                parts.append(f"{spares} the SWA KV of {_last_use(past, path)}, which {must}")
    return f"{past.here} {', and '.join(parts[:2])}" if parts else None


def _last_use(past: History, path: Key) -> str:
    """Return a node, and when it was last used in the reference: its SWA KV, if that alone is
    requested."""
    swa = isinstance(past.step.command, Evict) and not past.step.command.full
    before = past.before.state.tree
    node = (
        next((p.node for p in nodes(before) if p.path == path), None)
        if before is not None
        else None
    )
    if node is None:
        return path_text(path)
    if swa and not node.live:
        return f"{path_text(path)} (a tombstone)"
    moment = node.swa_used if swa else node.full_used
    moment_index = len(past.moments) - 2
    while moment_index > 0 and _tree_clock(past.moments[moment_index - 1]) >= moment:
        moment_index -= 1
    index = moment_index + past.run.history_start
    kind = "SWA" if swa else "full"
    used = f" ({kind} KV last used by {past.command(index)})" if moment_index > 0 else ""
    return f"{path_text(path)}{used}"


def _tree_clock(m: Moment) -> int:
    return m.state.tree.clock if m.state.tree is not None else 0


_REASONS: dict[str, Callable[[History], str | None]] = {
    "OUT-1": _outcome_reason,
    "TREE-11": _eviction_order_reason,
}
