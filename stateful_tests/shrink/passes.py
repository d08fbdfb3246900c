"""The smallest trace that still shows a fault: delta debugging on commands, then on their numbers.

Works on any trace, recorded ones too: commands are closed under deletion, so every shorter list means
something. The order of attempts is fixed, so the same fault gives the same trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from reference.commands import (
    Admit,
    CheckBusy,
    CheckIdle,
    Chunk,
    Command,
    Decode,
    Draft,
    Evict,
    Extend,
    Finish,
    Insert,
    Match,
    Open,
    Piece,
    Prompt,
    Retract,
    SpecDecode,
    Submit,
    Unlock,
    prompt_len,
)  # fmt: skip

Commands = tuple[Command, ...]
# Runs a candidate; returns it cut after the failing step if it still fails, else None.
StillFails = Callable[[Commands], Commands | None]
BUDGET = 1500  # candidates


def drop(commands: Commands, still_fails: StillFails) -> Commands:
    """Fewer commands, and nothing else changed: the cheap half of `shrink`."""
    search = _Search(still_fails, budget=300)
    return _drop_chunks(_first_improvement(commands, search, _name_dropped), search)


def shrink(commands: Commands, still_fails: StillFails, *, budget: int = BUDGET) -> Commands:
    """A locally minimal failing list: no command can go, no number can be smaller.

    `budget` bounds the candidates that are run. `commands` itself must fail.
    """
    search = _Search(still_fails, budget)
    best = search.run(commands) or commands
    best = search.run(_lives_apart(best)) or best
    while True:
        before = best
        best = _first_improvement(best, search, _name_dropped)
        best = _drop_chunks(best, search)
        for simpler in (
            _without_lane, _rounds_merged, _turns_merged, _turns_fused, _ordinary, _inserted, _pressed, _busy,
            _pairs_dropped, _plainer_prompts, _smaller_numbers,
        ):  # fmt: skip
            best = _first_improvement(best, search, simpler)
        if best == before or search.spent:
            best = search.run(_logged(best)) or best
            return search.run(_renamed(best)) or best


def _logged(commands: Commands) -> Commands:
    """Memory checks at the level that tells who was counted as what."""
    return tuple(CheckBusy(2) if isinstance(c, CheckBusy) and c.level else c for c in commands)


# The attributes in which commands and their lanes name somebody, and what the names are called afterwards.
_NAMING = {"request": "r", "requests": "r", "lanes": "r", "session": "s", "holder": "h"}


def _renamed(commands: Commands) -> Commands:
    """Sessions s1, s2, ..., requests r1, lock holders h1, texts a, b, ... in the order in which they
    appear."""
    names: dict[str, str] = {}
    counts = dict.fromkeys("rsh", 0)
    letters: dict[str, str] = {}
    for command in commands:
        for attribute, letter in _NAMING.items():
            for name in _named(getattr(command, attribute, None)):
                if name not in names:
                    counts[letter] += 1
                    names[name] = f"{letter}{counts[letter]}"
        for piece in getattr(command, "prompt", ()):
            letters.setdefault(piece.text, chr(ord("a") + len(letters) % 26))
    return tuple(_with_texts(_with_names(command, names), letters) for command in commands)


def _lives_apart(commands: Commands) -> Commands:
    """A name of its own for each life of a request: what is tried with one leaves the others alone."""
    taken = set().union(*map(_names, commands))
    seen: set[str] = set()
    names: dict[str, str] = {}
    apart = []
    for command in commands:
        if isinstance(command, Submit):
            name = command.request
            if name in seen:
                names[name] = next(n for i in range(len(taken) + 1) if (n := f"r{i + 1}") not in taken)
                taken.add(names[name])
            seen.add(name)
        apart.append(_with_names(command, names))
    return tuple(apart)


def _named(value: Any) -> list[str]:
    """The names in an attribute: one, or those of a batch, or of its lanes."""
    if isinstance(value, tuple):
        return [getattr(lane, "request", lane) for lane in value]
    return [] if value is None else [value]


class _Search:
    """Runs candidates once each, within the budget."""

    def __init__(self, still_fails: StillFails, budget: int) -> None:
        self._still_fails = still_fails
        self._left = budget
        self._seen: dict[Commands, Commands | None] = {}

    @property
    def spent(self) -> bool:
        return self._left <= 0

    def run(self, candidate: Commands) -> Commands | None:
        if candidate not in self._seen:
            if self.spent:
                return None
            self._left -= 1
            self._seen[candidate] = self._still_fails(candidate)
        return self._seen[candidate]


def _drop_chunks(best: Commands, search: _Search) -> Commands:
    """Leave out runs of commands, long runs first."""
    size = max(1, len(best) // 2)
    while size:
        at = len(best) - size
        while at >= 0:
            shorter = search.run(best[:at] + best[at + size :])
            if shorter is not None:
                best = shorter
            at = min(at - size, len(best) - size) if shorter is None else min(at, len(best)) - size
        size //= 2
    return best


def _first_improvement(
    best: Commands, search: _Search, candidates: Callable[[Commands], Iterator[Commands]]
) -> Commands:
    """Follow improvements until no candidate fails any more."""
    improved = True
    while improved and not search.spent:
        improved = False
        for candidate in candidates(best):
            smaller = search.run(candidate)
            if smaller is not None:
                best, improved = smaller, True
                break
    return best


def _names(command: Command) -> set[str]:
    """Sessions, requests and lock holders that a command names."""
    return {name for attribute in _NAMING for name in _named(getattr(command, attribute, None))}


def _texts(command: Command) -> set[str]:
    return {piece.text for piece in getattr(command, "prompt", ())}


def _related(a: Command, b: Command) -> bool:
    """Two commands may be of use only together: a name or a text in common, or all of the tree."""
    return any(isinstance(c, Evict) for c in (a, b)) or bool(_names(a) & _names(b) or _texts(a) & _texts(b))


def _name_dropped(commands: Commands) -> Iterator[Commands]:
    """Everything about one session, request or lock holder at once; batches keep their other lanes."""
    for name in sorted(set().union(*map(_names, commands))):
        kept = []
        for command in commands:
            if hasattr(command, "lanes"):
                command = replace(command, lanes=tuple(n for n in command.lanes if n.request != name))
            elif hasattr(command, "requests"):
                command = replace(command, requests=tuple(n for n in command.requests if n != name))
            if name not in _names(command):
                kept.append(command)
        yield tuple(kept)


def _pairs_dropped(commands: Commands) -> Iterator[Commands]:
    """Two commands about the same that are of use only together, such as retract and admit."""
    for i, command in enumerate(commands):
        for j in range(i + 1, len(commands)):
            if _related(command, commands[j]):
                yield commands[:i] + commands[i + 1 : j] + commands[j + 1 :]


def _without_lane(commands: Commands) -> Iterator[Commands]:
    """One lane less in a batch; two chunks of one prefill as one."""
    for i, command in enumerate(commands):
        for name in ("lanes", "requests"):
            lanes = getattr(command, name, ())
            for at in range(len(lanes) if len(lanes) > 1 else 0):
                fewer = replace(command, **{name: lanes[:at] + lanes[at + 1 :]})
                yield commands[:i] + (fewer,) + commands[i + 1 :]
        if isinstance(command, Extend) and len(command.lanes) == 1:
            lane = command.lanes[0]
            for j in range(i + 1, len(commands)):
                other = commands[j]
                if isinstance(other, Extend) and [n.request for n in other.lanes] == [lane.request]:
                    merged = Extend((Chunk(lane.request, lane.tokens + other.lanes[0].tokens),))
                    yield commands[:i] + (merged,) + commands[i + 1 : j] + commands[j + 1 :]


def _rounds_merged(commands: Commands) -> Iterator[Commands]:
    """Two decode rounds of a request as one; a retract that is admitted again as a decode."""
    for i, command in enumerate(commands):
        round_ = _round(command)
        if round_ is not None:
            for j in range(i + 1, len(commands)):
                other = _round(commands[j])
                if other is not None and other.request == round_.request:
                    allocate = max(round_.allocate, round_.accept + other.allocate)
                    merged = SpecDecode((Draft(other.request, allocate, round_.accept + other.accept),))
                    yield commands[:i] + commands[i + 1 : j] + (merged,) + commands[j + 1 :]
                    break
        if isinstance(command, Retract) and command.in_flight == 0:
            name = command.request
            rest = commands[i + 1 :]
            admit = next((c for c in rest if c == Admit(name)), None)
            extend = next((c for c in rest if c == Extend((Chunk(name, 1),))), None)
            if admit is not None and extend is not None:
                kept = tuple(c for c in rest if c is not admit and c is not extend)
                yield commands[:i] + (Decode((name,)), *kept)


def _turns_merged(commands: Commands) -> Iterator[Commands]:
    """A retract instead of a finish and the next turn's submit: one turn that is admitted twice."""
    for i, command in enumerate(commands):
        if not isinstance(command, Finish):
            continue
        for j in range(i + 1, len(commands)):
            submit = commands[j]
            if isinstance(submit, Submit) and submit.session is not None:
                rest = commands[i + 1 : j] + commands[j + 1 :]
                names = {submit.request: command.request}
                yield commands[:i] + (Retract(command.request), *(_with_names(c, names) for c in rest))
                break


