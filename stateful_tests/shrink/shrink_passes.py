"""The smallest trace that still shows a fault: delta debugging on commands, then on their numbers.

Works on any trace, recorded ones too: commands are closed under deletion, so every shorter list means
something. The order of attempts is fixed, so the same fault gives the same trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from string import ascii_lowercase

from reference.blocks.commands import SOURCE_FIELDS, Add, Schedule
from reference.commands import (
    TREE_COMMANDS, Admit, CheckBusy, CheckIdle, Chunk, Decode, Draft, Evict, Extend, Finish, Insert,
    Launch, Open, Piece, Prompt, Retract, SpecDecode, Submit, prompt_len,
)  # fmt: skip
from reference.system_kinds import AnyCommand
from stateful_tests.shrink.command_rewriting import (
    Commands,
    all_less,
    with_changes,
    lives_apart,
    names_in,
    numbers,
    with_names_in_order,
    texts_in,
    with_names,
    with_number,
    with_texts,
)
from stateful_tests.shrink.candidate_search import Search, first_improvement

# Runs a candidate; returns it cut after the failing step if it still fails, else None.
StillFails = Callable[[Commands], Commands | None]
BUDGET = 1500  # candidates


def drop(commands: Commands, still_fails: StillFails) -> Commands:
    """Return fewer commands, with nothing else changed: the cheap half of `shrink`."""
    search = Search(still_fails, budget=300)
    return _drop_chunks(first_improvement(commands, search, _name_dropped), search)


def shrink(commands: Commands, still_fails: StillFails, *, budget: int = BUDGET) -> Commands:
    """Return a locally minimal failing list: no command can be left out, no number can be smaller.

    budget: the most candidates that are run. `commands` itself must fail.
    """
    search = Search(still_fails, budget)
    best = search.run(commands) or commands
    best = search.run(lives_apart(best)) or best
    while True:
        before = best
        best = first_improvement(best, search, _name_dropped)
        best = _drop_chunks(best, search)
        for simpler in (
            _without_lane, _rounds_merged, _turns_merged, _turns_fused, _ordinary_requests,
            _inserts_for_requests, _evictions_for_pressure, _busy_checks, _pairs_dropped, _plainer_prompts,
            _plainer_sources, _plainer_steps, _smaller_numbers,
        ):  # fmt: skip
            best = first_improvement(best, search, simpler)
        if best == before or search.is_spent:
            best = search.run(_logging_checks(best)) or best
            return search.run(with_names_in_order(best)) or best


def _logging_checks(commands: Commands) -> Commands:
    """Return the commands with memory checks at the level that logs each entry."""
    return tuple(CheckBusy(2) if isinstance(c, CheckBusy) and c.level else c for c in commands)


def _drop_chunks(best: Commands, search: Search[Commands]) -> Commands:
    """Leave out runs of commands, long runs first."""
    size = max(1, len(best) // 2)
    while size:
        begin = len(best) - size
        while begin >= 0:
            shorter = search.run(best[:begin] + best[begin + size :])
            if shorter is not None:
                best = shorter
            begin = min(begin - size, len(best) - size) if shorter is None else min(begin, len(best)) - size
        size //= 2
    return best


def _may_depend(a: AnyCommand, b: AnyCommand) -> bool:
    """Return whether two commands may depend on each other: they share a name or a text, or one is
    about the whole tree."""
    together = names_in(a) & names_in(b) or texts_in(a) & texts_in(b)
    return isinstance(a, Evict) or isinstance(b, Evict) or bool(together)


def _replace_at(commands: Commands, index: int, *instead: AnyCommand) -> Commands:
    """Return the commands with others in the place of one."""
    return (*commands[:index], *instead, *commands[index + 1 :])


def _name_dropped(commands: Commands) -> Iterator[Commands]:
    """Yield lists without any mention of one session, request or lock owner; batches keep their other
    entries."""
    for name in sorted(set().union(*map(names_in, commands))):
        others = []
        for command in commands:
            if isinstance(command, (Extend, SpecDecode, Launch)):
                command = with_changes(
                    command, lanes=tuple(n for n in command.lanes if n.request != name)
                )
            elif isinstance(command, Decode):
                command = Decode(tuple(n for n in command.requests if n != name))
            if name not in names_in(command):
                others.append(command)
        yield tuple(others)


def _pairs_dropped(commands: Commands) -> Iterator[Commands]:
    """Yield lists without two related commands that depend on each other, such as retract and admit."""
    for i, j in combinations(range(len(commands)), 2):
        if _may_depend(commands[i], commands[j]):
            yield _replace_at(_replace_at(commands, j), i)


def _without_lane(commands: Commands) -> Iterator[Commands]:
    """Yield lists with one entry less in a batch, or two chunks of one prefill as one."""
    for i, command in enumerate(commands):
        for name in ("lanes", "requests"):
            lanes = getattr(command, name, ())
            for index in range(len(lanes) if len(lanes) > 1 else 0):
                yield _replace_at(
                    commands, i, with_changes(command, **{name: lanes[:index] + lanes[index + 1 :]})
                )
        if isinstance(command, Extend) and len(command.lanes) == 1:
            [lane] = command.lanes
            for j, other in enumerate(commands[i + 1 :], i + 1):
                if isinstance(other, Extend) and [n.request for n in other.lanes] == [lane.request]:
                    merged = Extend((Chunk(lane.request, lane.tokens + other.lanes[0].tokens),))
                    yield _replace_at(_replace_at(commands, j), i, merged)


def _rounds_merged(commands: Commands) -> Iterator[Commands]:
    """Yield lists with two decode rounds of a request as one, a round in flight as one with its result,
    or a retract that is admitted again as a decode."""
    for i, command in enumerate(commands):
        if isinstance(command, Launch):
            yield _replace_at(commands, i, SpecDecode(command.lanes))
        if (single_round := _single_round(command)) is not None:
            for j, later in enumerate(commands[i + 1 :], i + 1):
                other = _single_round(later)
                if other is not None and other.request == single_round.request:
                    allocate = max(single_round.allocate, single_round.accept + other.allocate)
                    merged = SpecDecode(
                        (Draft(other.request, allocate, single_round.accept + other.accept),)
                    )
                    yield _replace_at(_replace_at(commands, j, merged), i)
                    break
        if isinstance(command, Retract) and command.in_flight == 0:
            again = Admit(command.request), Extend((Chunk(command.request, 1),))
            later_commands = list(commands[i + 1 :])
            if {*again} <= {*later_commands}:
                for gone in again:
                    later_commands.remove(gone)
                yield (*commands[:i], Decode((command.request,)), *later_commands)


def _turns_merged(commands: Commands) -> Iterator[Commands]:
    """Yield lists with a retract in the place of a finish and the next turn's submit: one turn that is
    admitted twice."""
    for i, finish in enumerate(commands):
        after = [c for c in commands[i + 1 :] if isinstance(c, Submit) and c.session is not None]
        if isinstance(finish, Finish) and after:
            names = {after[0].request: finish.request}
            later_commands = (with_names(c, names) for c in commands[i + 1 :] if c is not after[0])
            yield (*commands[:i], Retract(finish.request), *later_commands)


def _turns_fused(commands: Commands) -> Iterator[Commands]:
    """Yield lists with one turn with the whole input in the place of a turn and the one after it."""
    for i, finish in enumerate(commands):
        if not isinstance(finish, Finish):
            continue
        submits = [c for c in commands[:i] if isinstance(c, Submit) and c.request == finish.request]
        if not submits or submits[-1].session is None:
            continue
        first_submit = submits[-1]
        later_commands = commands[i + 1 :]
        after = next(
            (c for c in later_commands if isinstance(c, Submit) and c.session == first_submit.session), None
        )
        if after is None:
            continue
        tokens = first_submit.tokens + finish.finished_len + after.tokens
        extend = next(
            (c for c in later_commands if isinstance(c, Extend) and after.request in names_in(c)), None
        )
        merged_extend = Extend((Chunk(after.request, tokens),))
        yield (
            *(c for c in commands[:i] if finish.request not in names_in(c)),
            replace(after, tokens=tokens),
            *(merged_extend if c is extend else c for c in later_commands if c is not after),
        )


def _single_round(command: AnyCommand) -> Draft | None:
    """Return the only entry of a decode round."""
    if isinstance(command, SpecDecode) and len(command.lanes) == 1:
        return command.lanes[0]
    if isinstance(command, Decode) and len(command.requests) == 1:
        return Draft(command.requests[0], 1, 1)
    return None


def _ordinary_requests(commands: Commands) -> Iterator[Commands]:
    """Yield lists with an ordinary request in the place of a session's turn."""
    for i, command in enumerate(commands):
        if isinstance(command, Submit) and command.session is not None:
            plain = _replace_at(commands, i, replace(command, session=None))
            yield tuple(c for c in plain if c != Open(command.session))


