"""Dequantising against the layout's own code, bit for bit, and the product made with it, on a GPU."""

import pytest
import torch

from deepinfer_lab import kernels
from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import catalogue
from deepinfer_lab.kernels.dequantise import dequantise
from deepinfer_lab.kernels.dequantise_tiles import dequantise_tiles_cublas
from deepinfer_lab.kernels.dispatch import Row
from deepinfer_lab.quant.layout import PackedWeight, pack
from deepinfer_lab.quant.linear import QuantLinear
from deepinfer_lab.quant.tiles import to_tiles

PRODUCTS = ("w4_dequantise_cublas", "w3_dequantise_cublas")


def dense(weight: PackedWeight, rows: slice = slice(None)) -> torch.Tensor:
    """The kernel's answer, into memory that held NaN."""
    shape = len(range(*rows.indices(weight.n))), weight.k
    out = torch.full(shape, torch.nan, dtype=torch.float16, device="cuda")
    return dequantise(weight.packed, weight.scales, weight.bits, weight.group, rows, out)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Zeros of either sign differ; one NaN is as good as another."""
    known = ~b.isnan()
    return torch.equal(a.isnan(), ~known) and torch.equal(a.view(torch.int16)[known], b.view(torch.int16)[known])


@pytest.fixture
def weight(problem):
    """Random packed weights, with scales of a layer's size."""

    def make(bits: int, n: int, k: int, group: int) -> PackedWeight:
        return problem(f"w{bits}_tiled_gemm", 1, n, k, group).weight

    return make


@pytest.fixture
def small_slices(monkeypatch):
    """128 rows of a weight are dense at a time."""
    monkeypatch.setattr(catalogue, "SLICE_BYTES", 1)


@pytest.mark.parametrize("bits", [4, 3])
def test_every_value_with_every_scale(bits):
    """All 65536 float16 numbers as scales: subnormals, overflow, infinities, NaN."""
    values = torch.arange(32, dtype=torch.int8, device="cuda") % 2**bits - 2 ** (bits - 1)
    scales = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.float16).view(-1, 1)
    w = PackedWeight(bits, 32, 65536, 32, pack(values.repeat(65536, 1), bits), scales)
    assert same_bits(dense(w), w.dequantise(torch.float16))


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_sweep_over_odd_sizes(weight, bits, group):
    for n in (1, 2, 3, 17, 129, 1000):
        for k in (group, 3 * group, 9 * group, 2048 + group):
            w = weight(bits, n, k, group)
            assert same_bits(dense(w), w.dequantise(torch.float16)), (n, k)


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize(("n", "k"), [(5632, 2048), (3584, 18944)])
def test_the_articles_shapes(weight, bits, n, k):
    w = weight(bits, n, k, 128)
    assert same_bits(dense(w), w.dequantise(torch.float16))


@pytest.mark.parametrize("bits", [4, 3])
def test_ranges_of_rows_and_memory_around_the_output(weight, bits):
    w = weight(bits, 67, 160, 32)
    expected = w.dequantise(torch.float16)
    for rows in (slice(None), slice(1), slice(13, 14), slice(30, None), slice(-2, None), slice(5, 900), slice(9, 9)):
        count = len(expected[rows])
        buffer = torch.full((4096 + count * w.k + 4096,), 7.0, dtype=torch.float16, device="cuda")
        out = buffer[4096 : 4096 + count * w.k].view(count, w.k)
        assert dequantise(w.packed, w.scales, bits, w.group, rows, out) is out
        assert same_bits(out, expected[rows]), rows
        assert (buffer[:4096] == 7).all()
        assert (buffer[4096 + count * w.k :] == 7).all()
    assert same_bits(dequantise(w.packed, w.scales, bits, w.group), expected)  # `out` left out


