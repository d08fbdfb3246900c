"""Clients of a whole server: what they send, and what they wait for."""

import msgspec

from impl.sglang.server.clients import EOS, FLUSH, PATIENCE, Client, Clients, Turn


def serve_clients(clients: Clients, rounds: int = 200) -> list[str]:
    """Return what the clients say to a server that answers at once."""
    sent = []
    for now in range(rounds):
        for message in clients.round(now, 1):
            sent.append(f"{message.kind} {message.name}")
            if message.kind == "submit":
                clients.note_answer(message.name, now)
    return sent


def test_clients_wait_for_answers_and_close():
    two = (
        Client("a", 0, (Turn(wait=0, tokens=3, limit=2), Turn(wait=2, tokens=3, limit=2))),
        Client("b", 1, (Turn(wait=0, tokens=2, limit=2),), session=False),
    )
    clients = Clients(two, 1)
    assert serve_clients(clients) == ["open a", "submit a.1", "submit b.1", "submit a.2", "close a"]
    assert clients.done


def test_a_client_may_be_taken_out():
    after = Client("b", 0, (Turn(wait=0, tokens=2, limit=2),), after="a")
    assert serve_clients(Clients((after,), 1)) == ["open b", "submit b.1", "close b"]
    both = serve_clients(Clients((Client("a", 5, (Turn(wait=0, tokens=1, limit=1),)), after), 1))
    assert both.index("open b") > both.index("close a")


def test_an_operator_waits_until_the_flush_is_done():
    operator = Client("o", 3, (), session=False, operator="flush")
    after = Client("b", 0, (Turn(wait=0, tokens=2, limit=2),), session=False, after="o")
    clients = Clients((after, operator), 1)
    assert serve_clients(clients) == ["flush o"]
    clients.note_answer(FLUSH, 200)
    assert [said.name for now in range(201, 210) for said in clients.round(now, 1)] == ["b.1"]


def test_an_operator_pauses_a_server_for_some_rounds():
    update = Client("o", 3, (), session=False, operator="update", close=4)
    clients = Clients((update,), 1)
    lines_said = [(now, message.kind, message.mode) for now in range(20) for message in clients.round(now, 1)]
    assert lines_said == [(3, "pause", "retract"), (3, "flush", "now"), (7, "go on", "")]
    assert clients.done
    paused = Clients((msgspec.structs.replace(update, operator="pause"),), 1)
    lines_said = [(now, message.kind, message.mode) for now in range(20) for message in paused.round(now, 1)]
    assert lines_said == [(3, "pause", "in_place"), (7, "go on", "")]


def test_a_flush_is_sent_once():
    waits: list[list[str]] = []
    clients = Clients((Client("o", 0, (), session=False, operator="flush"),), 1, waits.append)
    assert [said.kind for now in range(2 * PATIENCE) for said in clients.round(now, 0)] == ["flush"]
    assert waits == [[]]


def test_the_model_says_the_same_again():
    clients = (
        Client(
            "a",
            0,
            (
                Turn(wait=0, tokens=3, limit=9, stop=4, shared=2, text=1),
                Turn(wait=0, tokens=3, limit=9, shared=2, text=1),
            ),
        ),
    )
    one = Clients(clients, 7)
    two = Clients(clients, 7)
    tokens_of_one = [one.sampled_token("a.1", n) for n in (1, 2, 3)]
    assert tokens_of_one == [two.sampled_token("a.1", n) for n in (1, 2, 3)]
    assert one.sampled_token("a.1", 4) == EOS
    assert one.prompt("a.1")[:2] == one.prompt("a.2")[:2] and one.prompt("a.1") != one.prompt("a.2")
