"""The servers and clients that are drawn for a check of whole servers."""

import itertools

import pytest

from impl.choices import RandomChoices
from impl.sglang.server.clients import EOS, Client, Clients, Config, Turn
from stateful_tests.watched.servers import population, random_clients, served_run
from stateful_tests.tests.watched.test_scheduler_runs import RELEASE


def test_the_same_seed_gives_the_same_population():
    def draw_clients():
        choices = RandomChoices(5)
        config = population.configuration(choices, window=8)
        return config, random_clients.clients(choices, config, count=9, impatient=True)

    assert draw_clients() == draw_clients()
    assert draw_clients()[0].window == 8 and len(draw_clients()[1]) == 9


def test_every_second_run_is_a_scene():
    runs = population.Population(1, fixed={"running": 4}, count=5)
    for scene in population.scenes():
        assert sum(not client.operator for client in runs.draw()[1]) == 5
        config, clients, _ = runs.draw()
        assert config.running == 4 and len(clients) > len(scene["clients"])
        fields = {**scene["server"], "running": 4}
        assert all(getattr(config, name) == value for name, value in fields.items())


@pytest.fixture(scope="module")
def between_scenes():
    """Six runs between scenes: two storms, shared texts, talks, a storm and random clients."""
    runs = population.Population(1)
    return [runs.draw() for _ in range(12)][::2]


def test_storms_and_floods_put_a_server_under_pressure(between_scenes):
    servers = [config for config, _, _ in between_scenes]
    of_storms = [servers[at] for at in (0, 1, 4)]
    assert [storm.tokens for storm in of_storms] == [64, 192, 64]
    assert all(storm.pressure for storm in of_storms)
    assert servers[1].chunk == 8


def test_texts_come_back_in_one_run_between_scenes(between_scenes):
    shared = [
        sum(turn.shared for client in clients for turn in client.turns)
        for _, clients, _ in between_scenes
    ]
    assert max(shared) == shared[2]


def test_talks_resend_their_conversation(between_scenes):
    asking = [[client for client in clients if not client.operator] for _, clients, _ in between_scenes]
    assert all(client.resends and not client.session for client in asking[3])
    of_others = [client for at in (0, 1, 2, 5) for client in asking[at]]
    assert {client.resends for client in of_others if not client.session} == {False, True}
    assert not any(client.resends for client in of_others if client.session)


def test_another_seed_gives_another_population(between_scenes):
    again = population.Population(1)
    other = population.Population(2)
    assert again.draw()[0] == between_scenes[0][0]
    assert again.draw()[1:] != other.draw()[1:]


def test_in_some_runs_clients_state_priorities():
    """Always where the server has them by a setting, never where it has none by a setting."""

    def draw_runs(**fixed):
        runs = population.Population(1, fixed=fixed)
        for config, clients, _ in (runs.draw() for _ in range(30)):
            yield config, {turn.priority for client in clients for turn in client.turns}

    preempting = [config for config, stated in draw_runs() if config.priority and stated - {0}]
    assert 5 <= len(preempting) <= 15
    assert {client.priority for client in preempting} == {1, 2}
    assert {e.lowest for e in preempting} == {
        True,
        False,
    }
    assert {bool(client.queue) for client in preempting} == {True, False}
    assert all(config.priority == 2 and stated - {0} for config, stated in draw_runs(priority=2))
    assert not any(config.priority for config, _ in draw_runs(priority=0))
    without = population.Population(1, lowest=False)
    assert not any(without.draw()[0].lowest for _ in range(30))


def test_in_some_runs_a_server_has_operators():
    """With a storage half of the clients come after a flush."""
    runs = population.Population(1, fixed={"hicache": True, "storage": 1})
    drawn = [clients for _, clients, _ in (runs.draw() for _ in range(12))]
    flushed = [population for population in drawn if any(client.operator for client in population)]
    assert 2 <= len(flushed) <= 6
    for clients in flushed:
        after = {client.name for client in clients if client.after == "o1"}
        assert 0 < len(after) < len(clients) / 2 + 1
        assert "o1" in {client.name for client in clients}


def test_a_client_without_a_session_resends_its_conversation():
    """Up to the end token of an answer, which is a part of it."""
    turns = (
        Turn(wait=0, tokens=3, limit=5),
        Turn(wait=0, tokens=2, limit=4, stop=2),
        Turn(wait=0, tokens=1, limit=1),
    )
    own, whole = (
        Clients((Client("c1", 0, turns, session=False, resends=resends),), seed=7)
        for resends in (False, True)
    )
    lines_said = [tuple(own.sampled_token("c1.1", index) for index in range(1, 6))]
    lines_said += [tuple(own.sampled_token("c1.2", index) for index in range(1, 3))]
    first, second, third = (own.prompt(f"c1.{number}") for number in (1, 2, 3))
    assert [len(each) for each in (first, second, third)] == [3, 2, 1] and lines_said[1][-1] == EOS
    assert whole.prompt("c1.1") == first and whole.prompt("c1.2") == first + lines_said[0] + second
    assert whole.prompt("c1.3") == first + lines_said[0] + second + lines_said[1] + third


