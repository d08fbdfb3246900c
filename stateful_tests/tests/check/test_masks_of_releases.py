"""Known faults of real releases as masks: they are there; a mend, or another fault, is told apart."""

import io
import os
import shutil
from contextlib import closing
from dataclasses import replace

import pytest

from ci.documents.findings import known_bugs
from ci.export import bug_report
from ci.report import report_data as report
from ci.report import text_output, run_text
from impl.torch_kv import TorchKV
from reference.commands import (
    Abort, Decode, Retract,
)  # fmt: skip
from reference.failures import Failure

from stateful_tests.check.known_faults import explanation
from stateful_tests.check.campaign import run
from stateful_tests.check.known_faults.explanation import (
    Explained, explaining_masks, known_fault, shape_of,
)  # fmt: skip
from stateful_tests.check.known_faults.masks import (
    masks,
)  # fmt: skip
from stateful_tests.check.check_plans import plan
from stateful_tests.check.known_faults.causes import without_needs, needs
from stateful_tests.lockstep.known_faults import FOLDER, of_system
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Violation
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.night import at_night
from stateful_tests.tests.support.patched_code import replace_once
from stateful_tests.tests.support.planted_faults import checkout_with, planted_faults
from stateful_tests.traces.trace_files import load, prompt_of, save
from stateful_tests.tests.check.test_masks import KNOWN, THREE


@pytest.mark.parametrize("name", ["0.5.23", "0.5.23+overlap", "0.5.14"])
def test_the_known_faults_of_a_release_reproduce_and_state_their_needs(name, release):
    system = release(name)
    known_masks = list(masks(system))
    requested = [fault.id for fault in of_system("sglang", system.release, name.split("+")[1:])]
    can = system.capabilities
    masks_by_trace = {  # of every way, by traces with recurrent state alone
        "queued-abort-finishes-turn": can.recurrent or can.tracks,
        "second-retract-takes-a-second-state": can.recurrent,
    }
    requested = [fault for fault in requested if masks_by_trace.get(fault, True)]
    assert [mask.fault.id for mask in known_masks] == requested
    gone_faults = [mask.fault.id for mask in known_masks if not mask.holds]
    assert gone_faults == []


@pytest.mark.parametrize(
    ("file", "needed"),
    [
        (
            "0.15.0/two_waiting_turns_hold_each_others_blocks",
            {"a next turn", "pools that run full"},
        ),
        (
            "0.19.0/a_turn_longer_than_the_model_waits_for_ever",
            {"a next turn", "a text longer than the model", "pools that run full"},
        ),
    ],
)
def test_two_stalls_of_an_engine_are_distinguished(file, needed, vllm):
    trace = load(FOLDER / f"vllm-{file}.json")
    assert {*needs(vllm("0.33.0"), trace, "RUN-4")} == needed


def test_a_prompt_may_wait_for_the_blocks_that_its_window_leaves_out(vllm):
    """The pool runs full where it has room for the window alone."""
    name = "a_prompt_waits_for_blocks_that_its_window_would_leave_out"
    trace = load(FOLDER / f"vllm-0.19.0/{name}.json")
    [add, schedule] = trace.commands
    pool = replace(trace.geometry, blocks=6, max_model_len=8)
    longer = replace(add, prompt=prompt_of("a7"))
    trace = replace(trace, commands=(longer, schedule), geometry=pool, expected=())
    assert needs(vllm("0.19.0"), trace, "RUN-4") == ("a window", "pools that run full")


def test_no_rejected_turn_is_left_but_for_the_last_command():
    """The second turn is rejected as the first waits; so are all that follow it."""
    [(trace, _)] = KNOWN[1].there
    opened, first, second, closed = trace.commands
    later = tuple(replace(second, request=f"r{number}") for number in (3, 4))
    trace = replace(trace, commands=(opened, first, second, later[0], closed, later[1]))
    system = TorchKV()
    less = without_needs(system, trace, ("a rejected turn",))
    assert less.commands == (opened, first, closed, later[1])
    patient = replace(trace, commands=(opened, first, closed))
    assert without_needs(system, patient, ("a rejected turn",)) == patient