def _turns_fused(commands: Commands) -> Iterator[Commands]:
    """One turn with the whole input instead of a turn and the one after it."""
    for i, finish in enumerate(commands):
        if not isinstance(finish, Finish):
            continue
        submits = [c for c in commands[:i] if isinstance(c, Submit) and c.request == finish.request]
        if not submits or submits[-1].session is None:
            continue
        first, rest = submits[-1], commands[i + 1 :]
        after = next((c for c in rest if isinstance(c, Submit) and c.session == first.session), None)
        if after is None:
            continue
        tokens = first.tokens + finish.finished_len + after.tokens
        fused: list[Command] = [c for c in commands[:i] if finish.request not in _names(c)]
        fused.append(replace(after, tokens=tokens))
        extend = next((c for c in rest if isinstance(c, Extend) and after.request in _names(c)), None)
        for command in rest:
            if command is extend:
                fused.append(Extend((Chunk(after.request, tokens),)))
            elif command is not after:
                fused.append(command)
        yield tuple(fused)


def _with_names(command: Command, names: dict[str, str]) -> Command:
    """The command with its bearers called otherwise; names that are not given stay."""
    changes: dict[str, Any] = {}
    for attribute in _NAMING:
        value: Any = getattr(command, attribute, None)
        if attribute == "lanes" and value is not None:
            changes[attribute] = tuple(replace(n, request=names.get(n.request, n.request)) for n in value)
        elif isinstance(value, tuple):
            changes[attribute] = tuple(names.get(n, n) for n in value)
        elif value is not None:
            changes[attribute] = names.get(value, value)
    return replace(command, **changes)