def _inserts_for_requests(commands: Commands) -> Iterator[Commands]:
    """Yield lists with a lock owner that inserts a prompt in the place of the request that computes it."""
    for i, command in enumerate(commands):
        if isinstance(command, Submit) and command.session is None:
            name = command.request
            prompt = command.prompt or _text_of_its_own(command, commands)
            for index, last in [(j, c) for j, c in enumerate(commands) if name in names_in(c)][1:]:
                if isinstance(last, (Finish, Extend)):
                    insert = Insert(name, prompt, 0, isinstance(last, Extend))
                    before, after = (
                        [c for c in some if name not in names_in(c)]
                        for some in (commands[i + 1 : index], commands[index:])
                    )
                    yield (*commands[:i], *before, insert, *after)


def _evictions_for_pressure(commands: Commands) -> Iterator[Commands]:
    """Yield lists with an eviction, and only the lock owners of the tree, in the place of the requests
    that cause it."""
    lock_holders = tuple(c for c in commands if isinstance(c, TREE_COMMANDS))
    if len(commands) - len(lock_holders) < 2:
        return
    for index, pages in product(range(1, len(lock_holders)), (1, 2, 3)):
        for evict in (Evict(0, pages), Evict(pages, 0)):
            yield (*lock_holders[:index], evict, *lock_holders[index:])


