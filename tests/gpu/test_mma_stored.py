"""The tensor-core kernels for a few rows on weights as stored, on a GPU."""

import pytest
import torch

from deepinfer_lab import kernels
from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import mma_stored
from deepinfer_lab.kernels.dispatch import Row
from deepinfer_lab.quant.linear import QuantLinear

NAMES = ("w4_mma_stored", "w3_mma_stored")
EVERY_M = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 70)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bias", [False, True])
def test_sweep_over_odd_sizes(problem, name, group, bias):
    for m in EVERY_M:
        for n in (1, 2, 15, 16, 17, 129, 333):
            for k in (group, 3 * group, 9 * group, 2048 + group):
                problem(name, m, n, k, group, bias=bias).check(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "k"), [(5632, 2048), (2048, 11008), (2560, 2048), (3584, 18944), (22016, 2048)])
def test_the_shapes_of_real_layers(problem, name, n, k):
    for m in (1, 8, 16, 32, 64):
        problem(name, m, n, k, 128).check(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warps", [8, 16])
def test_either_number_of_warps(problem, monkeypatch, name, warps):
    monkeypatch.setattr(mma_stored, "warps_for", lambda *_: warps)
    for m in EVERY_M:
        for group in (32, 64, 128):
            problem(name, m, 333, 4096 + group, group).check(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [333, 4000])
def test_a_row_does_not_depend_on_its_batch(problem, name, n):
    p = problem(name, 40, n, 1152, 64, bias=True)
    together = p.run(name)
    for size in (1, 7, 12):
        parts = [type(p)(rows, p.weight, p.bias).run(name) for rows in p.x.split(size)]
        assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_one_hot_activations_return_the_weights(problem, name, group):
    p = problem(name, 1, 41, 256, group)
    p.weight.scales.fill_(0.25)
    hot = torch.eye(256, device="cuda").half()
    for m in (8, 16, 32):
        out = torch.cat([type(p)(part, p.weight).run(name) for part in hot.split(m)])
        assert torch.equal(out, p.weight.dequantise(torch.float16).T)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [1, 9, 20])
def test_nan_and_infinity_propagate_as_in_the_reference(problem, name, m):
    p = problem(name, m, 71, 96, 32)
    dense = p.weight.dequantise(torch.float64)
    for column, value in ((0, torch.inf), (37, -torch.inf), (95, torch.nan)):
        x = p.x.clone()
        x[-1, column] = value
        reference = (x.double()[:, None] * dense[None]).sum(2)
        out, finite = type(p)(x, p.weight).run(name), reference.isfinite()
        assert torch.equal(out.isnan(), reference.isnan())
        assert torch.equal(out[reference.isinf()], reference[reference.isinf()].half())
        assert torch.allclose(out[finite].double(), reference[finite], rtol=2e-3, atol=2e-3)
        assert finite[:-1].all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [8, 16, 33])
def test_memory_around_the_output_is_left_alone(problem, name, m):
    p = problem(name, m, 67, 128, 64)
    buffer = torch.full((m * 67 + 4096,), 7.0, dtype=torch.float16, device="cuda")
    out = buffer[2048 : 2048 + m * 67].view(m, 67)
    assert p.run(name, out=out) is out
    assert torch.equal(out, p.run(name))
    assert (buffer[:2048] == 7).all()
    assert (buffer[2048 + m * 67 :] == 7).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [1, 16, 32])
def test_cuda_graph_capture_and_replay(problem, name, m):
    p, q = (problem(name, m, 77, 256, 64, bias=True) for _ in range(2))
    w, x = p.weight, p.x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.LAUNCHERS[name](x, w.packed, w.scales, w.group, p.bias)
    for other in (p.x, q.x):
        x.copy_(other)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, type(p)(other, w, p.bias).run(name))


@pytest.mark.parametrize("name", NAMES)
def test_two_streams_at_once(problem, name):
    problems = [problem(name, 9, 1000, 1024, 128) for _ in range(2)]
    expected = [p.run(name) for p in problems]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for stream, p, results in zip(streams, problems, outs, strict=True):
            with torch.cuda.stream(stream):
                results.append(p.run(name))
    torch.cuda.synchronize()
    for results, right in zip(outs, expected, strict=True):
        assert all(torch.equal(result, right) for result in results)


def test_weights_that_one_load_cannot_take_are_refused(problem):
    p = problem("w4_mma_stored", 1, 4, 128, 128)
    shifted = torch.zeros(4 * 64 + 4, dtype=torch.uint8, device="cuda")[4:].view(4, 64)
    with pytest.raises(KernelError, match="must be 16-byte aligned"):
        kernels.w4_mma_stored(p.x, shifted, p.weight.scales, 128)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_multiplies_with_it_where_its_table_says_so(problem, name):
    p = problem(name, 40, 96, 256, 64, bias=True)
    bits = p.weight.bits
    layer = QuantLinear(p.weight, p.bias, (Row(bits, 1, 32, name), Row(bits, 33, None, f"w{bits}_dequantise_cublas")))
    assert layer.nbytes == p.weight.nbytes
    assert torch.equal(layer(p.x[:32]), type(p)(p.x[:32], p.weight, p.bias).run(name))
