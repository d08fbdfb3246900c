"""The rules that the adapter copies of SGLang's scheduler (see `impl.loading.copied_rules`)."""

from __future__ import annotations

from pathlib import Path

from impl.loading.copied_rules import CopiedRule, CopiedRules

_RESULTS = (
    "sglang/srt/managers/scheduler_components/batch_result_processor.py",
    "sglang/srt/managers/scheduler_output_processor_mixin.py",
)
RULES = {
    "results of a verify round": CopiedRule(
        _RESULTS,
        ("_resolve_spec_*tok*",),
        ("kv_committed_len",),
        "commit and skipped of releases: the function asks a draft worker and a reporter of metrics",
    ),
    "results of a decode batch": CopiedRule(
        _RESULTS,
        ("process_batch_result_decode", "_handle_finish_state_updated_req"),
        ("release_kv_cache", "free_group_", "kv_committed_len", "kv_allocated_len"),
        "Ends._end, Results.process: the function streams outputs and logprobs",
    ),
    "results of a prefill": CopiedRule(
        _RESULTS,
        ("process_batch_result_prefill",),
        (
            "release_kv_cache",
            "free_group_",
            "cache_unfinished_req",
            "checkpoint_kv_cache",
            "inflight_middle_chunks",
            "is_chunked -= 1",
        ),
        "Prefills._process_results, Results.process: the function streams outputs and logprobs",
    ),
    "a chunk that goes on": CopiedRule(
        ("sglang/srt/managers/schedule_policy.py",),
        ("add_chunked_req",),
        ("set_extend_input_len", "set_extend_range", "extend_end =", "fill_ids =", "fill_len ="),
        "set_chunk of releases: the function counts a budget of tokens",
    ),
    "an aborted chunk": CopiedRule(
        ("sglang/srt/managers/scheduler.py",),
        ("process_pending_chunked_abort", "_process_pending_chunked_abort"),
        ("release_kv_cache", "free_", "cache_unfinished_req"),
        "prefilled of releases: the function answers a client",
    ),
}
COPIED = CopiedRules(RULES, Path(__file__).with_name("copied.txt"))
