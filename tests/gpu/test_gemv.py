"""The matrix-vector kernels against dequantised weights and against each other, on a GPU."""

import pytest
import torch

from deepinfer_lab.kernels.catalogue import KERNELS

SINGLE = ("w4_gemv", "w3_gemv")
BATCHED = ("w4_gemv_batch_tile", "w3_gemv_grid_y", "w3_gemv_batch_tile", "w3_gemv_warp_tile")


def single(problem, name):
    """The same rows, one launch of the single-row kernel for each."""
    kernel = f"w{KERNELS[name].bits}_gemv"
    return torch.cat([type(problem)(row, problem.weight, problem.bias).run(kernel) for row in problem.x.split(1)])


@pytest.mark.parametrize("name", SINGLE + BATCHED)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bias", [False, True])
def test_sweep_over_odd_sizes(problem, name, group, bias):
    for m in (1,) if name in SINGLE else (1, 2, 3, 7, 8, 9, 17):
        for n in (1, 2, 3, 15, 16, 17, 129):
            for k in (group, 3 * group, 9 * group, 2048 + group):
                problem(name, m, n, k, group, bias=bias).check(name)


@pytest.mark.parametrize("name", SINGLE + BATCHED)
@pytest.mark.parametrize(("n", "k"), [(5632, 2048), (2048, 5632), (3584, 18944)])
def test_the_articles_shapes(problem, name, n, k):
    for m in (1,) if name in SINGLE else (2, 4, 8):
        problem(name, m, n, k, 128).check(name)


@pytest.mark.parametrize("name", ["w4_gemv_batch_tile", "w3_gemv_grid_y", "w3_gemv_warp_tile"])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 11])
def test_batched_gemv_equals_single_row_gemv(problem, name, m):
    p = problem(name, m, 333, 1056, 32, bias=True)
    assert torch.equal(p.run(name), single(p, name))  # bit for bit: the order of additions is the same


@pytest.mark.parametrize("m", [1, 2, 5, 8, 11])
def test_w3a16_batch_tile_matches_single_row_gemv(problem, m):
    p = problem("w3_gemv_batch_tile", m, 333, 1056, 32)
    together, apart = p.run("w3_gemv_batch_tile").float(), single(p, "w3_gemv_batch_tile").float()
    assert (together - apart).norm() / apart.norm() < 1e-3  # another order of additions, both rounded to float16


@pytest.mark.parametrize("name", SINGLE + BATCHED)
def test_one_hot_activations_return_the_weights(problem, name):
    """No rounding hides a misplaced value here: scales are a power of two and each sum has one term."""
    k = 96
    p = problem(name, 1, 41, k, 32)
    p.weight.scales.fill_(0.25)
    step = 1 if name in SINGLE else k
    hot = torch.eye(k, device="cuda").half()
    out = torch.cat([type(p)(part, p.weight).run(name) for part in hot.split(step)])
    assert torch.equal(out, p.weight.dequantise(torch.float16).T)
