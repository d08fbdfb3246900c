"""The situation of a server when its log ended, in a sentence: an error message alone says only the
symptom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from reference.state import Phase, Request, holders
from stateful_tests.watched.log_follower import LogFollower

MOST = 6  # holders that are named


def situation(follower: LogFollower) -> str:
    """Describe the batch that was prepared since the last step, the requests that admission looked at,
    and the holders of KV."""
    step = follower.step
    last = follower.step.last
    if not follower.follows or last is None:
        return ""
    requests = {r.name: r for r in follower.state.requests}
    looked_at = [name for name, request_seen in follower.requests.items() if request_seen.matched is not None]
    parts = []
    if looked_at:
        parts.append(f"admission looked at {_texts(requests, looked_at)}")
    if step.entries:
        parts.append(f"a batch of {_texts(requests, step.entries)} was prepared")
    elif last.batch:
        lanes = ", ".join(name for name, *_ in last.lanes if name in requests)
        parts.append(
            f"a batch of {last.batch} has run" + (f", in which {lanes} decode" if lanes else "")
        )
    waiting = sum(r.phase in (Phase.QUEUED, Phase.ADMITTED) for r in requests.values())
    owned = {owner.name: owner.cursors for owner in holders(follower.state)}
    most = sorted(owned, key=lambda name: -owned[name].kv_allocated_len)[:MOST]
    held = ", ".join(f"{name} {owned[name].kv_allocated_len}" for name in most)
    parts.append(f"{waiting} wait")
    parts.append(f"tokens of KV: {held or 'nobody holds any'}; {_free(follower)}")
    return f"since step {last.number} {'; '.join(parts)}"


def _texts(requests: Mapping[str, Request], names: Iterable[str]) -> str:
    return ", ".join(_text(requests[name]) for name in sorted(names) if name in requests)


def _text(request: Request) -> str:
    if request.phase in (Phase.QUEUED, Phase.ADMITTED):
        return f"{request.name} (from the queue, input {request.origin})"
    computed = request.cursors.kv_committed_len if request.cursors is not None else 0
    if request.phase is Phase.EXTENDING:
        return f"{request.name} (between two chunks, {computed} of {request.origin} tokens)"
    return f"{request.name} (runs, {computed} tokens)"


def _free(follower: LogFollower) -> str:
    last = follower.step.last
    assert last is not None
    text = f"{last.full} were free at that step"
    if follower.header.window:
        text += f", SWA {last.swa}"
    return f"{text}, {last.tree_full - last.tree_locked} evictable" if follower.header.tree else text
