"""The tensor-core kernel for a few rows on weights in tiles, on a GPU."""

import pytest
import torch

from deepinfer_lab import kernels
from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import mma_small
from deepinfer_lab.kernels.dispatch import Row
from deepinfer_lab.quant.layout import PackedWeight
from deepinfer_lab.quant.linear import QuantLinear
from deepinfer_lab.quant.tiles import from_tiles, to_tiles

NAME = "w4_mma_small"
EVERY_M = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 70)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bias", [False, True])
def test_sweep_over_odd_sizes(problem, group, bias):
    for m in EVERY_M:
        for n in (1, 2, 15, 16, 17, 129, 333):
            for k in (group, 3 * group, 9 * group, 2048 + group):
                problem(NAME, m, n, k, group, bias=bias).check(NAME)


@pytest.mark.parametrize(("n", "k"), [(5632, 2048), (2048, 11008), (2560, 2048), (3584, 18944), (22016, 2048)])
def test_the_shapes_of_real_layers(problem, n, k):
    for m in (1, 8, 16, 32, 64):
        problem(NAME, m, n, k, 128).check(NAME)


@pytest.mark.parametrize("warps", [8, 16])
def test_either_number_of_warps(problem, monkeypatch, warps):
    monkeypatch.setattr(mma_small, "warps_for", lambda *_: warps)
    for m in EVERY_M:
        for group in (32, 128):
            problem(NAME, m, 333, 4096 + group, group).check(NAME)


def test_a_row_does_not_depend_on_its_batch(problem, monkeypatch):
    monkeypatch.setattr(mma_small, "warps_for", lambda *_: 8)
    p = problem(NAME, 40, 333, 1056, 32, bias=True)
    together = p.run(NAME)
    for size in (1, 7, 12):
        parts = [type(p)(rows, p.weight, p.bias).run(NAME) for rows in p.x.split(size)]
        assert torch.equal(torch.cat(parts), together)


def test_twice_is_the_same_bits(problem):
    p = problem(NAME, 8, 2048, 2048, 128)
    first = p.run(NAME)
    assert all(torch.equal(p.run(NAME), first) for _ in range(20))


def test_one_hot_activations_return_the_weights(problem):
    p = problem(NAME, 1, 41, 160, 32)
    p.weight.scales.fill_(0.25)
    hot = torch.eye(160, device="cuda").half()
    for m in (1, 12, 32):
        out = torch.cat([type(p)(part, p.weight).run(NAME) for part in hot.split(m)])
        assert torch.equal(out, p.weight.dequantise(torch.float16).T)


@pytest.mark.parametrize("m", [1, 9, 20])
@pytest.mark.parametrize(("k", "group"), [(96, 32), (192, 64)])
def test_nan_and_infinity_propagate_as_in_the_reference(problem, m, k, group):
    p = problem(NAME, m, 71, k, group)
    dense = p.weight.dequantise(torch.float64)
    for column, value in ((0, torch.inf), (37, -torch.inf), (k - 1, torch.nan)):
        x = p.x.clone()
        x[-1, column] = value
        reference = (x.double()[:, None] * dense[None]).sum(2)
        out, finite = type(p)(x, p.weight).run(NAME), reference.isfinite()
        assert torch.equal(out.isnan(), reference.isnan())
        assert torch.equal(out[reference.isinf()], reference[reference.isinf()].half())
        assert torch.allclose(out[finite].double(), reference[finite], rtol=2e-3, atol=2e-3)
        assert finite[:-1].all()


@pytest.mark.parametrize("m", [8, 16, 33])
def test_memory_around_the_output_is_left_alone(problem, m):
    p = problem(NAME, m, 67, 128, 64)
    buffer = torch.full((m * 67 + 4096,), 7.0, dtype=torch.float16, device="cuda")
    out = buffer[2048 : 2048 + m * 67].view(m, 67)
    assert p.run(NAME, out=out) is out
    assert torch.equal(out, p.run(NAME))
    assert (buffer[:2048] == 7).all()
    assert (buffer[2048 + m * 67 :] == 7).all()


@pytest.mark.parametrize("m", [1, 16, 32])
def test_cuda_graph_capture_and_replay(problem, m):
    p, q = (problem(NAME, m, 77, 256, 64, bias=True) for _ in range(2))
    tiled, x = to_tiles(p.weight), p.x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.w4_mma_small(x, tiled.tiles, tiled.scales, 77, 64, p.bias)
    for other in (p.x, q.x):
        x.copy_(other)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, type(p)(other, p.weight, p.bias).run(NAME))


def test_activations_that_are_not_dense_or_aligned(problem):
    p = problem(NAME, 5, 50, 128, 64)
    right = p.run(NAME)
    strided = torch.full((5, 256), torch.nan, dtype=torch.float16, device="cuda")
    strided[:, ::2] = p.x
    misaligned = torch.full((5 * 128 + 1,), torch.nan, dtype=torch.float16, device="cuda")[1:].view(5, 128)
    misaligned.copy_(p.x)
    for x in (strided[:, ::2], p.x.T.contiguous().T, misaligned):
        assert torch.equal(type(p)(x, p.weight).run(NAME), right)


def test_refusals(problem):
    p = problem(NAME, 1, 20, 64, 32)
    tiled = to_tiles(p.weight)
    with pytest.raises(KernelError, match=r"scales is on cpu, must be on a CUDA device"):
        kernels.w4_mma_small(p.x, tiled.tiles, tiled.scales.cpu(), 20, 32)
    with pytest.raises(KernelError, match=r"tiles has strides"):
        kernels.w4_mma_small(p.x, tiled.tiles.repeat(1, 1, 2)[..., ::2], tiled.scales, 20, 32)


def test_tiles_are_made_on_the_gpu_as_on_the_cpu(problem):
    weight = problem(NAME, 1, 333, 1056, 32).weight
    tiled, on_cpu = to_tiles(weight), to_tiles(weight.to("cpu"))
    assert torch.equal(tiled.tiles.cpu(), on_cpu.tiles)
    assert torch.equal(tiled.scales.cpu(), on_cpu.scales)
    back = from_tiles(tiled)
    assert torch.equal(back.packed, weight.packed)
    assert torch.equal(back.scales, weight.scales)


def test_a_layer_holds_tiles_where_its_table_asks_for_them(problem):
    p = problem(NAME, 40, 96, 256, 64, bias=True)
    table = (Row(4, 1, 32, NAME), Row(4, 33, None, "w4_dequantise_cublas"))
    layer = QuantLinear(p.weight, p.bias, table)
    w: PackedWeight = p.weight
    assert layer.nbytes == w.nbytes + to_tiles(w).nbytes
    assert torch.equal(layer(p.x[:32]), type(p)(p.x[:32], w, p.bias).run(NAME))
    assert torch.equal(layer(p.x), p.run("w4_dequantise_cublas"))
    assert QuantLinear(w, p.bias).nbytes == w.nbytes
