"""Launches under CUDA graphs, on several streams, from several threads; special values; refusals. On a GPU."""

import threading

import pytest
import torch

from deepinfer_lab import kernels
from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import loader as loader_module
from deepinfer_lab.kernels.catalogue import KERNELS
from deepinfer_lab.kernels.dispatch import Row
from deepinfer_lab.quant.linear import QuantLinear

rows = {name: 1 if kernel.single_row else kernel.block_m + 1 for name, kernel in KERNELS.items()}


@pytest.mark.parametrize("name", KERNELS)
def test_cuda_graph_capture_and_replay(problem, name):
    p, q = (problem(name, rows[name], 77, 256, 64, bias=True) for _ in range(2))
    w = p.weight
    x = p.x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.LAUNCHERS[name](x, w.packed, w.scales, w.group, p.bias)  # allocated in the graph's own pool
    for other in (p.x, q.x):
        x.copy_(other)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, type(p)(other, w, p.bias).run(name))


@pytest.mark.parametrize("name", KERNELS)
def test_two_streams_at_once(problem, name):
    problems = [problem(name, rows[name], 1000, 1024, 128) for _ in range(2)]
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


def test_launch_is_ordered_on_the_current_stream(problem):
    """The kernel must wait for work queued before it on its stream: here a long sleep, then the write of its input."""
    p = problem("w4_gemv", 1, 64, 256, 64)
    right = p.run("w4_gemv")
    x, out = torch.full_like(p.x, torch.nan), torch.empty_like(right)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # clock cycles: tens of milliseconds
        x.copy_(p.x)
        type(p)(x, p.weight).run("w4_gemv", out=out)
    stream.synchronize()
    assert torch.equal(out, right)


def test_threads_share_one_loader(problem):
    p = problem("w3_tiled_gemm", 40, 100, 256, 64)
    right = p.run("w3_tiled_gemm")
    torch.cuda.synchronize()
    results: list[bool] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            out = p.run("w3_tiled_gemm")
            torch.cuda.current_stream().synchronize()
            results.append(torch.equal(out, right))

    team = [threading.Thread(target=work) for _ in range(8)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    assert results == [True] * 8


@pytest.mark.parametrize("name", KERNELS)
def test_nan_and_infinity_propagate_as_in_the_reference(problem, name):
    p = problem(name, rows[name], 71, 96, 32)
    dense = p.weight.dequantise(torch.float64)
    for column, value in ((0, torch.inf), (37, -torch.inf), (95, torch.nan)):
        x = p.x.clone()
        x[-1, column] = value
        reference = (x.double()[:, None] * dense[None]).sum(2)
        out = type(p)(x, p.weight).run(name)
        finite = reference.isfinite()
        assert torch.equal(out.isnan(), reference.isnan())
        assert torch.equal(out[reference.isinf()], reference[reference.isinf()].half())
        assert torch.allclose(out[finite].double(), reference[finite], rtol=2e-3, atol=2e-3)
        assert finite[:-1].all()  # no other row is touched


@pytest.mark.parametrize("name", KERNELS)
def test_output_beyond_fp16_is_infinite(problem, name):
    p = problem(name, 1, 9, 64, 32)
    p.weight.scales.fill_(8.0)
    p.x.fill_(60000.0)
    reference = p.reference()
    large = reference.abs() > 70000  # clear of the rounding boundary
    assert large.any()
    assert torch.equal(p.run(name)[large], reference[large].half())


@pytest.mark.parametrize("name", KERNELS)
def test_activations_that_are_not_dense_or_aligned(problem, name):
    p = problem(name, rows[name], 50, 128, 64)
    m, k = p.x.shape
    right = p.run(name)
    strided = torch.full((m, 2 * k), torch.nan, dtype=torch.float16, device="cuda")
    strided[:, ::2] = p.x
    transposed = p.x.T.contiguous().T
    misaligned = torch.full((m * k + 1,), torch.nan, dtype=torch.float16, device="cuda")[1:].view(m, k)
    misaligned.copy_(p.x)
    for x in (strided[:, ::2], transposed, misaligned):
        assert torch.equal(type(p)(x, p.weight).run(name), right)


@pytest.mark.parametrize("name", KERNELS)
def test_memory_around_the_output_is_left_alone(problem, name):
    p = problem(name, rows[name], 67, 128, 64)
    m, n = p.x.shape[0], p.weight.n
    buffer = torch.full((m * n + 4096,), 7.0, dtype=torch.float16, device="cuda")
    out = buffer[2048 : 2048 + m * n].view(m, n)
    assert p.run(name, out=out) is out
    assert torch.equal(out, p.run(name))
    assert (buffer[:2048] == 7).all()
    assert (buffer[2048 + m * n :] == 7).all()


@pytest.mark.parametrize("name", KERNELS)
def test_refusals(problem, name):
    p = problem(name, 1, 20, 64, 32)
    w = p.weight
    run = kernels.LAUNCHERS[name]
    with pytest.raises(KernelError, match=r"torch.float32, must be torch.float16"):
        run(p.x.float(), w.packed, w.scales, 32)
    with pytest.raises(KernelError, match=r"scales is on cpu, x is on cuda:\d"):
        run(p.x, w.packed, w.scales.cpu(), 32)
    with pytest.raises(KernelError, match=r"packed has strides"):
        run(p.x, w.packed.repeat(1, 2)[:, ::2], w.scales, 32)
    with pytest.raises(KernelError, match=r"K = 64, must be a positive multiple of group = 128"):
        run(p.x, w.packed, w.scales, 128)
    if KERNELS[name].single_row:
        with pytest.raises(KernelError, match=r"M = 2, must be 1 to 1"):
            run(p.x.repeat(2, 1), w.packed, w.scales, 32)


def test_a_kernel_is_not_loaded_during_capture(problem):
    """Loading a module may allocate, which capture forbids: the message says what to do instead."""
    fresh = loader_module.Loader(torch.cuda.current_device())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(KernelError, match=r"call kernels.preload\(\) first"):
        fresh.function("w4_gemv")


def test_dispatch_covers_every_m_on_this_gpu(problem):
    from deepinfer_lab.kernels.dispatch import choose

    for bits in (4, 3):
        for m in (1, 2, 8, 9, 100):
            name = choose(bits, m)
            problem(name, m, 100, 256, 64).check(name)


def test_a_layer_multiplies_with_what_its_table_says(problem, monkeypatch):
    p = problem("w4_gemv", 3, 96, 256, 64)
    table = (Row(4, 1, 2, "w4_gemv_batch_tile"), Row(4, 3, None, "w4_tiled_gemm_split_k"))
    layer = QuantLinear(p.weight, table=table)
    called = []
    spies = {
        name: lambda *a, name=name, run=run, **k: called.append(name) or run(*a, **k)
        for name, run in kernels.LAUNCHERS.items()
    }
    monkeypatch.setattr("deepinfer_lab.quant.linear.LAUNCHERS", spies)
    assert torch.equal(layer(p.x), p.run("w4_tiled_gemm_split_k"))
    assert torch.equal(layer(p.x[:2]), type(p)(p.x[:2], p.weight).run("w4_gemv_batch_tile"))
    assert called == ["w4_tiled_gemm_split_k", "w4_gemv_batch_tile"]
