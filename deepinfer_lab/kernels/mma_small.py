"""Launchers of the tensor-core kernels for a few rows, on weights in tiles (`quant/tiles.py`, `cuda/mma_unit.cuh`).

x[M, K] @ weight[N, K].T + bias[N], the weight as `TiledWeight` has it. Made for M up to 32, right for any: every 32 rows
read the weights again. Weights are exact and sums float32, rounded once. A row's result is the same bits for every M whose
`Plan` has the same number of warps.

Args:
    x: float16 [M, K] on a CUDA device. Copied where it is not contiguous or not 16-byte aligned.
    tiles: uint8 [ceil(N / 16), ceil(K / 128), 256 * bits]. scales: float16 [ceil(N / 16), ceil(K / 128) * 128 / group, 8, 2].
    n: N. group: 32, 64 or 128, a divisor of K. bias: float16 [N], or None.
    out: float16 [M, N], contiguous, to write into; None allocates it.

Returns:
    float16 [M, N].

Raises:
    KernelError: a shape, dtype, layout or device outside these limits.
"""

from dataclasses import dataclass

import torch

from deepinfer_lab.kernels.catalogue import GROUPS, MAX_GRID_Y, TILED
from deepinfer_lab.kernels.check import MAX_INT
from deepinfer_lab.kernels.loader import launch_op, multiprocessors
from deepinfer_lab.kernels.ops_catalogue import MMA_ROWS, OPS
from deepinfer_lab.kernels.ops_check import expect, require

Maybe = torch.Tensor | None
UNIT_N, UNIT_K = 16, 128


@dataclass(frozen=True)
class Plan:
    """One launch: its `Op`'s name, blocks along M and along N."""

    op: str
    grid: tuple[int, int]


def w4_mma_small(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: Maybe = None,
    out: Maybe = None,
) -> torch.Tensor:
    """Four bits."""
    return _multiply(4, x, tiles, scales, n, group, bias, out)


def w3_mma_small(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: Maybe = None,
    out: Maybe = None,
) -> torch.Tensor:
    """Three bits."""
    return _multiply(3, x, tiles, scales, n, group, bias, out)


def unit_bytes(bits: int) -> int:
    """Of 16 x 128 weights."""
    return UNIT_N * UNIT_K * bits // 8


def plan(bits: int, m: int, n: int, multiprocessors: int) -> Plan:
    """The launch for a product. Of `cuda/mma_small.cuh`, what an H200 found fastest: blocks of 16 outputs and 16 warps where
    each finds a multiprocessor to itself; for up to twice as many outputs, pairs, which read the activations half as often;
    beyond that 8 warps, so that some blocks read while others add up. 32 rows in pairs would take too many registers.
    """
    rows, count = _rows(m), -(-n // UNIT_N)
    form, columns = "", 1
    if count > multiprocessors:
        form, columns = ("_pair", 2) if count <= 2 * multiprocessors and rows < 32 else ("_many", 1)
    return Plan(f"w{bits}_mma_{rows}{form}", (-(-m // rows), -(-count // columns)))


def run(
    chosen: Plan, x: torch.Tensor, tiles: torch.Tensor, scales: torch.Tensor, bias: Maybe, out: torch.Tensor, group: int
) -> None:
    """Launch, without a look at the operands."""
    (m, k), n = x.shape, out.shape[1]
    # Blocks that read the same weights follow one another: the second finds them in the L2.
    launch_op(OPS[chosen.op], chosen.grid, (x, tiles, scales, bias, out), m, n, k, group)


def _rows(m: int) -> int:
    return next((rows for rows in MMA_ROWS if m <= rows), MMA_ROWS[-1])


def _multiply(
    bits: int,
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: Maybe,
    out: Maybe,
) -> torch.Tensor:
    product = TILED[f"w{bits}_mma_small"]
    name = product.name
    require(x.dtype == torch.float16, f"{name}: x has dtype {x.dtype}, must be torch.float16")
    require(x.dim() == 2, f"{name}: x has shape {tuple(x.shape)}, must be [M, K]")
    m, k = x.shape
    require(1 <= m <= product.max_m, f"{name}: M = {m}, must be 1 to {product.max_m}")
    require(1 <= n <= MAX_GRID_Y * UNIT_N, f"{name}: N = {n}, must be 1 to {MAX_GRID_Y * UNIT_N}")
    require(group in GROUPS, f"{name}: group = {group}, must be one of {', '.join(map(str, GROUPS))}")
    require(k > 0 and k % group == 0, f"{name}: K = {k}, must be a positive multiple of group = {group}")
    require(k <= MAX_INT // 4, f"{name}: K = {k} is too large")
    require(
        not (torch.is_grad_enabled() and x.requires_grad),
        f"{name}: x requires a gradient and this kernel has no backward pass; call it under torch.inference_mode()",
    )
    count, units = -(-n // UNIT_N), -(-k // UNIT_K)
    expect(name, "tiles", tiles, torch.uint8, (count, units, unit_bytes(bits)), x.device, aligned=True)
    expect(name, "scales", scales, torch.float16, (count, units * UNIT_K // group, 8, 2), x.device, aligned=True)
    if bias is not None:
        expect(name, "bias", bias, torch.float16, (n,), x.device)
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    out = torch.empty(m, n, dtype=torch.float16, device=x.device) if out is None else out
    expect(name, "out", out, torch.float16, (m, n), x.device)
    run(plan(bits, m, n, multiprocessors(x.device.index)), x, tiles, scales, bias, out, group)
    return out
