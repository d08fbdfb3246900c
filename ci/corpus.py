"""`python -m ci.corpus`, in a checkout: brings stateful_tests/check/corpus.txt up to date with the rules.

Each situation gets the shortest way to it in the scopes of `kvspec explore` that take seconds, and one in the
sizes of the presets: the first run of the generator that meets it on the reference, without the commands
that are not needed. Of the latter those stay that still meet their situation; without the file all are
looked for. It takes about three minutes of one core, most of them for the scopes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count

import click

from ci import cli
from ci.report.progress import Progress
from reference import model
from reference.commands import SHARED, Command, Mode
from stateful_tests.check.driving import start_run, unfitted
from stateful_tests.check.tiers import plan
from stateful_tests.check import corpus
from stateful_tests.check.corpus import CorpusLine
from stateful_tests.coverage.conjunctions import conjunctions
from stateful_tests.coverage.scopes import SCOPES
from stateful_tests.generate.scope import Scope
from stateful_tests.coverage.situations import situation
from stateful_tests.explore.search import Explorer
from stateful_tests.generate.next_command import propose
from stateful_tests.generate.run_profile import MACHINES
from stateful_tests.lockstep.systems import resolve
from stateful_tests.shrink.passes import drop
from stateful_tests.shrink.rewriting import Commands

SEED, RUNS = 12345, 400  # of the generator: runs of each machine, preset and mode at most
COMMON = 1  # a conjunction that comes up in so many needs no line
FRUITLESS = 20  # of these in a row that meet nothing new: the rest is out of reach


def shortest(scope: Scope) -> Iterator[CorpusLine]:
    """The shortest way to each situation of a scope."""
    explorer, seen = Explorer(scope, clauses=False), set[str]()
    explorer.run()
    for at, state in enumerate(explorer.queue):
        for command, outcome, now in explorer.moves(state):
            text = situation(state, command, outcome, now)
            if text not in seen:
                seen.add(text)
                yield CorpusLine(
                    text, scope.geometry, scope.mode, scope.name, explorer.path(at, command)
                )


def faithful(line: CorpusLine) -> CorpusLine:
    """The line in faithful mode, if it meets its situation there: then it runs in both."""
    other = line._replace(mode=Mode.FAITHFUL)
    return other if corpus.meets(other) is not None else line


def shrunk(line: CorpusLine) -> CorpusLine:
    """The line up to its situation, without commands that are not needed for it."""

    def still_meets(commands: Commands) -> Commands | None:
        end = corpus.meets(line._replace(commands=commands))
        return None if end is None else commands[: end + 1]

    return line._replace(commands=drop(line.commands, still_meets))


def at_random(wanted: set[str], there: set[str]) -> Iterator[CorpusLine]:
    """A way to each of these in the sizes of the presets, and to each rare conjunction that a run meets.

    there: situations that have one.
    """
    system, whole, found, last = resolve("reference"), plan("pr", seed=SEED), {*there}, 0
    configs = [
        unfitted(m, preset, mode) for preset in whole.presets for mode in Mode for m in MACHINES
    ]
    for example in range(RUNS):
        for config in configs:
            run, did, first_at = (
                start_run(system, whole, config, example),
                list[Command](),
                dict[str, int](),
            )
            state = model.initial(run.geometry, config.mode)
            while len(did) < whole.steps and state.serial < SHARED - 1:
                was, command = state, propose(state, run.source, run.profile)
                state, outcome = model.step(was, command)
                did.append(command)
                step = was, command, outcome, state
                met = conjunctions(*step)
                if run.geometry.tracks:  # most systems track none: they would be left out there
                    met = {text for text in met if text.startswith("tracked states, ")}
                for text in (*met, *({situation(*step)} & wanted)):
                    first_at.setdefault(text, len(did))
            for text in sorted(first_at.keys() - found):
                found.add(text)
                last = example
                if example < COMMON and text not in wanted:
                    continue
                yield CorpusLine(
                    text, run.geometry, config.mode, "random", tuple(did[: first_at[text]])
                )
        if example - last >= FRUITLESS:
            return


def still_meets(line: CorpusLine) -> bool:
    """The line ends with its situation."""
    return corpus.meets(line) == len(line.commands) - 1


@click.command()
def make() -> int:
    """Bring the directed corpus up to date."""
    old = corpus.load() if corpus.FILE.exists() else ()
    kept = {
        way: [n for n in old if n.origin == way and still_meets(n)] for way in ("random", "hand")
    }
    best: dict[str, CorpusLine] = {}
    with Progress() as progress:
        for scope in SCOPES.values():
            if scope.takes == "seconds":
                progress(scope.name, len(best), 0)
                for line in shortest(scope):
                    known = best.get(line.situation)
                    shorter = known is not None and len(line.commands) < len(known.commands)
                    if known is None or (shorter and not scope.geometry.states):
                        best[line.situation] = line
        random, number = kept["random"], count(1)
        there = {line.situation for line in random}
        for line in at_random({*best, *(line.situation for line in old)}, there):
            random.append(faithful(shrunk(line)))
            progress("random", next(number), 0)
    lines = [*map(faithful, best.values()), *random, *kept["hand"]]
    lines.sort(key=lambda line: (line.situation, line.origin))
    corpus.FILE.write_text("".join(f"{corpus.written(line)}\n" for line in lines), encoding="utf-8")
    missing = best.keys() - {line.situation for line in random}
    click.echo(
        f"wrote   {corpus.FILE} ({len(lines)} lines, {sum(len(n.commands) for n in lines)} commands)"
    )
    click.echo(f"        {len(missing)} situations of scopes alone: no run met them")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(command=make, name="corpus"))
