"""The Triton kernels as Triton's own compiler takes them for a GPU, which needs none."""

import importlib.util
import subprocess
import sys

import pytest

# In a process of its own: who imports triton decides whether it interprets.
COMPILE = """
import triton
from impl.torch_kv import kernels
from triton.backends.compiler import GPUTarget

for kernel, constants in (
    (kernels._fill, {"has_swa": False, "lanes": 1}),
    (kernels._fill, {"has_swa": True, "lanes": 4}),
    (kernels._give, {"has_full": True, "has_swa": True, "lanes": 4}),
    (kernels._give, {"has_full": False, "has_swa": True, "lanes": 1}),
    (kernels._give, {"has_full": True, "has_swa": False, "lanes": 2}),
):
    constants |= {"page_size": 16, "block": kernels.BLOCK}
    types = {"req_to_token": "*i32", "more": "i32", "width": "i32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32" if "_by" in name else "*i64") for name in kernel.arg_names}
    source = triton.compiler.ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert ".entry " + kernel.__name__ in compiled.asm["ptx"]
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_compile_for_a_gpu():
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
