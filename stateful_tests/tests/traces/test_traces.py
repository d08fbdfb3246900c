"""The trace format: what is written can be read, and what cannot be read is reported in one line."""

import gzip
import json
import os
import re
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci import cli
from ci.documents.new_trace import recipes
from reference.commands import (
    COMMANDS, Broken, Choice, Done, EvictSwa, Insert, Match, Mode, Open, Piece, Reason, Refused, Submit,
    kind_name,
)  # fmt: skip
from reference.geometry import PRESETS, Geometry
from stateful_tests.lockstep.results import Trace
from stateful_tests.tests.support.commands import commands, names
from stateful_tests.traces import files as traces
from stateful_tests.traces.files import TraceError, dump, load, loads, save
from stateful_tests.traces.schema import FORMATS, MAX_BYTES, MAX_LENGTH, in_words

README = traces.SCHEMA_PATH.parent / "README.md"

SCHEMA = jsonschema.Draft202012Validator(traces.schema())

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


def document(**changes: Any) -> dict[str, Any]:
    """A valid document with some header fields changed; MISSING takes a field out."""
    small = PRESETS["page2"]
    made = {
        "format": "kvspec-trace",
        "version": 2,
        "spec": "1",
        "kind": "rows",
        "geometry": {
            f.name: getattr(small, f.name) for f in fields(Geometry) if f.name != "settings"
        },
        "mode": "free",
        "origin": "hand-written",
        "steps": [
            {"do": "open", "session": "s1"},
            {"do": "extend", "lanes": [{"request": "r1", "tokens": 4}]},
        ],
    }
    return {k: v for k, v in {**made, **changes}.items() if v is not MISSING}


def geometry(**changes: Any) -> dict[str, Any]:
    return {**document()["geometry"], **changes}


def reading(data: bytes | str | dict[str, Any]) -> str:
    """The error that `data` is refused with: one printable line."""
    if isinstance(data, dict):
        data = json.dumps(data)
    if isinstance(data, str):
        data = data.encode()
    with pytest.raises(TraceError) as caught:
        loads(data, "bad.json")
    line = str(caught.value)
    assert line.startswith("bad.json: ")
    assert line.isprintable()
    assert len(line) < 600
    return line


@given(whole_traces())
def test_what_is_written_can_be_read_back(trace):
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
    assert code == 2 and "none.json" in said and json.loads(path.read_text()) == old


