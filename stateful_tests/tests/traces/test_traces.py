"""The trace format: what is written can be read, and its schema and README describe it."""

import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci import cli
from ci.documents import new_trace
from ci.documents.new_trace import recipes
from reference.blocks.config import EngineConfig
from reference.commands import (
    COMMANDS, Broken, Choice, Done, EvictSwa, Insert, Match, Mode, Open, Piece, Reason, Refused, Submit,
    kind_name,
)  # fmt: skip
from reference.geometry import PRESETS
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.tests.support.commands import commands, names
from stateful_tests.tests.traces.documents import SCHEMA, document
from stateful_tests.traces import trace_files as traces
from stateful_tests.traces.trace_files import TraceError, dump, load, loads, save
from stateful_tests.traces.schema import FORMATS, MAX_LENGTH, in_words

README = traces.SCHEMA_PATH.parent / "README.md"

cursors = st.none() | st.integers(0, MAX_LENGTH)
choices = st.builds(Choice, names, cursors, cursors, st.booleans())
outcomes = st.one_of(
    st.builds(Done, st.lists(choices, max_size=2).map(tuple)),
    st.builds(Refused, st.sampled_from(Reason)),
)
prose = st.text(st.characters(exclude_categories=["Cc", "Cs"]) | st.just("\n"), max_size=60)


@st.composite
def whole_traces(draw: st.DrawFn) -> Trace:
    steps = draw(st.lists(commands, max_size=8))
    stated = draw(st.lists(st.none() | outcomes, min_size=len(steps), max_size=len(steps)))
    return Trace(
        geometry=replace(
            draw(st.sampled_from(list(PRESETS.values()))),
            tree=draw(st.booleans()),
            settings=draw(st.sampled_from([(), (("A", "1"),), (("A", "0.5"), ("B_c.d", "x:y"))])),
        ),
        mode=draw(st.sampled_from(Mode)),
        commands=tuple(steps),
        origin=draw(st.sampled_from(["hand-written", "generated", "minimised", "recorded"])),
        bug=draw(st.sampled_from([None, "pr22900", "pr22862-tail"])),
        clause=draw(st.sampled_from([None, "LEN-2", "BROKEN"])),
        story=draw(prose),
        expected=tuple((i, outcome) for i, outcome in enumerate(stated) if outcome is not None),
    )


@given(whole_traces())
def test_a_written_trace_is_read_back_unchanged(trace):
    text = dump(trace)
    assert loads(text.encode(), "t") == trace
    assert dump(loads(text.encode(), "t")) == text
    assert text.endswith("}\n")
    SCHEMA.validate(json.loads(text))


def test_the_header_comes_first_and_every_step_has_a_line():
    trace = Trace(
        PRESETS["page2"], Mode.FREE, (Open("s1"), Submit("r1", "s1", 4)), expected=((0, Done()),)
    )
    lines = dump(trace).splitlines()
    assert [re.match(r' *"?(\w*)', line)[1] for line in lines[1:12]] == [
        "format", "version", "spec", "kind", "geometry", "mode", "origin", "bug", "clause", "story",
        "steps",
    ]  # fmt: skip
    assert lines[12:] == [
        '    {"do": "open", "session": "s1", "expect": "done"},',
        '    {"do": "submit", "request": "r1", "session": "s1", "tokens": 4}',
        "  ]",
        "}",
    ]


@pytest.mark.parametrize("file", [
    "regressions/a_trim_frees_the_tail.json",
    "releases/vllm-0.33.0/a_turn_that_ends_within_a_round_leaves_a_state_that_is_too_far.json",
    "releases/sglang-0.5.18+hicache/a_split_loses_the_lock_on_swa_kv_of_the_host.json",
])  # fmt: skip
def test_a_trace_of_version_1_is_read_and_upgraded(file, tmp_path, kvspec):
    """It has an engine in the place of a kind, and none where the trace gives each batch."""
    now = (traces.FIXTURES / file).read_text()
    old = json.loads(now) | {"version": 1}
    engine = {"rows": None, "blocks": "vllm", "tiers": "sglang"}[old.pop("kind")]
    old |= {"engine": engine} if engine else {}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    assert load(path) == load(traces.FIXTURES / file)
    code, out, _ = kvspec("upgrade", str(path), str(traces.FIXTURES / file))
    assert code == 0 and "1 upgraded, 1 of the present format already" in out
    assert path.read_text() == now
    path.write_text(json.dumps(old))
    code, _, said = kvspec("upgrade", str(path), str(tmp_path / "none.json"))
    assert code == 2
    assert "none.json" in said
    assert json.loads(path.read_text()) == old


def test_a_prompt_is_a_compact_string():
    prompt = (Piece("a", 8), Piece("b", 4))
    commands = (
        Submit("r1", None, 0, prompt=prompt),
        Insert("h1", prompt, 4, chunked=True),
        Match("h2", ()),
    )
    text = dump(Trace(replace(PRESETS["page4"], tree=True), Mode.FREE, commands))
    assert [line.strip().rstrip(",") for line in text.splitlines()[-5:-2]] == [
        '{"do": "submit", "request": "r1", "session": null, "tokens": 0, "prompt": "a8b4"}',
        '{"do": "insert", "holder": "h1", "prompt": "a8b4", "evicted": 4, "chunked": true}',
        '{"do": "match", "holder": "h2", "prompt": ""}',
    ]
    assert loads(text.encode(), "t").commands == commands


def test_saving_is_atomic_and_makes_the_folder(tmp_path):
    path = tmp_path / "deep" / "t.json"
    trace = Trace(PRESETS["page1"], Mode.FREE, (Open("s1"),))
    save(trace, path)
    before = path.read_bytes()
    with pytest.raises(TraceError):
        save(Trace(PRESETS["page1"], Mode.FREE, (Open("no spaces allowed"),)), path)
    assert path.read_bytes() == before
    assert load(path) == trace
    assert os.listdir(path.parent) == ["t.json"]


