"""A gate and an up projection in one weight, row by row: `cuda/mma_unit.cuh` finds both of an output in one lane.

Of gate [I, K] over up [I, K], eight rows of either in turn:

    gate 0 .. 7 | up 0 .. 7 | gate 8 .. 15 | up 8 .. 15 | ...

Rows are packed along K, so they move as they are: nothing is rounded.
"""

import torch

from deepinfer_lab.errors import QuantisationError
from deepinfer_lab.quant.layout import PackedWeight

RUN = 8  # rows of one kind that stay together


def interleaved_rows(n: int) -> torch.Tensor:
    """int64 [n]: which row of gate over up stands in each place. Good for a bias, too.

    Raises:
        QuantisationError: n is not a multiple of 16.
    """
    if n <= 0 or n % (2 * RUN):
        raise QuantisationError(f"{n} rows of gate and up: must be a positive multiple of {2 * RUN}")
    return torch.arange(n).view(2, -1, RUN).transpose(0, 1).flatten()


def interleave(weight: PackedWeight) -> PackedWeight:
    """Gate over up [2 * I, K] -> the rows in turn.

    Raises:
        QuantisationError: 2 * I is not a multiple of 16.
    """
    return _take(weight, interleaved_rows(weight.n))


def part(weight: PackedWeight) -> PackedWeight:
    """The inverse of `interleave`."""
    return _take(weight, interleaved_rows(weight.n).argsort())


def _take(weight: PackedWeight, rows: torch.Tensor) -> PackedWeight:
    rows = rows.to(weight.packed.device)
    return PackedWeight(weight.bits, weight.group, weight.n, weight.k, weight.packed[rows], weight.scales[rows])
