"""Parts of vLLM's API are looked up in the files of a tree, each by itself, and not by its version."""

import os
import shutil
import time

import pytest

from impl.adapter import UnusableImplementation
from impl.loading import parts, probe
from impl.vllm import api
from impl.vllm.copied import COPIED
from impl.vllm.fetch import complete
from impl.vllm.modules import VLLM
from impl.vllm.system import VLLMSystem
from stateful_tests.tests.support.night import at_night, some_at_night

# The first release with a part, as the adapter stated it before it looked parts up in the files.
FIRST_RELEASE = {
    "sessions": "0.15.0", "offload": "0.21.0", "reset": "0.22.0", "state": "0.27.0", "v2": "0.31.0",
    "state+v2": "0.32.0",
}  # fmt: skip


def test_the_tables_have_the_first_release_of_each_part():
    assert {part: api.SINCE[part] for part in FIRST_RELEASE} == FIRST_RELEASE


@pytest.mark.parametrize(
    "release", some_at_night(api.RELEASES, lambda release: release not in ("0.11.0", "0.25.0", "0.33.0"))
)
def test_a_release_has_the_parts_and_the_lines_that_the_tables_say(vllm, release):
    root = vllm(release).root
    complete(release, root)
    found = api.facts(root)
    assert found.near == (release, 0)
    assert found.parts == {part for part in api.PARTS if api.TABLES.is_documented(part, release)}
    checkout = probe.Checkout(root, "vllm", VLLM, ())
    number = api.RELEASES.index(release)
    for part, table in {"": api.CORE, **api.PARTS}.items():
        for (since, before), lines in parts.steps(table).items():
            lacks = checkout.missing_names(lines)
            if api.RELEASES.index(since) > number:
                # A release may have lines of a part that is driven from a later one on: pairs.
                assert lacks or part == "pair", lines[0]
            elif before == "..." or api.RELEASES.index(before) > number:
                assert not lacks


# Parts that a way or a setting asks for: a tree without all of one is refused as it is.
ASKED_FOR = {"offload", "storage", "simple", "images", "images+v2", "pair"}


@at_night
@pytest.mark.parametrize("part", sorted(api.PARTS.keys() - ASKED_FOR))
def test_each_line_of_a_part_begins_with_the_first_release_that_has_it(vllm, part):
    """Else a tree from before the part looks as if it had lost the rest of it."""
    older = []
    for (since, _), lines in parts.steps(api.PARTS[part]).items():
        at = api.RELEASES.index(since)
        if at > 0:
            checkout = probe.Checkout(vllm(api.RELEASES[at - 1]).root, "vllm", VLLM, ())
            older += [line for line in lines if not checkout.missing_names([line])]
    assert not older


@pytest.fixture
def copy_release(vllm, tmp_path):
    """A function that copies a release and replaces words in its files (old=new)."""

    def copy(release, **words):
        target = tmp_path / release
        shutil.copytree(vllm(release).root, target, copy_function=os.symlink)
        for file in target.rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            changed = text
            for old, new in words.items():
                changed = changed.replace(old, new)
            if changed != text:
                file.unlink()
                file.write_text(changed, encoding="utf-8")
        return target

    return copy


def refusal_of(root, **ways):
    with pytest.raises(UnusableImplementation) as caught:
        VLLMSystem(path=root, **ways)
    return str(caught.value)


def test_invented_names_are_named_together_and_no_part_is_driven_without(copy_release):
    root = copy_release(
        "0.33.0",
        external_req_id="outer_id",
        has_sync_kv_loads="loads_now",
        deferred_frees="later_frees",
        _req_status="_status_of",
    )
    began = time.monotonic()
    said = refusal_of(root, offloads=True)
    assert time.monotonic() - began < 10
    for name in ("external_req_id", "has_sync_kv_loads", "deferred_frees", "_req_status"):
        assert f"has no {name}" in said
    assert "taken for 0.33.0, the nearest release" in said
    assert "it may be newer than 0.33.0, the newest release that is driven" in said


def test_a_tree_between_two_releases_is_driven_by_its_own_facts(copy_release, vllm):
    """Nearest to 0.24.0, whose deferred frees it does not have yet: its pool is that of 0.23.0."""
    root = copy_release("0.24.0", deferred_frees="_x", defer_block_free="_y")
    pool = root / "vllm/v1/core/block_pool.py"
    pool.unlink()
    shutil.copy(vllm("0.23.0").root / "vllm/v1/core/block_pool.py", pool)
    found = api.facts(root)
    assert found.near.release == "0.24.0"
    assert found.parts >= {"sessions", "drafts in flight"}
    assert not found.parts & {"deferred frees", "further hashes"}
    assert not found.missing
    assert "without deferred frees, further hashes of a block, of which" in found.remark


def test_a_tree_older_than_all_is_one_sentence(copy_release):
    root = copy_release("0.11.0", get_group_id="group_of", block_hash="hash_of_block", Request="Asked")
    said = refusal_of(root)
    assert "older than 0.11.0, the oldest release that is driven. Nothing was driven" in said
    assert "get_group_id" not in said


def test_a_missing_way_is_refused_with_the_missing_names(vllm):
    said = refusal_of(vllm("0.30.0").root, v2=True)
    assert "GPUModelRunner.prepare_inputs takes 3 arguments, not 4" in said
    assert "taken for 0.30.0, the nearest release (no new line of code)" in said


def test_a_renamed_name_that_no_table_has_is_refused(vllm, monkeypatch):
    monkeypatch.setattr(api, "RENAMED", {"Scheduler.no_such_thing": "thing"})
    assert "no line of its tables has Scheduler.no_such_thing" in refusal_of(vllm("0.33.0").root)


def test_a_rule_that_the_adapter_copies_and_the_tree_has_otherwise_is_a_doubt(copy_release):
    kept = "self.input_batch.num_tokens_no_spec[req_idx] = end_idx"
    assert VLLMSystem(path=copy_release("0.33.0")).doubts == ()
    root = copy_release("0.32.0", **{kept: f"{kept} - 1"})
    [doubt] = VLLMSystem(path=root).doubts
    assert "sampled tokens of the worker" in doubt and f"`{kept} - 1`" in doubt


def test_the_statements_of_copied_rules_are_those_of_the_releases(vllm):
    known = {*COPIED.file.read_text().splitlines()}
    assert {line.partition(" | ")[0] for line in known} == {*COPIED.rules}
    for release in (api.RELEASES[0], api.RELEASES[-1]):
        written = {*COPIED.rules_text([vllm(release).root]).splitlines()}
        assert written and written <= known
