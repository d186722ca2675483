"""What a launch brings to the L2 beside its own work (`cuda/read_ahead.cuh`): weights of the products that follow.

Few rows are bound by reading weights, but between two products memory has nothing to do. Results do not depend on it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepinfer_lab.kernels.dependent_launch import MIN_CAPABILITY
from deepinfer_lab.kernels.loader import multiprocessors
from deepinfer_lab.kernels.ops_check import expect, require

MOST = 6  # tensors
# Of the L2. The rest is for what comes by meanwhile: activations, and the product at hand, whose weights may have been there
# before. What does not fit would drive out what is needed sooner.
SHARE = 0.75
BLOCK_BYTES = 2**17  # that are worth a block of their own; beyond one for each multiprocessor, blocks take more


@dataclass(frozen=True)
class ReadAhead:
    """tensors: `MOST`, the last of them None. counts: bytes of each, from its beginning, a multiple of 16. blocks: that share
    the work."""

    tensors: tuple[torch.Tensor | None, ...]
    counts: tuple[int, ...]
    blocks: int


def read_ahead(op: str, tensors: Sequence[torch.Tensor], device: torch.device, taken: int) -> ReadAhead:
    """As much of the tensors, in the given order, as there is room for.

    Args:
        op: for messages. taken: bytes of the L2 that the launch itself uses.

    Raises:
        KernelError: too many tensors, one that is elsewhere, not contiguous or not 16-byte aligned.
    """
    require(len(tensors) <= MOST, f"{op}: {len(tensors)} tensors ahead, must be at most {MOST}")
    if not tensors:
        return ReadAhead((None,) * MOST, (0,) * MOST, 0)
    left, counts = max(0, int(SHARE * cache_bytes(device.index)) - taken), []
    for i, tensor in enumerate(tensors):
        expect(op, f"ahead[{i}]", tensor, tensor.dtype, tuple(tensor.shape), device, aligned=True)
        counts.append(min(tensor.nbytes, left) // 16 * 16)
        left -= counts[-1]
    none = MOST - len(counts)
    blocks = min(-(-sum(counts) // BLOCK_BYTES), multiprocessors(device.index))
    return ReadAhead((*tensors, *[None] * none), (*counts, *[0] * none), blocks)


@functools.cache
def cache_bytes(device: int) -> int:
    """Of the device's L2, or 0 where kernels follow one another without a gap that could be used."""
    properties = torch.cuda.get_device_properties(device)
    return properties.L2_cache_size if (properties.major, properties.minor) >= MIN_CAPABILITY else 0
