"""The tensor-core kernel for some dozens of rows on weights in tiles, on a GPU."""

import pytest
import torch

from deepinfer_lab import kernels
from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import mma_block
from deepinfer_lab.kernels.counters import counters
from deepinfer_lab.kernels.dispatch import Row
from deepinfer_lab.kernels.loader import max_shared, multiprocessors
from deepinfer_lab.kernels.mma_block import Plan, tiles_of, units_of
from deepinfer_lab.kernels.mma_cuts import CUTS, Cut
from deepinfer_lab.quant.linear import QuantLinear
from deepinfer_lab.quant.tiles import to_tiles

NAMES = {4: "w4_mma_block", 3: "w3_mma_block"}
NAME = NAMES[4]
EVERY_M = (1, 9, 16, 17, 33, 64, 65, 128, 129, 200)


def forced(monkeypatch, cut: Cut, blocks: int) -> None:
    """From now on the launcher takes this cut; blocks 0: one a tile."""

    def plan(bits, m, n, k, *_):
        most = tiles_of(cut, m, n) * units_of(cut, k)
        return Plan(cut, min(blocks, most) or tiles_of(cut, m, n))

    monkeypatch.setattr(mma_block, "plan", plan)


@pytest.fixture(params=CUTS, ids=lambda cut: cut.name)
def cut(request):
    if request.param.shared > max_shared(torch.cuda.current_device()):
        pytest.skip("a block may have less shared memory on this device")
    return request.param


@pytest.mark.parametrize("name", NAMES.values())
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bias", [False, True])
def test_sweep_over_odd_sizes(problem, name, group, bias):
    for m in EVERY_M:
        for n in (1, 17, 64, 333):
            for k in (group, 3 * group, 9 * group, 2048 + group):
                problem(name, m, n, k, group, bias=bias).check(name)


@pytest.mark.parametrize(
    ("n", "k"), [(5632, 2048), (2048, 11008), (2560, 2048), (3584, 18944), (22016, 2048), (37888, 3584)]
)
@pytest.mark.parametrize("name", NAMES.values())
def test_the_shapes_of_real_layers(problem, name, n, k):
    for m in (9, 16, 32, 64, 128, 256):
        problem(name, m, n, k, 128).check(name)


def test_every_cut_with_every_kind_of_share(problem, monkeypatch, cut):
    """Whole tiles, several blocks a tile, fewer blocks than tiles, and more blocks than the card holds at once."""
    for m, n, k, group in ((cut.rows - 3, 333, 2048, 128), (cut.rows + 5, 1000, 1056, 32), (cut.rows, 64, 18944, 64)):
        p = problem(NAMES[cut.bits], m, n, k, group, bias=True)
        for blocks in (0, 1, 3, 2 * tiles_of(cut, m, n), 8 * tiles_of(cut, m, n), multiprocessors(0), 1000):
            forced(monkeypatch, cut, blocks)
            p.check(NAMES[cut.bits])


def test_twice_is_the_same_bits(problem, monkeypatch, cut):
    p = problem(NAMES[cut.bits], cut.rows, 700, 4096, 128)
    for blocks in (multiprocessors(0), 4 * tiles_of(cut, cut.rows, 700)):
        forced(monkeypatch, cut, blocks)
        first = p.run(NAMES[cut.bits])
        assert all(torch.equal(p.run(NAMES[cut.bits]), first) for _ in range(50))


def test_counters_are_zero_again(problem, monkeypatch, cut):
    forced(monkeypatch, cut, multiprocessors(0))
    problem(NAMES[cut.bits], cut.rows, 700, 4096, 128).check(NAMES[cut.bits])
    torch.cuda.synchronize()
    assert not counters(torch.cuda.current_device()).take(64).any()


@pytest.mark.parametrize("k", [160, 768])  # shared evenly by a block's teams: 768 alone
def test_one_hot_activations_return_the_weights(problem, monkeypatch, cut, k):
    p = problem(NAMES[cut.bits], 1, 241, k, 32)
    for blocks in (0, 2):
        forced(monkeypatch, cut, blocks)
        p.check_one_hot(NAMES[cut.bits], cut.rows - 1)


