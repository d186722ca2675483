"""Launcher of a kernel that does nothing for a while: a control for measurements of overlap."""

import numpy as np
import torch

from deepinfer_lab.kernels.loader import launch_op
from deepinfer_lab.kernels.ops_catalogue import OPS
from deepinfer_lab.kernels.ops_check import expect, require

MULTIPROCESSORS = 1024  # more than any GPU has


def spin(blocks: int, milliseconds: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Enqueue `blocks` thread blocks on torch's current stream, each of which runs for about `milliseconds`.

    A block has 1,024 threads, so that a multiprocessor holds one or two of them.

    Args:
        out: int32 [1024] on the GPU, added to; None starts from zeros on the current device.

    Returns:
        How many blocks ran on each multiprocessor, by its number (%smid).

    Raises:
        KernelError: fewer than one block, or a time that is not above 0.
    """
    require(blocks >= 1, f"spin: {blocks} blocks, must be 1 or more")
    require(milliseconds > 0, f"spin: {milliseconds} milliseconds, must be above 0")
    if out is None:
        out = torch.zeros(MULTIPROCESSORS, dtype=torch.int32, device="cuda")
    expect("spin", "out", out, torch.int32, (MULTIPROCESSORS,), out.device)
    launch_op(OPS["spin"], (blocks,), (out,), np.int64(milliseconds * 1e6))
    return out
