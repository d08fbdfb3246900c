"""kvspec check --impl sglang==all: the row of releases, and what ends it."""

import json


from ci.commands import release_row
from impl.sglang.releases.catalogue import TABLE

SMALL = ("--examples", "20", "--seed", "5", "--preset", "page2", "--machine", "sessions", "-j1")
ASKED = ("check", "--impl", "sglang==all", *SMALL)


def test_it_stands_for_all_releases_or_for_those_that_have_a_tree():
    assert release_row.names("sglang==all") == [f"sglang=={version}" for version in TABLE]
    assert release_row.names("sglang==all+overlap")[-1] == "sglang==0.5.23+overlap"
    rust = release_row.names("sglang==all+rust+overlap")
    assert rust[0] == "sglang==0.5.19+rust+overlap" and len(rust) == 5
    assert release_row.names("sglang==0.5.23") == []


def test_what_cannot_be_had_is_a_line_and_the_worst_exit_code_counts(kvspec, monkeypatch, tmp_path):
    systems = ["torch+pr22900", "sglang==9.9.9", "torch"]
    monkeypatch.setattr(release_row, "names", lambda impl: systems)
    code, out, err = kvspec(*ASKED, "--json", "row.json")
    assert code == 2
    assert "kvspec: sglang==9.9.9 is not supported" in err
    rows = [line.split("|") for line in out.splitlines() if line.startswith("|")]
    assert [row[1].strip() for row in rows[2:]] == ["torch+pr22900", "9.9.9", "torch"]
    assert "-" not in rows[2][4].split() and rows[4][4].strip() == "-"
    assert "9.9.9 is not supported" in rows[3][5]
    data = json.loads((tmp_path / "row.json").read_text())
    assert [row["exit_code"] for row in data["releases"]] == [1, 2, 0]
    assert data["releases"][2]["check"]["implementation"] == "torch"
    monkeypatch.setattr(release_row, "names", lambda impl: ["torch+pr22900", "torch"])
    assert kvspec(*ASKED)[0] == 1


def test_what_is_of_one_system_is_refused(kvspec):
    code, _, err = kvspec(*ASKED, "--junit", "x.xml")
    assert (code, err) == (2, "kvspec: --junit: goes with one system, not with --impl sglang==all\n")
