"""Launchers of the tensor-core kernels for a few rows, on weights in tiles (`quant/tiles.py`, `cuda/mma_small.cuh`).

x[M, K] @ weight[N, K].T + bias[N], the weight as `TiledWeight` has it. Made for M up to 32, right for any: every 32 rows
read the weights again. Weights are exact and sums float32, rounded once. A row's result is the same bits for every M whose
`Plan` has the same number of warps.

What stands before and after a product in a decoder can be part of its launch. Results are then the same bits as with a launch
for each.

Args:
    x: float16 [M, K] on a CUDA device. Copied where it is not contiguous or not 16-byte aligned.
    tiles: uint8 [ceil(N / 16), ceil(K / 128), 256 * bits]. scales: float16 [ceil(N / 16), ceil(K / 128) * 128 / group, 8, 2].
    n: N. group: 32, 64 or 128, a divisor of K. bias: float16 [N], or None.
    out: float16, contiguous, to write into; None allocates it.
    norm: multiply `elementwise.rms_norm(x)` instead of x. For M up to `FUSED_ROWS`, where `fuses`.
    residual: float16 [M, N], to add to the rounded product; may be `out`.
    gated: the weight is one of `quant.interleave`, and the result `elementwise.silu_mul(product, interleaved=True)`.

Returns:
    float16 [M, N], or [M, N / 2] where gated.

Raises:
    KernelError: a shape, dtype, layout or device outside these limits.
"""

from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_lab.kernels.catalogue import GROUPS, MAX_GRID_Y, TILED
from deepinfer_lab.kernels.check import MAX_INT
from deepinfer_lab.kernels.loader import RESERVED_SHARED, launch_op, max_shared, multiprocessors
from deepinfer_lab.kernels.ops_catalogue import MMA_ROWS, OPS
from deepinfer_lab.kernels.ops_check import expect, require
from deepinfer_lab.kernels.tiles_check import UNIT_K, UNIT_N, checked

Maybe = torch.Tensor | None
FUSED_ROWS = 8  # of which a block makes the norm
# Blocks of 8 warps that a multiprocessor holds, and how few of them are still fast: with three, 22016 x 2048 takes 9.5 us on an
# H200 instead of 9.4, with two 11.5.
RESIDENT, ENOUGH = 4, 3


@dataclass(frozen=True)
class Norm:
    """RMSNorm of a product's rows. weight: float16 [K], 16-byte aligned."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Card:
    """What a launch depends on: the number of multiprocessors, and bytes of shared memory that a block of each may have."""

    multiprocessors: int
    shared: int


@dataclass(frozen=True)
class Plan:
    """One launch: its `Op`'s name, blocks along M and along N, bytes of shared memory it asks for."""

    op: str
    grid: tuple[int, int]
    shared: int = 0


def w4_mma_small(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: Maybe = None,
    out: Maybe = None,
    *,
    norm: Norm | None = None,
    residual: Maybe = None,
    gated: bool = False,
) -> torch.Tensor:
    """Four bits."""
    return _multiply(4, x, tiles, scales, n, group, bias, out, norm, residual, gated)


def w3_mma_small(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: Maybe = None,
    out: Maybe = None,
    *,
    norm: Norm | None = None,
    residual: Maybe = None,
    gated: bool = False,
) -> torch.Tensor:
    """Three bits."""
    return _multiply(3, x, tiles, scales, n, group, bias, out, norm, residual, gated)


def fuses(bits: int, m: int, n: int, k: int, group: int, device: torch.device | str) -> bool:
    """Whether such a product can make the norm of its rows: they must fit the shared memory of the blocks that are wanted."""
    device = torch.device(device)
    if device.type != "cuda" or m > FUSED_ROWS or group not in GROUPS or k % group:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return norm_plan(bits, m, n, k, _card(index)) is not None


