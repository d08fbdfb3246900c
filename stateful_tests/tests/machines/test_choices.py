"""Sources of random decisions."""

from collections import Counter

import pytest

from impl.choices import KeyedChoices, RandomChoices, between, by_weight, chance, once_in, pick


@pytest.mark.parametrize("source", [RandomChoices("seed"), KeyedChoices(1, 2)])
def test_a_source_makes_every_decision_about_as_often(source):
    made = Counter(source.upto(3) for _ in range(4000))
    assert set(made) == {0, 1, 2, 3} and min(made.values()) > 800
    assert source.upto(0) == source.upto(-1) == 0
    assert {pick(source, "ab") for _ in range(40)} == {"a", "b"}
    assert 60 < sum(once_in(source, 4) for _ in range(400)) < 140
    assert 80 < sum(chance(source, 30) for _ in range(400)) < 160
    assert {between(source, 2, 4) for _ in range(40)} == {2, 3, 4}
    weighed = Counter(by_weight(source, {"a": 3, "b": 1, "c": 0}) for _ in range(400))
    assert weighed["a"] > weighed["b"] > weighed["c"] == 0


def test_a_keyed_decision_depends_only_on_its_key():
    def decisions(*numbers):
        source = KeyedChoices(*numbers)
        return [source.upto(99) for _ in range(8)]

    assert decisions(7, 1, 3) == decisions(7, 1, 3)
    others = [decisions(7, 1, 4), decisions(7, 2, 3), decisions(8, 1, 3)]
    assert all(sum(map(int.__eq__, decisions(7, 1, 3), other)) < 3 for other in others)