def _with_texts(command: Command, letters: dict[str, str]) -> Command:
    """The command with the texts of its prompt called otherwise."""
    if not hasattr(command, "prompt"):
        return command
    prompt = tuple(Piece(letters.get(p.text, p.text), p.tokens) for p in command.prompt)
    return replace(command, prompt=prompt)


def _round(command: Command) -> Draft | None:
    """The only lane of a decode round."""
    if isinstance(command, SpecDecode) and len(command.lanes) == 1:
        return command.lanes[0]
    if isinstance(command, Decode) and len(command.requests) == 1:
        return Draft(command.requests[0], 1, 1)
    return None


def _ordinary(commands: Commands) -> Iterator[Commands]:
    """An ordinary request instead of a session's turn."""
    for i, command in enumerate(commands):
        if isinstance(command, Submit) and command.session is not None:
            plain = replace(command, session=None)
            rest = commands[:i] + (plain,) + commands[i + 1 :]
            yield tuple(c for c in rest if c != Open(command.session))


def _inserted(commands: Commands) -> Iterator[Commands]:
    """A lock holder that inserts a prompt instead of the request that computes it."""
    for i, command in enumerate(commands):
        if isinstance(command, Submit) and command.session is None:
            prompt = command.prompt or _text_of_its_own(command, commands)
            for at, last in [(j, c) for j, c in enumerate(commands) if command.request in _names(c)][1:]:
                rest = tuple(c for c in commands[i + 1 :] if command.request not in _names(c))
                before = len([c for c in commands[i + 1 : at] if command.request not in _names(c)])
                if isinstance(last, (Finish, Extend)):
                    insert = Insert(command.request, prompt, 0, isinstance(last, Extend))
                    yield (*commands[:i], *rest[:before], insert, *rest[before:])


def _pressed(commands: Commands) -> Iterator[Commands]:
    """An eviction, and the lock holders of the tree alone, instead of all who press them."""
    lock_holders = tuple(c for c in commands if isinstance(c, (Insert, Match, Unlock, Evict)))
    if len(commands) - len(lock_holders) < 2:
        return
    for at in range(1, len(lock_holders)):
        for pages in (1, 2, 3):
            for evict in (Evict(0, pages), Evict(pages, 0)):
                yield (*lock_holders[:at], evict, *lock_holders[at:])


def _text_of_its_own(submit: Submit, commands: Commands) -> Prompt:
    """A prompt in place of tokens that nobody else has: in a letter that no other prompt uses."""
    used = set().union(*map(_texts, commands))
    letter = next((c for c in map(chr, range(ord("a"), ord("z") + 1)) if c not in used), "z")
    return (Piece(letter, submit.tokens),)


