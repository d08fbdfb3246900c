"""The stand-in for Triton does what kernels of vLLM ask of it."""

import torch

from impl.vllm.triton import Language, Triton

tl = Language


@Triton.jit
def _copy(source: int, target: int, size: int) -> None:
    """Bytes from address to address, a lane each, as mamba_utils.py copies a convolution's window."""
    offsets = tl.arange(0, 4)
    for first in range(0, size, 4):
        mask = (first + offsets) < size
        lanes = (source + first + offsets).to(tl.pointer_type(tl.uint8))
        copied = (target + first + offsets).to(tl.pointer_type(tl.uint8))
        tl.store(copied, tl.load(lanes, mask=mask), mask=mask)


def test_a_kernel_copies_bytes_from_an_address_in_each_lane() -> None:
    source = torch.arange(3, dtype=torch.int16)
    target = torch.zeros(4, dtype=torch.int16)
    _copy[(1,)](source.data_ptr(), target.data_ptr(), 6)
    assert target.tolist() == [0, 1, 2, 0]
