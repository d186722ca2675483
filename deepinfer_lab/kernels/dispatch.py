"""Which kernel multiplies M rows: a table, not branches spread over the callers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels.catalogue import GROUPS, KERNELS, PRODUCTS, TILED, DequantiseProduct, Kernel, MmaProduct
from deepinfer_lab.kernels.ops_catalogue import MIN_CAPABILITY

FALLBACK = "dequant_cublas"  # dequantise with torch, then F.linear: `quant/linear.py`
SCHEMA_VERSION = 2  # version 1 had no rows that name a shape
READ_VERSIONS = (1, 2)


@dataclass(frozen=True)
class Row:
    """`kernel` takes `bits`-bit weights for m_min <= M <= m_max (None: no upper end). With `n` and `k` the row is about weights
    [n, k] alone, and wins there over one without, which is about all."""

    bits: int
    m_min: int
    m_max: int | None
    kernel: str
    n: int | None = None
    k: int | None = None

    def covers(self, m: int) -> bool:
        return self.m_min <= m and (self.m_max is None or m <= self.m_max)


# The article's choice, section 2.5, for an RTX 3050: a 32-row tile is mostly idle below M = 9; at 2 to 8 rows W4 shares one
# read of the weights, and W3 does not, since its batch tile was slower (section 3).
ARTICLE = (
    Row(4, 1, 1, "w4_gemv"),
    Row(4, 2, 8, "w4_gemv_batch_tile"),
    Row(4, 9, None, "w4_tiled_gemm"),
    Row(3, 1, 1, "w3_gemv"),
    Row(3, 2, 8, "w3_gemv_grid_y"),
    Row(3, 9, None, "w3_tiled_gemm"),
)

# For cards with tensor cores (sm_80 and later) that have not been tuned: rows share one read of the weights, up to where cuBLAS
# gains more than it costs to make a weight dense. On an H200 that is between 64 and 128.
TENSOR_CORES = tuple(
    Row(bits, first, last, f"w{bits}_{kind}")
    for bits in (4, 3)
    for first, last, kind in ((1, 32, "mma_small"), (33, 128, "mma_block"), (129, None, "dequantise_cublas"))
)


def table_named(name: str | Path | None, device: torch.device) -> tuple[Row, ...]:
    """A dispatch.json's table, or the article's by the name "article"; None: one that suits a device whose own is not known.

    Raises:
        KernelError: as `load`.
    """
    if name is None:
        tensor_cores = device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
        return TENSOR_CORES if tensor_cores else ARTICLE
    return ARTICLE if name == "article" else load(name)


def choose(
    bits: int,
    m: int,
    *,
    dtype: torch.dtype = torch.float16,
    device_type: str = "cuda",
    table: Sequence[Row] = ARTICLE,
    n: int | None = None,
    k: int | None = None,
) -> str:
    """The name of the kernel for M rows: a key of `kernels.LAUNCHERS` or `kernels.TILED_LAUNCHERS`, or `FALLBACK`.

    n, k: the weight's shape; without one, rows that name a shape do not count.

    Raises:
        KernelError: M below 1, or bits that the table has no row for.
    """
    row = _own_row(bits, m, n, k, table) or _row(bits, m, table)
    return FALLBACK if device_type != "cuda" or dtype != torch.float16 else row.kernel


def for_shape(bits: int, n: int, k: int, table: Sequence[Row]) -> tuple[Row, ...]:
    """The same choice for weights [n, k] alone: a table whose rows follow one another and name no shape.

    Raises:
        KernelError: as `choose`.
    """
    about = [row for row in table if row.bits == bits and (row.n, row.k) in ((n, k), (None, None))]
    begins = sorted({1, *(row.m_min for row in about), *(row.m_max + 1 for row in about if row.m_max is not None)})
    rows: list[Row] = []
    for begin, following in zip(begins, [*begins[1:], None], strict=True):
        kernel = choose(bits, begin, table=table, n=n, k=k)
        end = None if following is None else following - 1
        if rows and rows[-1].kernel == kernel:
            rows[-1] = replace(rows[-1], m_max=end)
        else:
            rows.append(Row(bits, begin, end, kernel))
    return tuple(rows)


def explain(
    bits: int,
    m: int,
    n: int,
    k: int,
    group: int,
    dtype: torch.dtype = torch.float16,
    device_type: str = "cuda",
    table: Sequence[Row] = ARTICLE,
) -> str:
    """The choice for x[m, k] @ weight[n, k].T in one sentence, with its reason.

    Raises:
        KernelError: as `choose`, or a weight that no kernel takes.
    """
    if n < 1 or k < 1 or group not in GROUPS or k % group:
        groups = ", ".join(map(str, GROUPS))
        raise KernelError(f"N = {n}, K = {k}, group {group}: N must be 1 or more, K a multiple of a group of {groups}")
    name = choose(bits, m, dtype=dtype, device_type=device_type, table=table, n=n, k=k)
    shape = f"W{bits}A16, M x N x K = {m} x {n} x {k}, group {group}: {name}"
    if device_type != "cuda":
        return f"{shape}, because the tensors are on {device_type!r} and the kernels need a CUDA device."
    if dtype != torch.float16:
        return f"{shape}, because the activations are {dtype} and the kernels take torch.float16."
    row = _own_row(bits, m, n, k, table) or _row(bits, m, table)
    reach = f"M = {row.m_min}" if row.m_min == row.m_max else f"M from {row.m_min} to {row.m_max}"
    reach = f"M of {row.m_min} and more" if row.m_max is None else reach
    reach += "" if row.n is None else " of this shape"
    if name == FALLBACK:
        return f"{shape}, the table's row for {reach}: dequantise with torch, then multiply with cuBLAS."
    product = _product(name)
    said = f"{shape}, the table's row for {reach}: {product.summary}."
    if isinstance(product, MmaProduct):
        return said
    if isinstance(product, Kernel):
        x, y = product.grid(m, n)
        return f"{said} {x} x {y} blocks of {product.threads} threads."
    rows = min(product.slice_rows(k), n)
    return f"{said} Slices of up to {rows} weight rows: {-(-n // rows)}."


def _own_row(bits: int, m: int, n: int | None, k: int | None, table: Sequence[Row]) -> Row | None:
    rows = (row for row in table if row.n is not None and (row.bits, row.n, row.k) == (bits, n, k))
    return next((row for row in rows if row.covers(m)), None)


def load(path: str | Path) -> tuple[Row, ...]:
    """Read a table from a dispatch.json: {"schema_version": 2, "rows": [{"bits", "m_min", "m_max", "kernel"}, ...]}, rows about
    one shape with "n" and "k" too; other keys (the device, the measurement behind it) are the writer's own.

    Raises:
        KernelError: unreadable, malformed, an unknown kernel, one for other bits, or rows that leave a gap or overlap.
    """
    rows = read(path)
    validate(rows, str(path))
    return rows


def read(path: str | Path) -> tuple[Row, ...]:
    """The rows of a dispatch.json as they are, of kernels that there may be no more. Errors as `load`'s, of the file alone."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        version, rows = document["schema_version"], tuple(Row(**row) for row in document["rows"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise KernelError(f"{path}: not a dispatch table ({type(error).__name__}: {error})") from error
    if version not in READ_VERSIONS:
        raise KernelError(f"{path}: schema_version {version}, this program reads {', '.join(map(str, READ_VERSIONS))}")
    return rows