def test_more_values_than_32_bits_count():
    n, k = 65537, 2**15  # 2^31 + 2^15
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of free GPU memory")
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(n, k // 128, device="cuda") * 0.02 + 0.005).half()
    w = PackedWeight(4, 128, n, k, packed, scales)
    out = dense(w)
    for rows in (slice(0, 2), slice(32767, 32769), slice(65535, 65537)):  # bytes and values pass 2^30 and 2^31
        assert same_bits(out[rows], w.dequantise(torch.float16, rows)), rows
    assert not out.isnan().any()


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bias", [False, True])
def test_product_over_odd_sizes(problem, small_slices, name, group, bias):
    like = name[:2] + "_tiled_gemm"
    for m in (1, 2, 33, 129):
        for n in (1, 3, 128, 129, 300):
            for k in (group, 7 * group):
                problem(like, m, n, k, group, bias=bias).check(name)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(("m", "n", "k"), [(30, 5632, 2048), (512, 2048, 5632), (64, 3584, 18944)])
def test_product_of_the_articles_shapes(problem, name, m, n, k):
    problem(name[:2] + "_tiled_gemm", m, n, k, 128).check(name)


@pytest.mark.parametrize("name", PRODUCTS)
def test_one_hot_activations_return_the_dequantised_weights(problem, small_slices, name):
    """Each sum has one term, so nothing rounds: every slice must land in its own columns of the output."""
    p = problem(name[:2] + "_tiled_gemm", 1, 300, 96, 32)
    hot = torch.eye(96, device="cuda").half()
    assert torch.equal(type(p)(hot, p.weight).run(name), p.weight.dequantise(torch.float16).T)


@pytest.mark.parametrize("name", PRODUCTS)
def test_memory_around_the_output_of_a_product_is_left_alone(problem, small_slices, name):
    p = problem(name[:2] + "_tiled_gemm", 33, 301, 128, 64, bias=True)
    size = 33 * 301
    buffer = torch.full((size + 4096,), 7.0, dtype=torch.float16, device="cuda")
    out = buffer[2048 : 2048 + size].view(33, 301)
    assert p.run(name, out=out) is out
    assert torch.equal(out, p.run(name))
    assert (buffer[:2048] == 7).all()
    assert (buffer[2048 + size :] == 7).all()


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("slices", ["one", "three"])
def test_cuda_graph_capture_and_replay(problem, monkeypatch, name, slices):
    if slices == "three":
        monkeypatch.setattr(catalogue, "SLICE_BYTES", 1)
    p, q = (problem(name[:2] + "_tiled_gemm", 40, 300, 256, 64, bias=True) for _ in range(2))
    w, x = p.weight, p.x.clone()
    right = [type(p)(other, w, p.bias).run(name) for other in (p.x, q.x)]  # cuBLAS is set up before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.LAUNCHERS[name](
            x, w.packed, w.scales, w.group, p.bias
        )  # with its workspace in the graph's own pool
    for other, expected in zip((p.x, q.x), right, strict=True):
        x.copy_(other)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert (out.float() - expected.float()).norm() / expected.float().norm() < 1e-3


def test_slices_are_written_in_place(problem, small_slices):
    """No copy of an output's columns: 64 MiB for a slice of 128. Its dense weights take 8 KiB, and cuBLAS up to 32 MiB."""
    p = problem("w4_tiled_gemm", 2**18, 256, 32, 32)
    out = p.run("w4_dequantise_cublas")  # cuBLAS has its own workspace now
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernels.w4_dequantise_cublas(p.x, p.weight.packed, p.weight.scales, 32, out=out)
    assert torch.cuda.max_memory_allocated() - before < 48 * 2**20


@pytest.mark.parametrize("name", PRODUCTS)
def test_two_streams_at_once(problem, small_slices, name):
    """Each call has a workspace of its own, which its stream's next call may take over, and no other stream's."""
    problems = [problem(name[:2] + "_tiled_gemm", 40, 1000, 1024, 128) for _ in range(2)]
    expected = [p.reference() for p in problems]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for stream, p, results in zip(streams, problems, outs, strict=True):
            with torch.cuda.stream(stream):
                results.append(p.run(name))
    torch.cuda.synchronize()
    for results, right in zip(outs, expected, strict=True):
        assert all((out.float() - right).norm() / right.norm() < 2e-3 for out in results)


def test_a_layer_multiplies_with_it_where_its_table_says_so(problem):
    p = problem("w3_tiled_gemm", 40, 96, 256, 64, bias=True)
    table = (Row(3, 1, 1, "w3_gemv"), Row(3, 2, None, "w3_dequantise_cublas"))
    out = QuantLinear(p.weight, p.bias, table=table)(p.x)
    assert torch.equal(out, p.run("w3_dequantise_cublas"))


def test_refusals(weight):
    w = weight(4, 20, 64, 32)
    with pytest.raises(KernelError, match=r"w4_dequantise: scales is on cpu, must be on a CUDA device"):
        dequantise(w.packed, w.scales.cpu(), 4, 32)
    with pytest.raises(KernelError, match=r"w4_dequantise: out is on cpu, must be on a CUDA device"):
        dequantise(w.packed, w.scales, 4, 32, out=torch.zeros(20, 64, dtype=torch.float16))
    x = torch.zeros(2, 64, dtype=torch.float16, device="cuda")
    with pytest.raises(KernelError, match=r"w4_dequantise_cublas: scales is on cpu, x is on cuda:\d"):
        kernels.w4_dequantise_cublas(x, w.packed, w.scales.cpu(), 32)


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_weights_in_tiles_give_the_same_bits(weight, small_slices, bits, group):
    """Of the weight as it is stored: one slice after the other, whole and broken units, with and without bias."""
    for n in (1, 37, 300):
        for k in (group, 3 * group, 2048 + group):
            w = weight(bits, n, k, group)
            tiled, launch = to_tiles(w), getattr(kernels, f"w{bits}_dequantise_cublas")
            x = torch.randn(33, k, device="cuda").half()
            for bias in (None, torch.randn(n, device="cuda").half()):
                found = dequantise_tiles_cublas(x, tiled.tiles, tiled.scales, n, group, bias)
                assert torch.equal(found, launch(x, w.packed, w.scales, group, bias)), (n, k)