@pytest.mark.parametrize(("k", "group"), [(96, 32), (192, 64)])
def test_nan_and_infinity_propagate_as_in_the_reference(problem, monkeypatch, cut, k, group):
    p = problem(NAMES[cut.bits], 11, 71, k, group)
    for blocks, column, value in ((0, 0, torch.inf), (2, 37, -torch.inf), (3, k - 1, torch.nan)):
        forced(monkeypatch, cut, blocks)
        p.check_propagation(NAMES[cut.bits], column, value)


@pytest.mark.parametrize("m", [9, 16, 33, 100])
def test_memory_around_the_output_is_left_alone(problem, m):
    p = problem(NAME, m, 67, 128, 64)
    buffer = torch.full((m * 67 + 4096,), 7.0, dtype=torch.float16, device="cuda")
    out = buffer[2048 : 2048 + m * 67].view(m, 67)
    assert p.run(NAME, out=out) is out
    assert torch.equal(out, p.run(NAME))
    assert (buffer[:2048] == 7).all()
    assert (buffer[2048 + m * 67 :] == 7).all()


@pytest.mark.parametrize("m", [16, 64])
def test_cuda_graph_capture_and_replay(problem, monkeypatch, m):
    p, q = (problem(NAME, m, 777, 2048, 64, bias=True) for _ in range(2))
    forced(monkeypatch, next(cut for cut in CUTS if (cut.bits, cut.rows) == (4, m)), 2 * multiprocessors(0))
    tiled, x = to_tiles(p.weight), p.x.clone()
    p.run(NAME)  # counters for captured launches exist from now on
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.w4_mma_block(x, tiled.tiles, tiled.scales, 777, 64, p.bias)
    for other in (p.x, q.x):
        x.copy_(other)
        out.fill_(torch.nan)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, type(p)(other, p.weight, p.bias).run(NAME))


def test_streams_and_graphs_at_the_same_time(problem, monkeypatch):
    """Launches on two streams, and replays of graphs that were captured on one, each with several blocks a tile."""
    forced(monkeypatch, CUTS[0], 64)
    ps = [problem(NAME, 16, 256, 4096, 128) for _ in range(4)]
    tiled, right = [to_tiles(p.weight) for p in ps], [p.run(NAME) for p in ps]
    outs, graphs, streams = [], [], [torch.cuda.Stream() for _ in ps]
    for p, weight in zip(ps[:2], tiled[:2], strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(kernels.w4_mma_block(p.x, weight.tiles, weight.scales, 256, 128))
        graphs.append(graph)
    outs += [torch.empty_like(right[0]) for _ in ps[2:]]
    torch.cuda.synchronize()
    for _ in range(200):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if i < 2:
                    graphs[i].replay()
                else:
                    kernels.w4_mma_block(ps[i].x, tiled[i].tiles, tiled[i].scales, 256, 128, out=outs[i])
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out, expected in zip(outs, right, strict=True))


def test_activations_that_are_not_dense_or_aligned(problem):
    problem(NAME, 20, 50, 128, 64).check_loose_activations(NAME)


def test_an_output_that_is_not_aligned(problem):
    p = problem(NAME, 20, 64, 128, 64)
    out = torch.empty(20 * 64 + 1, dtype=torch.float16, device="cuda")[1:].view(20, 64)
    assert torch.equal(p.run(NAME, out=out), p.run(NAME))


def test_refusals(problem):
    p = problem(NAME, 1, 20, 64, 32)
    tiled = to_tiles(p.weight)
    with pytest.raises(KernelError, match=r"scales is on cpu, must be on a CUDA device"):
        kernels.w4_mma_block(p.x, tiled.tiles, tiled.scales.cpu(), 20, 32)
    with pytest.raises(KernelError, match=r"tiles has strides"):
        kernels.w4_mma_block(p.x, tiled.tiles.repeat(1, 1, 2)[..., ::2], tiled.scales, 20, 32)


def test_a_layer_uses_it_where_its_table_says_so(problem):
    p = problem(NAME, 64, 96, 256, 64, bias=True)
    table = (Row(4, 1, 8, "w4_mma_small"), Row(4, 9, 256, NAME), Row(4, 257, None, "w4_dequantise_cublas"))
    layer = QuantLinear(p.weight, p.bias, table)
    assert layer.nbytes == to_tiles(p.weight).nbytes  # from which it is also made dense, for many rows
    assert torch.equal(layer(p.x), p.run(NAME))
    assert torch.equal(layer(p.x[:5]), type(p)(p.x[:5], p.weight, p.bias).run("w4_mma_small"))