def test_shrunk_runs_are_valid_configurations():
    """States at the end of a text alone go with neither overlap nor pages."""
    for given in ({"overlap": True}, {"page_size": 2}, {}):
        run = served_run.ServedRun(
            RELEASE, Config(states=30, track=8, **{"overlap": False, **given}), (), 1
        )
        smaller = [smaller_run.config for smaller_run in served_run.smaller_parts(run)]
        assert any(not config.track for config in smaller) == (not given)
        assert any(not config.states for config in smaller)


def test_a_scene_and_one_run_of_eight_have_recurrent_layers():
    runs = population.Population(1)
    drawn = [runs.draw()[0] for _ in range(40)]
    between = [config.states for config in drawn[6::8]]
    assert {*between} <= {*population.SLOTS} and len({*between}) > 1
    assert [bool(config.states) for config in drawn].count(True) == len(between) + 1


@pytest.mark.parametrize("settings", [{"states": False}, {"fixed": {"window": 6}}])
def test_servers_that_cannot_have_recurrent_layers_have_none(settings):
    runs = population.Population(1, **settings)
    assert not any(runs.draw()[0].states for _ in range(20))


def test_fixed_recurrent_layers_come_with_every_way_to_track_them():
    runs = population.Population(1, fixed={"states": 30})
    configs = [runs.draw()[0] for _ in range(80)]
    assert {config.states for config in configs} == {30} and not any(c.window for c in configs)
    assert {(config.track, config.draft) for config in configs} >= {
        *itertools.product((0, 8), (2, 4)),
        (4, 2),
    }
    assert all(config.track >= 2 * config.draft for config in configs if config.track)
    assert not any(config.overlap or config.page_size > 1 for config in configs if not config.track)


@pytest.mark.parametrize(
    ("setting", "tracks"), [({"overlap": True}, {4, 8}), ({"page_size": 8}, {8})]
)
def test_states_are_tracked_under_overlap_and_at_whole_pages(setting, tracks):
    runs = population.Population(1, fixed={"states": 30, **setting})
    assert {runs.draw()[0].track for _ in range(9)} == tracks


def test_a_second_slot_on_demand_needs_overlap():
    runs = population.Population(1, fixed={"states": 30, "track": 8, "lazy": True})
    assert all(runs.draw()[0].overlap for _ in range(9))


@pytest.fixture(scope="module")
def tier_runs():
    """80 runs with a host tier."""
    runs = population.Population(1, fixed={"hicache": True})
    return [runs.draw() for _ in range(80)]


def test_every_setting_of_a_host_tier_is_drawn(tier_runs):
    configs = [config for config, *_ in tier_runs]
    assert all(c.hicache and c.tree and not c.states for c in configs)
    assert {c.draft for c in configs} == {0, 2, 4}
    assert {c.policy for c in configs} == {0, 1, 2}
    assert {c.host for c in configs} == {6, 12, 20, 40}
    assert {c.storage for c in configs} == {0, 1, 2}
    assert {c.rust for c in configs} == {False, True}


def test_texts_or_talks_come_back_in_every_second_run_with_a_host_tier(tier_runs):
    for clients in (clients for _, clients, _ in tier_runs[::2]):
        assert sum(not client.operator for client in clients) == 12
        assert {t.text for c in clients for t in c.turns} <= {*range(8)}


def test_sessions_meet_a_storage_in_one_run_of_eight(tier_runs):
    for number, (config, clients, _) in enumerate(tier_runs):
        sessions = any(client.session for client in clients)
        assert not (sessions and config.storage) or number % 8 == population.SESSIONS_AT


def test_every_fourth_run_with_a_host_tier_is_a_scene():
    plain = population.Population(1, fixed={"hicache": True, "storage": 0, "priority": 0})
    drawn = [plain.draw() for _ in range(6)]
    scene = population.of_scene(population.scenes()[0])
    assert drawn[1][1] == scene
    assert drawn[5][1] == population.of_scene(population.scenes()[1])


def test_states_in_a_host_tier_exclude_what_they_cannot_have():
    states = population.Population(1, fixed={"hicache": True, "states": 20})
    configs = [states.draw()[0] for _ in range(9)]
    assert all(c.states and not (c.track or c.storage or c.mixed or c.overlap) for c in configs)


def test_fixed_settings_of_a_host_tier_are_those_of_every_run():
    fixed = population.Population(1, fixed={"hicache": True, "policy": 2, "host": 6})
    assert {(c.policy, c.host) for c, *_ in (fixed.draw() for _ in range(9))} == {(2, 6)}


def test_a_triple_of_switches_is_at_work_once_each_has_done_something():
    runs = population.Population(1)
    config = Config(window=4, draft=4, tree=False, chunk=64, pressure=False)
    runs._config = config
    fresh = runs._novelty(config)
    triple = (("window", 3), ("draft", 4), ("tree", False))
    assert triple in population.triples(config)
    runs.record_run({"a window eviction": 3})
    assert not runs._at_work[triple] and runs._novelty(config) < fresh
    assert runs._at_work[("page", 0), ("window", 3), ("overlap", False)] == 1
    tried = runs._novelty(config)
    runs.record_run({"a window eviction": 1, "a verify round that accepts several": 1})
    assert runs._at_work[triple] == 1 and runs._novelty(config) < tried
