"""Situations: kind of command, outcome, and the case of its rule, in words.

`situation` is a pure function of one step and cheap, so that exhaustive and random runs count the same
things.
"""

from __future__ import annotations

from reference.commands import Command, Outcome, Reason, Refused
from reference.commands import kind_name as kind_name
from reference.ledger import State
from stateful_tests.coverage.rule_cases import CASES, REFUSED, Labels


def situation(was: State, command: Command, outcome: Outcome, now: State) -> str:
    """The situation of one step of the reference, such as "finish, turn, target inside a page"."""
    kind = type(command)
    if isinstance(outcome, Refused):
<<<<<<< HEAD
        text = _PLAIN.get((kind, outcome.reason))
        if text is None:
            label = REFUSED.get((kind, outcome.reason))
            text = _refused(kind, outcome.reason, label is not None and label[1](was, command))
            if label is None:
                _PLAIN[kind, outcome.reason] = text
        return text
    return _said(kind, CASES[kind][0](was, command, now) if kind in CASES else ())


def catalogue(geometry: Geometry, kinds: Iterable[type], absent: Container[str] = ()) -> list[str]:
    """Every situation of these kinds of commands that could be thought of with these sizes.

    absent: labels and reasons that are out of the question, such as "batch" where there is one request.
    """
    found: list[str] = []
    for kind in kinds:
        found += dict.fromkeys(_said(kind, labels) for labels in _combinations(kind, geometry, absent))
        reasons = [reason for reason in RULES[kind].refused if reason.value not in absent]
        for reason in (reason for reason in reasons if _fits(geometry, reason)):
            found.append(_refused(kind, reason))
            label = REFUSED.get((kind, reason))
            if label is not None and (geometry.tree or "tree" not in label[0]):
                found.append(_refused(kind, reason, True))
    return found


def _fits(geometry: Geometry, reason: Reason) -> bool:
    """Whether these sizes can be a reason at all."""
    if reason in (Reason.NO_SWA, Reason.OUT_OF_SWA):
        return (geometry.window is None) == (reason is Reason.NO_SWA)
    return reason is not Reason.NO_TREE or not geometry.tree


def _combinations(kind: type, geometry: Geometry, absent: Container[str]) -> Iterator[Labels]:
    no_window = ("window", "evicted", "tombstone", "swept", "both pools")
    for labels in product(*(CASES[kind][1] if kind in CASES else ())):
        text = " ".join(labels)
        if not geometry.tree and "tree" in text:
            continue
        if geometry.window is None and any(word in text for word in no_window):
            continue
        if geometry.page_size == 1 and ("inside" in text or "within" in text):
            continue
        if _sense(kind, labels, geometry) and not any(label in absent for label in labels):
            yield labels


def _sense(kind: type, labels: Labels, geometry: Geometry) -> bool:
    """Whether these labels go together by what they mean."""
    if labels[-2:] == ("no page opened", "tree evicts for room"):
        return False
    return kind not in _SENSE or _SENSE[kind](labels, geometry)


def _sense_admit(labels: Labels, _geometry: Geometry) -> bool:
    again, found, tail = labels
    if found in SLOTLESS:
        return tail not in TAILS
    if again:  # the first time has cut the slot
        return found in ("commit at its key", "commit below its key") and tail == "no tail"
    if found == "from R, its window lost":  # R is a page boundary, and the commit was past it
        return tail == "frees pages"
    return tail in TAILS and not (found == "commit past its key" and tail == "no tail")


def _sense_extend(labels: Labels, geometry: Geometry) -> bool:
    start, _, kept, opened, _ = labels
    small = geometry.page_size == 1
    if opened == "no page opened" and (start == "takes a row" or small):
        return False
    if start == "takes a row" and small and geometry.tree:
        return bool(kept)
    return not kept or start in ("takes a row", "goes on")


def _sense_spec_decode(labels: Labels, _: Geometry) -> bool:
    return labels[:4] != ("", "all accepted", "ahead by a window", "opens pages")


def _sense_cut(cut: Labels) -> bool:
    past, below, inside, tail = cut
    if tail == "no tail":
        return not past and not below
    # A sweep stays behind what is allocated: a page that keeps its end was not passed.
    return tail == "frees pages" or (tail != "" and bool(inside) and not below)


def _sense_finish(labels: Labels, geometry: Geometry) -> bool:
    who, left = labels[0], labels[-1]
    if who == "turn":
        return not left and _sense_cut(labels[1:-1])
    if who == "ordinary" and geometry.tree:
        return bool(left) and not labels[-2]
    return not any(labels[1:])


def _sense_retract(labels: Labels, _geometry: Geometry) -> bool:
    who, _, *cut = labels  # the last output is never computed, so the commit is not past the target
    return not cut[0] and (_sense_cut(tuple(cut)) if who == "turn" else not any(cut))


def _sense_abort(labels: Labels, _: Geometry) -> bool:
    where, who, closing, prefix = labels
    if where == "waits after a retract" and who == "no slot":
        return False
    nothing_held = where in ("queued", "marked") and who != "slot"
    return not (closing and who == "ordinary") and not (prefix and nothing_held)


def _sense_close(labels: Labels, _: Geometry) -> bool:
    return labels[0] == "slot" or not labels[1]


def _sense_match(labels: Labels, _: Geometry) -> bool:
    how, short, splits = labels
    return not (short and how == "all of it") and not (splits and not short and how == "nothing")


def _sense_insert(labels: Labels, _: Geometry) -> bool:
    goes_on, what, swa, out, room = labels
    if what == "nothing new":
        return not (swa or out or room)
    if out:
        return goes_on == "goes on" and not swa
    return not swa.startswith({"nothing there": "revives", "all there": "brings"}.get(what, "-"))


def _sense_evict(labels: Labels, _: Geometry) -> bool:
    return labels[1] != "nothing to be had" or not any(labels[2:])


_SENSE: dict[type, Callable[[Labels, Geometry], bool]] = {
    Admit: _sense_admit, Extend: _sense_extend, SpecDecode: _sense_spec_decode, Finish: _sense_finish,
    Retract: _sense_retract, Abort: _sense_abort, Close: _sense_close, Match: _sense_match,
    Insert: _sense_insert, Evict: _sense_evict,
}  # fmt: skip
=======
        label = REFUSED.get((kind, outcome.reason))
        return _refused(kind, outcome.reason, label is not None and label[1](was, command))
    return _said(kind, CASES[kind](was, command, now) if kind in CASES else ())
>>>>>>> main


_TEXTS: dict[object, str] = {}
_PLAIN: dict[tuple[type, Reason], str] = {}  # of refusals that are all alike


def _refused(kind: type, reason: Reason, special: bool = False) -> str:
    key = (kind, reason, special)
    if key not in _TEXTS:
        label = f", {REFUSED[kind, reason][0]}" if special else ""
        _TEXTS[key] = f"{kind_name(kind)}, refused: {reason.value}{label}"
    return _TEXTS[key]


def _said(kind: type, labels: Labels) -> str:
    key = (kind, labels)
    if key not in _TEXTS:
        _TEXTS[key] = ", ".join([kind_name(kind), *(label for label in labels if label)])
    return _TEXTS[key]
