"""Runs of a check of whole servers, by a seed alone: random configurations with their clients, and scenes."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from impl.choices import Choices, RandomChoices, chance, once_in, pick
from impl.sglang.server.clients import Client, Config
from stateful_tests.watched.servers.random_clients import (
    clients,
    hardly_fits,
    with_operators,
    burst_of_clients,
    resending_clients,
    texts,
)

SCENES = Path(__file__).with_name("scenes.toml")
USUAL_TURN: dict[str, Any] = {"wait": 1, "tokens": 1, "limit": 6}


# Every second run is a scene, one after the other; what the clients of the others are, in turns.
KINDS = ("storm", "flood", "texts", "talks", "storm", "random")
KINDS_OF_A_TIER = ("texts", "scene", "talks", "storm")  # with a host tier, run by run
# A session that comes again ends a server with a storage (session-asks-the-storage): in one run of eight.
SESSIONS_AT = 7
WITH_PRIORITIES = 30  # percent of the runs: clients state them
FITS_HARDLY_AT = 0, 4  # the runs of eight in which somebody sends a prompt of the size of a pool
# In one run of eight a model has recurrent layers, with this many slots of state: a server takes a third as
# many requests at a time.
STATES_AT = 6
SLOTS = (9, 12, 18, 30)
TRIES = 40  # servers of which one is chosen
# Memory is short, and what runs is retracted. A flood has prompts of many chunks.
STORMS: dict[str, dict[str, int | bool]] = {
    "storm": {"pressure": True, "running": 6, "tokens": 64},
    "flood": {"pressure": True, "running": 6, "tokens": 192, "chunk": 8},
}
# What the log shows where a switch that is on does something. Overlap and pages always do.
AT_WORK = {
    "window": "a window eviction",
    "draft": "a verify round that accepts several",
    "mixed": "a mixed batch",
    "tree": "a prefix from the tree",
    "chunk": "a chunked prefill",
    "pressure": "a retract",
}
# of a scene's server, where there is a host tier
NOT_OF_A_TIER = ("states", "track", "tree")
Triple = tuple[tuple[str, int | bool], ...]


class Population:
    """The runs of a check, in order.

    fixed: fields of the server that chance does not choose.
    states: some servers may have recurrent layers.
    lowest: some may retract the request of the lowest priority.

    A fault often needs two or three switches at once, and chance leaves out many of these for long. So
    a run has, of some random servers, the one with the triples of switches that were least at work.
    """

    def __init__(
        self,
        seed: int,
        *,
        fixed: dict[str, int | bool] | None = None,
        count: int = 12,
        impatient: bool = False,
        states: bool = True,
        lowest: bool = True,
    ) -> None:
        """Begin before the first draw. The parameters are those of the class."""
        self.states = states
        self.lowest = lowest
        self.seed = seed
        self.fixed = fixed or {}
        self.count = count
        self.impatient = impatient
        self._number = -1
        self._config = Config()
        self._at_work: Counter[Triple] = Counter()
        self._in_vain: Counter[Triple] = Counter()

    def draw(self) -> tuple[Config, tuple[Client, ...], int]:
        """Return the next run: its server, its clients and its seed."""
        self._number += 1
        number = self._number
        known = scenes()
        choices = RandomChoices(f"{self.seed} {number}")
        tier = bool(self.fixed.get("hicache"))
        kind = KINDS[number // 2 % len(KINDS)] if not tier else KINDS_OF_A_TIER[number % 4]
        each = 4 if tier else 2
        scene = known[number // each % len(known)] if number % each == 1 else None
        settings = dict(scene["server"] if scene else STORMS.get(kind, {}))
        if scene is None and number % 8 == STATES_AT:
            settings["states"] = pick(RandomChoices(f"{self.seed} {number} states"), SLOTS)
        if not self.states or self.fixed.get("window"):
            settings.pop("states", None)
        if self.fixed.get("states"):  # it does not go with a window
            settings.pop("window", None)
        if tier:
            settings = {name: value for name, value in settings.items() if name not in NOT_OF_A_TIER}
        drawn = [configuration(choices, **{**settings, **self.fixed}) for _ in range(TRIES)]
        config = self._config = max(drawn, key=self._novelty)
        if scene is not None:
            candidate = of_scene(scene)
        elif kind in STORMS:
            candidate = burst_of_clients(
                choices, config, count=self.count, flood=kind == "flood", impatient=self.impatient
            )
        elif kind in MEETINGS:
            candidate = MEETINGS[kind](choices, config, count=self.count, impatient=self.impatient)
        else:
            candidate = clients(choices, config, count=self.count, impatient=self.impatient)
        if scene is None:
            candidate = tuple(
                replace(each, resends=each.resends or (index % 2 == 1 and not each.session))
                for index, each in enumerate(candidate)
            )
        if scene is None and number % 8 in FITS_HARDLY_AT:
            big = hardly_fits(RandomChoices(f"{self.seed} {number} prompt"), candidate[-1], config)
            candidate = *candidate[:-1], big
        if scene is None and number % 6 in (0, 4):
            candidate = with_operators(RandomChoices(f"{self.seed} {number} operators"), candidate, config)
        stated = bool(scene and scene["server"].get("priority"))  # by the scene's own turns
        preempting = RandomChoices(f"{self.seed} {number} priorities")
        if not stated and (config.priority or chance(preempting, WITH_PRIORITIES)):
            config, candidate = self._with_priorities(preempting, config, candidate)
        if config.storage and number % 8 != SESSIONS_AT:
            candidate = tuple(
                replace(client, session=False, resends=client.session or client.resends)
                for client in candidate
            )
        return config, candidate, choices.upto((1 << 30) - 1)

    def _with_priorities(
        self, choices: Choices, config: Config, clients: tuple[Client, ...]
    ) -> tuple[Config, tuple[Client, ...]]:
        """Return the server and clients with priorities, by which a waiting request may preempt a
        running one."""
        settings: dict[str, int | bool] = {
            "priority": pick(choices, (1, 2)),
            "threshold": pick(choices, (0, 0, 1)),
            "queue": pick(choices, (0, 0, 0, 2, 4)),
            "lowest": self.lowest and once_in(choices, 2),
        }
        settings |= {name: value for name, value in self.fixed.items() if name in settings}
        if not settings["priority"]:
            return config, clients
        self._config = config = replace(config, **settings)
        levels = (0, 1, 2, 3)
        return config, tuple(
            replace(
                client,
                turns=tuple(replace(turn, priority=pick(choices, levels)) for turn in client.turns),
            )
            for client in clients
        )

    def record_run(self, reached: Mapping[str, int]) -> None:
        """Record what the last run reached. A triple was at work if each of its switches has done
        something."""
        for triple in triples(self._config):
            shown_by = [AT_WORK[name] for name, on in triple if on and name in AT_WORK]
            done = all(reached.get(situation) for situation in shown_by)
            (self._at_work if done else self._in_vain)[triple] += 1

    def _novelty(self, config: Config) -> float:
        """Return the novelty of a server: a triple counts by its switches that are on, and less each
        time that it was at work, or tried in vain."""
        return sum(
            sum(map(bool, dict(triple).values()))
            / (1 + self._at_work[triple]) ** 2
            / (1 + self._in_vain[triple])
            for triple in triples(config)
        )


def triples(config: Config) -> list[Triple]:
    """Yield the switches of a server three at a time, as classes: 0 is off."""
    window = config.window
    page = config.page_size
    if not window:
        window_class = 0
    elif window < page:
        window_class = 1
    else:
        window_class = 2 if window % page else 3
    switches = {
        "page": page - 1,
        "window": window_class,
        "draft": config.draft,
        "overlap": config.overlap,
        "tree": config.tree,
        "mixed": config.mixed,
        "chunk": config.chunk < 16,
        "pressure": config.pressure,
    }
    return list(itertools.combinations(switches.items(), 3))


def of_scene(scene: dict[str, Any]) -> tuple[Client, ...]:
    """Return the clients of a scene."""
    kinds = [each for kind in scene["clients"] for each in _one_by_one(kind)]
    return tuple(
        msgspec.convert({"start": 0, **each, "name": f"c{index}"}, Client)
        for index, each in enumerate(kinds, 1)
    )


MEETINGS = {"texts": texts, "talks": resending_clients}  # at the tree


@lru_cache(maxsize=1)
def scenes() -> list[dict[str, Any]]:
    """Return the scenes of scenes.toml."""
    tables: list[dict[str, Any]] = tomllib.loads(SCENES.read_text(encoding="utf-8"))["scene"]
    return tables


def _one_by_one(client: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a client for each of the numbers that replace one."""
    parts = [client, *client["turns"]]
    lists = [v for part in parts for k, v in part.items() if isinstance(v, list) and k != "turns"]
    most = max(map(len, lists), default=1)

    def at(part: dict[str, Any], number: int) -> dict[str, Any]:
        return {
            name: value[number % len(value)] if isinstance(value, list) else value
            for name, value in part.items()
            if name != "turns"
        }

    return [
        {**at(client, n), "turns": [{**USUAL_TURN, **at(turn, n)} for turn in client["turns"]]}
        for n in range(most)
    ]


