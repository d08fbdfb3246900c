"""What tests of exports share: releases with faults fixed, and random runs as exported tests."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from textwrap import indent

import pytest

from ci.export import unit_test as export
from ci.export.recorded_run import in_tree, tokens_of_release
from ci.export.template_parts import SHARED, definitions, imports
from impl.adapter import UnusableImplementation
from impl.process.wire import Noted
from impl.sglang.process.system import SGLangSystem
from impl.sglang.scheduler.call_log import small_id, variable
from reference.commands import Mode
from reference.geometry import PRESETS
from reference.token_ids import tokens_of
from impl.choices import RandomChoices, pick
from stateful_tests.generate.next_command import propose
from stateful_tests.generate.run_profile import draw_geometry, draw_profile, with_settings
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.tests.support.planted_faults import checkout_with, planted_faults
from stateful_tests.traces.notation import format_command

ALIKE = "ran alike"
FIXES = planted_faults("export/fixes.toml").values()


def root_of(version: str) -> Path:
    try:
        return export.target(version).root
    except UnusableImplementation as error:
        pytest.skip(str(error))


def with_fixes(version: str, folder: Path) -> Path:
    """Return a checkout of a release with its fixes."""
    return checkout_with(root_of(version), folder, *FIXES, release=version)


def assertions_in(text: str) -> list[str]:
    """Return the assertions of a test, without their message."""
    text = re.sub(r"\n +(?=.*,$)|(?<=message),\n +(?=\)$)", " ", text, flags=re.MULTILINE)
    text = text.replace("( ", "(")
    matches = re.findall(r"^ +(self\.assert.*)$", text, re.MULTILINE)
    return [re.sub(r",\s+message\s*\)$", ")", line) for line in matches]


def run_alike(system: SGLangSystem, number: int, folder: Path) -> Path:
    """Return a random run as a test: where the driver has come to, to the slot, the test must come
    to.

    Those with odd numbers import what they need from one module.
    """
    source = RandomChoices(f"alike {number}")
    machine = "sessions" if number % 3 == 0 else "both"
    sizes = [preset for preset in PRESETS.values() if not preset.states]  # states cannot be exported
    geometry = draw_geometry(source, pick(source, sizes))
    geometry = replace(geometry, tree=machine == "both")
    can = replace(system.capabilities, swa_tail=False)  # which cannot be exported
    geometry = with_settings(RandomChoices(f"settings {number}"), geometry, can)
    profile = draw_profile(source, can, machine)
    lockstep = Lockstep(system, geometry, Mode.FAITHFUL)
    steps = []
    while len(steps) < 30 and lockstep.violation is None:
        command = propose(lockstep.state, source, profile)
        if type(command).__name__ not in {"CheckBusy", "CheckIdle"}:
            system.noted = Noted()
            outcome = lockstep.do(command)
            steps += export.lines_of_command(
                format_command(command), outcome, system.noted.calls, sessions=True
            )
    view = system.view()
    places = system.kind.places
    facts = {"server.rows.free_slots": list(view.free_rows)}
    for name, request in view.requests.items():
        var = variable(name)
        cursors = request.cursors
        facts[f"[*{var}.origin_input_ids, *{var}.output_ids]"] = list(
            map(small_id, tokens_of_release(geometry, request.text))
        )
        if request.row is not None and cursors is not None:
            row = f"{var}.{places['req_pool_idx']}"
            end = cursors.kv_allocated_len
            facts[f"server.rows.req_to_token[{row}, :{end}].tolist()"] = list(
                view.rows[request.row][:end]
            )
            for cursor, value in cursors._asdict().items():
                facts[f"{var}.{places[cursor]}"] = value
    pool = "available_size" if geometry.window is None else "full_available_size"
    facts[f"server.allocator.{pool}()"] = len(view.free_full) * geometry.page_size
    if geometry.window is not None:
        facts["server.allocator.swa_available_size()"] = len(view.free_swa) * geometry.page_size
    if view.tree is not None:
        if system.kind.core == "python":
            texts = [tokens_of_release(geometry, tokens_of(node.path)) for node in view.tree.nodes]
            paths = [map(small_id, text) for text in texts]
            known = [list(pairwise(path) if geometry.bigram else path) for path in paths]
            facts["sorted(path for _, path in nodes(server.cache))"] = sorted(known)
        for node in view.tree.nodes:
            slots = list(node.slots)
            collected = in_tree(geometry, node.path)
            facts[f"tree_slots(server.cache, {collected})[{-len(slots)}:]"] = slots
    lines = [line for _, line in system.noted.late]
    lines += [f"self.assertEqual({code}, {value})" for code, value in facts.items()]
    steps += [*lines, f"self.fail({ALIKE!r})"]
    code = "\n".join([*export.lines_of_start(geometry, "\n".join(steps)), *steps])
    if number % 2:
        (folder / f"{SHARED}.py").write_text(export.shared_module(system))
        text = imports(code, system, {system.release})
    else:
        text = definitions(code, geometry, system, {system.release}, sessions=True)
    text += "\n\n\nclass TestAlike(unittest.TestCase):\n    def test(self):\n" + indent(
        code, " " * 8
    )
    file = folder / f"alike_{number}.py"
    file.write_text(text)
    return file
