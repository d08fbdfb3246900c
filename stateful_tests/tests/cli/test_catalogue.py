"""kvspec bugs and kvspec clauses: what is listed, and how it is found by words of a report or by release."""

import json
import re
from pathlib import Path

import pytest

from ci import messages
from ci.cli import cli
from ci.commands.options.help_groups import CHECK_OPTIONS, COMMANDS
from ci.documents import bug_search, related_faults
from ci.documents.findings import is_of
from impl.engines import engine
from impl.system_spec import ENGINES
from reference.all_clauses import ALL_CLAUSES
from stateful_tests.lockstep.known_faults import known_faults, releases

README = Path(__file__).parents[3] / "README.md"
REGRESSIONS = Path(__file__).parents[3] / "fixtures" / "regressions"


@pytest.mark.parametrize(
    "words, listed, not_listed",
    [
        (["vllm==0.30.0", "preempted"], "preempted-request-publishes", "retract-ends-turn"),
        (["sglang", "retracts", "session"], "retract-ends-turn", "preempted-request-publishes"),
        (["sglang==0.5.14"], "split-leaf", "last-token"),
        (["vllm==0.33.0"], "turns-wait-for-each-other", "split-leaf"),
        (["vllm==0.33.0+offload"], "chunk-with-a-hole", "running-state-is-named-again"),
        (["vllm==0.33.0+pair"], "one-reader-frees-for-all", "turns-wait-for-each-other"),
        (["28754"], "last-token", "split-leaf"),
        (["40251"], "queued-abort-finishes-turn", "split-leaf"),
        (["36770"], "stores-pin-every-state", "split-leaf"),
    ],
)
def test_bugs_are_found_by_other_forms_of_a_word_and_by_release(words, listed, not_listed, kvspec):
    code, text, _ = kvspec("bugs", *words)
    assert code == 0
    assert listed in text
    assert not_listed not in text
    assert "not known" not in text


# What reporters wrote -> a bug that must be among the first four.
FOUND = {
    "memory leak detected": "claimed-page-is-lost",
    "Can not alloc mamba cache": "second-retract-takes-a-second-state",
    "Prefill out of memory": "chunk-without-room",
    "PD disaggregation": "dropped-answer-is-kept",
    "preemption garbage shared prefix async": "preempted-request-publishes",
    "a reused row must carry allocated KV": "nothing-to-resume",
    "deadlock in decode server": "parked-prompt-keeps-the-room",
    "deadlock in decode server after a retract": "retracted-request-shuts-the-decode-queue",
    "livelock": "fenced-victims-preempt-for-ever",
    "CPU offload garbage": "storage-outlives-new-weights",
    "nixl timeout": "abort-waits-for-the-lease",
    "lora adapter reload wrong answers": "reloaded-adapter-keeps-its-key",
    "wrong output after update_weights": "storage-outlives-new-weights",
    "server hangs after preemption with prefix caching": "request-preempts-itself-beside-a-turn",
    "wrong output with images under memory pressure": "drafter-looks-into-an-image",
    "multimodal encoder cache garbage": "image-of-a-preempted-request-counts-as-encoded",
}
# Words for which no bug is known -> what the answer must mention.
UNKNOWN = {
    "server hangs after abort offloading connector": "reset-blocks-new-requests",
    "index of states wrong units": "not reachable",
    "image prompts": "images of other engines are not",
    "LMCache": "OffloadingConnector and NixlConnector are driven",
    "throughput": "how fast",
}


def entries(text):
    """Return the rows of a listing as single lines: each with its indented lines below."""
    return [" ".join(entry.split()) for entry in re.split(r"\n(?=\S)", text)]


def answer(kvspec, query: str) -> list[str]:
    """Return the first line of the answer to these words, and the first four rows."""
    code, text, _ = kvspec("bugs", *query.split())
    assert code == 0
    return entries(text)[:5]


SAYS_UNKNOWN = "not known", "no bug has all of these words"


@pytest.mark.parametrize("query", FOUND)
def test_a_reporters_words_find_the_bug(query, kvspec):
    head, *rows = answer(kvspec, query)
    assert not head.startswith(SAYS_UNKNOWN)
    assert any(FOUND[query] in row for row in rows), rows


