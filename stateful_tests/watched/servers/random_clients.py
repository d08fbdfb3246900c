"""Random clients of a whole server, by kind: storms, texts, talks, operators and plain clients.

A saved seed stands for its clients: the order of draws must not change.
"""

from __future__ import annotations

from msgspec.structs import replace

from impl.choices import Choices, between, chance, once_in, pick
from impl.sglang.server.clients import OPERATIONS, Client, Config, Turn

LEAST_LEFT = 7  # tokens of the pool that a prompt must leave free; a server refuses a longer one


def burst_of_clients(
    choices: Choices,
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
        tokens = between(choices, 1, sixth)
        limit = between(choices, sixth, 2 * sixth)
        if tiny:
            tokens = between(choices, 1, 3)
            limit = between(choices, 1, 4)
        elif flood and once_in(choices, 2):
            tokens = between(choices, sixth, 2 * sixth)
            limit = between(choices, 1, sixth)
        return Turn(
            wait=pick(choices, (0, 0, 1, 3)),
            tokens=tokens,
            limit=limit,
            stop=between(choices, 1, limit) if once_in(choices, 5) else 0,
            abort=between(choices, 1, 40) if chance(choices, 15) else 0,
            shared=between(choices, tokens // 2, tokens) if chance(choices, 60) else 0,
            text=choices.upto(1),
        )

    def client(number: int) -> Client:
        tiny = number % 3 == 0
        turns = tuple(turn(tiny) for _ in range(between(choices, 5, 10) if tiny else between(choices, 1, 3)))
        return Client(
            f"c{number}",
            choices.upto(4),
            turns,
            session=once_in(choices, 2),
            impatient=impatient and once_in(choices, 2),
            after=f"c{number - at_a_time}" if number > at_a_time else "",
        )

    return tuple(client(number) for number in range(1, count + 1))


def texts(
    choices: Choices, config: Config, *, count: int = 12, impatient: bool = False
) -> tuple[Client, ...]:
    """Draw clients that send the same few long texts again, so that the tree evicts them and caches
    them anew."""
    longest = max(4, config.tokens // pick(choices, (3, 4)))
    text_count = pick(choices, (2, 4, 8))

    def turn() -> Turn:
        tokens = between(choices, 1, longest)
        return Turn(
            wait=pick(choices, (0, 0, 3, 10)),
            tokens=tokens,
            limit=between(choices, 1, 8),
            abort=between(choices, 1, 12) if chance(choices, 12) else 0,
            shared=max(0, tokens - pick(choices, (0, 0, 1, 5))),
            text=choices.upto(text_count - 1),
        )

    def client(number: int) -> Client:
        return Client(
            f"c{number}",
            1 + number * pick(choices, (0, 2)),
            tuple(turn() for _ in range(between(choices, 2, 6))),
            session=once_in(choices, 4),
            impatient=impatient and once_in(choices, 2),
        )

    return tuple(client(number) for number in range(1, count + 1))


def resending_clients(
    choices: Choices, config: Config, *, count: int = 12, impatient: bool = False
) -> tuple[Client, ...]:
    """Draw clients without sessions that resend their conversation with each turn. The next turn, and
    other clients with the same conversation, match the answers that the tree has cached."""
    turn_count = between(choices, 3, 6)
    longest_answer = max(2, config.tokens // 2 // turn_count)

    def turn() -> Turn:
        tokens = between(choices, 1, max(1, longest_answer // 4))
        limit = between(choices, 1, longest_answer)
        return Turn(
            wait=pick(choices, (0, 0, 1, 4)),
            tokens=tokens,
            limit=limit,
            stop=between(choices, 1, limit) if once_in(choices, 5) else 0,
            abort=between(choices, 1, 20) if once_in(choices, 10) else 0,
            shared=tokens,
            text=choices.upto(1),
        )

    return tuple(
        Client(
            f"c{number}",
            number * pick(choices, (0, 1, 4)),
            tuple(turn() for _ in range(turn_count)),
            session=False,
            resends=True,
            impatient=impatient and once_in(choices, 2),
        )
        for number in range(1, count + 1)
    )


def with_operators(choices: Choices, clients: tuple[Client, ...], config: Config) -> tuple[Client, ...]:
    """Return the clients, and operators that flush the caches and so on (OPERATIONS).

    With a storage behind the host tier, half of the clients come after a flush: they find their texts in the
    storage alone, and an operator aborts some while the server reads these texts.
    """
    kinds = ["flush", *(pick(choices, OPERATIONS) for _ in range(3))]
    operators = tuple(
        Client(
            f"o{number}",
            choices.upto(pick(choices, (10, 30, 100, 300)) - 1),
            (),
            session=False,
            operator=kind,
            close=pick(choices, (1, 1, 5, 20)),
        )
        for number, kind in enumerate(kinds, 1)
    )
    half = len(clients) // 2
    early = clients[:half]
    late = clients[half:]
    if config.storage:
        names = {client.name for client in late}
        late = tuple(client if client.after in names else replace(client, after="o1") for client in late)
        # The abort should come while late clients wait for the storage.
        start = between(choices, 2, 14)
        operators += (Client("o5", start, (), session=False, operator="abort", after="o1"),)
    return *early, *late, *operators


def hardly_fits(choices: Choices, client: Client, config: Config) -> Client:
    """Return the client with another first prompt: as long as a pool, a little shorter, or a token longer."""
    pool = config.tokens
    if config.window and chance(choices, 60):
        pool = config.tokens * config.swa // 10
    # LEAST_LEFT makes the longest prompt that a server of SGLang accepts.
    left = pick(choices, (-1, 0, 1, config.page_size, 2 * config.page_size + 1, LEAST_LEFT))
    tokens = max(1, pool - left)
    turn = Turn(wait=0, tokens=tokens, limit=pick(choices, (1, 2, 5)), text=client.turns[0].text)
    return replace(client, turns=(turn, *client.turns[1:]))


def clients(
    choices: Choices, config: Config, *, count: int = 6, impatient: bool = False
) -> tuple[Client, ...]:
    """Return `count` plain clients. About as many are there at a time as the server has rows: an idle session
    keeps its row, so more clients would wait for ever.

    impatient: some of them do not wait for answers.
    """
    longest = max(4, config.tokens // 5)
    at_a_time = between(choices, max(2, config.running - 1), config.running + 1)
    return tuple(_client(choices, n, at_a_time, longest, impatient) for n in range(1, count + 1))


def _client(
    choices: Choices, number: int, at_a_time: int, longest: int, impatient: bool
) -> Client:
    """Draw a client.

    at_a_time: clients before it that may still be there.
    longest: of a prompt and an answer (tokens).
    """
    turns = tuple(_turn(choices, longest) for _ in range(between(choices, 1, 5)))
    return Client(
        f"c{number}",
        choices.upto(11),
        turns,
        session=chance(choices, 75),
        impatient=impatient and once_in(choices, 2),
        close=pick(choices, (1, 1, 3, 10)),
        after=f"c{number - at_a_time}" if number > at_a_time else "",
    )


def _turn(choices: Choices, longest: int) -> Turn:
    tokens = 1 if once_in(choices, 7) else between(choices, 1, longest)
    limit = between(choices, 1, longest)
    return Turn(
        wait=pick(choices, (0, 1, 1, 3, 12)),
        tokens=tokens,
        limit=limit,
        stop=between(choices, 1, limit) if chance(choices, 40) else 0,
        abort=between(choices, 1, 30) if chance(choices, 12) else 0,
        shared=between(choices, 0, tokens) if chance(choices, 40) else 0,
        text=choices.upto(2),
    )
