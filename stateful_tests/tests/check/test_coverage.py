"""The situations that a check must reach: the list of them, and who is asked for which."""

import re
from dataclasses import replace

import pytest

from impl.adapter import Capabilities
from reference.commands import Mode
from stateful_tests.check import campaign, tiers
from stateful_tests.coverage.required import FILE, Known, SituationsError, coverage, dump, elsewhere, load
from stateful_tests.coverage.scopes import SCOPES
from stateful_tests.generate.run_profile import MACHINES
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.results import MachineResult

KNOWN = load()
ALL = [MachineResult(m, preset, mode) for m in MACHINES for preset in ("page4", "no-swa") for mode in Mode]
EVERYTHING = dict.fromkeys(KNOWN.required, 1)


def test_the_list_is_written_as_it_is_read():
    assert FILE.read_text(encoding="utf-8") == dump(KNOWN)
    assert KNOWN.exempt.keys() <= KNOWN.situations.keys()
    assert KNOWN.beyond.keys().isdisjoint(KNOWN.situations), "a scope reaches it now"
    assert all(KNOWN.exempt.values()), "an exemption has a reason"


def test_the_list_has_what_scopes_can_have():
    """That it is what they reach is seen where they are explored (test_explorer)."""
    for name, scope in SCOPES.items():
        listed = {text for text, scopes in KNOWN.situations.items() if name in scopes}
        assert bool(listed) == (scope.takes == "seconds"), f"{name}: kvspec explore --situations"
    assert {name for names in KNOWN.situations.values() for name in names} <= SCOPES.keys()
    of_holders = elsewhere(SCOPES["tree-tiny"])
    assert "unlock, pins some" in of_holders and "decode, refused: no_swa" not in of_holders


def test_the_places_where_faults_hide_long_are_guarded():
    """Situations that a reviewer's faults needed, and random runs came to rarely."""
    wanted = [
        "evict, full, what was asked, a parent after its child",
        "admit, slot wiped, part of its key from the tree",
        "abort, in a batch, slot, with a prefix of the tree",
        "insert, goes on, nothing new",
        "insert, ends, nothing there, brings a tombstone, swept to inside a page",
        "finish, turn, commit past target, target below evicted, above a prefix of the tree, target inside a"
        " page, frees pages",
        "close, slot, others lock its path in the tree",
        "decode, refused: window_lost, and a page only from the tree",
    ]
    assert set(wanted) <= KNOWN.required.keys() - KNOWN.exempt.keys()


def test_everything_is_asked_of_whom_can_everything():
    found = coverage(EVERYTHING, ALL, Capabilities(swa_tail=True), KNOWN)
    assert (found.missing, found.left_out) == ([], {})
    assert len(found.reached) + len(found.exempt) == len(KNOWN.required)


def test_what_was_not_met_is_missing_unless_exempt():
    known = Known({"open": "why not"}, KNOWN.required)
    met = EVERYTHING | {"open": 0, "unlock, pins some": 0}
    found = coverage(met, ALL, Capabilities(), known)
    assert [wanted.text for wanted in found.missing] == ["unlock, pins some"]
    assert found.exempt == {"open": "why not"}


@pytest.mark.parametrize(
    "offers, machines, why",
    [
        ({}, [m for m in ALL if m.name == "sessions"], r"no (match|insert|unlock|evict) was driven"),
        ({}, [m for m in ALL if m.name == "sessions"], "a radix tree"),
        ({}, [m for m in ALL if m.preset == "no-swa"], "a window"),
        ({}, [m for m in ALL if m.mode is Mode.FAITHFUL], "free mode"),
        ({"commands": Capabilities().commands - {"SpecDecode"}}, ALL, "no spec_decode was driven"),
        ({"commands": Capabilities().commands - {"Retract"}}, ALL, "Retract is not offered"),
        ({"commands": Capabilities().commands - {"Close"}}, ALL, "Close is not offered"),
        ({"commands": Capabilities().commands - {"Open"}}, ALL, "Open is not offered"),
    ],
)
def test_what_cannot_be_is_left_out_and_said(offers, machines, why):
    found = coverage({}, machines, Capabilities(**offers), KNOWN)
    assert any(re.search(why, said) for said in found.left_out)
    counts = len(found.missing), len(found.exempt), sum(map(len, found.left_out.values()))
    assert sum(counts) == len(KNOWN.required) and all(counts[::2])


def test_nobody_without_sessions_gets_into_what_is_left_out():
    system = ReferenceSystem()
    system.capabilities = replace(system.capabilities, commands=Capabilities().commands - {"Open"})
    plan = tiers.plan("smoke", presets=("tight",), examples=6)
    result = campaign.run(system, plan)
    found = coverage(result.situations, result.machines, system.capabilities, KNOWN)
    left_out = found.left_out["Open is not offered"]
    assert len(left_out) > 80 and "submit, later turn" in left_out
    assert len(found.reached) > 100
    assert {*left_out} & result.situations.keys() == set()


def test_a_scope_enters_what_it_reaches_now():
    known = Known({}, {"open": ["session-tiny", "checks"], "gone": ["checks"], "older": ["no such scope"]})
    now = known.taken("checks", ["open", "new"])
    assert now.situations == {"new": ["checks"], "open": ["session-tiny", "checks"]}


def test_a_file_that_is_none_says_so(tmp_path):
    file = tmp_path / "list.json"
    with pytest.raises(SituationsError, match="No such file"):
        load(file)
    file.write_text('{"exempt": {}, "situations": {"open": 3}}')
    with pytest.raises(SituationsError, match=r"\$\.situations"):
        load(file)
    file.write_bytes(b'{"exempt": {}, "situations": {"\xff": []}}')
    with pytest.raises(SituationsError, match=r"list\.json: .*can't decode byte 0xff"):
        load(file)


