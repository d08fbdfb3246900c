"""The rules that the adapter copies of vLLM's engine core and worker (see `impl.loading.copied_rules`)."""

from __future__ import annotations

from pathlib import Path

from impl.loading.copied_rules import CopiedRule, CopiedRules

PROPOSER = "vllm/v1/spec_decode/llm_base_proposer.py"  # prepares a drafter's inputs; V2's is SPECULATOR
DRAFT_KERNELS = "vllm/v1/spec_decode/utils.py"
SPECULATOR = "vllm/v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py"
RULES = {
    "steps of the engine core": CopiedRule(
        ("vllm/v1/engine/core.py",),
        ("step", "step_with_batch_queue", "post_step"),
        (
            "scheduler.schedule",
            "update_from_output",
            "batch_queue.",
            "update_draft_token_ids",
            "take_draft_token_ids",
        ),
        "_schedule, _update of driver.py: a command is half a step, and the functions wait for workers",
    ),
    "sampled tokens of the worker": CopiedRule(
        ("vllm/v1/worker/gpu_model_runner.py",),
        ("_bookkeeping_sync",),
        ("num_tokens_no_spec", "num_tokens[", "output_token_ids", "prev_req_id_to_index"),
        "_bookkeep, run of runner.py: the function reads tensors of a sampler",
    ),
    "entries of the worker's batch": CopiedRule(
        ("vllm/v1/worker/gpu_input_batch.py",),
        ("add_request", "remove_request"),
        ("num_computed_tokens_cpu[", "num_tokens_no_spec[", "num_tokens[", "block_table.", "req_id_to_index"),
        "PersistentBatch of runner.py: the class has tensors of samplers",
    ),
    "batches for which a drafter runs": CopiedRule(
        ("vllm/v1/worker/gpu_model_runner.py",),
        ("_input_fits_in_drafter", "sample_tokens", "execute_model"),
        ("effective_drafter_max_model_len", "input_fits_in_drafter"),
        "fits of drafter.py: the functions read attention metadata, or run the batch",
    ),
    "further passes of a drafter": CopiedRule(
        (DRAFT_KERNELS,),
        ("eagle_step_slot_mapping_metadata_kernel",),
        ("exceeds_max =", "where(exceeds_max"),
        "run of drafter.py: each pass runs the model",
    ),
    "rows of the worker's block tables": CopiedRule(
        ("vllm/v1/worker/block_table.py",),
        ("append_row", "add_row"),
        ("block_table", "num_blocks_per_row"),
        "append_row, add_request of runner.py: the class has buffers on a GPU",
    ),
}
COPIED = CopiedRules(RULES, Path(__file__).with_name("copied.txt"))
# that every release has
FILES = tuple(
    file for rule in RULES.values() for file in rule.files if file != DRAFT_KERNELS
)