def test_a_prompt_is_a_compact_string():
    prompt = (Piece("a", 8), Piece("b", 4))
    commands = (
        Submit("r1", None, 0, prompt=prompt),
        Insert("h1", prompt, 4, True),
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
def test_what_the_format_cannot_hold_is_not_written(trace, where):
    with pytest.raises(TraceError) as caught:
        dump(trace)
    assert caught.value.path == where


STEP = "$.steps[0]"


def steps(*made: dict[str, Any]) -> dict[str, Any]:
    return document(steps=list(made))


MALFORMED: list[tuple[dict[str, Any], str]] = [
    (document(format="other"), "$.format: "),
    (document(version="1"), "$.version: must be a whole number"),
    (document(version=7), "$.version: 7 is newer than this kvspec reads (1, 2)"),
    (document(version=0), "$.version: 0 is not what this kvspec reads (1, 2)"),
    (document(kind="engine"), "$.kind: must be one of rows, blocks, tiers"),
    (document(kind=MISSING), "$.kind: must be one of rows, blocks, tiers"),
    (
        document(version=1, engine="lmdeploy"),
        "$.engine: must be vllm or sglang in a trace of version 1",
    ),
    (document(mode="fast"), "$.mode: 'fast' is no value here; one of free, faithful"),
    (document(mode="faithfull"), "$.mode: 'faithfull' is no value here; did you mean faithful?"),
    (document(mode=MISSING), "$.mode: is missing: free or faithful"),
    (document(steps=MISSING), "$.steps: is missing"),
    (document(steps=[[]]), "$.steps[0]: expected object, got array"),
    (document(extra=1), "$.extra: unknown field"),
    (document(story="a\x1b[31m"), "$.story: "),
    (document(bug="../../etc"), "$.bug: "),
    (document(clause="len-2"), "$.clause: "),
    (document(geometry=geometry(page_size=0)), "$.geometry.page_size: "),
    (
        document(geometry=geometry(pages=1)),
        "$.geometry.pages: unknown field; did you mean swa_pages? ",
    ),
    (document(geometry=geometry(rows=None)), "$.geometry.rows: "),
    (document(geometry=geometry(settings={"A": "x y"})), "$.geometry.settings"),
    (document(geometry=geometry(settings={"A=B": "1"})), "$.geometry.settings"),
    (steps({"session": "s"}), f"{STEP}.do: is missing; the commands: open, "),
    (
        steps({"do": "fly", "session": "s"}),
        f"{STEP}.do: no command is called 'fly'. The commands: open, ",
    ),
    (
        steps({"do": "admitt", "request": "r"}),
        f"{STEP}.do: no command is called 'admitt'; did you mean admit?",
    ),
    (
        steps({"do": "open", "sesion": "s"}),
        f"{STEP}.sesion: unknown field; did you mean session? The fields of open: do, session, expect",
    ),
    (
        steps({"do": "extend", "lanes": [{"request": "r", "token": 1}]}),
        f"{STEP}.lanes[0].token: unknown field; did you mean tokens? The fields: request, tokens, tail",
    ),
    (
        steps({"do": "admit", "request": "r 1"}),
        f"{STEP}.request: contains a character that is not allowed here; a name has A-Z a-z 0-9 _ . - alone",
    ),
    (
        steps({"do": "close", "session": "s", "expect": {"refused": "wrongphase"}}),
        f"{STEP}.expect.refused: 'wrongphase' is no value here; did you mean wrong_phase?",
    ),
    (steps({"do": "open"}), f"{STEP}.session: is missing"),
    (steps({"do": "open", "session": "x" * 33}), f"{STEP}.session: "),
    (steps({"do": "open", "session": "s\n"}), f"{STEP}.session: "),
    (steps({"do": "open", "session": "s", "x\x1b[1m": 1}), f"{STEP}.x?[1m: unknown field"),
    (
        steps({"do": "submit", "request": "r", "session": "s", "tokens": "4"}),
        f"{STEP}.tokens: expected int",
    ),
    (
        steps({"do": "submit", "request": "r", "session": "s", "tokens": MAX_LENGTH + 1}),
        f"{STEP}.tokens: ",
    ),
    (steps({"do": "extend", "lanes": [{"request": "r", "tokens": 1}] * 257}), f"{STEP}.lanes: "),
    (steps({"do": "decode", "requests": ["r", 7]}), f"{STEP}.requests[1]: "),
    *(
        (
            steps({"do": "match", "holder": "h", "prompt": bad}),
            f"{STEP}.prompt: must be texts (a to z)",
        )
        for bad in ("8", "a", "a08", "a+1", "A8", "a8 b4", "a8\n", "a10000")
    ),
    (steps({"do": "match", "holder": "h", "prompt": "a1" * 33}), f"{STEP}.prompt: "),
    (steps({"do": "close", "session": "s", "expect": {}}), f"{STEP}.expect: "),
    (
        steps({"do": "close", "session": "s", "expect": {"refused": "mood"}}),
        f"{STEP}.expect.refused: ",
    ),
    (
        steps({"do": "close", "session": "s", "expect": {"refused": "empty", "done": []}}),
        f"{STEP}.expect: expected one of done and refused",
    ),
    (
        steps({"do": "admit", "request": "r", "expect": {"done": [{"request": "", "kv": 0}]}}),
        f"{STEP}.expect.done[0].request: ",
    ),
]


@pytest.mark.parametrize(("made", "says"), MALFORMED, ids=[says for _, says in MALFORMED])
def test_a_malformed_field_is_named(made, says):
    assert f"bad.json: {says}" in reading(made)
    if any(problem in says for problem in ("geometry.page_size", "geometry.rows")):
        return
    with pytest.raises(jsonschema.ValidationError):
        SCHEMA.validate(made)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (document(geometry=geometry(window=None)), "$.geometry.swa_pages: must be 0"),
        (
            document(geometry=geometry(page_size=1024, full_pages=1 << 14)),
            "$.geometry.full_pages: ",
        ),
        (document(geometry=geometry(rows=1024, width=1 << 14)), "$.geometry.rows: "),
    ],
)
def test_sizes_that_do_not_fit_together_are_named(made, says):
    assert says in reading(made)


