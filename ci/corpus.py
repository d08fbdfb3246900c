"""`python -m ci.corpus`, in a checkout: brings stateful_tests/check/corpus.txt up to date with the rules.

Each situation gets the shortest way to it in the scopes of `kvspec explore` that take seconds, and one in the
sizes of the presets: the first run of the generator that meets it on the reference, without the commands
that are not needed. Lines in the sizes of presets stay while they still meet their situation; without the
file all are searched anew. It takes about three minutes of one core, most of them for the scopes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from ci import cli
from ci.report.progress_line import Progress
from reference import model
from reference.commands import Command, Mode
from reference.token_ids import SHARED
from stateful_tests.check.run_driver import start_run
from stateful_tests.check.run_batches import with_stated_sizes
from stateful_tests.check.check_plans import plan
from stateful_tests.check import corpus
from stateful_tests.check.corpus import CorpusLine
from stateful_tests.coverage.conjunctions import conjunctions
from stateful_tests.coverage.scopes import SCOPES
from stateful_tests.generate.exploration_scope import Scope
from stateful_tests.coverage.situations import situation
from stateful_tests.explore.search import Explorer
from stateful_tests.generate.next_command import propose
from stateful_tests.generate.run_profile import MACHINES
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.shrink.shrink_passes import drop
from stateful_tests.shrink.command_rewriting import Commands

SEED = 12345  # of the generator
RUNS = 400  # of each machine, preset and mode at most
COMMON_RUNS = 1  # a conjunction that the first so many runs of a configuration meet needs no line
FRUITLESS = 20  # of these in a row that meet nothing new: the rest is out of reach


def shortest_lines(scope: Scope) -> Iterator[CorpusLine]:
    """Yield the shortest way to each situation of a scope."""
    explorer = Explorer(scope, clauses=False)
    situations_seen = set[str]()
    explorer.run()
    for index, state in enumerate(explorer.queue):
        for command, outcome, now in explorer.moves(state):
            text = situation(state, command, outcome, now)
            if text not in situations_seen:
                situations_seen.add(text)
                yield CorpusLine(
                    text, scope.geometry, scope.mode, scope.name, explorer.path(index, command)
                )


def faithful(line: CorpusLine) -> CorpusLine:
    """Return the line in faithful mode, if it meets its situation there: then it runs in both."""
    other = line._replace(mode=Mode.FAITHFUL)
    return other if corpus.step_of_situation(other) is not None else line


def shrunk_line(line: CorpusLine) -> CorpusLine:
    """Return the line up to its situation, without commands that it does not need."""

    def cut_after_situation(commands: Commands) -> Commands | None:
        end = corpus.step_of_situation(line._replace(commands=commands))
        return None if end is None else commands[: end + 1]

    return line._replace(commands=drop(line.commands, cut_after_situation))


def random_lines(wanted: set[str], known_situations: set[str]) -> Iterator[CorpusLine]:
    """Yield a way to each wanted situation in the sizes of the presets, and to each rare conjunction.

    known_situations: situations that have a line.
    """
    system = resolve("reference")
    full_plan = plan("pr", seed=SEED)
    situations_reached = {*known_situations}
    last = 0
    configs = [
        with_stated_sizes(machine, preset, mode)
        for preset in full_plan.presets
        for mode in Mode
        for machine in MACHINES
    ]
    for example in range(RUNS):
        for config in configs:
            run = start_run(system, full_plan, config, example)
            commands_driven: list[Command] = []
            first_at: dict[str, int] = {}
            state = model.initial(run.geometry, config.mode)
            while len(commands_driven) < full_plan.steps and state.serial < SHARED - 1:
                before = state
                command = propose(before, run.source, run.profile)
                state, outcome = model.step(before, command)
                commands_driven.append(command)
                step = before, command, outcome, state
                met = set(conjunctions(*step))
                # Most systems cannot run sizes that track states: such lines show only what needs them.
                if run.geometry.tracks:
                    met = {text for text in met if text.startswith("tracked states, ")}
                if situation(*step) in wanted:
                    met.add(situation(*step))
                for text in met:
                    first_at.setdefault(text, len(commands_driven))
            for text in sorted(first_at.keys() - situations_reached):
                situations_reached.add(text)
                last = example
                if example < COMMON_RUNS and text not in wanted:
                    continue
                yield CorpusLine(
                    text, run.geometry, config.mode, "random", tuple(commands_driven[: first_at[text]])
                )
        if example - last >= FRUITLESS:
            return


def ends_with_situation(line: CorpusLine) -> bool:
    """Return whether the last command meets the situation, and no earlier one does."""
    return corpus.step_of_situation(line) == len(line.commands) - 1


@click.command()
def update_corpus() -> int:
    """Bring the directed corpus up to date."""
    old = corpus.load() if corpus.FILE.exists() else ()
    kept_lines = {
        origin: [line for line in old if line.origin == origin and ends_with_situation(line)]
        for origin in ("random", "hand")
    }
    best: dict[str, CorpusLine] = {}
    with Progress() as progress:
        for scope in SCOPES.values():
            if scope.takes == "seconds":
                progress(scope.name, len(best), 0)
                for line in shortest_lines(scope):
                    known = best.get(line.situation)
                    shorter = known is not None and len(line.commands) < len(known.commands)
                    if known is None or (shorter and not scope.geometry.states):
                        best[line.situation] = line
        random = kept_lines["random"]
        random_situations = {line.situation for line in random}
        wanted = {*best, *(line.situation for line in old)}
        for number, line in enumerate(random_lines(wanted, random_situations), 1):
            random.append(faithful(shrunk_line(line)))
            progress("random", number, 0)
    lines = [*map(faithful, best.values()), *random, *kept_lines["hand"]]
    lines.sort(key=lambda line: (line.situation, line.origin))
    corpus.FILE.write_text("".join(f"{corpus.line_text(line)}\n" for line in lines), encoding="utf-8")
    missing = best.keys() - {line.situation for line in random}
    click.echo(
        f"wrote   {corpus.FILE} ({len(lines)} lines, {sum(len(n.commands) for n in lines)} commands)"
    )
    click.echo(f"        {len(missing)} situations of scopes alone: no run met them")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(command=update_corpus, name="corpus"))
