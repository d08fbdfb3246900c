"""What the adapters read of a release stands in a table of its API."""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

import impl
from impl.adapter import UnusableImplementation
from impl.lmdeploy import api as lmdeploy
from impl.loading import nearest
from impl.sglang.releases import api_lines as sglang
from impl.sglang.releases.catalogue import TABLE
from impl.transformers_paging import api as transformers
from impl.vllm import api as vllm
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.adapter_reads import (
    OPTIONAL,
    attributes,
    calls,
    defined_names,
    enumeration_members,
    names_in_tables,
    texts,
)

IMPL = Path(impl.__file__).parent
CLAUSES = [*(IMPL.parent / "reference" / "blocks").rglob("*.py")]
FREE = "a method of lists, dictionaries and deques"


class Adapter(NamedTuple):
    """An adapter and the table of the API that it uses.

    table: of the API.
    accepted: names that releases define as well, and that are read of something else -> of what.
    silent: calls of getattr and hasattr that need no line of the table -> why.
    stood_for: files of classes for which the adapter has a stand-in.
    """

    engine: str
    folder: str
    table: str
    accepted: dict[str, str]
    silent: dict[str, str]
    stood_for: tuple[str, ...] = ()


ADAPTERS = (
    Adapter(
        "sglang",
        "sglang",
        sglang.all_lines(TABLE),
        {
            **dict.fromkeys(("clear", "copy", "insert", "match", "set", "accept", "attach"), FREE),
            **dict.fromkeys(
                ("abort", "error", "bind", "socket", "write", "limit", "message", "sample", "shape", "take"),
                "of our own objects, sockets and logs",
            ),
            **dict.fromkeys(
                ("buffers", "cache", "complete", "evicted", "finish", "finish_loads", "load", "open_session",
                 "phase", "pools", "priority", "threshold",
                 "build", "current", "seconds", "reset", "scheduler", "spec", "tail", "tracker"),
                "of our driver, commands and sizes",
            ),
            **dict.fromkeys(
                ("empty", "exists", "extend", "keys", "remove", "resolve", "wait"),
                "a method of lists, dictionaries, paths, queues and processes",
            ),
            **dict.fromkeys(
                ("allocator", "end", "entries", "full", "poll", "pool", "register", "request", "snapshot",
                 "start", "swa", "tokens"),
                "of our server, commands, clients and logs",
            ),
            **dict.fromkeys(("device_pool", "host_pool", "load_events"), "of what our copy engine moves"),
            **dict.fromkeys(("DEVICE", "HOST"), "of our tiers of memory"),
            "write_policy": "of the controller that the table has",
            "_get_new_prebuilt_batch": "of the mixin; the table has its public name",
            **dict.fromkeys(("__getattr__", "__getitem__", "__init__", "__setattr__"), "of our classes"),
            **dict.fromkeys(
                ("chunked_prefill_size", "disable_radix_cache", "enable_hierarchical_cache",
                 "prefetch_stop_policy", "model_config", "max_new_tokens", "policy", "bootstrap_room"),
                "of settings, sizes and requests that the adapter sets itself",
            ),
            **dict.fromkeys(("model_runner", "init_new"), "of a whole server, which serve-check runs"),
            "batch_to_run": "of the plan that the table has",
            "req_pool_indices_cpu": "stored by the adapter beside it",
            "temporal": "of the record of states that HybridReqToTokenPool makes",
        },
        {
            "testing.py: getattr(sys.modules[module], name)": "no default",
            "facts.py: hasattr(source, name)": "of our classes",
            "loaded_modules.py: getattr(load(module), name)": "no default; the table has it",
            "v0_5_10_to_14.py: getattr(load(module), name)": "no default; the table has it",
            "release_requests.py: getattr(req, self.looks)": "no default; the table has it",
            "release_requests.py: getattr(req, self.chunks)": "no default; the table has it",
            "v0_5_10_to_14.py: getattr(self.common, self.checkpoints)": "no default; the table has it",
            "v0_5_22_to_23.py: getattr(self.common, self.checkpoints)": "no default; the table has it",
            "v0_5_22_to_23.py: hasattr(rows, 'mamba_allocator')": "whether it is the class of the table",
            "variants.py: getattr(trees, f'Rust{release.tree.__name__}')": "of our classes",
            "call_log.py: hasattr(driver, '_load_prefix')": "of our driver",
            "call_log.py: getattr(owner, name)": "no default",
            "call_log.py: getattr(self, f'_{name}')": "of our driver",
            "call_log.py: getattr(self._driver, 'results', None)": "of our driver",
            "call_log.py: getattr(self._driver, 'copies', None)": "of our driver",
            "call_log.py: getattr(server, name)": "of our driver",
            "driver.py: getattr(Driver, kind_name(kind))": "of our driver",
            "driver.py: hasattr(Driver, kind_name(kind))": "of our driver",
            "driver.py: getattr(self.cache.cache_controller, waiting)": "no default; the table has them",
            "gathering_storage.py: getattr(controller, name)": "no default; the table has them",
            "tree_commands.py: getattr(holder.req, field)": "no default",
            "boot.py: getattr(import_utils, check)": "no default",
            "tier.py: getattr(copies, 'storage', None)": "of our copies",
            "tier.py: getattr(lock, _PATH)": "of our mark",
            "tier.py: getattr(getattr(lock, 'receipt', lock), _PATH, None)": "of our mark",
            "tier.py: getattr(lock, 'receipt', lock)": "the table has TreeLock.receipt",
            "tier.py: getattr(engine, name)": "no default",
            "tier.py: getattr(core, name)": "no default",
            "hooks.py: getattr(watcher, name)": "of our watcher",
            "build.py: hasattr(module, 'SpawnRanks')": "how a whole server starts",
            "build.py: hasattr(module, 'publish')": "how a whole server starts",
            "whole_scheduler.py: getattr(io_struct, 'SessionParams', None)": "what a client may send",
            "whole_scheduler.py: getattr(owner, name)": "no default",
            "whole_scheduler.py: getattr(output, 'finished_reasons', ())": "an output without requests",
            "whole_scheduler.py: getattr(output, 'rids', None)": "an output without requests",
            **dict.fromkeys(
                ("stand_ins.py: getattr(kv, 'full_kv_pool', kv)",
                 "model.py: getattr(allocator, names[pool], allocator)",
                 "model.py: getattr(kv, 'full_kv_pool', kv)", "model.py: getattr(kv, 'swa_kv_pool', None)"),
                "of one server of a pair, with a window or without, of either side",
            ),
            "server_leftovers.py: getattr(manager, table)": "no default",
            "stand_ins.py: getattr(common, owner)": "no default",
            "stand_ins.py: getattr(owner, name)": "no default",
            "loading.py: hasattr(host, 'HostPoolGroup')": "in which of two modules it is",
            "storage.py: getattr(_RUNNING, 'thread', None)": "of our thread",
            "storage.py: getattr(controller, name)": "no default",
        },
    ),
    Adapter(
        "vllm",
        "vllm",
        vllm.EVERY,
        {
            **dict.fromkeys(
                ("append", "insert", "pop", "popleft", "clear", "get", "keys", "update", "__setitem__"), FREE
            ),
            "__getitem__": "of Inert",
            "__init__": "for its parameters: `accepted_arguments` passes what there is",
            "block_ids": "of WorkerRequest, which the release fills, and of the jobs of a device",
            **dict.fromkeys(("store", "waiting"), "of our storage"),
            **dict.fromkeys(("chunks", "counts", "events"), "of copies to a pool"),
            "output_token_ids": "of WorkerRequest",
            "prompt_token_ids": "of WorkerRequest",
            "num_tokens": "of WorkerRequest",
            "dtype": "of tensors",
            "block_size": "of our LayerGroup, and of each spec (KVCacheSpec)",
            "max_model_len": "of our EngineConfig",
            "max_tokens": "of our commands",
            "mamba_block_size": "of our settings",
            "num_hash_lookahead_tokens": "of our settings",
            **dict.fromkeys(("request", "running", "load", "remote"), "of our commands"),
            **dict.fromkeys(("error", "remove", "reset", "apply"), "of our network and our servers"),
            **dict.fromkeys(("_worker", "scheduler", "groups", "host"), "of our drivers and sizes"),
            **dict.fromkeys(("device", "tensor"), "of torch"),
            **dict.fromkeys(
                ("parallel_config", "kv_connector", "kv_transfer_config", "max_num_reqs", "model_config",
                 "speculative_config", "scheduler_config", "max_num_encoder_input_tokens"),
                "of our settings",
            ),
            "encoder_cache": "of our EngineConfig, and of our worker",
            "offset": "of our ImageSpan",
            "name": "of enumerations, files and agents",
            "IN_FLIGHT": "of our network",
            "LBHNC": "of our settings",
            "CPU": "of our events",
            "get_token_id": "of our request for a drafter",
        },
        {
            "tables.py: getattr(owner, table, ())": "a release has those tables that it has",
            "bare_scheduler.py: getattr(utils, 'resolve_kv_cache_block_sizes', None)": (
                "the table has it; exported tests have this file in them"
            ),
            "bare_connectors.py: getattr(of_key, 'chunk', of_key)": "an entry of ours in tests wraps it",
            "bare_connectors.py: getattr(importlib.import_module(f'{CONNECTORS}.v1.{module}'), name)": (
                "no default"
            ),
            "offload.py: getattr(base, name)": "no default",
            "offload.py: getattr(scheduler, f'{mark}_kv_req_ids')": "no default; the table has both",
        },
        ("vllm/v1/worker/gpu_input_batch.py",),
    ),
    Adapter(
        "lmdeploy",
        "lmdeploy",
        lmdeploy.TABLES.all_lines,
        {
            **dict.fromkeys(("append", "copy", "get", "update"), FREE),
            "add": "of our RequestSources",
            "finish": "of our InferOutput",
            "resp": "of our InferOutput",
            "input_ids": "of our BatchInputs",
            "is_last_chunk": "of our BatchInputs",
            "send": "of coroutines",
            "seq": "of our rows of a batch, and of a load that the table has",
            "state": "of our LayerGroup",
            "__init__": "of our ReleaseSystem",
            "name": "of enumerations",
            "cache_block_ids": "of our InferOutput",
            **dict.fromkeys(("begin", "event", "run", "sleep"), "of our MigrationLoop"),
            **dict.fromkeys(("clear", "set"), "of our sets and events"),
            **dict.fromkeys(("cancel", "reset"), "of our server of a pair"),
            **dict.fromkeys(("end", "stop"), "of our SessionEnds"),
            **dict.fromkeys(("prefill", "session"), "of our pair"),
            "reason": "of refusals",
            "index": "a method of tuples",
        },
        {
            "driver.py: getattr(owner, method)": "no default; the table has both",
            "model_agent.py: getattr(copies, f'kv_{which}_plan')": "no default; the table has them",
            "model_agent.py: getattr(copies, f'state_{which}_plan')": "no default; the table has them",
            "loading.py: hasattr(module, 'time')": "which modules have the clock",
        },
        ("lmdeploy/pytorch/model_inputs.py", "lmdeploy/messages.py"),
    ),
    Adapter(
        "transformers",
        "transformers_paging",
        transformers.TABLES.all_lines,
        {"update": FREE, "device": "of torch", "start": "of our BatchEntry"},
        {"stamped_cache.py: getattr(torch, name)": "of torch, no default"},
    ),
)  # fmt: skip
each = pytest.mark.parametrize("adapter", ADAPTERS, ids=[adapter.engine for adapter in ADAPTERS])