def configuration(choices: Choices, **fixed: int | bool) -> Config:
    """Draw a server that is small enough to be short of memory.

    fixed: fields that chance does not choose.
    """
    page = pick(choices, (1, 1, 1, 2, 2, 4, 4, 8))
    settings: dict[str, int | bool] = {
        "page_size": page,
        "tokens": pick(choices, (64, 96, 128, 192)) // page * page,
        "running": pick(choices, (3, 6)),
        "chunk": pick(choices, (8, 16, 64)) // page * page,
        "window": pick(choices, (0, 0, 0, 1, 3, 4, 6, 8, 12)),
        "draft": pick(choices, (0, 0, 2, 4)),
        "overlap": once_in(choices, 2),
        "tree": chance(choices, 70),
        "pressure": chance(choices, 70),
        "mixed": chance(choices, 30),
        "swa": pick(choices, (8, 8, 10, 5, 4)),
    }
    if fixed.get("states") and fixed.get("hicache"):  # kept at the end of a text alone
        fixed = {"track": 0, "storage": 0, "mixed": False, **fixed}
    if fixed.get("states"):
        track = pick(choices, (0, 8))
        fixed = _with_states({**settings, "track": track}, fixed)
    if fixed.get("hicache"):
        settings |= {
            "tree": True,
            "host": pick(choices, (6, 12, 20, 40)),
            "policy": choices.upto(2),
            "storage": pick(choices, (0, 0, 1, 2)),
            "rust": once_in(choices, 2),
        }
    return Config(**{**settings, **_whole_pages(settings, fixed), **fixed})  # type: ignore[arg-type]


