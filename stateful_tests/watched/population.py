"""Clients and configurations of a whole server, by a seed alone: random ones, and scenes."""

from __future__ import annotations

import random
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from impl.sglang.server.clients import Client, Config, Turn

SCENES = Path(__file__).with_name("scenes.toml")
USUAL_TURN: dict[str, Any] = {"wait": 1, "tokens": 1, "limit": 6}


def drawn(
    rng: random.Random, number: int, *, fixed: dict[str, int | bool], count: int = 12, impatient: bool = False
) -> tuple[Config, tuple[Client, ...]]:
    """Run number `number`: random clients, and in every second one a scene. fixed: fields of the server."""
    known = scenes()
    scene = known[number // 2 % len(known)] if number % 2 else None
    config = configuration(rng, **{**(scene["server"] if scene else {}), **fixed})
    if scene is None:
        return config, clients(rng, config, count=count, impatient=impatient)
    kinds = [each for kind in scene["clients"] for each in _one_by_one(kind)]
    return config, tuple(
        msgspec.convert({"start": 0, **each, "name": f"c{at}"}, Client) for at, each in enumerate(kinds, 1)
    )


@lru_cache(maxsize=1)
def scenes() -> list[dict[str, Any]]:
    """The scenes of scenes.toml."""
    found: list[dict[str, Any]] = tomllib.loads(SCENES.read_text(encoding="utf-8"))["scene"]
    return found


def _one_by_one(client: dict[str, Any]) -> list[dict[str, Any]]:
    """A client for each of the numbers that stand in the place of one."""
    parts = [client, *client["turns"]]
    lists = [v for part in parts for k, v in part.items() if isinstance(v, list) and k != "turns"]
    most = max(map(len, lists), default=1)

    def at(part: dict[str, Any], number: int) -> dict[str, Any]:
        return {
            name: value[number % len(value)] if isinstance(value, list) else value
            for name, value in part.items() if name != "turns"
        }  # fmt: skip

    return [
        {**at(client, n), "turns": [{**USUAL_TURN, **at(turn, n)} for turn in client["turns"]]}
        for n in range(most)
    ]


def configuration(rng: random.Random, **fixed: int | bool) -> Config:
    """A server that is small enough to be short of memory. fixed: fields that are not left to chance."""
    page = rng.choice((1, 1, 2, 4))
    found: dict[str, int | bool] = {
        "page_size": page, "tokens": rng.choice((64, 96, 128, 192)) // page * page,
        "running": rng.choice((3, 6)),
        "chunk": rng.choice((8, 16, 64)) // page * page, "window": rng.choice((0, 0, 0, 1, 3, 4, 6, 8, 12)),
        "draft": rng.choice((0, 0, 2, 4)), "overlap": rng.random() < 0.5, "tree": rng.random() < 0.7,
        "pressure": (luck := rng.random()) < 0.7, "mixed": luck * 10 % 1 < 0.3,
    }  # fmt: skip
    return Config(**{**found, **fixed})  # type: ignore[arg-type]


def clients(
    rng: random.Random, config: Config, *, count: int = 6, impatient: bool = False
) -> tuple[Client, ...]:
    """So many clients; impatient: some of them do not wait for answers.

    About as many at a time as there are rows: idle sessions keep theirs, and a full server waits for ever.
    """
    longest = max(4, config.tokens // 5)
    lanes = rng.randint(max(2, config.running - 1), config.running + 1)
    return tuple(_client(rng, n, lanes, longest, impatient) for n in range(1, count + 1))


def _client(rng: random.Random, number: int, lanes: int, longest: int, impatient: bool) -> Client:
    turns = tuple(_turn(rng, longest) for _ in range(rng.randint(1, 5)))
    return Client(
        f"c{number}", rng.randrange(12), turns, session=rng.random() < 0.75,
        impatient=impatient and rng.random() < 0.5, close=rng.choice((1, 1, 3, 10)),
        after=f"c{number - lanes}" if number > lanes else "",
    )  # fmt: skip


def _turn(rng: random.Random, longest: int) -> Turn:
    tokens, limit = rng.choice((1, *[rng.randint(1, longest)] * 6)), rng.randint(1, longest)
    return Turn(
        wait=rng.choice((0, 1, 1, 3, 12)), tokens=tokens, limit=limit,
        stop=rng.randint(1, limit) if rng.random() < 0.4 else 0,
        abort=rng.randint(1, 30) if rng.random() < 0.12 else 0,
        shared=rng.randint(0, tokens) if rng.random() < 0.4 else 0, text=rng.randrange(3),
    )  # fmt: skip