def files(adapter):
    return sorted((IMPL / adapter.folder).rglob("*.py"))


def names_without_table(adapter, root, code):
    """Names that the code reads, that files of the release define, and that no table has."""
    driven = [root / file for file in (*nearest.read(adapter.engine).files, *adapter.stood_for)]
    names = defined_names(file for file in driven if file.is_file()) - names_in_tables(
        adapter.table
    )
    return {name: at for name, at in attributes(code).items() if name in names}


@each
def test_every_attribute_of_a_release_stands_in_a_table(adapter, tmp_path):
    newest = nearest.read(adapter.engine).releases[-1]
    try:
        root = resolve(f"{adapter.engine}=={newest}").root
    except UnusableImplementation as error:
        pytest.skip(str(error))
    left = {
        n: at
        for n, at in names_without_table(adapter, root, files(adapter)).items()
        if n not in adapter.accepted
    }
    assert left == {}
    code = tmp_path / "new.py"
    code.write_text(
        "x.resumable; x.end_session; x._true_initial_tokens; x.kv_committed_len; x.extra\n"
    )
    bare = adapter._replace(table="")
    assert "extra" not in (found := names_without_table(bare, root, [code]))
    assert found


@each
def test_states_that_facts_are_told_by_stand_in_a_table(adapter):
    """An adapter gives some by name, and the clauses compare the text."""
    newest = nearest.read(adapter.engine).releases[-1]
    try:
        root = resolve(f"{adapter.engine}=={newest}").root
    except UnusableImplementation as error:
        pytest.skip(str(error))
    driven = [root / file for file in nearest.read(adapter.engine).files]
    members = enumeration_members(file for file in driven if file.is_file())
    members_read = texts([*files(adapter), *CLAUSES]) & members
    assert members_read <= names_in_tables(adapter.table) | {*adapter.accepted}


@each
def test_optional_attributes_are_read_by_one_function(adapter):
    """`optional` and `either` take names of the table; nothing else has a default for what is not there."""
    silent = {text for text, _ in calls(files(adapter), "getattr", "hasattr")}
    assert silent == {*adapter.silent}
    known = {*adapter.table.replace(";", " ").replace("(", " ").split()}
    for text, call in calls(files(adapter), *OPTIONAL):
        names = [node.value for node in call.args if isinstance(node, ast.Constant) and node.value]
        assert {*filter(None, names)} <= known, text
