"""Every kind of system is shown: what explains it, its page, its exports."""

import pytest

from ci.shown_kinds import shown
from reference.system_kinds import KINDS


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_kind_that_facts_judge_alone_has_an_explanation_and_a_page_of_its_own(kind):
    of = shown(kind.name)
    assert (of.explains() is None) is (of.draws() is None) is kind.modelled
    if not kind.modelled:
        assert all(
            map(callable, (of.explains().facts_at, of.explains().events, of.draws().content))
        )


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_kind_has_exports_and_asserts_of_one_form(kind):
    of = shown(kind.name)
    exports = of.exports()
    if exports is not None:
        assert exports.ENGINE in ("sglang", "vllm") and callable(exports.unit_test)
    if of.asserts:
        asserts = of.server_asserts()
        sizes = next(iter(kind.presets.values()))
        assert asserts.HOOK.startswith("impl.sglang.") and asserts.device_sizes(sizes).pages("full")
