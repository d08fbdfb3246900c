"""Runs of a pair of whole servers, by a seed alone: servers, clients, and what the environment does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from impl.choices import Choices, RandomChoices, between, chance, once_in, pick
from impl.sglang.server.clients import Client, Config, Turn
from impl.sglang.server.outcome import PairEvent
from impl.sglang.server.pair.choices import NetworkChoice
from reference.pairs.config import DECODE, PREFILL, SERVERS

Settings = Mapping[str, int | bool]
# What a run is about, run by run. In `calm` nothing is slow, in `late` everything may be. In `aborts` clients
# leave, in `failures` transfers fail, in `time` timeouts end in the middle, in `death` a server dies, and in
# `alone` an abort reaches only one server.
KINDS = (
    "calm", "late", "aborts", "failures", "late", "aborts", "time", "late", "aborts", "death",
    "late", "alone", "aborts", "failures", "late",
)  # fmt: skip
SIZES = 1, 3, 8, 9, 16, 17, 25, 33, 40  # of prompts
# Rests in steps. A decode round takes one.
SHORT = (1, 2, 5, 12, 30)
LONG = (20, 60, 100, 150)
# What a reader wants to know that a check has reached, by the words of the events.
_REACHED = {
    "a prompt part": "computes a prompt part", "a decode batch": "decodes:",
    "a verify round": "verifies drafts:",
    "a prompt part with KV of the host": "with KV of its host:",
    "a prefix of D's host": "tokens of its host for",
    "a transfer": "^transfer .* ends",
    "a message that rests": "rests [0-9]+ steps", "a scheduler that rests": "^rests",
    "an abort": "gets the abort", "a notice of an abort": "^gets notice", "an acknowledgement": "^gets ack",
    "a transfer that fails": "fails after", "a rest that is copied late": "the rest of a transfer",
    "a timeout": "the clock moves", "a death": "^ends$",
}  # fmt: skip


class PairPopulation:
    """The runs of a check, in order.

    fixed: fields of the servers that chance does not choose.
    count: a run has 2 to two thirds as many clients.
    """

    def __init__(self, seed: int, *, fixed: Settings | None = None, count: int = 12) -> None:
        self.seed = seed
        self.fixed = dict(fixed or {})
        self.count = count
        self._number = -1

    def draw(self) -> tuple[Config, tuple[Client, ...], int, tuple[NetworkChoice, ...]]:
        """Return the next run: its servers, clients, seed and environment."""
        self._number += 1
        choices = RandomChoices(f"pair {self.seed} {self._number}")
        kind = KINDS[self._number % len(KINDS)]
        config = servers(choices, self.fixed)
        asking = clients(choices, config, self.count, aborts=kind in ("aborts", "alone"))
        return config, asking, choices.upto((1 << 30) - 1), environment(choices, kind, asking)

    def record_run(self, reached: Mapping[str, int]) -> None:
        """Do nothing: draws do not depend on what earlier runs reached."""


def servers(choices: Choices, fixed: Settings) -> Config:
    """Draw two servers that are small enough to be short of memory."""
    page = int(fixed.get("page_size", pick(choices, (1, 2, 4, 4, 8))))
    # with pages of one token D keeps SWA KV of a whole prompt, and its pool seldom holds one
    windows = (0, 0, 0, 4, 6, 8) if page > 1 else (0, 0, 0, 0, 0, 0, 0, 0, 6)
    window = int(fixed.get("window", pick(choices, windows)))
    least = 96 if window else 64
    settings: dict[str, int | bool] = {
        "pair": True,
        "page_size": page,
        "tokens": max(least, pick(choices, (64, 96, 160))),
        "decode_tokens": pick(choices, (80, 96, 160)),
        "running": pick(choices, (2, 3, 4)),
        "chunk": max(page, pick(choices, (8, 16, 64))),
        "window": window,
        "swa": 10 if window else 8,
        "overlap": once_in(choices, 2),
        "decode_overlap": once_in(choices, 2),
        "tree": chance(choices, 80),
        "decode_tree": chance(choices, 30),
        "pressure": chance(choices, 30),
        "optimistic": pick(choices, (0, 0, 0, 1, 2)),
    }
    # two thirds of the runs have no priorities; P orders its queue by them, and D retracts by them
    priority = int(fixed.get("priority", pick(choices, (0, 0, 0, 0, 1, 2))))
    if priority:
        settings |= {
            "priority": priority,
            "threshold": pick(choices, (0, 1)),
            "lowest": once_in(choices, 2),
        }
    # SGLang has prefill_complete with neither a window nor D's tree
    may_complete = not (fixed.get("window") or fixed.get("decode_tree"))
    if may_complete and "prefill_complete" not in fixed and once_in(choices, 4):
        settings |= {"prefill_complete": True, "window": 0, "swa": 8, "decode_tree": False}
    for draw in (_states, _drafts, _tiers):
        settings |= draw(choices, {**settings, **fixed}, fixed)
    settings["mixed"] = chance(choices, 15)
    if fixed.get("hicache") and (fixed.get("states") or settings.get("states")):
        settings["mixed"] = False
    return Config(**{**settings, **fixed})  # type: ignore[arg-type]


def _states(choices: Choices, so_far: Settings, fixed: Settings) -> dict[str, int | bool]:
    """Draw recurrent layers. States are kept on the way, or without pages and overlap at the end of a
    text."""
    if so_far["window"] or so_far.get("prefill_complete"):
        return {}
    if not fixed.get("states", chance(choices, 15)):
        return {}
    page = int(so_far["page_size"])
    at_the_end = page == 1 and not (fixed.get("overlap") or fixed.get("decode_overlap"))
    settings: dict[str, int | bool] = {"states": pick(choices, (8, 12, 20)), "track": 8}
    if not fixed.get("track", not (at_the_end and once_in(choices, 2))):
        return {**settings, "track": 0, "overlap": False, "decode_overlap": False}
    return {**settings, "chunk": max(16, int(so_far["chunk"]))}


def _drafts(choices: Choices, so_far: Settings, fixed: Settings) -> dict[str, int | bool]:
    """Draw speculation of D, mostly with P's draft KV. With a window the draft model has as many layers
    as the other has full ones, so that P has to send them (draft-as-deep-as-the-model)."""
    draft = int(fixed.get("draft", pick(choices, (0, 0, 0, 0, 2, 4))))
    if not draft:
        return {}
    return {"draft": draft, "prefill_draft": bool(so_far["window"]) or chance(choices, 70)}


_TIERS = "hicache", "decode_hicache", "host_backup"


def _tiers(choices: Choices, so_far: Settings, fixed: Settings) -> dict[str, int | bool]:
    """Draw host tiers of P and of D's tree, and the pool for KV that D retracts."""
    recurrent = so_far.get("states")
    late = so_far.get("prefill_complete")
    alone = not recurrent or not (so_far["track"] or so_far["overlap"])
    settings: dict[str, int | bool] = {
        "hicache": bool(so_far["tree"]) and alone and chance(choices, 30),
        "decode_hicache": bool(so_far["decode_tree"])
        and not (so_far["window"] or recurrent)
        and once_in(choices, 2),
    }
    host = pick(choices, (6, 12, 20, 40))
    more = {"host": host, "policy": 2 if late else choices.upto(2), "rust": chance(choices, 30)}
    backup = not (recurrent or so_far.get("priority"))
    share = 5 if so_far["decode_tree"] else 60
    if fixed.get("host_backup", backup and chance(choices, share)):
        # it must hold the longest request that D can retract
        settings["host_backup"] = True
        more["host"] = max(20, host)
    cached = {**settings, **fixed}
    if (cached["hicache"] or cached["decode_hicache"]) and not (recurrent or late):
        more["storage"] = pick(choices, (0, 0, 1, 2))  # of P's tier, or of D's alone
    return settings | more if any({**settings, **fixed}.get(name) for name in _TIERS) else settings