def plan(bits: int, m: int, n: int, card: Card) -> Plan:
    """The launch for a product. Of `cuda/mma_small.cuh`, what an H200 found fastest: blocks of 16 outputs and 16 warps where
    each finds a multiprocessor to itself; for up to twice as many outputs, pairs, which read the activations half as often;
    beyond that 8 warps, so that some blocks read while others add up. 32 rows in pairs would take too many registers.
    """
    rows, count = _rows(m), -(-n // UNIT_N)
    form, columns = "", 1
    if count > card.multiprocessors:
        form, columns = ("_pair", 2) if count <= 2 * card.multiprocessors and rows < 32 else ("_many", 1)
    return Plan(f"w{bits}_mma_{rows}{form}", (-(-m // rows), -(-count // columns)))


def norm_plan(bits: int, m: int, n: int, k: int, card: Card) -> Plan | None:
    """The launch for a product of up to `FUSED_ROWS` rows that it norms itself: by the same warps as `plan`'s, so that the bits
    are the same, in blocks that stay for several outputs where those are many. None where too few blocks fit."""
    plain = plan(bits, m, n, card)
    op, count = OPS[f"{plain.op}_norm"], plain.grid[1]
    many = plain.op.endswith("_many")
    shared = norm_shared(m, k)
    block = shared + op.threads * 16 * (1 + plain.op.endswith("_pair")) + RESERVED_SHARED  # and the sums of its warps
    fit = min((card.shared + RESERVED_SHARED) // block, RESIDENT if many else 1)
    if fit < min(ENOUGH if many else 1, -(-count // card.multiprocessors)):
        return None
    return Plan(op.name, (1, min(count, fit * card.multiprocessors)), shared)


def norm_shared(m: int, k: int) -> int:
    """Bytes of shared memory that `NormedRows` in `cuda/small_rows.cuh` has rows and weight in."""
    return (m + 1) * (-(-k // UNIT_K) * UNIT_K + 32) * 2


def run(
    chosen: Plan,
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    bias: Maybe,
    out: torch.Tensor,
    n: int,
    group: int,
    norm: Norm | None = None,
    residual: Maybe = None,
    gated: bool = False,
) -> None:
    """Launch, without a look at the operands."""
    m, k = x.shape
    # Blocks that read the same weights follow one another: the second finds them in the L2.
    tensors, numbers = (x, tiles, scales, bias, residual, out), (m, n, k, group, int(gated))
    if norm is not None:
        tensors, numbers = (*tensors, norm.weight), (*numbers, np.float32(norm.eps))
    launch_op(OPS[chosen.op], chosen.grid, tensors, *numbers, shared=chosen.shared)


def _rows(m: int) -> int:
    return next((rows for rows in MMA_ROWS if m <= rows), MMA_ROWS[-1])


def _card(device: int) -> Card:
    return Card(multiprocessors(device), max_shared(device))


def _multiply(
    bits: int,
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: Maybe,
    out: Maybe,
    norm: Norm | None,
    residual: Maybe,
    gated: bool,
) -> torch.Tensor:
    product = TILED[f"w{bits}_mma_small"]
    name = product.name
    require(not gated or n % UNIT_N == 0, f"{name}: N = {n}, must be a multiple of {UNIT_N} where gated")
    require(not gated or residual is None, f"{name}: residual is given and gated is True, only one of them can be")
    most = FUSED_ROWS if norm else product.max_m
    limits = {"max_m": most, "max_n": MAX_GRID_Y * UNIT_N, "max_k": MAX_INT // 4}
    x = checked(f"{name}{' with a norm' if norm else ''}", bits, x, tiles, scales, n, group, bias, **limits)
    m, k = x.shape
    if residual is not None:
        expect(name, "residual", residual, torch.float16, (m, n), x.device)
    if norm is not None:
        expect(name, "norm.weight", norm.weight, torch.float16, (k,), x.device, aligned=True)
    columns = n // 2 if gated else n
    out = torch.empty(m, columns, dtype=torch.float16, device=x.device) if out is None else out
    expect(name, "out", out, torch.float16, (m, columns), x.device)
    card = _card(x.device.index)
    chosen = norm_plan(bits, m, n, k, card) if norm else plan(bits, m, n, card)
    require(chosen is not None, f"{name}: M = {m}, K = {k}: the norm of so many does not fit {card}; see `fuses`")
    run(chosen, x, tiles, scales, bias, out, n, group, norm, residual, gated)
    return out
