"""What a kernel cannot take is refused by name, value and limit, before anything is launched."""

import pytest
import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import LAUNCHERS
from deepinfer_lab.kernels.catalogue import BLOCKS_PER_SM, KERNELS, MAX_GRID_Y, MAX_SPLITS, PRODUCTS
from deepinfer_lab.kernels.check import check


def arguments(name, m=1, n=5, k=64, group=32):
    bits = PRODUCTS[name].bits
    return {
        "x": torch.zeros(m, k, dtype=torch.float16),
        "packed": torch.zeros(n, k * bits // 8, dtype=torch.uint8),
        "scales": torch.ones(n, k // group, dtype=torch.float16),
        "group": group,
    }


@pytest.mark.parametrize("name", LAUNCHERS)
def test_cpu_tensors_are_refused_last_of_all(name):
    """Everything else about these arguments is right, so this is the only complaint left."""
    with pytest.raises(KernelError, match=rf"{name}: x is on cpu, must be on a CUDA device"):
        LAUNCHERS[name](**arguments(name))


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"x": torch.zeros(1, 64)}, r"x has dtype torch.float32, must be torch.float16"),
        ({"x": torch.zeros(1, 64, dtype=torch.bfloat16)}, r"x has dtype torch.bfloat16"),
        ({"x": torch.zeros(64, dtype=torch.float16)}, r"x has shape \(64,\), must be \[M, K\]"),
        ({"x": torch.zeros(0, 64, dtype=torch.float16)}, r"M = 0, must be 1 to"),
        ({"x": torch.zeros(1, 48, dtype=torch.float16)}, r"K = 48, must be a positive multiple of group = 32"),
        ({"x": torch.zeros(1, 0, dtype=torch.float16)}, r"K = 0, must be a positive multiple"),
        ({"x": torch.zeros(1, 128, dtype=torch.float16)}, r"packed has shape \(5, \d+\), must be \(5, \d+\)"),
        ({"x": torch.zeros(1, 64, dtype=torch.float16, requires_grad=True)}, r"requires a gradient"),
        ({"group": 16}, r"group = 16, must be one of 32, 64, 128"),
        ({"packed": torch.zeros(5, 64, dtype=torch.int8)}, r"packed has dtype torch.int8, must be torch.uint8|shape"),
        ({"packed": torch.zeros(64, dtype=torch.uint8)}, r"packed has shape \(64,\), must be \[N, K \* \d / 8\]"),
        ({"packed": torch.zeros(0, 32, dtype=torch.uint8)}, r"N = 0, must be at least 1"),
        ({"scales": torch.ones(5, 2)}, r"scales has dtype torch.float32, must be torch.float16"),
        ({"scales": torch.ones(5, 1, dtype=torch.float16)}, r"scales has shape \(5, 1\), must be \(5, 2\)"),
        ({"scales": torch.ones(2, 5, dtype=torch.float16).T}, r"scales has strides \(1, 5\), must be contiguous"),
        ({"bias": torch.zeros(4, dtype=torch.float16)}, r"bias has shape \(4,\), must be \(5,\)"),
        ({"bias": torch.zeros(5)}, r"bias has dtype torch.float32"),
        ({"out": torch.zeros(2, 5, dtype=torch.float16)}, r"out has shape \(2, 5\), must be \(1, 5\)"),
        ({"out": torch.zeros(1, 10, dtype=torch.float16)[:, ::2]}, r"out has strides \(10, 2\), must be contiguous"),
    ],
)
def test_wrong_arguments(name, change, complaint):
    with pytest.raises(KernelError, match=complaint):
        LAUNCHERS[name](**{**arguments(name), **change})


@pytest.mark.parametrize("name", LAUNCHERS)
def test_packed_that_is_not_aligned(name):
    good = arguments(name)
    size = good["packed"].numel()
    shifted = torch.zeros(size + 1, dtype=torch.uint8)[1:].view_as(good["packed"])
    with pytest.raises(KernelError, match=r"packed starts at address 0x[0-9a-f]+, must be 4-byte aligned"):
        LAUNCHERS[name](**{**good, "packed": shifted})


def test_single_row_kernels_take_one_row():
    for name, kernel in KERNELS.items():
        limit = 1 if kernel.single_row else MAX_GRID_Y * (1 if kernel.split_k else kernel.block_m)
        x = torch.zeros(1, 1, dtype=torch.float16).expand(limit + 1, 64)  # costs no memory
        with pytest.raises(KernelError, match=rf"{name}: M = {limit + 1}, must be 1 to {limit}"):
            check(kernel, **{**arguments(name), "x": x})


def test_gradients_are_no_matter_in_inference_mode():
    x = torch.zeros(1, 64, dtype=torch.float16, requires_grad=True)
    with torch.no_grad(), pytest.raises(KernelError, match="must be on a CUDA device"):
        LAUNCHERS["w4_gemv"](**{**arguments("w4_gemv"), "x": x})


def test_grids_cover_the_output_and_no_more():
    for kernel in KERNELS.values():
        for m, n in ((1, 1), (kernel.block_m, kernel.block_n), (kernel.block_m + 1, kernel.block_n + 1), (37, 131)):
            x, y = kernel.grid(m, n)
            assert (x - 1) * kernel.block_n < n <= x * kernel.block_n
            assert (y - 1) * kernel.block_m < m <= y * kernel.block_m


def test_splits_fill_the_card_and_leave_no_part_without_a_step():
    kernel = KERNELS["w4_tiled_gemm_split_k"]
    for n, k, multiprocessors in ((1, 32, 132), (2048, 5632, 132), (37888, 3584, 132), (37888, 3584, 16), (64, 96, 16)):
        splits = kernel.splits(n, k, multiprocessors)
        assert 1 <= splits <= min(MAX_SPLITS, k // 32)
        blocks = kernel.grid(1, n)[0]
        enough = blocks * splits >= BLOCKS_PER_SM * multiprocessors
        assert enough or splits == min(MAX_SPLITS, k // 32)
        assert splits == 1 or blocks * (splits - 1) < BLOCKS_PER_SM * multiprocessors  # and no more than that takes
    assert KERNELS["w4_tiled_gemm"].splits(2048, 5632, 132) == 1
