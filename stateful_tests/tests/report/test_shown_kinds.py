"""Every kind of system is shown: what explains it, its page, its exports."""

import pytest

from ci.shown_kinds import shown_kind
from reference.system_kinds import KINDS


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_kind_that_facts_judge_alone_has_an_explanation_and_a_page_of_its_own(kind):
    kind_shown = shown_kind(kind.name)
    assert (kind_shown.explains() is None) is (kind_shown.draws() is None) is kind.modelled
    if not kind.modelled:
        explains = kind_shown.explains()
        assert callable(explains.facts_at) and callable(explains.events)
        assert callable(kind_shown.draws().content)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_kind_has_exports_and_asserts_of_one_form(kind):
    kind_shown = shown_kind(kind.name)
    exports = kind_shown.exports()
    if exports is not None:
        assert exports.ENGINE in ("sglang", "vllm") and callable(exports.unit_test)
    if kind_shown.asserts:
        asserts = kind_shown.server_asserts()
        sizes = next(iter(kind.presets.values()))
        assert asserts.HOOK.startswith("impl.sglang.") and asserts.device_sizes(sizes).pages("full")