GOOD = json.dumps(document())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("", "is empty"),
        ("hello", "is not JSON"),
        ("[]", "$: expected object, got array"),
        (GOOD[:-1], "is not JSON: it ends too early"),
        (GOOD + "x", "is not JSON: "),
        (
            GOOD.replace("2,", "2\n,,", 1),
            "is not JSON: object keys must be strings at line 2 column 2",
        ),
        (GOOD.replace('tokens": 4', 'tokens": NaN'), "is not JSON: "),
        (
            GOOD.replace('tokens": 4', 'tokens": 4.0'),
            "$.steps[1].lanes[0].tokens: expected int, got float",
        ),
        (GOOD.replace('tokens": 4', 'tokens": 1e999'), "$.steps[1].lanes[0].tokens: "),
        (GOOD.replace('tokens": 4', 'tokens": ' + "9" * 1_000_000), "$.steps[1].lanes[0].tokens: "),
        (
            GOOD.replace('"session": "s1"', '"session": "s1", "session": "s2"'),
            "'session' is given twice",
        ),
        (GOOD.replace('"s1"', '"\\ud800"'), "bad.json: "),
        (b"\xef\xbb\xbf" + GOOD.encode(), "starts with a byte order mark"),
        (gzip.compress(GOOD.encode()), "is packed with gzip; a trace is JSON"),
        (GOOD.encode("utf-16"), "is not UTF-8 (byte 0)"),
        ('{"x":' + "[" * 100_000, "is nested too deeply"),
        (
            GOOD.replace("2,", '0, "x":' + "[" * 100_000 + "]" * 100_000 + ",", 1),
            "is nested too deeply",
        ),
        (GOOD[:-1] + ', "x": [' + "[]," * 4_000_000 + "[]]}", "$.x: unknown field"),
        (b" " * (MAX_BYTES + 1), "larger than 16 MiB"),
    ],
    ids=range(19),
)
def test_hostile_bytes_are_refused_in_one_line(data, says):
    assert says in reading(data)


def test_too_many_steps_are_refused():
    one = json.dumps({"do": "open", "session": "s"})
    text = json.dumps(document(steps=[])).replace("[]", f"[{','.join([one] * 100_001)}]")
    assert "$.steps: expected array of length <= 100000" in reading(text)


not_as_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")


def _no_rights(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "not a regular file"),
        (lambda path: os.mkfifo(path), "not a regular file"),
        pytest.param(_no_rights, "Permission denied", marks=not_as_root),
    ],
)
def test_paths_that_are_no_readable_file(tmp_path, make, says):
    path = tmp_path / "bad\n.json"
    make(path)
    with pytest.raises(TraceError) as caught:
        load(path)
    assert str(caught.value) == f"{tmp_path}/bad?.json: {says}"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("@retract_counts_as_finish", "did you mean @a_retract_counts_as_a_finish or @"),
        ("@retract", "did you mean @"),
        ("@the_tail_of_a_trim", "did you mean @a_trim_frees_the_tail"),
        ("@LEN-2", "`kvspec bugs WORD` names those of a bug"),
    ],
)
def test_a_name_that_no_fixture_has_finds_its_nearest(name, says):
    with pytest.raises(TraceError) as caught:
        load(name)
    assert f"{name}: no fixture has that name; {says}" in str(caught.value)


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
        "vllm==0.33.0+pair", "lmdeploy==0.18.0", "transformers==5.23.0",
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
    assert "1. " in page and "| `do` | fields |" in page and f"--impl {impl}" in page
    assert cli.run(["new-trace", "--impl", impl]) == 2


def test_the_readme_keeps_its_word():
    text = README.read_text()
    example = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    trace = loads(example[1].encode(), "README.md")
    assert trace.bug == "pr22897"
    assert dict(trace.expected)[6] == Refused(Reason.UNKNOWN_REQUEST)
    for word in [*Reason, *msgspec.structs.asdict(_file(trace))]:
        assert f"`{word}`" in text


def _file(trace: Trace) -> Any:
    return msgspec.json.decode(dump(trace).encode(), type=FORMATS["rows"].struct)
