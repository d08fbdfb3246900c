"""An error of the adapter is none of the tree: it ends a check, and leaves no configuration out."""

import os
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from types import ModuleType

import pytest

from impl.adapter import Misfit, UnusableImplementation
from impl.process.failures import raising_misfit
from impl.stand_ins import Values
from impl.system_spec import SystemSpec
from impl.vllm.bare_scheduler import Questions
from reference.blocks.commands import Add, Schedule
from reference.blocks.presets import engine_preset
from reference.commands import Piece
from reference.tiers.config import tier_preset
from stateful_tests.check import check_plans
from stateful_tests.check.plan_order import configurations
from stateful_tests.lockstep.system_names import resolve

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
CONFIG = "vllm/config/vllm.py"
START = "        self.max_num_running_reqs ="


@pytest.fixture
def changed(tmp_path):
    """Makes a copy of the newest release of an engine in which a file says something else, or is new."""

    def change(release, file, new, old=None):
        try:
            root = resolve(release).root
        except UnusableImplementation as error:
            pytest.skip(str(error))
        target = tmp_path / "checkout"
        shutil.copytree(root, target, copy_function=os.symlink)
        text = (root / file).read_text(encoding="utf-8") if old else new
        assert old is None or old in text
        (target / file).unlink(missing_ok=True)
        (target / file).parent.mkdir(exist_ok=True)
        (target / file).write_text(text.replace(old, new, 1) if old else new, encoding="utf-8")
        spec = SystemSpec.parse(release)
        return resolve(str(spec.of_version(None)), checkout=str(target))

    return change


def test_a_stand_in_names_an_unknown_attribute():
    with pytest.raises(AttributeError, match="the stand-in with size has no width"):
        _ = Values(size=1).width
    assert getattr(Values(size=1), "width", 7) == 7
    asked = Questions(size=1)
    assert not asked.is_rocm and not asked.use_ngram_gpu()
    with pytest.raises(AttributeError, match="has no width"):
        _ = asked.width


@pytest.mark.parametrize("release", ["vllm==0.25.0", "vllm==0.33.0"])
def test_a_tree_whose_modules_lack_each_others_names_does_not_load(changed, release):
    """Files of two releases, or half of a rename: the tree cannot start, and no client is told of it."""
    asked = "from vllm.v1.core.kv_cache_utils import no_such_name\n"
    start = "from vllm.v1.core.kv_cache_metrics import"
    unable = pytest.raises(UnusableImplementation, match=r"does not load: ImportError.*no_such_name")
    with unable, closing(changed(release, "vllm/v1/core/block_pool.py", asked + start, start)) as system:
        configurations(system, check_plans.for_system(check_plans.plan("smoke"), system))


def test_a_drafter_that_is_asked_something_unknown_is_no_refusal(changed):
    """The presets with drafts would be left out, and a check of the drafter's fork be green."""
    asks = "        if vllm_config.speculative_config: vllm_config.speculative_config.rounds_of_tree()\n"
    system = changed("vllm==0.33.0", SCHEDULER, asks + START, START)
    unknown = pytest.raises(Misfit, match=f"no rounds_of_tree at {SCHEDULER}:")
    with closing(system), unknown:
        configurations(system, check_plans.for_system(check_plans.plan("smoke"), system))


def test_a_question_of_a_drafter_is_answered_no(changed):
    asks = "        if vllm_config.speculative_config: assert not vllm_config.speculative_config.use_tree()\n"
    with closing(changed("vllm==0.33.0", SCHEDULER, asks + START, START)) as system:
        system.reset(engine_preset("drafts"))


def test_only_the_lines_of_a_tree_refuse_a_configuration(changed):
    says = "        if vllm_config.speculative_config: raise ValueError('no drafts here')\n"
    with closing(changed("vllm==0.33.0", SCHEDULER, says + START, START)) as system:
        system.reset(engine_preset("full"))
        with pytest.raises(
            UnusableImplementation, match="refuses the configuration: no drafts"
        ) as caught:
            system.reset(engine_preset("drafts"))
        assert not isinstance(caught.value, Misfit)


VALIDATORS = """
class VllmConfig:
    def validate_block_size(self) -> None:
        if self.cache_config.mamba_cache_mode == "align":
            if self.scheduler_config.long_prefill_token_threshold > 0:
                assert self.scheduler_config.long_prefill_token_threshold >= self.cache_config.block_size
    def validate_mamba_block_size(self):
        return self.model_config.what_no_scheduler_reads
"""


def test_settings_that_a_checkout_refuses_are_not_driven(changed):
    with closing(changed("vllm==0.33.0", CONFIG, VALIDATORS)) as system:
        config = engine_preset("state-tight")
        system.reset(config)
        with pytest.raises(
            UnusableImplementation, match=r"refuses .*long_prefill|refuses .*Assertion"
        ):
            system.reset(replace(config, long_prefill=1))
        system.reset(replace(engine_preset("tight"), long_prefill=1))