def _busy(commands: Commands) -> Iterator[Commands]:
    """A busy check instead of an idle one: nothing has to end before it."""
    for i, command in enumerate(commands):
        if isinstance(command, CheckIdle):
            yield commands[:i] + (CheckBusy(2),) + commands[i + 1 :]


def _plainer_prompts(commands: Commands) -> Iterator[Commands]:
    """A piece less, two as one, nobody's text for a shared one, one text for another: here or everywhere."""
    for i, command in enumerate(commands):
        prompt: Prompt = getattr(command, "prompt", ())
        fewer = [prompt[:at] + prompt[at + 1 :] for at in range(len(prompt))]
        for at in range(len(prompt) - 1):
            merged = Piece(prompt[at].text, prompt_len(prompt[at : at + 2]))
            fewer.append((*prompt[:at], merged, *prompt[at + 2 :]))
        for at, piece in enumerate(prompt):
            for text in (chr(c) for c in range(ord("a"), ord(piece.text))):
                fewer.append((*prompt[:at], Piece(text, piece.tokens), *prompt[at + 1 :]))
        if isinstance(command, Submit) and prompt:
            plain = replace(command, prompt=(), tokens=command.tokens + prompt_len(prompt))
            yield (*commands[:i], plain, *commands[i + 1 :])
        for changed in fewer:
            yield (*commands[:i], replace(command, prompt=changed), *commands[i + 1 :])  # type: ignore[call-arg]
    texts = sorted(set().union(*map(_texts, commands)))
    for at, text in enumerate(texts):
        for other in texts[:at]:
            yield tuple(_with_texts(c, {text: other}) for c in commands)


def _smaller_numbers(commands: Commands) -> Iterator[Commands]:
    """Every number of every command towards 0: at once, by half, by one; matching ones together."""
    for i, command in enumerate(commands):
        for path, value in _numbers(command):
            tries = dict.fromkeys((0, 1, value // 2, value - 1))
            for smaller in (t for t in tries if 0 <= t < value):
                changed = _with_number(command, path, smaller)
                yield commands[:i] + (changed,) + commands[i + 1 :]
    # What several commands have in common shrinks only together: all equal lengths, all that are as long.
    values = sorted({value for c in commands for _, value in _numbers(c) if value > 1}, reverse=True)
    for value in values:
        for less in dict.fromkeys((value - 1, value // 2, 1)):
            yield tuple(_all_less(c, less, lambda number, v=value: number == v) for c in commands)
            yield tuple(_all_less(c, less, lambda number, v=value: number >= v) for c in commands)
    # A prompt and the chunk that prefills it as well.
    for i, command in enumerate(commands):
        for path, value in _numbers(command):
            for j in range(i + 1, len(commands)):
                if not _related(command, commands[j]):
                    continue
                for other_path, other in _numbers(commands[j]):
                    most = min(value, other) - 1
                    for less in dict.fromkeys((most, most // 2, 1)) if most > 0 else ():
                        if less:
                            both = list(commands)
                            both[i] = _with_number(command, path, value - less)
                            both[j] = _with_number(commands[j], other_path, other - less)
                            yield tuple(both)


Path = tuple[str] | tuple[str, int, str]


def _numbers(command: Command) -> Iterator[tuple[Path, int]]:
    """Paths and values of the whole numbers in a command, flags included."""
    for field in fields(command):
        value: Any = getattr(command, field.name)
        if isinstance(value, int):
            if value:
                yield (field.name,), int(value)
        elif isinstance(value, tuple):
            for at, lane in enumerate(value):
                if is_dataclass(lane):
                    for inner in fields(lane):
                        number = getattr(lane, inner.name)
                        if isinstance(number, int) and number:
                            yield (field.name, at, inner.name), int(number)


def _with_number(command: Command, path: Path, number: int) -> Command:
    """The command with one number replaced; a flag stays a flag."""
    old: Any = getattr(command, path[0])
    if len(path) == 1:
        return replace(command, **{path[0]: bool(number) if isinstance(old, bool) else number})
    name, at, inner = path
    return replace(command, **{name: (*old[:at], replace(old[at], **{inner: number}), *old[at + 1 :])})


def scaled(commands: Commands, size: int, was: int) -> Commands:
    """Lengths that were meant for pages of `was` tokens, for pages of `size`."""
    fitted = []
    for command in commands:
        for path, value in list(_numbers(command)):
            command = _with_number(command, path, -(-value * size // was))
        fitted.append(command)
    return tuple(fitted)


def _all_less(command: Command, less: int, chosen: Callable[[int], bool]) -> Command:
    """The command with all numbers that are chosen smaller by `less`."""
    for path, value in list(_numbers(command)):
        if chosen(value):
            command = _with_number(command, path, value - less)
    return command
