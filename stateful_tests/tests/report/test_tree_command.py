"""`kvspec tree`: the drawing of the radix tree, and traces with one in the other commands."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ci.report import tree_view
from reference.commands import Insert, Match, Mode
from reference.geometry import PRESETS
from stateful_tests.lockstep.results import Trace
from stateful_tests.tests.support.commands import script
from stateful_tests.traces.files import prompt_of, save

TREE = replace(PRESETS["page4"], tree=True)  # a window of 6 tokens: two pages
COMMANDS = script(
    "insert h1 a16b4 SWA from 4; insert h1 a8c4 SWA from 4; match h2 a12c4; match h3 d4;"
    " submit r1 (no session) a8c4 +3; admit r1; extend r1 +3; evict full 0 swa 4"
)
WHOLE = Trace(TREE, Mode.FREE, COMMANDS)


def drawn(out: str) -> list[str]:
    """Lines without the guides of the drawing."""
    guides = dict.fromkeys(map(ord, "│├└─"), " ")
    return [" ".join(line.translate(guides).split()) for line in out.splitlines()]


def saved(trace: Trace) -> str:
    save(trace, "t.json")
    return "t.json"


def test_nodes_with_why_they_stay_and_when_they_go(kvspec):
    code, out, err = kvspec("tree", saved(WHOLE), "--step", "2")
    assert (code, err) == (0, "")
    assert drawn(out) == [
        "t.json after step 2: match h2 a12c4 (done)",
        "root",
        "[0, 4) a4: 1 full page, SWA tombstone",
        "full: pinned by h2",
        "[4, 8) a4: 1 full page, SWA live",
        "full: pinned by h2",
        "SWA: pinned by h2",
        "[8, 12) a4: 1 full page, SWA live",
        "full: pinned by h2",
        "SWA: pinned by h2",
        "[12, 20) a4 b4: 2 full pages, SWA live",
        "full: LRU 1 (goes first)",
        "SWA: LRU 1 (goes first), takes the node with it",
        "[8, 12) c4: 1 full page, SWA live",
        "full: LRU 2",
        "SWA: LRU 2, takes the node with it",
        "",
        "tokens evictable protected free total",
        "",
        "full 12 12 24 48",
        "swa 12 8 16 36",
        "",
        "lock holder h2 locks [0, 12) a12: pins 8 SWA tokens, a window needs 8",
    ]


def test_inner_nodes_wait_for_what_is_below_them(kvspec):
    _, out, _ = kvspec("tree", saved(WHOLE), "--step", "0")
    assert drawn(out)[2:7] == [
        "[0, 4) a4: 1 full page, SWA tombstone",
        "full: LRU 2, inner node: a8 below it",
        "[4, 12) a8: 2 full pages, SWA live",
        "full: LRU 2, inner node: a4 b4 below it",
        "SWA: LRU 1 (goes first), leaves a tombstone",
    ]


def test_the_last_step_is_the_default_and_holders_are_told_apart(kvspec):
    path = saved(Trace(TREE, Mode.FREE, (*COMMANDS, *script("open s1; submit r2 in s1 +1; admit r2"))))
    _, out, _ = kvspec("tree", path)
    assert drawn(out)[0] == "t.json after step 10: admit r2 (done)"
    assert drawn(out)[-4:] == [
        "lock holder h2 locks [0, 12) a12: pins 8 SWA tokens, a window needs 8",
        "lock holder h3 has nothing locked",
        "request r1 locks [0, 12) a8 c4: pins 8 SWA tokens, a window needs 8",
        "session s1 has nothing locked",
    ]


def test_a_tree_without_a_window(kvspec):
    none = replace(PRESETS["no-swa"], tree=True)
    path = saved(Trace(none, Mode.FREE, (Insert("h1", prompt_of("a8")), Match("h2", prompt_of("a4")))))
    _, out, _ = kvspec("tree", path)
    assert "SWA" not in out and "swa" not in out
    assert drawn(out)[-1] == "lock holder h2 locks [0, 4) a4"
    assert drawn(kvspec("tree", path, "--step", "0")[1])[1:4] == [
        "root", "[0, 8) a8: 2 full pages", "full: LRU 1 (goes first)",
    ]  # fmt: skip


def test_large_trees_are_cut_in_the_drawing_alone(kvspec, monkeypatch):
    monkeypatch.setattr(tree_view, "MAX_NODES", 4)
    path = saved(Trace(TREE, Mode.FREE, COMMANDS[:2]))
    _, out, _ = kvspec("tree", path, "--json", "t2.json")
    assert "1 more nodes are left out here" in out
    assert len(json.loads(Path("t2.json").read_text())["nodes"]) == 5


def test_json_has_every_figure(kvspec):
    path = saved(Trace(TREE, Mode.FREE, COMMANDS[:3]))
    code, out, err = kvspec("tree", path, "--json", "-")
    data = json.loads(out)
    assert code == 0 and "after step 2" in err, "the text goes to stderr"
    assert (data["format"], data["version"], data["step"]) == ("kvspec-tree", 1, 2)
    assert data["nodes"][2] == {
        "start": 8, "end": 12, "text": "a4", "parent": 1, "children": ["a4 b4"], "pages": 1, "swa": "live",
        "full_locked_by": ["h2"], "swa_locked_by": ["h2"], "full_rank": None, "swa_rank": None,
    }  # fmt: skip
    assert data["pools"][1] == {"pool": "swa", "evictable": 12, "protected": 8, "free": 16, "total": 36}
    assert data["locks"] == [
        {"holder": "h2", "kind": "lock holder", "length": 12, "text": "a12", "pins": 8, "needs": 8}
    ]


@pytest.mark.parametrize(
    ("trace", "options", "says"),
    [
        (Trace(PRESETS["page4"], Mode.FREE, COMMANDS), (), "t.json: there is no radix tree in its geometry"),
        (Trace(TREE, Mode.FREE, ()), (), "t.json: the trace has no steps"),
        (WHOLE, ("--step", "8"), "t.json: there is no step 8; the trace has steps 0 to 7"),
    ],
)
def test_unusable_input_is_one_line(kvspec, trace, options, says):
    code, out, err = kvspec("tree", saved(trace), *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_replay_tells_what_changed_in_the_tree(kvspec):
    code, out, _ = kvspec("replay", saved(WHOLE), "--impl", "reference")
    assert code == 0
    flat = " ".join(out.split())
    assert "swa_pages 9, rows 4, width 32, tree" in flat
    assert "0 insert h1 a16b4 SWA from 4 done + [0, 4) a4, tombstone" in flat
    assert "7 evict full 0 swa 4 done; freed full 8 swa 8 - [12, 20)" in flat