@pytest.mark.parametrize(
    ("trace", "where"),
    [
        (Trace(PRESETS["page1"], Mode.FREE, (Open("x" * 33),)), "$.steps[0].session"),
        (Trace(PRESETS["page1"], Mode.FREE, (EvictSwa("r", 1 << 70),)), "$.steps[0].length"),
        (
            Trace(PRESETS["page1"], Mode.FREE, (Match("h", (Piece("a", 10**4),)),)),
            "$.steps[0].prompt",
        ),
        (Trace(PRESETS["page1"], Mode.FREE, (Open("s"),), expected=((0, Broken("x")),)), "$.steps"),
        (Trace(PRESETS["page1"], Mode.FREE, (), story="\x1b[2J"), "$.story"),
        (Trace(PRESETS["page1"], Mode.FREE, (), story="\ud800"), "$"),
    ],
)
def test_a_trace_that_the_format_cannot_hold_is_not_written(trace, where):
    with pytest.raises(TraceError) as caught:
        dump(trace)
    assert caught.value.path == where


def test_the_published_schema_is_the_generated_one(request):
    if request.config.getoption("accept"):
        traces.SCHEMA_PATH.write_text(traces.schema_text())
    assert traces.SCHEMA_PATH.read_text() == traces.schema_text(), "--accept"
    jsonschema.Draft202012Validator.check_schema(traces.schema())
    SCHEMA.validate(document())


def test_the_readme_has_the_fields_of_each_command(request):
    rows = [f"| `{kind_name(kind)}` | {in_words(kind)} |" for kind in COMMANDS]
    table = "\n".join(["| `do` | fields |", "|---|---|", *rows])
    before, rest = README.read_text().split("<!-- commands -->\n")
    now, after = rest.split("<!-- end -->")
    if request.config.getoption("accept"):
        README.write_text(f"{before}<!-- commands -->\n{table}\n<!-- end -->{after}")
    assert now == f"{table}\n", "--accept"


def test_the_readme_has_the_recipe_of_each_kind(request):
    before, rest = README.read_text().split("<!-- recipes -->\n")
    now, after = rest.split("<!-- end of recipes -->")
    if request.config.getoption("accept"):
        README.write_text(f"{before}<!-- recipes -->\n{recipes()}<!-- end of recipes -->{after}")
    assert now == recipes(), "--accept"


@pytest.mark.parametrize(
    "impl",
    [
        "torch", "sglang==0.5.23", "sglang==0.5.23+overlap", "sglang==0.5.23+hicache", "vllm==0.33.0",
        "vllm==0.33.0+async", "vllm==0.33.0+v2", "vllm==0.33.0+offload", "vllm==0.33.0+async+offload",
        "vllm==0.33.0+images", "vllm==0.33.0+async+images", "vllm==0.33.0+pair", "lmdeploy==0.18.0",
        "lmdeploy==0.18.0+pair", "transformers==5.23.0",
    ],
)  # fmt: skip
def test_a_trace_to_start_from_conforms_and_has_a_page(impl, tmp_path, monkeypatch, capsys):
    """Of each kind and way to run, without a refusal."""
    monkeypatch.chdir(tmp_path)
    assert cli.run(["new-trace", "--impl", impl]) == 0
    assert f"kvspec replay by_hand.json --impl {impl}" in capsys.readouterr().out
    assert cli.run(["replay", "by_hand.json", "--impl", impl]) == 0
    assert "refused" not in capsys.readouterr().out
    page = Path("by_hand.md").read_text()
    steps = re.findall(r"^\| \d+ \| .* \| .+ \|$", page, re.MULTILINE)
    assert len(steps) == len(load("by_hand.json").commands)
    assert "1. " in page
    assert "| `do` | fields |" in page
    assert f"--impl {impl}" in page
    assert cli.run(["new-trace", "--impl", impl]) == 2


def test_the_page_of_a_new_trace_explains_each_size_of_an_engine():
    text = new_trace._sizes_text(EngineConfig)
    assert text.startswith("Sizes and switches of one engine.")
    explained = re.findall(r"^([a-z_]+): .", text, re.MULTILINE)
    assert explained == [field.name for field in fields(EngineConfig) if field.name != "groups"]


def test_a_replay_shows_encoded_and_cached_images(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cli.run(["new-trace", "--impl", "vllm==0.33.0+images"])
    trace = json.loads(Path("by_hand.json").read_text())
    trace["config"] |= {"encoder_cache": 3, "encoder_budget": 3}
    Path("small.json").write_text(json.dumps(trace))
    capsys.readouterr()
    assert cli.run(["replay", "small.json", "--impl", "vllm==0.33.0+images"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    about = [line for line in lines if line.startswith(("encodes", "image "))]
    assert about[:6] == [
        "encodes A3",
        "image A3 kept, needed by r1",
        "image A3 kept, needed by nobody",
        "image A3 kept, needed by r2",
        "image A3 kept, needed by nobody",
        "encodes B3",
    ]
    assert about[6:8] == ["image A3 is no longer kept", "image B3 kept, needed by r3"]


def test_the_readme_documents_the_trace_format():
    text = README.read_text()
    example = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    trace = loads(example[1].encode(), "README.md")
    assert trace.bug == "pr22897"
    assert dict(trace.expected)[6] == Refused(Reason.UNKNOWN_REQUEST)
    for word in [*Reason, *msgspec.structs.asdict(_file(trace))]:
        assert f"`{word}`" in text, word


def _file(trace: Trace) -> Any:
    return msgspec.json.decode(dump(trace).encode(), type=FORMATS["rows"].struct)
