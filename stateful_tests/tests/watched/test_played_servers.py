"""What the driver plays on a release, watched as a server is, validates; the log says the same commands."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from impl.sglang.scheduler.ends import Ends
from impl.adapter import UnusableImplementation
from impl.sglang.releases.catalogue import TABLE
from reference import model
from reference.commands import (
    Abort, Command, Decode, Done, Extend, Finish, Mode, Refused, Retract, SpecDecode, Submit, prompt_len,
)  # fmt: skip
from reference.geometry import preset
from impl.choices import RandomChoices
from stateful_tests.generate.next_command import propose
from stateful_tests.generate.run_profile import draw_profile
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.tests.support.night import NIGHT
from stateful_tests.tests.support.played_watch import WatchedRelease
from stateful_tests.watched.log_follower import NOTHING
from stateful_tests.watched.log_reader import logs_of
from stateful_tests.watched.validator import Validator

FROM_0_5_14 = list(TABLE)[list(TABLE).index("0.5.14") :]
RELEASES = FROM_0_5_14 if NIGHT else ["0.5.23"]
SIZES = ("page1", "page2", "page4", "no-swa")
STEPS = 60
Lives = dict[str, list[tuple[object, ...]]]  # of each request, what was done to it


class Tells(Validator):
    """Notes the commands that the events become."""

    def __init__(self, header):
        super().__init__(header)
        self.lives: Lives = defaultdict(list)

    def do(self, command, *choices, shown=NOTHING):
        super().do(command, *choices, shown=shown)
        note(self.lives, command, str)


def note(lives: Lives, command: Command, name: Any) -> None:
    """Admissions and window evictions are left out: a log has them before the round that they belong to."""
    match command:
        case Submit(request, session, tokens):
            lives[name(request)].append(("submit", session, tokens + prompt_len(command.prompt)))
        case Extend(lanes):
            for lane in lanes:
                lives[name(lane.request)].append(("extend", lane.tokens))
        case Decode(requests):
            for request in requests:
                lives[name(request)].append(("decode",))
        case SpecDecode(drafts):
            for draft in drafts:
                lives[name(draft.request)].append(("accept", draft.accept))
        case Retract(request, in_flight):
            lives[name(request)].append(("retract", in_flight))
        case Finish(request, outputs):
            lives[name(request)].append(("finish", outputs))
        case Abort(request):
            lives[name(request)].append(("abort",))


def comparable(life: list[tuple[object, ...]], claims: bool) -> list[tuple[object, ...]]:
    """As a log has it: who is given up as the last resort is retracted first; where rounds claim a token as
    they are launched, the result accepts the others."""
    events: list[tuple[object, ...]] = []
    for what, *more in life:
        if what == "abort" and events and events[-1][0] == "retract":
            events.pop()
        if claims and what == "accept" and events and events[-1][0] == "accept":
            more = [events.pop()[1] + more[0]]
        events.append((what, *more))
    return events


def play(system: WatchedRelease, number: int, tree: bool) -> tuple[Lives, bool]:
    """Return a random run, up to a fault of the release; what it did, and whether there was none."""
    source = RandomChoices(f"played {number}")
    names = dict[str, str]()
    lives: Lives = defaultdict(list)
    rejected = set[str]()
    lockstep = Lockstep(
        system, replace(preset(SIZES[number % len(SIZES)]), tree=tree), Mode.FAITHFUL
    )
    profile = draw_profile(source, system.capabilities, "sessions")
    for _ in range(STEPS):
        command = propose(lockstep.state, source, profile)
        if isinstance(command, Abort) and command.marked:
            continue  # a server marks a request before it queues it
        _, expected = model.step(lockstep.state, command)
        if isinstance(expected, Refused) and not isinstance(command, Submit):
            continue  # nor does it what the rules refuse, but for what a client asks
        outcome = lockstep.do(command)
        if lockstep.violation is not None:
            return but_for(rejected, lives), False
        if isinstance(command, Submit) and isinstance(outcome, Refused):
            rejected.add(f"{command.request}#{lockstep.state.serial + 1}")
        if isinstance(outcome, Done):
            if isinstance(command, Submit):
                names[command.request] = f"{command.request}#{lockstep.state.serial}"
            note(lives, command, names.__getitem__)
    return but_for(rejected, lives), True


def but_for(names: set[str], lives: Lives) -> Lives:
    """The lives of all others: a turn that is rejected has the name of the next one of its client."""
    return {name: life for name, life in lives.items() if name not in names}


@pytest.mark.parametrize("how", ["plain", "spec", "overlap", "tree"])
@pytest.mark.parametrize("version", RELEASES)
def test_logs_of_played_servers_validate(version, how, tmp_path, monkeypatch):
    # A server meets a stop token as the result comes. What is played ends a command later.
    monkeypatch.setattr(Ends, "_ends_by_stop", lambda *_: False)
    try:
        system = WatchedRelease(version, tmp_path, spec=how == "spec", overlap=how == "overlap")
    except UnusableImplementation as error:
        pytest.skip(str(error))
    try:
        played = [play(system, number, how == "tree") for number in range(8)]
        system.reset(preset("page1"))  # ends the log of the last
    finally:
        system.close()
    compared = 0
    for (lives, conforms), folder in zip(played, sorted(tmp_path.iterdir()), strict=False):
        (log,) = logs_of([folder])
        recorder = Tells(log.header)
        validated = recorder.run(log.lines())
        assert not validated.unexplained, (folder.name, validated.unexplained[0])
        if how == "overlap" or validated.ended:
            continue  # results come later than they are played; or anything may have happened
        for name, life in lives.items():
            compared += 1
            same, life = (
                comparable(each, bool(log.header.claims)) for each in (recorder.lives[name], life)
            )
            assert (same if conforms else same[: len(life)]) == life, (folder.name, name)
    assert compared > 10 or how == "overlap"
