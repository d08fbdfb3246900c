"""A run of a pair of servers as text: what its environment does, and what happens on both servers and between
them."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from ci import Data
from reference.pairs.config import DECODE, PREFILL

SHOWN = 60  # lines that the text shows of a run; the last ones
_WIDTH = 34  # of the column of P
_ROUTINE = "the clock moves by 1.1 s"  # of the timeouts, one after the other


def pair_words(finding: Data) -> dict[str, str]:
    """Return the servers and the environment of a pair for a report, by label; nothing for a single
    server."""
    config = finding["config"]
    if not config.get("pair"):
        return {}
    usual = {"pair": True, "deferred": True}
    on = {name: value for name, value in config.items() if value != usual.get(name, False)}
    server = ", ".join(name if value is True else f"{name} {value}" for name, value in on.items())
    return {
        "server": f"{PREFILL} and {DECODE}: {server}",
        "environment": "\n".join(map(choice_text, finding["choices"]))
        or "nothing is slow, nothing fails",
        "its last lines": "",
    }


def choice_text(choice: Data) -> str:
    """Return a choice of the environment in words, such as "the status of c1.1 rests 20 steps"."""
    what, who, side, number = (choice[name] for name in ("what", "request", "side", "number"))
    which = f" number {number}" if number > 1 else ""
    rests = f"rests {choice['steps']} steps"
    if what == "clock":
        return f"the clock moves by {choice['steps']} s at step {number}"
    if what == "death":
        return f"{side} ends at step {number}"
    if what == "lookup":
        return f"D asks for the address of P{which}: no answer"
    if what == "round":
        return f"the scheduler of {side} {rests} at round {number}"
    if what == "call":
        return f"a thread of {side} {rests} at its call number {number} for {who}"
    if what in ("request", "abort"):
        name = f"the {what}{' of' if what == 'abort' else ''} {who}"
        return (
            f"{name} does not reach {side}"
            if choice["fails"]
            else f"{name} {rests} on its way to {side}"
        )
    if what == "transfer":
        where = f"transfer {number} of {who}, when {choice['at']} tenths are copied,"
        if choice["late"]:
            return f"{where} fails, and the rest is copied {choice['steps']} steps later"
        return f"{where} {rests}{' and fails' if choice['fails'] else ''}"
    return f"the {what} of {who}{which} {rests}"


def story(events: Sequence[Data]) -> Iterator[str]:
    """Return three columns, P, the wire, D, up to a judge's last finding; none for a single server."""
    shown = [event for event in events if _ROUTINE not in event["says"]]
    marked = [index for index, each in enumerate(shown) if each["says"].startswith("FOUND")]
    if not shown:
        return
    lines = list(_event_lines(shown[: marked[-1] + 1] if marked else shown))
    if len(lines) > SHOWN:
        yield f"(the last {SHOWN} of {len(lines)} lines)"
    yield f"{'step':>6}  {PREFILL:{_WIDTH}}{'wire':{_WIDTH}}{DECODE}"
    yield from lines[-SHOWN:]


def _event_lines(events: Sequence[Data]) -> Iterator[str]:
    """Return a line for each event, or for the same one again and again."""
    for (where, says), same in groupby(events, lambda each: (each["where"], each["says"])):
        steps = [choice["step"] for choice in same]
        indent = {PREFILL: 0, "wire": 1}.get(where, 2) * _WIDTH
        if says.startswith("FOUND"):
            indent = 0
        again = f", {len(steps)} times" if len(steps) > 1 else ""
        yield f"{steps[0]:>6}  {' ' * indent}{says}{again}"