def _whole_pages(
    settings: Mapping[str, int | bool], fixed: Mapping[str, int | bool]
) -> dict[str, int | bool]:
    """Fit pages or chunks to those that are fixed: a chunk is whole pages."""
    if "page_size" in fixed:
        page = int(fixed["page_size"])
        return {
            "tokens": settings["tokens"] // page * page,
            "chunk": max(settings["chunk"] // page, 1) * page,
        }
    return {"page_size": math.gcd(settings["page_size"], fixed["chunk"])} if "chunk" in fixed else {}


def _with_states(
    settings: Mapping[str, int | bool], fixed: Mapping[str, int | bool]
) -> dict[str, int | bool]:
    """Draw a server with recurrent layers. One that keeps only the state at the end of a text has
    neither pages nor overlap; one that keeps states on the way has no chunk in which it would keep
    none."""
    page = int(fixed.get("page_size", 1))
    needs_track = page > 1 or fixed.get("overlap")
    track = fixed.get("track", 8 if needs_track else settings["track"])
    fitting: dict[str, int | bool] = {"window": 0, "track": track}
    draft = fixed.get("draft", settings["draft"])
    # two rounds in flight cross one boundary at most; where a model without states had a window, 4 is tried
    if track and "track" not in fixed:
        least = max(2 * draft, 4 if draft == 2 and settings["window"] else track)
        fitting["track"] = -(-least // page) * page  # whole pages
    elif track and "draft" not in fixed:
        fitting["draft"] = min(draft, track // 2)
    fitting["page_size"] = math.gcd(settings["page_size"], int(fitting["track"]))
    fitting |= {"overlap": True} if fixed.get("lazy") else {}
    fitting |= {"chunk": max(16, settings["chunk"])} if track else {"page_size": 1, "overlap": False}
    return {**fitting, **fixed}
