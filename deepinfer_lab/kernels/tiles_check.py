"""What the products with weights in tiles (`quant/tiles.py`) can take, and on which devices."""

import torch

from deepinfer_lab.kernels.catalogue import TILED
from deepinfer_lab.kernels.ops_check import dense, expect, half_rows, refuse_gradient, require, whole_groups

UNIT_N, UNIT_K = 16, 128  # outputs and k of a unit of tiles


def unit_bytes(bits: int) -> int:
    """Of a unit."""
    return UNIT_N * UNIT_K * bits // 8


def require_capability(name: str, x: torch.Tensor) -> None:
    """x must be on a device that can run this product of `catalogue.TILED`, one with a `capability`.

    Raises:
        KernelError: it is on another.
    """
    require(x.is_cuda, f"{name}: x is on {x.device}, must be on a CUDA device")
    found, needed = torch.cuda.get_device_capability(x.device), TILED[name].capability
    require(
        found == needed,
        f"{name}: {x.device} has compute capability {found[0]}.{found[1]}, must be {needed[0]}.{needed[1]}, whose tensor cores "
        f"it is made for; there is {name[:2]}_mma_block for others",
    )


def checked(
    name: str,
    bits: int,
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: torch.Tensor | None,
    *,
    max_m: int,
    max_n: int,
    max_k: int,
) -> torch.Tensor:
    """x, contiguous and 16-byte aligned: copied if it was not.

    Args:
        name: of the launcher. max_m, max_n, max_k: what it can count.

    Raises:
        KernelError: a shape, dtype, layout or device outside these limits, or that does not fit the others'.
    """
    m, k = half_rows(name, x)
    require(1 <= m <= max_m, f"{name}: M = {m}, must be 1 to {max_m}")
    require(1 <= n <= max_n, f"{name}: N = {n}, must be 1 to {max_n}")
    whole_groups(name, k, group)
    require(k <= max_k, f"{name}: K = {k}, must be at most {max_k}")
    refuse_gradient(name, x)
    count, units = -(-n // UNIT_N), -(-k // UNIT_K)
    expect(name, "tiles", tiles, torch.uint8, (count, units, unit_bytes(bits)), x.device, aligned=True)
    expect(name, "scales", scales, torch.float16, (count, units * UNIT_K // group, 8, 2), x.device, aligned=True)
    if bias is not None:
        expect(name, "bias", bias, torch.float16, (n,), x.device)
    return dense(x)
