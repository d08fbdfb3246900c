"""What the adapters of vLLM, LMDeploy and transformers read of a release stands in a table of its API."""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

import impl
from impl import nearest
from impl.adapter import UnusableImplementation
from impl.lmdeploy import api as lmdeploy
from impl.transformers_paging import api as transformers
from impl.vllm import api as vllm
from stateful_tests.lockstep.systems import resolve
from stateful_tests.tests.support.adapter_reads import OPTIONAL, attributes, calls, defined, tabled

IMPL = Path(impl.__file__).parent
FREE = "a method of lists, dictionaries and deques"


class Adapter(NamedTuple):
    """table: of the API. accepted: names that releases define as well, and that are read of something else ->
    of what. silent: calls of getattr and hasattr that need no line of the table -> why.
    """

    engine: str
    folder: str
    table: str
    accepted: dict[str, str]
    silent: dict[str, str]


ADAPTERS = (
    Adapter(
        "vllm",
        "vllm",
        vllm.EVERY,
        {
            **dict.fromkeys(("append", "insert", "pop", "popleft"), FREE),
            "__getitem__": "of Inert",
            "__init__": "for its parameters: `taken` passes what there is",
            "block_ids": "of WorkerRequest, which the release fills, and of the jobs of a device",
            "output_token_ids": "of WorkerRequest",
            "prompt_token_ids": "of WorkerRequest",
            "num_tokens": "of WorkerRequest",
            "dtype": "of tensors",
            "block_size": "of our LayerGroup, and of each spec (KVCacheSpec)",
            "max_model_len": "of our EngineConfig",
            "max_tokens": "of our commands",
            "mamba_block_size": "of our settings",
            "num_hash_lookahead_tokens": "of our settings",
            "running": "of our commands",
        },
        {
            "bare_scheduler.py: getattr(owner, name.rpartition('.')[2], default)": "`optional` itself",
            "bare_connectors.py: getattr(of_key, 'chunk', of_key)": "an entry of ours in tests wraps it",
            "offload.py: getattr(base, name)": "no default",
            "offload.py: getattr(scheduler, f'{mark}_kv_req_ids')": "no default; the table has both",
        },
    ),
    Adapter(
        "lmdeploy",
        "lmdeploy",
        lmdeploy.TABLES.every,
        {
            **dict.fromkeys(("append", "copy", "get", "update"), FREE),
            "finish": "of our InferOutput",
            "resp": "of our InferOutput",
            "input_ids": "of our BatchInputs",
            "is_last_chunk": "of our BatchInputs",
            "send": "of coroutines",
            "seq": "of our rows of a batch",
            "state": "of our LayerGroup",
        },
        {
            "driver.py: getattr(owner, method)": "no default; the table has both",
            "driver.py: getattr(copies, f'kv_{which}_plan')": "no default; the table has them",
            "driver.py: getattr(copies, f'state_{which}_plan')": "no default; the table has them",
            "loading.py: hasattr(module, 'time')": "which modules have the clock",
        },
    ),
    Adapter(
        "transformers",
        "transformers_paging",
        transformers.TABLES.every,
        {"update": FREE, "device": "of torch"},
        {},
    ),
)  # fmt: skip
each = pytest.mark.parametrize("adapter", ADAPTERS, ids=[adapter.engine for adapter in ADAPTERS])


def files(adapter):
    return sorted((IMPL / adapter.folder).glob("*.py"))


def untabled(adapter, root, code):
    """Names that the code reads, that files of the release define, and that no table has."""
    driven = [root / file for file in nearest.read(adapter.engine).files]
    names = defined(file for file in driven if file.is_file()) - tabled(adapter.table)
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
        for n, at in untabled(adapter, root, files(adapter)).items()
        if n not in adapter.accepted
    }
    assert left == {}
    (code := tmp_path / "new.py").write_text(
        "x.resumable; x.end_session; x._true_initial_tokens; x.extra\n"
    )
    bare = adapter._replace(table="")
    assert set(untabled(bare, root, [code])) & {"resumable", "end_session", "_true_initial_tokens"}


@each
def test_what_may_be_missing_is_read_by_one_function(adapter):
    """`optional` and `either` take names of the table; nothing else has a default for what is not there."""
    silent = {text for text, _ in calls(files(adapter), "getattr", "hasattr")}
    assert silent == {*adapter.silent}
    known = {*adapter.table.replace(";", " ").replace("(", " ").split()}
    for text, call in calls(files(adapter), *OPTIONAL):
        names = [node.value for node in call.args if isinstance(node, ast.Constant) and node.value]
        assert names and {*filter(None, names)} <= known, text
