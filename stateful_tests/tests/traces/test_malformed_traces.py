"""A trace that cannot be read is refused in one line, which says where it is wrong and how."""

import gzip
import json
import os
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stateful_tests.tests.traces.documents import SCHEMA, document, geometry
from stateful_tests.traces.trace_files import TraceError, load, loads
from stateful_tests.traces.schema import MAX_BYTES, MAX_LENGTH

STEP = "$.steps[0]"


def reading(data: bytes | str | dict[str, Any]) -> str:
    """Return the error that `data` is refused with: one printable line."""
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
            f"{STEP}.prompt: must be texts (a to z), images",
        )
        for bad in ("8", "a", "a08", "a+1", "a8 b4", "a8\n", "a10000")
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
        (GOOD[:-1] + ', "x": [' + "[]," * 1_000_000 + "[]]}", "$.x: unknown field"),
        (b" " * (MAX_BYTES + 1), "larger than 16 MiB"),
    ],
    ids=range(19),
)
def test_hostile_bytes_are_refused_in_one_line(data, says):
    assert says in reading(data)


def test_too_many_steps_are_refused():
    step_text = json.dumps({"do": "open", "session": "s"})
    text = json.dumps(document(steps=[])).replace("[]", f"[{','.join([step_text] * 100_001)}]")
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
def test_an_unknown_fixture_name_suggests_the_nearest(name, says):
    with pytest.raises(TraceError) as caught:
        load(name)
    assert f"{name}: no fixture has that name; {says}" in str(caught.value)
