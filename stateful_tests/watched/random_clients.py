"""Random clients of a whole server, by kind: storms, texts, talks, operators and plain ones."""

from __future__ import annotations

import random

from msgspec.structs import replace

from impl.sglang.server.clients import OPERATIONS, Client, Config, Turn

LEAST_LEFT = 7  # tokens of the pool that a prompt leaves, or it is refused


def storm(
    rng: random.Random,
    config: Config,
    *,
    count: int = 12,
    flood: bool = False,
    impatient: bool = False,
) -> tuple[Client, ...]:
    """Clients that come at once and want long answers to short prompts, so that memory ends while they are
    decoded. flood: half of the prompts are long, and chunks meet that.

    Every third client has many tiny turns. These alone are still admitted when hardly anything is free, and
    are then retracted before their first result.
    """
    share = config.tokens // 6
    lanes = config.running + 1

    def turn(tiny: bool) -> Turn:
        tokens, limit = rng.randint(1, share), rng.randint(share, 2 * share)
        if tiny:
            tokens, limit = rng.randint(1, 3), rng.randint(1, 4)
        elif flood and rng.random() < 0.5:
            tokens, limit = rng.randint(share, 2 * share), rng.randint(1, share)
        return Turn(
            wait=rng.choice((0, 0, 1, 3)),
            tokens=tokens,
            limit=limit,
            stop=rng.randint(1, limit) if rng.random() < 0.2 else 0,
            abort=rng.randint(1, 40) if rng.random() < 0.15 else 0,
            shared=rng.randint(tokens // 2, tokens) if rng.random() < 0.6 else 0,
            text=rng.randrange(2),
        )

    def client(number: int) -> Client:
        tiny = number % 3 == 0
        turns = tuple(turn(tiny) for _ in range(rng.randint(5, 10) if tiny else rng.randint(1, 3)))
        return Client(
            f"c{number}",
            rng.randrange(5),
            turns,
            session=rng.random() < 0.5,
            impatient=impatient and rng.random() < 0.5,
            after=f"c{number - lanes}" if number > lanes else "",
        )

    return tuple(client(number) for number in range(1, count + 1))


def texts(
    rng: random.Random, config: Config, *, count: int = 12, impatient: bool = False
) -> tuple[Client, ...]:
    """Clients that ask for the same few long texts again: these are evicted and come back."""
    length = max(4, config.tokens // rng.choice((3, 4)))
    own = rng.choice((2, 4, 8))

    def turn() -> Turn:
        tokens = rng.randint(1, length)
        return Turn(
            wait=rng.choice((0, 0, 3, 10)),
            tokens=tokens,
            limit=rng.randint(1, 8),
            abort=rng.randint(1, 12) if rng.random() < 0.12 else 0,
            shared=max(0, tokens - rng.choice((0, 0, 1, 5))),
            text=rng.randrange(own),
        )

    def client(number: int) -> Client:
        return Client(
            f"c{number}",
            1 + number * rng.choice((0, 2)),
            tuple(turn() for _ in range(rng.randint(2, 6))),
            session=rng.random() < 0.25,
            impatient=impatient and rng.random() < 0.5,
        )

    return tuple(client(number) for number in range(1, count + 1))


def talks(
    rng: random.Random, config: Config, *, count: int = 12, impatient: bool = False
) -> tuple[Client, ...]:
    """Clients without sessions who resend their conversation with each turn: what the tree has of an answer
    is matched again, by the next turn and by who has had the same conversation."""
    turns = rng.randint(3, 6)
    share = max(2, config.tokens // 2 // turns)

    def turn() -> Turn:
        tokens, limit = rng.randint(1, max(1, share // 4)), rng.randint(1, share)
        return Turn(
            wait=rng.choice((0, 0, 1, 4)),
            tokens=tokens,
            limit=limit,
            stop=rng.randint(1, limit) if rng.random() < 0.2 else 0,
            abort=rng.randint(1, 20) if rng.random() < 0.1 else 0,
            shared=tokens,
            text=rng.randrange(2),
        )

    return tuple(
        Client(
            f"c{number}",
            number * rng.choice((0, 1, 4)),
            tuple(turn() for _ in range(turns)),
            session=False,
            resends=True,
            impatient=impatient and rng.random() < 0.5,
        )
        for number in range(1, count + 1)
    )


def operated(rng: random.Random, clients: tuple[Client, ...], config: Config) -> tuple[Client, ...]:
    """The clients with operators.

    With a storage behind the host tier, half of the clients come after a flush: they find their texts in the
    storage alone, and some are aborted while these are read.
    """
    kinds = ["flush", *(rng.choice(OPERATIONS) for _ in range(3))]
    operators = tuple(
        Client(
            f"o{number}",
            rng.randrange(rng.choice((10, 30, 100, 300))),
            (),
            session=False,
            operator=kind,
            close=rng.choice((1, 1, 5, 20)),
        )
        for number, kind in enumerate(kinds, 1)
    )
    first, then = clients[: len(clients) // 2], clients[len(clients) // 2 :]
    if config.storage:
        names = {each.name for each in then}
        then = tuple(each if each.after in names else replace(each, after="o1") for each in then)
        # while they wait for what is being read
        start = rng.randint(2, 14)
        operators += (Client("o5", start, (), session=False, operator="abort", after="o1"),)
    return *first, *then, *operators


def hardly_fits(rng: random.Random, client: Client, config: Config) -> Client:
    """The client with a prompt that takes all of a pool, hardly less, or a token more than there is."""
    pool = config.tokens
    if config.window and rng.random() < 0.6:
        pool = config.tokens * config.swa // 10
    # the last of these is the most that a server of SGLang takes
    less = rng.choice((-1, 0, 1, config.page_size, 2 * config.page_size + 1, LEAST_LEFT))
    tokens = max(1, pool - less)
    turn = Turn(wait=0, tokens=tokens, limit=rng.choice((1, 2, 5)), text=client.turns[0].text)
    return replace(client, turns=(turn, *client.turns[1:]))


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
        f"c{number}",
        rng.randrange(12),
        turns,
        session=rng.random() < 0.75,
        impatient=impatient and rng.random() < 0.5,
        close=rng.choice((1, 1, 3, 10)),
        after=f"c{number - lanes}" if number > lanes else "",
    )


def _turn(rng: random.Random, longest: int) -> Turn:
    tokens, limit = rng.choice((1, *[rng.randint(1, longest)] * 6)), rng.randint(1, longest)
    return Turn(
        wait=rng.choice((0, 1, 1, 3, 12)),
        tokens=tokens,
        limit=limit,
        stop=rng.randint(1, limit) if rng.random() < 0.4 else 0,
        abort=rng.randint(1, 30) if rng.random() < 0.12 else 0,
        shared=rng.randint(0, tokens) if rng.random() < 0.4 else 0,
        text=rng.randrange(3),
    )
