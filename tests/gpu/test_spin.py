"""The kernel that only occupies multiprocessors."""

import pytest
import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels.spin import spin


def test_spin_counts_its_blocks():
    seen = spin(7, 0.1)
    seen = spin(5, 0.1, seen)
    assert seen.sum().item() == 12
    count = torch.cuda.get_device_properties(seen.device).multi_processor_count
    assert seen[count:].sum().item() == 0


@pytest.mark.parametrize(("blocks", "milliseconds"), [(0, 1.0), (1, 0.0)])
def test_spin_refuses_nothing_to_do(blocks, milliseconds):
    with pytest.raises(KernelError, match="must be"):
        spin(blocks, milliseconds)
