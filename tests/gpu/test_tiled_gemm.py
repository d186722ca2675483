"""The tiled kernels against dequantised weights, on a GPU."""

import pytest
import torch
from torch.nn import functional

TILED = ("w4_tiled_gemm", "w3_tiled_gemm", "w4_tiled_gemm_split_k", "w3_tiled_gemm_split_k")


def matches_dequantised_reference(problem, name, group):
    """As in the article (section 2.6): M = 37 forces the tiled kernel to cut a tile; the module's own weights are the judge."""
    p = problem(name, 37, 200, 512, group)
    p.check(name)
    dense = functional.linear(p.x.float(), p.weight.dequantise(torch.float16).float())
    assert torch.allclose(p.run(name).float(), dense, rtol=2e-3, atol=2e-3)  # same rounded weights: closer still


@pytest.mark.parametrize("group", [32, 64, 128])
def test_w4a16_tiled_prefill_matches_dequantized_reference(problem, group):
    matches_dequantised_reference(problem, "w4_tiled_gemm", group)
    matches_dequantised_reference(problem, "w4_tiled_gemm_split_k", group)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_w3a16_tiled_prefill_matches_dequantized_reference(problem, group):
    matches_dequantised_reference(problem, "w3_tiled_gemm", group)
    matches_dequantised_reference(problem, "w3_tiled_gemm_split_k", group)


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bias", [False, True])
def test_sweep_over_odd_sizes(problem, name, group, bias):
    for m in (1, 2, 31, 32, 33, 63, 65, 129):
        for n in (1, 3, 63, 64, 65, 127, 200):
            for k in (group, 3 * group, 7 * group):
                problem(name, m, n, k, group, bias=bias).check(name)


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize(("m", "n", "k"), [(30, 5632, 2048), (30, 2048, 5632), (30, 3584, 18944), (512, 2048, 2048)])
def test_the_articles_shapes(problem, name, m, n, k):
    problem(name, m, n, k, 128).check(name)


@pytest.mark.parametrize("name", TILED)
def test_a_row_does_not_depend_on_its_batch(problem, name):
    p = problem(name, 70, 130, 256, 64)
    together = p.run(name)
    for rows in (1, 32, 33):
        w = p.weight
        part = type(p)(p.x[:rows], w).run(name)
        assert torch.equal(part, together[:rows])
