"""Linear layers: y[M, N] = x[M, K] @ weight[N, K].T + bias[N], dense or few-bit."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from deepinfer_lab.kernels import LAUNCHERS, TILED_LAUNCHERS, dispatch, mma_small
from deepinfer_lab.kernels.dense_rows import dense_rows, most_rows
from deepinfer_lab.kernels.dequantise_tiles import dequantise_tiles_cublas
from deepinfer_lab.kernels.mma_small import MMA_ROWS, Norm
from deepinfer_lab.quant.layout import PackedWeight
from deepinfer_lab.quant.tiles import TiledWeight, from_tiles, to_tiles

NORM_PAYS = 2  # rows up to which a product that makes its norm itself was faster on an H200 than a launch for each
DEQUANT_ROWS = 4096  # rows of a weight that `dequant_cublas` holds densely at a time


def _prepacked(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight in oneDNN's blocked order, or None where that does not apply.

    A product with few rows is bound by reading the weight, and oneDNN reads its own order at nearly full memory bandwidth
    while a row-major weight is re-ordered on every call: on two AVX2 cores, SmolLM2-135M's layers take 24.6 ms instead of
    40.9 at M = 1, and 43.2 instead of 72.0 at M = 8. The operator is the one that torch.compile emits on CPUs.
    """
    ops = torch.ops.mkldnn
    usable = weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    if not usable or not hasattr(ops, "_reorder_linear_weight") or not hasattr(ops, "_linear_pointwise"):
        return None
    return ops._reorder_linear_weight(weight.contiguous(), 8)


def fused_rows(weight: PackedWeight, table: Sequence[dispatch.Row], device: torch.device) -> frozenset[int]:
    """Numbers of rows of x that go to the kernel which can do more than multiply (`QuantLinear.fused`)."""
    if device.type != "cuda":
        return frozenset()
    bits, few = weight.bits, range(1, MMA_ROWS[-1] + 1)
    names = {m: dispatch.choose(bits, m, table=table, n=weight.n, k=weight.k) for m in few}
    return frozenset(m for m in few if names[m] == f"w{bits}_mma_small")


def norm_rows(weight: PackedWeight, table: Sequence[dispatch.Row], device: torch.device) -> frozenset[int]:
    """Those among `fused_rows` whose norm that kernel shall make, too."""
    shape = weight.n, weight.k, weight.group
    rows = fused_rows(weight, table, device)
    return frozenset(m for m in rows if m <= NORM_PAYS and mma_small.fuses(weight.bits, m, *shape, device))


