"""Launcher of the product of a few rows with a dense weight, which it reads once, as fast as memory gives it: a model's head
in decode steps. On torch's current stream.
"""

import torch

from deepinfer_lab.errors import MissingDependency
from deepinfer_lab.kernels.compiler import load_nvrtc
from deepinfer_lab.kernels.loader import RESERVED_SHARED, launch_op, max_shared, multiprocessors
from deepinfer_lab.kernels.ops_catalogue import MIN_CAPABILITY, OPS
from deepinfer_lab.kernels.ops_check import dense, expect, refuse_gradient, require

MAX_ROWS = 4
VECTOR = 8  # values of one 16-byte access
STEP = 256  # values of a row that a warp takes at a time
RING = 8 * 6 * 2 * STEP * 2  # bytes: of eight warps, six steps of two rows of the weight
# Blocks that a multiprocessor is given at once, each with 40 KiB of weights on their way. Where memory gives 4.4 TB/s and takes
# a microsecond, as an H200's does under load, a multiprocessor's part is 33 KiB.
RESIDENT = 4
MAX_N = 2**31 - 2**16  # places are 32-bit numbers


def dense_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias, sums in float32, rounded once. A row's result is the same bits for any number of rows.

    Args:
        x: float16 [M, K], M up to `most_rows(weight)`; copied where it is not contiguous or not 16-byte aligned.
        weight: float16 [N, K], contiguous and 16-byte aligned, K a multiple of 8. bias: float16 [N], or None.
        out: float16 [M, N], to write into; None allocates it.

    Raises:
        KernelError: an argument outside these limits, with its name, its value and the limit.
    """
    name = "dense_rows"
    require(x.dim() == 2, f"{name}: x has shape {tuple(x.shape)}, must be [M, K]")
    require(weight.dim() == 2, f"{name}: weight has shape {tuple(weight.shape)}, must be [N, K]")
    (m, k), n = x.shape, weight.shape[0]
    require(1 <= m <= MAX_ROWS, f"{name}: M = {m}, must be 1 to {MAX_ROWS}")
    require(1 <= n <= MAX_N, f"{name}: N = {n}, must be 1 to {MAX_N}")
    require(k > 0 and k % VECTOR == 0, f"{name}: K = {k}, must be a positive multiple of {VECTOR}")
    refuse_gradient(name, x)
    x = dense(x)
    out = x.new_empty(m, n) if out is None else out
    expect(name, "x", x, torch.float16, (m, k), x.device, aligned=True)
    expect(name, "weight", weight, torch.float16, (n, k), x.device, aligned=True)
    expect(name, "out", out, torch.float16, (m, n), x.device)
    if bias is not None:
        expect(name, "bias", bias, torch.float16, (n,), x.device)
    shared, available = shared_bytes(m, k), max_shared(x.device.index)
    require(
        shared <= available,
        f"{name}: M = {m}, K = {k}: {shared} bytes of shared memory, must be at most {available}",
    )
    blocks = grid(n, shared, multiprocessors(x.device.index), available)
    launch_op(OPS[name], (blocks,), (x, weight, bias, out), m, n, k, shared=shared)
    return out


def most_rows(weight: torch.Tensor) -> int:
    """Rows that `dense_rows` takes with this weight where it is, up to `MAX_ROWS`. 0: none."""
    fits = weight.is_cuda and weight.dtype == torch.float16 and weight.is_contiguous() and weight.data_ptr() % 16 == 0
    n, k = weight.shape
    if not fits or n == 0 or k == 0 or k % VECTOR or torch.cuda.get_device_capability(weight.device) < MIN_CAPABILITY:
        return 0
    try:
        load_nvrtc()
    except MissingDependency:  # then torch does all the work
        return 0
    available = max_shared(weight.device.index)
    return sum(shared_bytes(m, k) <= available for m in range(1, MAX_ROWS + 1))


def shared_bytes(m: int, k: int) -> int:
    """Of a block: the weights on their way, and the activations, in whole steps and by ones, twos or fours."""
    return RING + (1 << (m - 1).bit_length()) * -(-k // STEP) * STEP * 2


def grid(n: int, shared: int, processors: int, available: int) -> int:
    """Blocks for N outputs: all that are resident at once, but none without a pair of outputs for its first warp."""
    resident = min(RESIDENT, (available + RESERVED_SHARED) // (shared + RESERVED_SHARED))
    return min(resident * processors, -(-n // 2))
