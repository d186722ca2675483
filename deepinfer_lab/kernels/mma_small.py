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
from deepinfer_lab.kernels.loader import RESERVED_SHARED, launch_op, max_shared, multiprocessors
from deepinfer_lab.kernels.ops_catalogue import MMA_ROWS, OPS
from deepinfer_lab.kernels.ops_check import expect, require

Maybe = torch.Tensor | None
UNIT_N, UNIT_K = 16, 128
# Warps of `cuda/mma_ring.cuh` that a multiprocessor holds at once, by activation rows of a block: registers limit them.
RING_WARPS = {8: 32, 16: 16, 32: 12}
RING_STAGES = {4: 4, 3: 5}  # units on their way to a warp, by bits: nearly as many bytes


@dataclass(frozen=True)
class Card:
    """What a launch depends on: the number of multiprocessors, and bytes of shared memory that a block of each may have."""

    multiprocessors: int
    shared: int


@dataclass(frozen=True)
class Plan:
    """One launch: its `Op`'s name, blocks along M and along N, warps of a block, bytes of shared memory it asks for."""

    op: str
    grid: tuple[int, int]
    warps: int
    shared: int = 0


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


def plan(bits: int, m: int, n: int, k: int, group: int, card: Card) -> Plan:
    """The launch for a product: through rings in shared memory where the activations fit there beside them."""
    return ring_plan(bits, m, n, k, group, card) or register_plan(bits, m, n, card)


def register_plan(bits: int, m: int, n: int, card: Card) -> Plan:
    """`cuda/mma_small.cuh`: blocks of 16 outputs where each finds a multiprocessor to itself, otherwise of 32, which read the
    activations half as often. For 32 rows that would take more registers than there are."""
    rows, count = _rows(m), -(-n // UNIT_N)
    pair = count > card.multiprocessors and rows < 32
    return Plan(f"w{bits}_mma_{rows}" + "_pair" * pair, (-(-m // rows), -(-count // (1 + pair))), 16)


def ring_plan(bits: int, m: int, n: int, k: int, group: int, card: Card) -> Plan | None:
    """`cuda/mma_ring.cuh`: as many warps to a multiprocessor as fit it and find work, in small blocks rather than large ones.
    Blocks that stay for several outputs give each warp two units of them at least: adding up takes as long as half a unit.

    Returns:
        None where fewer warps fit than half of what registers allow, as activations take the shared memory.
    """
    rows, count, units = _rows(m), -(-n // UNIT_N), -(-k // UNIT_K)
    op, best, most = OPS[f"w{bits}_mma_ring_{rows}"], None, RING_WARPS[rows] // 2 - 1
    for warps in range(4, op.threads // 32 + 1, 4):
        shared = ring_shared(bits, min(m, rows), rows, k, group, warps)
        fit = min((card.shared + RESERVED_SHARED) // (shared + RESERVED_SHARED), RING_WARPS[rows] // warps)
        blocks = min(count, card.multiprocessors * fit)
        if blocks < count and warps > max(units // 2, 4):
            continue
        resident = min(fit, -(-count // card.multiprocessors)) * warps
        if resident > most:
            best, most = Plan(op.name, (-(-m // rows), blocks), warps, shared), resident
    return best


def ring_shared(bits: int, filled: int, rows: int, k: int, group: int, warps: int) -> int:
    """Bytes of shared memory of a block: activations of `filled` rows, the warps' rings, and their sums of `rows` rows."""
    units = -(-k // UNIT_K)
    ring = RING_STAGES[bits] * (unit_bytes(bits) + 128 * UNIT_K // group)
    return filled * (units * UNIT_K * 2 + 64) + warps * (ring + 64 * rows)


def run(
    chosen: Plan, x: torch.Tensor, tiles: torch.Tensor, scales: torch.Tensor, bias: Maybe, out: torch.Tensor, group: int
) -> None:
    """Launch, without a look at the operands."""
    (m, k), n = x.shape, out.shape[1]
    # Blocks that read the same weights follow one another: the second finds them in the L2.
    tensors = (x, tiles, scales, bias, out)
    launch_op(OPS[chosen.op], chosen.grid, tensors, m, n, k, group, threads=32 * chosen.warps, shared=chosen.shared)


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
    device = x.device.index
    card = Card(multiprocessors(device), max_shared(device))
    run(plan(bits, m, n, k, group, card), x, tiles, scales, bias, out, group)
    return out
