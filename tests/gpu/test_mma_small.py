"""The tensor-core kernels for a few rows on weights in tiles, on a GPU: each of them, whatever the launcher would choose."""

import pytest
import torch

from deepinfer_lab import kernels
from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import mma_small
from deepinfer_lab.kernels.dispatch import FALLBACK, Row
from deepinfer_lab.kernels.mma_small import Plan
from deepinfer_lab.quant.layout import PackedWeight
from deepinfer_lab.quant.linear import QuantLinear
from deepinfer_lab.quant.tiles import from_tiles, to_tiles

NAMES = ("w4_mma_small", "w3_mma_small")
FORMS = ("8", "8_pair", "8_many", "16", "16_pair", "16_many", "32", "32_many")


def force(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """This kernel for any M."""
    rows, columns = int(form.split("_")[0]), 32 if "pair" in form else 16
    monkeypatch.setattr(
        mma_small, "plan", lambda bits, m, n, card: Plan(f"w{bits}_mma_{form}", (-(-m // rows), -(-n // columns)))
    )


@pytest.fixture(params=FORMS)
def form(request, monkeypatch) -> str:
    force(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bias", [False, True])
def test_sweep_over_odd_sizes(problem, form, name, group, bias):
    rows = int(form.split("_")[0])
    for m in (1, rows - 1, rows, rows + 1, 70):
        for n in (1, 16, 17, 333):
            for k in (group, 9 * group, 2048 + group):
                problem(name, m, n, k, group, bias=bias).check(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "k"), [(5632, 2048), (2048, 11008), (2560, 2048), (3584, 18944), (22016, 2048)])
def test_the_shapes_of_real_layers(problem, name, n, k):
    for m in (1, 3, 8, 16, 32, 64):
        problem(name, m, n, k, 128).check(name)


@pytest.mark.parametrize("name", NAMES)
def test_more_units_than_are_on_their_way(problem, form, name):
    for m, n in ((1, 1), (8, 33), (17, 333)):
        for group in (32, 64, 128):
            problem(name, m, n, 75 * 128 + group, group).check(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_its_batch_nor_on_the_kernel(problem, monkeypatch, name):
    """Of those with as many warps, which take the same units and add up in the same order."""
    p = problem(name, 40, 333, 1056, 32, bias=True)
    for same in (("8", "8_pair", "16", "16_pair", "32"), ("8_many", "16_many", "32_many")):
        results = []
        for form in same:
            force(monkeypatch, form)
            for size in (1, 7, 12, 40):
                parts = [type(p)(rows, p.weight, p.bias).run(name) for rows in p.x.split(size)]
                results.append(torch.cat(parts))
        assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("name", NAMES)
def test_twice_is_the_same_bits(problem, form, name):
    p = problem(name, 8, 2048, 2048, 128)
    first = p.run(name)
    assert all(torch.equal(p.run(name), first) for _ in range(20))


@pytest.mark.parametrize("name", NAMES)
def test_one_hot_activations_return_the_weights(problem, form, name):
    problem(name, 1, 41, 160, 32).check_one_hot(name, 39)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [1, 9, 20])
@pytest.mark.parametrize(("k", "group"), [(96, 32), (192, 64)])
def test_nan_and_infinity_propagate_as_in_the_reference(problem, form, name, m, k, group):
    p = problem(name, m, 71, k, group)
    for column, value in ((0, torch.inf), (37, -torch.inf), (k - 1, torch.nan)):
        p.check_propagation(name, column, value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [8, 16, 33])
def test_memory_around_the_output_is_left_alone(problem, form, name, m):
    p = problem(name, m, 67, 128, 64)
    buffer = torch.full((m * 67 + 4096,), 7.0, dtype=torch.float16, device="cuda")
    out = buffer[2048 : 2048 + m * 67].view(m, 67)
    assert p.run(name, out=out) is out
    assert torch.equal(out, p.run(name))
    assert (buffer[:2048] == 7).all()
    assert (buffer[2048 + m * 67 :] == 7).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [1, 16, 32])
def test_cuda_graph_capture_and_replay(problem, form, name, m):
    p, q = (problem(name, m, 77, 256, 64, bias=True) for _ in range(2))
    tiled, x = to_tiles(p.weight), p.x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.TILED_LAUNCHERS[name](x, tiled.tiles, tiled.scales, 77, 64, p.bias)
    for other in (p.x, q.x):
        x.copy_(other)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, type(p)(other, p.weight, p.bias).run(name))


@pytest.mark.parametrize("name", NAMES)
def test_activations_that_are_not_dense_or_aligned(problem, form, name):
    problem(name, 5, 50, 128, 64).check_loose_activations(name)


def test_refusals(problem):
    p = problem("w4_mma_small", 1, 20, 64, 32)
    tiled = to_tiles(p.weight)
    with pytest.raises(KernelError, match=r"scales is on cpu, must be on a CUDA device"):
        kernels.w4_mma_small(p.x, tiled.tiles, tiled.scales.cpu(), 20, 32)
    with pytest.raises(KernelError, match=r"tiles has strides"):
        kernels.w4_mma_small(p.x, tiled.tiles.repeat(1, 1, 2)[..., ::2], tiled.scales, 20, 32)
    with pytest.raises(KernelError, match=r"w3_mma_small: tiles has shape"):
        kernels.w3_mma_small(p.x, tiled.tiles, tiled.scales, 20, 32)


@pytest.mark.parametrize("name", NAMES)
def test_tiles_are_made_on_the_gpu_as_on_the_cpu(problem, name):
    weight = problem(name, 1, 333, 1056, 32).weight
    tiled, on_cpu = to_tiles(weight), to_tiles(weight.to("cpu"))
    assert torch.equal(tiled.tiles.cpu(), on_cpu.tiles)
    assert torch.equal(tiled.scales.cpu(), on_cpu.scales)
    back = from_tiles(tiled)
    assert torch.equal(back.packed, weight.packed)
    assert torch.equal(back.scales, weight.scales)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_holds_tiles_where_its_table_asks_for_them(problem, name):
    p = problem(name, 40, 96, 256, 64, bias=True)
    w: PackedWeight = p.weight
    many = f"w{w.bits}_dequantise_cublas"
    layer = QuantLinear(w, p.bias, (Row(w.bits, 1, 32, name), Row(w.bits, 33, None, many)))
    assert layer.nbytes == to_tiles(w).nbytes
    assert torch.equal(layer(p.x[:32]), type(p)(p.x[:32], w, p.bias).run(name))
    assert torch.equal(layer(p.x), p.run(many))
    assert QuantLinear(w, p.bias).nbytes == w.nbytes
    both = QuantLinear(w, p.bias, (Row(w.bits, 1, 32, name), Row(w.bits, 33, None, f"w{w.bits}_tiled_gemm")))
    assert both.nbytes == w.nbytes + to_tiles(w).nbytes


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_of_tiles_alone_multiplies_other_dtypes_too(problem, name):
    p = problem(name, 40, 96, 256, 64)
    bits = p.weight.bits
    layer = QuantLinear(p.weight, None, (Row(bits, 1, None, name),))
    assert layer.nbytes == to_tiles(p.weight).nbytes
    stored = QuantLinear(p.weight, None, (Row(bits, 1, None, FALLBACK),))
    assert torch.equal(layer(p.x.float()), stored(p.x.float()))
