"""kvspec bugs: found by words of a bug report and by release."""

import json
from pathlib import Path

import pytest

REGRESSIONS = Path(__file__).parents[3] / "fixtures" / "regressions"


@pytest.mark.parametrize(
    "words, has, has_not",
    [
        (["preemption"], "preempted-request-publishes", "last-token"),
        (["vllm==0.30.0", "preempt"], "preempted-request-publishes", "retract-ends-turn"),
        (["sglang==0.5.20", "retract"], "retract-ends-turn", "pr22862"),
        (["sglang==0.5.14"], "split-leaf", "last-token"),
        (["EAGLE"], "last-token", "split-leaf"),
    ],
)
def test_bugs_are_found_by_other_forms_of_a_word_and_by_release(words, has, has_not, kvspec):
    code, text, _ = kvspec("bugs", *words)
    assert code == 0 and has in text and has_not not in text


@pytest.mark.parametrize(
    "words, says",
    [
        (["retract", "nonesuch"], "of each: retract "),
        (["sglang==0.9.9"], "not one of the releases"),
    ],
)
def test_what_no_bug_mentions_is_counted_word_by_word(words, says, kvspec):
    code, _, err = kvspec("bugs", *words)
    assert code == 2 and says in err and err.count("\n") == 1


def test_a_known_bug_in_full_has_its_stories_its_report_and_its_test(kvspec):
    _, text, _ = kvspec("bugs", "last-token", "--json")
    [row] = json.loads(text)
    assert len(row["story"]) == len(row["replay"])
    assert row["report"].endswith(".md") and row["test"].endswith(".py")


def test_a_shrunk_trace_says_of_what_its_story_is(kvspec, tmp_path):
    trace = json.loads((REGRESSIONS / "a_batch_evicts_states_for_its_slots.json").read_text())
    trace["steps"].insert(0, trace["steps"][0] | {"holder": "h2"})
    (long := tmp_path / "long.json").write_text(json.dumps(trace))
    into = tmp_path / "small.json"
    kvspec("shrink", str(long), "--impl", f"torch+{trace['bug']}", "--out", str(into))
    story = json.loads(into.read_text())["story"]
    assert story.startswith("(Shortened from 3 commands to 2; of the original:) The tree")
