"""Two servers of one vLLM release, prefill and decode, joined by its own NixlConnector over a played network.

The schedulers, the cache managers and both sides of the connector are the release's own. Stand-ins replace
nixl's agents, the clock and handshakes (`network`), GPU memory (`memory`, `states`: KV and recurrent state as
bytes at addresses) and the model. `loading` lists the modules that are loaded, `server` is one server,
`driver` executes commands, and `gathering` reads the facts. A server with host memory has the release's own
MultiConnector, over its NixlConnector and its OffloadingConnector (`both_connectors`).
"""

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
NIXL = f"{V1}.nixl"
MULTI = f"{V1}.multi_connector"
REAL = (NIXL, MULTI, f"{V1}.ssm_conv_transfer_utils", "vllm.model_executor.layers.mamba")  # modules
# Paths in a release's wheel.
FILES = tuple(
    f"vllm/distributed/kv_transfer/kv_connector/v1/{name}"
    for name in ("nixl/", "nixl_connector.py", "ssm_conv_transfer_utils.py", "multi_connector.py")
)
CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/connector.py"
MULTI_CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py"