@pytest.mark.parametrize("query", UNKNOWN)
def test_words_that_no_bug_has_are_answered_with_not_known_and_the_nearest(query, kvspec):
    head, *rows = answer(kvspec, query)
    assert head.startswith(SAYS_UNKNOWN)
    assert any(UNKNOWN[query] in row for row in (head, *rows)), rows


def test_bugs_of_a_release_by_words_are_those_that_it_has(kvspec):
    """Bugs that only earlier releases had are not listed."""
    _, text, _ = kvspec("bugs", "vllm==0.33.0", "hangs", "after", "preemption", "--json")
    ids_found = {row["id"] for row in json.loads(text)} & known_faults().keys()
    assert ids_found
    assert {each for each in ids_found if not is_of(each, "vllm==0.33.0")} == set()


def test_a_bug_of_the_built_in_implementation_that_does_not_fit_is_behind_those_of_releases(kvspec):
    line = "memory leak detected! available_size=123, self.max_total_num_tokens=140"
    _, text, _ = kvspec("bugs", line, "--json")
    kinds = [row["kind"].partition(",")[0] for row in json.loads(text) if not row["fits"]]
    assert {*kinds} >= {"built in", "in releases"}
    first = kinds.index("built in")
    assert {*kinds[first:]} == {"built in"}


def test_the_examples_of_readme_are_answered(kvspec):
    examples = re.findall(r"^ +kvspec bugs (.*?)(?: +#.*)?$", README.read_text(), re.MULTILINE)
    assert examples
    for line in examples:
        code, text, _ = kvspec("bugs", *line.split())
        assert code == 0 and not text.startswith(("not known", "no bug has")), line


def test_a_word_that_no_bug_has_is_named(kvspec):
    _, text, _ = kvspec("bugs", "retract", "nonesuch")
    assert text.startswith("no bug has all of these words (nothing here mentions 'nonesuch')")


def test_a_misspelt_name_gets_a_suggestion(kvspec):
    _, text, _ = kvspec("bugs", "last-tokn")
    assert text.strip() == "no bug is named 'last-tokn'; is it last-token?"


def test_a_near_hit_says_which_words_it_lacks(kvspec):
    _, text, _ = kvspec("bugs", "drafter", "skips", "garbage")
    heading, first = text.splitlines()[1:3]
    assert heading.split() == ["bug", "kind", "clause", "lacks"]
    assert first.split() == ["drafter-skips-a-batch", "in", "releases", "DRAFT-1", "garbage"]


def test_a_word_that_is_near_to_nothing_gets_no_suggestion(kvspec):
    _, text, err = kvspec("bugs", "zzz")
    assert "nothing is near" in text
    assert not err


@pytest.mark.parametrize(
    "words, says",
    [
        (["bugs", "sglang==0.9.9"], "not one of the releases"),
        (["bugs", "vllm==0.33.0+warp"], "vllm has no way +warp"),
        (["clauses", "x" * 90], f"mentions '{'x' * 37}...'; without a name"),
    ],
)
def test_a_name_that_does_not_exist_is_unusable_input_in_one_line(words, says, kvspec):
    code, _, err = kvspec(*words)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["free-1", "FREE1", "Free-1"])
def test_a_clause_is_named_in_any_case(name, kvspec):
    code, text, _ = kvspec("clauses", name)
    assert code == 0 and text.splitlines()[0].split() == ["id", "FREE-1"]


def test_a_family_in_capitals_lists_only_its_clauses(kvspec):
    _, text, _ = kvspec("clauses", "FREE", "--json")
    assert [row["id"] for row in json.loads(text)] == ["FREE-1", "FREE-2"]


def test_the_same_word_in_lower_case_is_searched_for(kvspec):
    _, text, _ = kvspec("clauses", "free", "--json")
    assert len(json.loads(text)) > 2


def test_help_of_check_lists_each_option_once_in_its_group(kvspec):
    _, text, _ = kvspec("check", "--help")
    heads = [line for line in text.splitlines() if re.fullmatch(r"[A-Z][\w ]+:", line)]
    assert heads == [f"{heading}:" for heading in CHECK_OPTIONS]
    # Options of several checkouts stand in one line, of which this finds the first.
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)", text.partition(heads[0])[2], re.MULTILINE)
    for name in [option for names in CHECK_OPTIONS.values() for option in names]:
        assert options.count(name) == 1, name