def clients(choices: Choices, config: Config, count: int, *, aborts: bool) -> tuple[Client, ...]:
    """Draw clients one after the other or at once, some of whose prompts share a text. None has a
    session: after a turn P's has one output and D's has all, so that they disagree on the next prompt."""
    longest = min(config.tokens, config.decode_tokens or config.tokens) // 2
    comes_back = config.hicache or config.decode_hicache  # what was evicted is asked for again

    def turn() -> Turn:
        tokens = min(longest, pick(choices, (17, 25, 33, 40) if comes_back else SIZES))
        limit = pick(choices, (1, 2, 4, 9) if not config.pressure else (4, 9, 20))
        return Turn(
            wait=pick(choices, (0, 1, 5, 20)),
            tokens=tokens,
            limit=limit,
            stop=between(choices, 1, limit) if once_in(choices, 5) else 0,
            abort=between(choices, 1, 90) if aborts and chance(choices, 40) else 0,
            shared=pick(choices, (0, tokens // 2 if comes_back else 0, tokens // 2, tokens - 1, tokens)),
            text=choices.upto(1),
            priority=choices.upto(3) if config.priority else 0,
        )

    return tuple(
        Client(
            f"c{number}",
            pick(choices, (0, 1, 4, 15, 40)),
            tuple(turn() for _ in range(pick(choices, (1, 3, 4) if comes_back else (1, 1, 2)))),
            session=False,
            resends=once_in(choices, 5 if comes_back else 2),
        )
        for number in range(1, 1 + between(choices, 2, max(2, count * 2 // 3)))
    )


def environment(
    choices: Choices, kind: str, asking: Sequence[Client]
) -> tuple[NetworkChoice, ...]:
    """Draw the events for these clients' requests."""
    if kind == "calm":
        return ()
    turns = {f"{client.name}.{at}": turn for client in asking for at, turn in enumerate(client.turns, 1)}
    events: list[NetworkChoice] = []
    for name, turn in turns.items():
        events += _draw_delays(choices, name)
        if turn.abort:
            events += _aborts(choices, name, alone=kind == "alone")
        if kind == "failures" and once_in(choices, 5):
            events.append(
                NetworkChoice(
                    "transfer",
                    name,
                    number=between(choices, 1, 3),
                    steps=pick(choices, (0, *LONG)),
                    at=choices.upto(10),
                    fails=True,
                    late=chance(choices, 40),
                )
            )
    for _ in range(choices.upto(3)):
        side = pick(choices, SERVERS)
        events.append(NetworkChoice("round", "", side, between(choices, 1, 80), pick(choices, SHORT)))
    if kind == "failures" and chance(choices, 30):
        events.append(NetworkChoice("lookup", number=between(choices, 1, 3), fails=True))
    if kind == "time":
        jumps = ((between(choices, 1, 150), pick(choices, (35, 310))) for _ in range(2))
        events += [NetworkChoice("clock", number=at, steps=seconds) for at, seconds in jumps]
    if kind == "death":
        events.append(NetworkChoice("death", side=pick(choices, SERVERS), number=between(choices, 5, 120)))
    return tuple(events)


def _draw_delays(choices: Choices, name: str) -> list[NetworkChoice]:
    """Draw which messages of a request rest, and how long. Transfers rest long: short ones hide early
    frees."""
    rests = []
    if chance(choices, 30):
        rests.append(NetworkChoice("request", name, pick(choices, SERVERS), steps=pick(choices, SHORT)))
    for kind in ("metadata", "status", "notice", "ack", "endpoint", "ready"):
        if once_in(choices, 4):
            rests.append(NetworkChoice(kind, name, steps=pick(choices, (*SHORT, 100))))
    for number in range(1, 5):
        if once_in(choices, 4):
            time = pick(choices, (0, 5, 10))
            rests.append(
                NetworkChoice("transfer", name, number=number, steps=pick(choices, LONG), at=time)
            )
    if once_in(choices, 4):
        rests.append(NetworkChoice("row", name, steps=pick(choices, LONG), at=pick(choices, (0, 5))))
    if chance(choices, 30):
        side = pick(choices, SERVERS)
        rests.append(NetworkChoice("call", name, side, between(choices, 1, 12), pick(choices, SHORT)))
    return rests


def _aborts(choices: Choices, name: str, *, alone: bool) -> list[NetworkChoice]:
    """Draw an abort that reaches both servers, often one later than the other; or one alone."""
    side = pick(choices, SERVERS)
    if alone:
        # P misses it more often: an abort that P alone gets reaches nobody else, and hides other waits.
        missed_by = pick(choices, (PREFILL, PREFILL, DECODE))
        return [NetworkChoice("abort", name, missed_by, fails=True)]
    return (
        [NetworkChoice("abort", name, side, steps=pick(choices, SHORT))] if chance(choices, 60) else []
    )


def choices_about(
    asking: Sequence[Client], choices: Sequence[NetworkChoice]
) -> tuple[NetworkChoice, ...]:
    """Return the choices that are about these clients' requests, or about none."""
    names = {f"{client.name}.{index}" for client in asking for index in range(1, 1 + len(client.turns))}
    return tuple(choice for choice in choices if not choice.request or choice.request in names)


def count_reached(events: Iterable[PairEvent]) -> Counter[str]:
    """Count the events that a run has reached."""
    return Counter(
        what for event in events for what, words in _REACHED.items() if re.search(words, event.says)
    )
