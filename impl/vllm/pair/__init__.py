"""Two servers of one vLLM release, prefill and decode, joined by its own NixlConnector over a played network.

The release's own: schedulers, cache managers, both sides of the connector. Ours: `network` (nixl's agents,
the clock, handshakes), `memory` and `states` (KV and state as bytes at addresses), the model. `loading` says
what is loaded, `server` is one server, `driver` carries commands out and gathers facts, `system` is all of
that in a process of its own.
"""

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
NIXL = f"{V1}.nixl"
REAL = (NIXL, f"{V1}.ssm_conv_transfer_utils", "vllm.model_executor.layers.mamba")  # modules
# Of a release's wheel.
FILES = tuple(
    f"vllm/distributed/kv_transfer/kv_connector/v1/{name}"
    for name in ("nixl/", "nixl_connector.py", "ssm_conv_transfer_utils.py")
)
CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/connector.py"
