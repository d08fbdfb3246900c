"""The rule that the adapter copies of LMDeploy's worker (see `impl.loading.copied_rules`)."""

from __future__ import annotations

from pathlib import Path

from impl.loading.copied_rules import CopiedRule, CopiedRules

RULES = {
    "starts of loads in the worker": CopiedRule(
        (
            "lmdeploy/pytorch/kv_connector/mooncake/store/worker.py",
            "lmdeploy/pytorch/engine/model_agent/kv_connector.py",
        ),
        ("start_load_kv", "start_kv_connector_step"),
        ("receiver.", "kv_recv_thread", "start_load_kv()", "Event", "event."),
        "MooncakeStore of store.py: the worker's threads move KV, and no load waits for a forward pass",
    ),
}
COPIED = CopiedRules(RULES, Path(__file__).with_name("copied.txt"))
