"""What a check must reach: the lines of the directed corpus."""

from pathlib import Path

from reference.blocks.config import EngineConfig
from stateful_tests.check import corpus

README = Path(__file__).parents[3] / "ci" / "README.md"


def test_the_corpus_is_written_as_it_is_read():
    lines = corpus.FILE.read_text(encoding="utf-8").splitlines()
    assert [corpus.line_text(line) for line in corpus.load()] == lines


def test_the_document_has_the_number_of_situations():
    assert f"({len(corpus.situations())} on `torch`)" in README.read_text(encoding="utf-8")


def test_each_line_of_the_corpus_meets_its_situation_at_its_end():
    """A rule that has changed, or a situation that is no more: `python -m ci.corpus`."""
    assert [line for line in corpus.load() if corpus.step_of_situation(line) != len(line.commands) - 1] == []


def test_the_corpus_has_the_situations_in_the_sizes_of_the_presets_as_well():
    """That it has all that scopes reach is seen where they are explored (test_explorer)."""
    again = {line.situation for line in corpus.load() if line.origin == "random"}
    assert len(corpus.situations() - again) < 10


def test_the_traces_of_known_faults_are_lines():
    names = {line.situation for line in corpus.fault_lines()}
    assert {
        "finish_behind_the_window_sweep_caps_all_three_lengths",
        "a_turn_comes_back_to_nothing",
    } <= names
    assert any(isinstance(line.geometry, EngineConfig) for line in corpus.fault_lines())
