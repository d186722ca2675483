"""Gate and up row by row, and back."""

import pytest
import torch

from deepinfer_lab.errors import QuantisationError
from deepinfer_lab.quant.interleave import interleave, interleaved_rows, part
from deepinfer_lab.quant.rtn import quantise


@pytest.mark.parametrize("bits", [4, 3])
def test_eight_rows_of_either_in_turn(bits):
    gate, up = torch.randn(2, 24, 64)
    stored = quantise(torch.cat([gate, up]), bits, 32)
    dense, mixed = stored.dequantise(torch.float32), interleave(stored).dequantise(torch.float32)
    for i in range(24):
        place = i // 8 * 16 + i % 8
        assert torch.equal(mixed[place], dense[i])
        assert torch.equal(mixed[place + 8], dense[24 + i])
    back = part(interleave(stored))
    assert torch.equal(back.packed, stored.packed)
    assert torch.equal(back.scales, stored.scales)


@pytest.mark.parametrize("n", [0, 8, 24])
def test_other_numbers_of_rows_are_refused(n):
    with pytest.raises(QuantisationError, match=f"{n} rows of gate and up: must be a positive multiple of 16"):
        interleaved_rows(n)