def _validate_shapes(rows: Sequence[Row], source: str) -> None:
    """Rows that name a shape name all of it, and do not overlap; they may leave gaps."""
    for row in rows:
        named = [size for size in (row.n, row.k) if size is not None]
        if named and (len(named) < 2 or any(type(size) is not int or size < 1 for size in named)):
            raise KernelError(f"{source}: n and k must both be whole numbers of 1 or more, or both be absent, in {row}")
        if named and (row.m_min < 1 or (row.m_max is not None and row.m_max < row.m_min)):
            raise KernelError(f"{source}: m_min must be 1 or more, and m_max no less, in {row}")
    shapes = sorted((row for row in rows if row.n is not None), key=lambda row: (row.bits, row.n, row.k, row.m_min))
    for before, row in pairwise(shapes):
        same = (before.bits, before.n, before.k) == (row.bits, row.n, row.k)
        if same and (before.m_max is None or before.m_max >= row.m_min):
            raise KernelError(f"{source}: {before} and {row} overlap")


def validate(rows: Sequence[Row], source: str) -> None:
    """Every M from 1 up has exactly one row without a shape, for each number of bits that occurs, and at most one for a shape.

    Raises:
        KernelError: naming `source` and the row that is wrong.
    """
    if not rows:
        raise KernelError(f"{source}: no rows")
    for row in rows:
        if any(type(value) is not int for value in (row.bits, row.m_min, 0 if row.m_max is None else row.m_max)):
            raise KernelError(f"{source}: bits, m_min and m_max must be whole numbers (m_max also null) in {row}")
        if row.kernel == FALLBACK:
            continue
        if not exists(row.kernel):
            raise KernelError(f"{source}: unknown kernel {row.kernel!r} in {row}")
        product = _product(row.kernel)
        if product.bits != row.bits:
            raise KernelError(f"{source}: {row.kernel} takes {product.bits}-bit weights, not {row.bits}, in {row}")
        if product.max_m == 1 and row.m_max != 1:
            raise KernelError(f"{source}: {row.kernel} takes M = 1 only, in {row}")
    _validate_shapes(rows, source)
    for bits in sorted({row.bits for row in rows}):
        expected: int | None = 1
        for row in sorted((row for row in rows if row.bits == bits and row.n is None), key=lambda row: row.m_min):
            if expected != row.m_min or (row.m_max is not None and row.m_max < row.m_min):
                raise KernelError(f"{source}: {bits} bits: expected a row from M = {expected}, found {row}")
            expected = None if row.m_max is None else row.m_max + 1
        if expected is not None:
            raise KernelError(f"{source}: {bits} bits: no row from M = {expected} up")


def exists(kernel: str) -> bool:
    """Whether a table may name it."""
    return kernel == FALLBACK or kernel in PRODUCTS or kernel in TILED


def needs_tiles(bits: int, table: Sequence[Row]) -> bool:
    """Whether some M of weights of so many bits goes to a kernel that takes them in tiles."""
    return any(row.bits == bits and row.kernel in TILED for row in table)


def needs_stored(bits: int, table: Sequence[Row]) -> bool:
    """Whether some M of weights of so many bits goes to a kernel that takes them only as they are stored."""
    return any(row.bits == bits and row.kernel in (*KERNELS, FALLBACK) for row in table)


def _product(name: str) -> Kernel | DequantiseProduct | MmaProduct:
    return TILED[name] if name in TILED else PRODUCTS[name]


def _row(bits: int, m: int, table: Sequence[Row]) -> Row:
    if m < 1:
        raise KernelError(f"M = {m}: must be at least 1")
    for row in table:
        if row.bits == bits and row.n is None and row.covers(m):
            return row
    offered = ", ".join(str(b) for b in sorted({row.bits for row in table}))
    raise KernelError(f"no kernel for {bits}-bit weights at M = {m}: the dispatch table has {offered} bits")