def test_options_of_no_group_are_in_the_last_one(kvspec):
    _, text, _ = kvspec("check", "--help")
    assert "--help" not in {name for names in CHECK_OPTIONS.values() for name in names}
    assert text.rindex("\n" + [*CHECK_OPTIONS][-1]) < text.index("--help")


def test_help_names_each_way_to_run_an_engine(kvspec):
    _, text, _ = kvspec("check", "--help")
    impl = text.partition("--impl IMPL")[2].partition("--sglang-path, ")[0]
    named = {*re.findall(r"\+[a-z0-9+]+", impl)}
    assert named == {f"+{way}" for name in ENGINES for way in engine(name).ways if way}


def test_help_lists_each_command_once_in_its_group(kvspec):
    _, text, _ = kvspec("--help")
    heads = [line for line in text.splitlines() if re.fullmatch(r"[A-Z][\w ]+:", line)]
    assert heads == ["Options:", *(f"{heading}:" for heading in COMMANDS)]
    listed = re.findall(r"^  ([a-z][\w-]*)  ", text.partition("Check:")[2], re.MULTILINE)
    assert listed == [name for names in COMMANDS.values() for name in names]
    assert {*listed} == {*cli.commands}


@pytest.mark.parametrize("listed", ["bugs", "bugs vllm==0.33.0", "clauses", "driven vllm", "bugs chunk hole"])
def test_a_list_in_a_pipe_has_lines_of_100_characters_and_cuts_no_text(kvspec, listed):
    """A row begins with its name. Text that is too wide continues in indented lines below."""
    _, text, _ = kvspec(*listed.split())
    assert max(map(len, text.splitlines())) <= 100
    _, data, _ = kvspec(*listed.split(), "--json", "-")
    rows = json.loads(data)
    names = {entry.split()[0] for entry in entries(text)}
    shown = [row for row in rows if row["id"] in names]
    assert len(shown) > 3
    for row in shown:
        description = row.get("sentence") or row.get("title") or row["how"]
        assert " ".join(description.split()) in " ".join(text.split()), row


def test_a_bug_names_the_settings_that_avoid_it():
    """Each setting avoids the bug by itself. A condition with an "or", and one of the model, names none."""
    settings = {
        "preempted-turn-keeps-its-row": "without --enable-priority-scheduling",
        "request-behind-a-preemption-forgets-its-drafts":
            "without speculative decoding, or without --scheduling-policy priority",
        "left-out-request-reads-the-first-column":
            "with --no-async-scheduling, or without speculative decoding",
        "page-in-front-of-the-window-is-lost-0.5.13": "without SGLANG_OPT_SWA_EVICT_DROP_PAGE_MARGIN",
        "second-load-of-a-loaded-node":
            "without --enable-hierarchical-cache, or with another --hicache-write-policy than write_back",
        "unreceived-window-is-published": "without --disaggregation-decode-enable-radix-cache",
        "window-blocks-stored-after-reuse": "without the OffloadingConnector",
        "next-turn-waits-for-its-own-row": "",
        "last-token": "",
    }  # fmt: skip
    known = known_faults()
    assert {setting: related_faults.avoidance_text(known[setting]) for setting in settings} == settings


def test_a_bug_in_full_says_how_to_avoid_it(kvspec):
    _, text, _ = kvspec("bugs", "mixed-round-not-counted")
    assert re.search(r"^  avoid +without --enable-mixed-chunk, or without EAGLE *$", text, re.MULTILINE)


def test_bugs_with_one_cause_name_each_other():
    see_also = {fault: related_faults.related_faults(fault) for fault in known_faults()}
    for bug, others in see_also.items():
        for other in others:
            assert bug in see_also[other], other
    first_column = see_also["left-out-request-reads-the-first-column"]
    assert "request-behind-a-preemption-forgets-its-drafts" in first_column
    assert "end-asserts-behind-its-window" in see_also["swept-too-far"]