def test_violations_of_one_shape_are_explained_in_full_now_and_then(monkeypatch):
    """The first two, and each sixteenth: a fault that looks the same is found by one of these."""
    [retracts, rejects] = KNOWN
    looked = []
    told = []

    def explains(*_):
        looked.append(explained.shapes.total())
        return len(looked) < 5

    monkeypatch.setattr(explanation, "explains", explains)
    monkeypatch.setattr(explanation, "explaining", lambda *_: told.append(1) or retracts)
    (trace, _) = retracts.there[0]
    explained = Explained()

    def explained_by(number, masks=(retracts, rejects), command=Abort):
        commands = (*trace.commands[:-1], command("r1"))
        violation = Violation("SES-2", len(commands) - 1, Failure("x", f"{number} tokens"))
        return explained.candidates(THREE, masks, replace(trace, commands=commands), violation, ())

    assert [explained_by(number) for number in range(3)] == [[retracts]] * 3
    assert [explained_by(number) for number in range(3, 33)] == [(retracts, rejects)] * 30
    assert looked == [0, 1, 16, 32] and len(told) == 3
    assert explained_by(0, command=Retract) == []  # another shape, which nothing explains
    assert looked[4:] == [33]
    assert explained_by(33) == (retracts, rejects)
    assert len(looked) == 5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("no batch comes, with 3 blocks free and r1 WAITING",
         "no batch comes, with 0 blocks free and r4 WAITING, r2 WAITING"),
        ("a key of r1 finds block 2, which holds KV of adapter a (load 1), salt b",
         "a key of r8 finds block 7, which holds KV of adapter b (load 2), salt a"),
    ],
)  # fmt: skip
def test_numbers_names_and_the_length_of_a_list_do_not_change_a_shape(one, other):
    [retracts, _] = KNOWN
    (trace, _) = retracts.there[0]
    last = len(trace.commands) - 1
    shapes = [
        shape_of([retracts], trace, Violation("SES-2", last, Failure("x", words)))
        for words in (one, other, f"{one}, r2 RUNNING")
    ]
    assert shapes[0] == shapes[1] != shapes[2]


def test_a_long_trace_is_not_attributed(monkeypatch):
    [retracts, rejects] = KNOWN
    (trace, _) = retracts.there[0]
    commands = (*(Decode(("r9",)),) * 60, trace.commands[-1])
    violation = Violation("SES-2", len(commands) - 1, Failure("x", "y"))
    monkeypatch.setattr(explanation, "explains", lambda *_: True)
    monkeypatch.setattr(explanation, "explaining", lambda *_: retracts)
    both = retracts, rejects
    assert Explained().candidates(THREE, both, replace(trace, commands=commands), violation, ()) == both


def test_a_fault_behind_a_switch_needs_it(release):
    trace = load(FOLDER / "sglang-0.5.12/joined_nodes_lose_where_a_lock_ends.json")
    assert needs(release("0.5.12"), trace, "TREE-6") == ("a setting",)


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        ("0.5.18/a_prompt_that_is_swept_too_far_has_two_owners", "swept-too-far"),
        (
            "0.5.16/a_received_prompt_keeps_less_than_a_window",
            "received-tail-shorter-than-a-window",
        ),
    ],
)
def test_a_fault_of_received_prompts_is_told_from_one_of_every_prompt(file, fault, release):
    """A report named the fault of a server that only decodes for a prompt of a plain one: neither trace needs
    that the prompt is received."""
    system = release("0.5.18")
    run = replay(system, replace(load(FOLDER / f"sglang-{file}.json"), clause="OWN-1"))
    assert known_fault(system, run).id == fault


def test_a_known_stall_is_known_where_the_base_happens_not_to_stall(vllm):
    """A stall without what the known ones need is new."""
    system = vllm("0.33.0")
    known_masks = list(masks(vllm("0.33.0")))
    trace = load(FOLDER / "vllm-0.15.0" / "two_waiting_turns_hold_each_others_blocks.json")
    violation = replay(system, trace).violation
    fault = "turns-wait-for-each-other"
    for base in (None, vllm("0.14.0")):
        assert [mask.fault.id for mask in explaining_masks(system, base, known_masks, trace, violation)] == [
            fault
        ]
    assert fault in {
        mask.fault.id for mask in explaining_masks(system, system, known_masks, trace, violation)
    }
    short = [
        replace(mask, there=tuple((t, (*n, "priorities")) for t, n in mask.there)) for mask in known_masks
    ]
    assert not explaining_masks(system, vllm("0.14.0"), short, trace, violation)