def _text_of_its_own(submit: Submit, commands: Commands) -> Prompt:
    """Return a submit with a prompt in the place of unique tokens: in a letter that no other prompt
    uses."""
    used = set().union(*map(texts_in, commands))
    return (Piece(next((c for c in ascii_lowercase if c not in used), "z"), submit.tokens),)


def _busy_checks(commands: Commands) -> Iterator[Commands]:
    """Yield lists with a busy check in the place of an idle one: nothing has to end before it."""
    for i, command in enumerate(commands):
        if isinstance(command, CheckIdle):
            yield _replace_at(commands, i, CheckBusy(2))


def _plainer_prompts(commands: Commands) -> Iterator[Commands]:
    """Yield lists with a piece less, two pieces as one, a unique text for a shared one, or one text for
    another: in one place or everywhere."""
    for i, command in enumerate(commands):
        prompt: Prompt = getattr(command, "prompt", ())
        fewer = [prompt[:index] + prompt[index + 1 :] for index in range(len(prompt))]
        for index in range(len(prompt) - 1):
            merged = Piece(prompt[index].text, prompt_len(prompt[index : index + 2]))
            fewer.append((*prompt[:index], merged, *prompt[index + 2 :]))
        for index, piece in enumerate(prompt):
            for text in (c for c in ascii_lowercase if c < piece.text):
                fewer.append((*prompt[:index], Piece(text, piece.tokens), *prompt[index + 1 :]))
        if isinstance(command, Submit) and command.answers:
            yield _replace_at(commands, i, replace(command, answers=""))
        if isinstance(command, Submit) and prompt:
            yield _replace_at(
                commands, i, replace(command, prompt=(), tokens=command.tokens + prompt_len(prompt))
            )
        for plainer in fewer:
            yield _replace_at(commands, i, with_changes(command, prompt=plainer))
    texts = sorted(set().union(*map(texts_in, commands)))
    for other, text in combinations(texts, 2):
        yield tuple(with_texts(c, {text: other}) for c in commands)


def _plainer_sources(commands: Commands) -> Iterator[Commands]:
    """Yield lists without an adapter or salt, for all requests that have the same one, or for one."""
    for field in SOURCE_FIELDS:
        add_indexes = [i for i, c in enumerate(commands) if getattr(c, field, "") and isinstance(c, Add)]
        names = sorted({getattr(commands[i], field) for i in add_indexes})
        for those in (
            *([i for i in add_indexes if getattr(commands[i], field) == name] for name in names),
            *([i] for i in add_indexes),
        ):
            plainer = list(commands)
            for i in those:
                plainer[i] = with_changes(commands[i], **{field: ""})
            yield tuple(plainer)


def _plainer_steps(commands: Commands) -> Iterator[Commands]:
    """Yield lists with a model that accepts fewer drafts, and samples no stop token."""
    for i, command in enumerate(commands):
        if isinstance(command, Schedule):
            accept = command.accept
            stop = command.stop
            for index in range(len(stop)):
                yield _replace_at(commands, i, with_changes(command, stop=stop[:index] + stop[index + 1 :]))
            if accept:
                yield _replace_at(commands, i, with_changes(command, accept=accept[:-1]))
            for index in (index for index, count in enumerate(accept) if count):
                fewer = (*accept[:index], accept[index] - 1, *accept[index + 1 :])
                yield _replace_at(commands, i, with_changes(command, accept=fewer))


def _smaller_numbers(commands: Commands) -> Iterator[Commands]:
    """Yield lists with smaller numbers. All go towards 0, at once, by half or by one, and equal numbers
    together."""
    for i, command in enumerate(commands):
        for path, value in numbers(command):
            for smaller in dict.fromkeys((0, 1, value // 2, value - 1)):
                if 0 <= smaller < value:
                    yield _replace_at(commands, i, with_number(command, path, smaller))
    # What several commands have in common shrinks only together: all equal lengths, all that are as long.
    values = sorted({value for c in commands for _, value in numbers(c) if value > 1}, reverse=True)
    for value in values:
        for less in dict.fromkeys((value - 1, value // 2, 1)):
            yield tuple(all_less(c, less, value, value) for c in commands)
            yield tuple(all_less(c, less, value, values[0]) for c in commands)
    # A prompt and the chunk that prefills it as well.
    for i, j in combinations(range(len(commands)), 2):
        one = commands[i]
        two = commands[j]
        if _may_depend(one, two):
            for (path, value), (other_path, other) in product(numbers(one), numbers(two)):
                most = min(value, other) - 1
                if most <= 0:
                    continue
                for less in dict.fromkeys((most, most // 2, 1)):
                    if less:
                        reduced = _replace_at(commands, i, with_number(one, path, value - less))
                        yield _replace_at(reduced, j, with_number(two, other_path, other - less))