class DenseLinear:
    """A linear layer with a dense weight [N, K] and an optional bias [N].

    On a GPU, up to `few` rows of float16 go to `kernels.dense_rows`, and whatever else to torch.

    `nbytes` is what the weight takes as stored, `read_bytes` what one product must read of it.

    Args:
        fixed_rows: multiply exactly so many rows at a time, the last of them padded with zeros. cuBLAS chooses its kernel, and
            with it the order of a sum, by shape; where it sees one shape only, a row's result depends neither on how many
            there are nor on its place among them. NVIDIA does not promise this: `tests/gpu/` checks it. `few` is 0 then: that
            kernel's sums have another order than cuBLAS's. None: all at once.
    """

    fused_rows: frozenset[int] = frozenset()
    norm_rows: frozenset[int] = frozenset()
    tiled: TiledWeight | None = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, fixed_rows: int | None = None) -> None:
        self.n, self.k = weight.shape
        self.bias = bias
        self._fixed_rows = fixed_rows
        self.few = most_rows(weight) if fixed_rows is None else 0
        self.nbytes = self.read_bytes = weight.nbytes
        packed = _prepacked(weight)
        self._is_prepacked = packed is not None
        self._weight = weight if packed is None else packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [M, K] -> [M, N]."""
        if self._fixed_rows is None:
            return self._product(x)
        rows, tile = x.shape[0], self._fixed_rows
        # A copy even where nothing is padded: cuBLAS also looks at strides and alignment.
        padded = x.new_zeros(-(-rows // tile) * tile, self.k)
        padded[:rows] = x
        parts = [self._product(part) for part in padded.split(tile)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows]

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_prepacked:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        if 0 < x.shape[0] <= self.few and x.dtype == torch.float16:
            return dense_rows(x, self._weight, self.bias)
        return functional.linear(x, self._weight, self.bias)


class QuantLinear:
    """A linear layer with a packed weight and an optional bias [N].

    On a GPU, float16 activations go to the kernel that `kernels.dispatch` names for their number of rows. On a CPU the
    weight is dequantised once and the dense copy kept: the article's fallback for machines without CUDA. Nothing on that
    path touches CuPy.

    On a GPU the weight is held in the forms that the table's kernels take, made once: as it is stored, in tiles, or both, which
    doubles its memory; the one that makes it dense first takes either. Activations of another dtype go to `dequant_cublas`; a
    weight in tiles alone is unpacked each time then.

    `fused_rows` are the numbers of float16 rows that `fused` takes, `norm_rows` those of them that it takes with a norm.

    Args:
        table: which kernel takes how many rows. The layer keeps what concerns its own bits and shape.

    Raises:
        KernelError: the table has no row for the weight's bits.
    """

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        table: Sequence[dispatch.Row] = dispatch.ARTICLE,
    ) -> None:
        dispatch.choose(weight.bits, 1, table=table)  # better now than at the first product
        table = dispatch.for_shape(weight.bits, weight.n, weight.k, table)
        self._table = table
        self.n, self.k = weight.n, weight.k
        self.bias = bias
        self._bits = weight.bits
        on_cpu = weight.packed.device.type == "cpu"
        tiled = not on_cpu and dispatch.needs_tiles(weight.bits, table)
        self._tiled = to_tiles(weight) if tiled else None
        self.fused_rows = fused_rows(weight, table, weight.packed.device)
        self.norm_rows = norm_rows(weight, table, weight.packed.device)
        self._stored = weight if not tiled or dispatch.needs_stored(weight.bits, table) else None
        self.nbytes = sum(held.nbytes for held in (self._stored, self._tiled) if held is not None)
        self._dense = DenseLinear(weight.dequantise(torch.float32), bias) if on_cpu else None
        self.read_bytes = weight.nbytes if self._dense is None else self._dense.read_bytes

    @property
    def tiled(self) -> TiledWeight | None:
        """The weight in tiles, where it is held so."""
        return self._tiled

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [M, K] -> [M, N]."""
        if self._dense is not None:
            return self._dense(x)
        stored, tiled = self._stored, self._tiled
        name = dispatch.choose(self._bits, x.shape[0], dtype=x.dtype, device_type=x.device.type, table=self._table)
        if name == dispatch.FALLBACK:
            return dequant_cublas(x, from_tiles(tiled) if stored is None else stored, self.bias)
        if stored is None and name in LAUNCHERS:  # the one that makes the weight dense first, whatever its form
            return dequantise_tiles_cublas(x, tiled.tiles, tiled.scales, tiled.n, tiled.group, self.bias)
        if name in TILED_LAUNCHERS:
            return TILED_LAUNCHERS[name](x, tiled.tiles, tiled.scales, tiled.n, tiled.group, self.bias)
        return LAUNCHERS[name](x, stored.packed, stored.scales, stored.group, self.bias)

    def fused(
        self, x: torch.Tensor, *, norm: Norm | None = None, residual: torch.Tensor | None = None, gated: bool = False
    ) -> torch.Tensor:
        """The product with x [M, K], or with its RMSNorm, and what follows, in one launch.

        Args:
            residual: [M, N], added to the result. gated: the weight is interleaved (`quant.interleave`), and silu(gate) * up
                [M, N / 2] is the result.
        """
        w, launch = self._tiled, TILED_LAUNCHERS[f"w{self._bits}_mma_small"]
        return launch(x, w.tiles, w.scales, w.n, w.group, self.bias, norm=norm, residual=residual, gated=gated)


def dequant_cublas(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Dequantise a few thousand rows at a time with torch, then multiply: the article's old prefill path (section 1.1).

    It is the baseline of every kernel comparison and the path for whatever no kernel takes.

    Args:
        x: [M, K], any floating dtype. weight: packed [N, K]. bias: [N] in x's dtype, or None.

    Returns:
        [M, N] in x's dtype.
    """
    out = x.new_empty(x.shape[0], weight.n)
    for start in range(0, weight.n, DEQUANT_ROWS):
        rows = slice(start, min(start + DEQUANT_ROWS, weight.n))
        dense = weight.dequantise(x.dtype, rows)
        out[:, rows] = functional.linear(x, dense, None if bias is None else bias[rows])
    return out