def test_a_replayed_trace_names_the_known_fault_that_explains_it(release):
    trace = load(FOLDER / "sglang-0.5.11" / "a_retract_counts_as_a_finish.json")
    fault = known_fault(release("0.5.23"), run := replay(release("0.5.23"), trace))
    refused = replace(
        trace, commands=(Decode(("r9",)),) * len(trace.commands) + trace.commands, expected=()
    )
    odd = replay(release("0.5.23"), refused)
    assert odd.violation is not None and known_fault(release("0.5.23"), odd) is None
    data = report.replay_data("t.json", run, known=fault)
    data["known"] |= next(row for row in known_bugs() if row["id"] == "retract-ends-turn")
    run_text.replay(out := text_output.console(io.StringIO()), data)
    for text in (out.file.getvalue(), bug_report.story(data | {"text": ""}, "t.json", "")):
        assert "retract-ends-turn" in text and "#40252" in text


@at_night
@pytest.mark.parametrize("name", ["sglang==0.5.23", "sglang==0.5.23+overlap", "vllm==0.33.0"])
def test_nothing_is_new_in_the_newest_releases(name, release, vllm):
    engine, _, version = name.partition("==")
    system = {"sglang": release, "vllm": vllm}[engine](version)
    result = run(system, plan("smoke"), masks=list(masks(system)))
    assert not result.findings and result.executed_count >= 30_000


FAULTS = planted_faults("check/masked_faults.toml").values()
MENDS = planted_faults("check/mended_faults.toml").values()


@at_night
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_that_is_put_into_a_release_is_new(fault, release, tmp_path):
    base = release("0.5.23")
    checkout = str(checkout_with(base.root, tmp_path / "checkout", fault))
    with closing(resolve("sglang", checkout=checkout)) as system:
        result = run(system, plan("smoke"), base=base, masks=list(masks(system, base)))
    assert {*fault.caught_by} <= {finding.clause for finding in result.findings if not finding.old}


@at_night
@pytest.mark.parametrize("mend", MENDS, ids=lambda mend: mend.name)
def test_a_mend_of_a_known_fault_is_green(mend, release, tmp_path):
    base = release(mend.spec.short)
    checkout = str(checkout_with(base.root, tmp_path / "checkout", mend))
    with closing(resolve(str(mend.spec.of_version(None)), checkout=checkout)) as system:
        known = list(masks(system, base))
        result = run(system, plan("smoke"), base=base, masks=known)
    assert {mask.fault.id for mask in known if mask.gone} >= {*mend.gone}
    assert not [finding for finding in result.findings if not finding.old] and not result.incomplete


@pytest.mark.parametrize("mend", [mend for mend in MENDS if mend.cut], ids=lambda mend: mend.name)
def test_a_mend_in_a_file_that_is_not_loaded_is_noticed(mend, release, tmp_path):
    base = release("0.5.23")
    checkout = str(checkout_with(base.root, tmp_path / "checkout", mend))
    [name] = mend.gone
    clause = next(f.clauses[0] for f in of_system("sglang", "0.5.23", []) if f.id == name)
    with closing(resolve("sglang", checkout=checkout)) as system:
        [mask] = (mask for mask in masks(system, base, clause) if mask.fault.id == name)
    assert mask.gone, mask.line


def test_a_replay_on_a_checkout_is_decided_by_its_base(kvspec, release, tmp_path):
    """A fault that breaks the tree in all traces is not the known one whose trace breaks as well."""
    file = release("0.5.23").root / "sglang/srt/mem_cache/memory_pool.py"
    line = "        reusing = [i for i, r in enumerate(reqs) if r.kv.holds_kv]\n"
    checkout = tmp_path / "checkout"
    shutil.copytree(release("0.5.23").root, checkout, copy_function=os.symlink)
    (edited := checkout / file.relative_to(release("0.5.23").root)).unlink()
    edited.write_text(replace_once(file, line, "        assert False\n"))
    trace_file = FOLDER / "sglang-0.5.11" / "a_turn_comes_back_to_nothing.json"
    known = load(trace_file)
    save(replace(known, commands=known.commands[:4]), plain := tmp_path / "plain.json")
    code, out, _ = kvspec("replay", str(plain), "--impl", "sglang", "--sglang-path", str(checkout))
    assert code == 3 and "nothing-to-resume" not in out
    assert " changed   sglang/srt/mem_cache/memory_pool.py: ReqToTokenPool.alloc ran in command " in out
    code, out, _ = kvspec("replay", str(trace_file), "--impl", "sglang==0.5.23")
    assert code == 3 and "nothing-to-resume" in out
