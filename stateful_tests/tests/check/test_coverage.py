"""What a check must reach: the lines of the directed corpus; and which scopes reach a situation."""

import pytest

from reference.blocks.config import EngineConfig
from stateful_tests.check import corpus
from stateful_tests.coverage.required import FILE, ReachedIn, SituationsError, dump, reached_by_similar, load
from stateful_tests.coverage.scopes import SCOPES

KNOWN = load()


def test_the_list_is_written_as_it_is_read():
    assert FILE.read_text(encoding="utf-8") == dump(KNOWN)
    lines = corpus.FILE.read_text(encoding="utf-8").splitlines()
    assert [corpus.written(line) for line in corpus.load()] == lines


def test_each_line_of_the_corpus_meets_its_situation_at_its_end():
    """A rule that has changed, or a situation that is no more: `python -m ci.corpus`."""
    assert [line for line in corpus.load() if corpus.meets(line) != len(line.commands) - 1] == []


def test_the_corpus_has_every_situation_that_scopes_reach():
    texts = {line.situation for line in corpus.load()}
    assert KNOWN.situations.keys() <= texts
    again = {line.situation for line in corpus.load() if line.origin == "random"}
    assert len(texts - again) < 10, "in the sizes of the presets as well"


def test_the_traces_of_known_faults_are_lines():
    names = {line.situation for line in corpus.known_faults()}
    assert {"finish_behind_the_window_sweep_caps_all_three_lengths", "a_turn_comes_back_to_nothing"} <= names
    assert any(isinstance(line.geometry, EngineConfig) for line in corpus.known_faults())


def test_the_list_has_what_scopes_can_have():
    """That it is what they reach is seen where they are explored (test_explorer)."""
    for name, scope in SCOPES.items():
        listed = {text for text, scopes in KNOWN.situations.items() if name in scopes}
        assert bool(listed) == (scope.takes == "seconds"), f"{name}: kvspec explore --situations"
    assert {name for names in KNOWN.situations.values() for name in names} <= SCOPES.keys()
    of_holders = reached_by_similar(SCOPES["tree-tiny"])
    assert "unlock, pins some" in of_holders and "decode, refused: no_swa" not in of_holders


def test_a_scope_enters_what_it_reaches_now():
    known = ReachedIn({"open": ["session-tiny", "checks"], "gone": ["checks"], "older": ["no such scope"]})
    now = known.taken("checks", ["open", "new"])
    assert now.situations == {"new": ["checks"], "open": ["session-tiny", "checks"]}


def test_a_file_that_is_none_says_so(tmp_path):
    file = tmp_path / "list.json"
    with pytest.raises(SituationsError, match="No such file"):
        load(file)
    file.write_text('{"situations": {"open": 3}}')
    with pytest.raises(SituationsError, match=r"\$\.situations"):
        load(file)
    file.write_bytes(b'{"situations": {"\xff": []}}')
    with pytest.raises(SituationsError, match=r"list\.json: .*can't decode byte 0xff"):
        load(file)