def test_a_list_of_bugs_has_the_conditions_of_each(kvspec):
    _, text, _ = kvspec("bugs", "chunk", "hole", "vllm")
    [line] = [line for line in entries(text) if line.startswith("chunk-with-a-hole")]
    assert "chunks of several blocks, and a window" in line


MESSAGES = json.loads(bug_search.MESSAGES.read_text())


def test_messages_of_releases_are_saved_for_every_fault_that_has_some():
    faults = {fault.id: fault for fault in known_faults().values() if messages.shows_message(fault)}
    assert MESSAGES.keys() == faults.keys()
    for fault, texts in MESSAGES.items():
        assert texts, fault
        assert texts.keys() <= {*faults[fault].traces}, fault


def test_words_of_reporters_are_for_known_faults_and_clauses():
    assert bug_search.reporter_words().said.keys() <= known_faults().keys()
    assert bug_search.reporter_words().symptoms.keys() <= {*ALL_CLAUSES, "BROKEN"}


@pytest.mark.parametrize("fault", ["nothing-to-resume", "busy-check-knows-one-pool", "longer-turn-raises"])
def test_the_saved_message_is_that_of_the_newest_release_with_the_fault(fault):
    [trace, *_] = MESSAGES[fault]
    known = known_faults()[fault]
    *_, newest = (release for release in releases(known.engine) if known.is_in(release))
    assert messages.message(trace, newest) == MESSAGES[fault][trace][-1], "python -m ci.messages"


def test_json_of_a_known_bug_has_its_stories_its_report_and_its_test(kvspec):
    _, text, _ = kvspec("bugs", "last-token", "--json")
    [row] = json.loads(text)
    assert len(row["story"]) == len(row["replay"])
    assert row["report"].endswith(".md")
    assert row["test"].endswith(".py")


def test_the_story_of_a_shrunk_trace_says_that_it_is_of_the_original(kvspec, tmp_path):
    trace = json.loads((REGRESSIONS / "a_batch_evicts_states_for_its_slots.json").read_text())
    trace["steps"].insert(0, trace["steps"][0] | {"holder": "h2"})
    long = tmp_path / "long.json"
    long.write_text(json.dumps(trace))
    small = tmp_path / "small.json"
    kvspec("shrink", str(long), "--impl", f"torch+{trace['bug']}", "--out", str(small))
    story = json.loads(small.read_text())["story"]
    assert story.startswith("(Shortened from 3 commands to 2; of the original:) The tree")


def test_a_line_of_a_log_may_mention_an_option(kvspec):
    code, text, _ = kvspec("bugs", "Decode", "out", "of", "memory", "--enable-mixed-chunk")
    assert code == 0
    fitting, _, nearest = text.partition("if that is not it, nearest:")
    assert "mixed-without-room" in fitting
    assert nearest.count("\n") > 2, "fewer than three are listed as nearest"


def test_the_list_of_built_in_bugs_says_where_those_of_releases_are(kvspec):
    _, text, err = kvspec("bugs")
    assert "in releases" not in text
    assert "`kvspec bugs vllm` lists those of releases" in err
    _, text, err = kvspec("bugs", "vllm")
    assert "in releases" in text and not err


def test_json_of_built_in_bugs_says_whether_they_were_reported_or_invented(kvspec):
    _, text, _ = kvspec("bugs", "--json")
    kinds = {row["id"]: row["kind"] for row in json.loads(text)}
    assert kinds["free-list-duplicate"] == "built in, invented"
    assert kinds["pr22900"] == "built in, as reported"
    assert {*kinds.values()} == {"built in, invented", "built in, as reported"}


def test_a_list_tells_bugs_in_releases_from_built_in_ones(kvspec):
    _, text, _ = kvspec("bugs", "vllm==0.33.0")
    assert all("in releases" in line for line in entries(text)[1:])
    _, text, _ = kvspec("bugs", "retract", "tail")
    [copied] = [line for line in entries(text) if line.startswith("pr22213-tail")]
    assert "built in, as reported" in copied
    assert "in releases" in text


def test_a_bug_in_full_says_whether_it_was_invented(kvspec):
    _, text, _ = kvspec("bugs", "free-list-duplicate")
    assert re.search(r"^  kind +built in, invented *$", text, re.MULTILINE)
