"""Random clients of a whole server, by kind: storms, texts, talks, operators and plain clients.

A saved seed stands for its clients: the order of draws must not change.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from impl.sglang.server.clients import OPERATIONS, Client, Config, Turn

LEAST_LEFT = 7  # tokens of the pool that a prompt must leave free; a server refuses a longer one


def storm(
    rng: random.Random,
    config: Config,
    *,
    count: int = 12,
    flood: bool = False,
    impatient: bool = False,
) -> tuple[Client, ...]:
    """Draw clients that arrive at once and want long answers to short prompts, so that the pool runs out
    while they decode. Every third client has many tiny turns. The server still admits these when hardly
    anything is free, and retracts them before their first result.

    flood: half of the prompts are long, so that chunks of prefill compete with decode.
    """
    sixth = config.tokens // 6
    at_a_time = config.running + 1

    def turn(tiny: bool) -> Turn:
        tokens = rng.randint(1, sixth)
        limit = rng.randint(sixth, 2 * sixth)
        if tiny:
            tokens = rng.randint(1, 3)
            limit = rng.randint(1, 4)
        elif flood and rng.random() < 0.5:
            tokens = rng.randint(sixth, 2 * sixth)
            limit = rng.randint(1, sixth)
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
            after=f"c{number - at_a_time}" if number > at_a_time else "",
        )

    return tuple(client(number) for number in range(1, count + 1))


def texts(
    rng: random.Random, config: Config, *, count: int = 12, impatient: bool = False
) -> tuple[Client, ...]:
    """Draw clients that send the same few long texts again, so that the tree evicts them and caches
    them anew."""
    longest = max(4, config.tokens // rng.choice((3, 4)))
    text_count = rng.choice((2, 4, 8))

    def turn() -> Turn:
        tokens = rng.randint(1, longest)
        return Turn(
            wait=rng.choice((0, 0, 3, 10)),
            tokens=tokens,
            limit=rng.randint(1, 8),
            abort=rng.randint(1, 12) if rng.random() < 0.12 else 0,
            shared=max(0, tokens - rng.choice((0, 0, 1, 5))),
            text=rng.randrange(text_count),
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
    """Draw clients without sessions that resend their conversation with each turn. The next turn, and
    other clients with the same conversation, match the answers that the tree has cached."""
    turn_count = rng.randint(3, 6)
    longest_answer = max(2, config.tokens // 2 // turn_count)

    def turn() -> Turn:
        tokens = rng.randint(1, max(1, longest_answer // 4))
        limit = rng.randint(1, longest_answer)
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
            tuple(turn() for _ in range(turn_count)),
            session=False,
            resends=True,
            impatient=impatient and rng.random() < 0.5,
        )
        for number in range(1, count + 1)
    )


def with_operators(rng: random.Random, clients: tuple[Client, ...], config: Config) -> tuple[Client, ...]:
    """Return the clients, and operators that flush the caches and so on (OPERATIONS).

    With a storage behind the host tier, half of the clients come after a flush: they find their texts in the
    storage alone, and an operator aborts some while the server reads these texts.
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
    half = len(clients) // 2
    early = clients[:half]
    late = clients[half:]
    if config.storage:
        names = {each.name for each in late}
        late = tuple(each if each.after in names else replace(each, after="o1") for each in late)
        # The abort should come while late clients wait for the storage.
        start = rng.randint(2, 14)
        operators += (Client("o5", start, (), session=False, operator="abort", after="o1"),)
    return *early, *late, *operators


def hardly_fits(rng: random.Random, client: Client, config: Config) -> Client:
    """Return the client with another first prompt: as long as a pool, a little shorter, or a token longer."""
    pool = config.tokens
    if config.window and rng.random() < 0.6:
        pool = config.tokens * config.swa // 10
    # LEAST_LEFT makes the longest prompt that a server of SGLang accepts.
    left = rng.choice((-1, 0, 1, config.page_size, 2 * config.page_size + 1, LEAST_LEFT))
    tokens = max(1, pool - left)
    turn = Turn(wait=0, tokens=tokens, limit=rng.choice((1, 2, 5)), text=client.turns[0].text)
    return replace(client, turns=(turn, *client.turns[1:]))


def clients(
    rng: random.Random, config: Config, *, count: int = 6, impatient: bool = False
) -> tuple[Client, ...]:
    """Return `count` plain clients. About as many are there at a time as the server has rows: an idle session
    keeps its row, so more clients would wait for ever.

    impatient: some of them do not wait for answers.
    """
    longest = max(4, config.tokens // 5)
    at_a_time = rng.randint(max(2, config.running - 1), config.running + 1)
    return tuple(_client(rng, n, at_a_time, longest, impatient) for n in range(1, count + 1))


def _client(
    rng: random.Random, number: int, at_a_time: int, longest: int, impatient: bool
) -> Client:
    """Draw a client.

    at_a_time: clients before it that may still be there.
    longest: of a prompt and an answer (tokens).
    """
    turns = tuple(_turn(rng, longest) for _ in range(rng.randint(1, 5)))
    return Client(
        f"c{number}",
        rng.randrange(12),
        turns,
        session=rng.random() < 0.75,
        impatient=impatient and rng.random() < 0.5,
        close=rng.choice((1, 1, 3, 10)),
        after=f"c{number - at_a_time}" if number > at_a_time else "",
    )


def _turn(rng: random.Random, longest: int) -> Turn:
    # One prompt in seven is a single token.
    tokens = rng.choice((1, *[rng.randint(1, longest)] * 6))
    limit = rng.randint(1, longest)
    return Turn(
        wait=rng.choice((0, 1, 1, 3, 12)),
        tokens=tokens,
        limit=limit,
        stop=rng.randint(1, limit) if rng.random() < 0.4 else 0,
        abort=rng.randint(1, 30) if rng.random() < 0.12 else 0,
        shared=rng.randint(0, tokens) if rng.random() < 0.4 else 0,
        text=rng.randrange(3),
    )
