"""Random clients and configurations of a whole server, by a seed alone."""

from __future__ import annotations

import random

from impl.sglang.server.clients import Client, Config, Turn


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
