"""Facts of a release's API, and trees that have those of two releases: impl/sglang/releases/facts.py."""

import shutil

import pytest

from impl.loading import probe
from impl.adapter import UnusableImplementation
from impl.loading.nearest import Nearest
from impl.sglang.parts.fetch import release_root
from impl.loading.copied_rules import statements
from impl.sglang.releases import api_lines
from impl.sglang.releases.copied import COPIED
from impl.sglang.releases.catalogue import TABLE, detect, spec_of, supported_release
from impl.sglang.releases.facts import FACTS, compose_release, facts_of
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from stateful_tests.tests.support.night import some_at_night

ORDER = list(TABLE)
# What the machinery sets, and no release says.
OF_NO_FACT = {"version", "facts", "renamed"}


def members_of(kind):
    """Return what a class says otherwise than the first release, or adds."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("impl.sglang.releases.v")]
    own = {name for base in bases if base is not Release0510 for name in vars(base)}
    return {name for name in own if not name.startswith("__")}


def test_each_member_that_releases_differ_in_is_of_one_fact():
    differ = set().union(*map(members_of, TABLE.values())) - OF_NO_FACT - {"_sessions"}
    named = [member for members in FACTS.values() for member in members]
    assert len(named) == len({*named})
    assert differ <= {*named}


def test_each_line_of_the_api_is_of_a_fact():
    assert {line.fact for line in api_lines.lines() if line.by == "driven"} <= {"all", *FACTS}


def test_a_composed_class_has_its_facts_of_other_releases():
    kind = compose_release(TABLE, "0.5.14", {"chunks": "0.5.12", "claims": "0.5.15"})
    assert kind.version == "0.5.14"
    assert kind.set_chunk is TABLE["0.5.12"].set_chunk
    assert kind.claimed == TABLE["0.5.15"].claimed == 0
    assert kind.chunks == TABLE["0.5.14"].chunks
    assert kind.recurrent is False
    assert supported_release(spec_of(kind)).facts == kind.facts


def checkout_of(version):
    try:
        root = release_root(version)
    except UnusableImplementation as error:
        pytest.skip(str(error))
    return api_lines.files(root, TABLE)


class Without(probe.Checkout):
    """A checkout that has lost one use."""

    def __init__(self, whole, lost):
        self.__dict__ = dict(whole.__dict__)
        self.lost = lost

    def _why_not(self, file, use):
        key = file, probe.ast.unparse(use)
        return "lost" if key == self.lost else super()._why_not(file, use)


@pytest.mark.parametrize("version", some_at_night(["0.5.14", "0.5.19", "0.5.23"], "0.5.14".__ne__))
def test_a_name_that_is_gone_is_missing_whatever_older_releases_have(version):
    checkout = checkout_of(version)
    uses = [use for fact in ("all", *FACTS) for use in checkout.uses(version, ORDER, fact)]
    names = [use for use in uses if "'" not in use[1]]  # less the texts of rules
    assert len(names) > 60
    taken_for_another = {}
    for use in names:
        others, missing = facts_of(Without(checkout, use), ORDER, Nearest(version, 20))
        if not missing:
            taken_for_another[use] = others
    # That name alone tells the locks of 0.5.17 from those before.
    taken_for_another.pop(
        ("mem_cache/unified_radix_cache.py", "UnifiedRadixCache.root_node_handle()"), None
    )
    assert taken_for_another == {}


def test_a_tree_between_two_releases_is_driven_by_its_own_facts(tmp_path):
    """0.5.14 with the requests of 0.5.12: their chunks are `fill_ids`."""
    roots = []
    for version in ("0.5.14", "0.5.15"):
        try:
            roots.append(release_root(version))
        except UnusableImplementation as error:
            pytest.skip(str(error))
    copy = tmp_path / "checkout"
    shutil.copytree(roots[0], copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (
        "speculative/eagle_utils.py",
        "managers/scheduler_components/batch_result_processor.py",
    ):
        shutil.copy(roots[1] / "sglang/srt" / file, copy / "sglang/srt" / file)
    (copy / "sglang/srt/speculative/eagle_info_v2.py").unlink()
    kind = detect(copy)
    assert kind.release.version == "0.5.14"
    of_rounds = ("rounds", "round ends", "claims")
    assert kind.release.facts == dict.fromkeys(of_rounds, "0.5.15")
    assert "rounds, round ends, claims as in 0.5.15" in kind.remark


def test_a_rule_that_the_adapter_copies_and_the_tree_has_otherwise_is_a_doubt(tmp_path):
    try:
        root = release_root("0.5.23")
    except UnusableImplementation as error:
        pytest.skip(str(error))
    assert COPIED.doubts(root) == ()
    name = "managers/scheduler_components/batch_result_processor.py"
    text = (root / "sglang/srt" / name).read_text()
    old = "req.kv.kv_committed_len += num_accept_tokens"
    assert old in text
    file = tmp_path / "sglang/srt" / name
    file.parent.mkdir(parents=True)
    file.write_text(text.replace(old, f"{old} + 1"))
    [doubt] = COPIED.doubts(tmp_path)
    assert "results of a verify round" in doubt
    assert f"`{old} + 1`" in doubt


def test_the_statements_of_copied_rules_are_those_of_the_releases():
    cached = []
    for version in (ORDER[0], "0.5.14", ORDER[-1]):
        try:
            cached.append(release_root(version))
        except UnusableImplementation as error:
            pytest.skip(str(error))
    for rule in COPIED.rules.values():
        assert any(True for root in cached for _ in statements(root, rule)), rule
    assert {*COPIED.rules_text(cached).splitlines()} <= {*COPIED.file.read_text().splitlines()}