ONE_BLOCK = """
class VllmConfig:
    def validate_mamba_block_size(self):
        is_set = (
            self.cache_config.mamba_block_size is not None
            and self.cache_config.mamba_block_size != self.model_config.max_model_len
        )
        if is_set and not self.cache_config.enable_prefix_caching:
            raise ValueError("--mamba-block-size can only be set with --enable-prefix-caching")
"""


def test_a_runner_that_is_no_python_is_named_with_its_line(changed):
    """It was "SyntaxError: invalid syntax (<unknown>, line 3301)": no file of the tree was named."""
    file = "vllm/v1/worker/gpu_model_runner.py"
    with pytest.raises(UnusableImplementation, match=f": {file}:1: SyntaxError: .*Nothing was driven"):
        changed("vllm==0.33.0", file, "else:\n")


def test_a_state_block_longer_than_the_model_is_a_server_s_one_block(changed):
    """Four lines of the corpus were left out of every checkout beside a release: exit code 4."""
    config = replace(engine_preset("state-tight"), caching=False, max_model_len=5)
    groups = tuple(replace(g, block_size=8) if g.state else g for g in config.groups)
    with closing(changed("vllm==0.33.0", CONFIG, ONE_BLOCK)) as system:
        system.reset(replace(config, groups=groups))


def test_a_key_that_a_driver_misses_is_none_of_the_tree(changed):
    """LMDeploy: what was made for a batch has no plans of copies any more."""
    file = "lmdeploy/pytorch/engine/inputs_maker.py"
    key = "cache_inputs=result.cache_inputs,"
    with closing(changed("lmdeploy==0.18.0", file, "plans=result.cache_inputs,", key)) as system:
        system.reset(engine_preset("full"))
        system.apply(Add("r1", 2, 3))
        with pytest.raises(
            Misfit, match=r"KeyError: 'cache_inputs' at impl/lmdeploy/model_agent.py:\d+, in the ad"
        ):
            system.apply(Schedule())


def test_a_function_of_the_adapter_that_gets_another_argument_is_none_of_the_tree(changed):
    """It was BROKEN: _attach() missing 1 required keyword-only argument."""
    file = "sglang/srt/mem_cache/unified_radix_cache.py"
    given = "load_cache_event=self"
    system = changed("sglang==0.5.23+hicache", file, given.replace("=", "s="), given)
    says = r"_attach\(\) missing 1 .* asks more of the adapter's stand-in"
    with closing(system), pytest.raises(Misfit, match=says):
        system.reset(tier_preset("tier"))


def test_a_function_of_the_tree_may_be_named_as_one_of_the_adapter(tmp_path, monkeypatch):
    source = "def cut(a):\n    return a\n"
    module = ModuleType("of_tree")
    module.__file__ = str(tmp_path / "of_tree.py")
    exec(compile(source, module.__file__, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "of_tree", module)
    guard = tmp_path, "does not fit", "an engine", "modules", "setting", "values"
    with pytest.raises(TypeError), raising_misfit(*guard):
        exec(compile("cut()", module.__file__, "exec"), vars(module))


def test_an_error_of_the_tree_stays_its_own(changed):
    with closing(
        changed("lmdeploy==0.18.0", "lmdeploy/pytorch/paging/scheduler.py",
                "    def has_unfinished(self):\n        return {}['x']\n    def _was(self):\n",
                "    def has_unfinished(self):\n")
    ) as system:  # fmt: skip
        system.reset(engine_preset("full"))
        system.apply(Add("r1", 2, 3))
        assert "KeyError" in system.apply(Schedule()).error


def test_a_renamed_attribute_of_lmdeploy_is_named_at_once(changed):
    with pytest.raises(
        UnusableImplementation,
        match=r"SchedulerSequence has no num_history_ids; taken for 0\.18\.0",
    ):
        changed(
            "lmdeploy==0.18.0",
            "lmdeploy/pytorch/messages.py",
            "def num_past_ids",
            "def num_history_ids",
        )


def test_a_module_that_is_not_loaded_decides_nothing_in_lmdeploy(changed):
    asks = "        from lmdeploy.pytorch.devices import plan\n        if plan(self): return True\n"
    begins = "    def has_unfinished(self):\n"
    file = "lmdeploy/pytorch/paging/scheduler.py"
    system = changed("lmdeploy==0.18.0", file, begins + asks, begins)
    says = r"plan\(\) decides a branch, and is not loaded \(impl/lmdeploy/loading\.py\)"
    with closing(system):
        system.reset(engine_preset("full"))
        system.apply(Add("r1", 2, 0, (Piece("a", 5),)))
        with pytest.raises(Misfit, match=says):
            system.apply(Schedule())
