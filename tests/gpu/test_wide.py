"""The kernels for many rows on Hopper, whose blocks form clusters, on a GPU that has them."""

import threading

import pytest
import torch

from deepinfer_lab import kernels
from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import wide
from deepinfer_lab.kernels.catalogue import TILED
from deepinfer_lab.kernels.loader import held_clusters, multiprocessors
from deepinfer_lab.kernels.ops_catalogue import OPS
from deepinfer_lab.kernels.wide_cuts import WIDE_CUTS, WideCut
from deepinfer_lab.kernels.wide_plan import WidePlan, tiles_of
from deepinfer_lab.quant.tiles import to_tiles

NAMES = {4: "w4_wide", 3: "w3_wide"}
NAME = NAMES[4]
EVERY_M = (1, 9, 17, 33, 64, 65, 127, 128, 129, 257, 600)


def has_wgmma() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == TILED[NAME].capability


hopper = pytest.mark.skipif(not has_wgmma(), reason="needs a device of compute capability 9.0")


def forced(monkeypatch, cut: WideCut, clusters: int, blocks: int) -> None:
    """From now on the launcher takes this plan; clusters 0: one a tile."""

    def planned(bits, m, n, k, device):
        chosen = WidePlan(cut, clusters or tiles_of(cut, m, n), blocks)
        assert chosen.rest(tiles_of(cut, m, n)) <= chosen.clusters, "some tile would have no cluster"
        return chosen

    monkeypatch.setattr(wide, "planned", planned)


def spoil_memory() -> None:
    """What is allocated next holds NaN: rows beyond M are never written."""
    for size in (2**14, 2**20, 2**23):
        torch.full((size,), torch.nan, dtype=torch.float16, device="cuda")


@pytest.fixture(params=WIDE_CUTS, ids=lambda cut: cut.name)
def cut(request):
    return request.param


@hopper
@pytest.mark.parametrize("name", NAMES.values())
@pytest.mark.parametrize(("group", "bias"), [(32, True), (64, False), (128, True)])
def test_sweep_over_odd_sizes(problem, name, group, bias):
    spoil_memory()
    for m in EVERY_M:
        for n in (1, 17, 333):
            for k in (group, 9 * group, 2048 + group):
                problem(name, m, n, k, group, bias=bias).check(name)


@hopper
@pytest.mark.parametrize(
    ("n", "k"), [(5632, 2048), (2048, 11008), (2560, 2048), (3584, 18944), (22016, 2048), (37888, 3584)]
)
@pytest.mark.parametrize("name", NAMES.values())
def test_the_shapes_of_real_layers(problem, name, n, k):
    p = problem(name, 512, n, k, 128)
    for m in (17, 32, 64, 128, 256, 512):
        type(p)(p.x[:m], p.weight).check(name)


@hopper
@pytest.mark.parametrize("name", NAMES.values())
def test_more_rows_than_a_band_has(problem, name):
    for m, n, k in ((2049, 1000, 512), (4500, 333, 1056), (70_001, 17, 96)):
        problem(name, m, n, k, 32, bias=True).check(name)


@hopper
def test_every_cut_with_every_kind_of_share(problem, monkeypatch, cut):
    """Clusters of several sizes for each tile; and blocks that have whole tiles, with and without clusters for the rest."""
    spoil_memory()
    rows = cut.rows
    for m, n, k, group in ((rows - 3, 333, 2048, 128), (rows + 5, 1000, 1056, 32), (2 * rows, 64, 4096, 64)):
        p, tiles = problem(NAMES[cut.bits], m, n, k, group, bias=True), tiles_of(cut, m, n)
        shared, whole = ((0, 1), (0, 2), (0, 3), (tiles + 5, 4)), ((1, 1), (3, 1), (2, 2), (multiprocessors(0), 1))
        for clusters, blocks in (*shared, *whole):
            if WidePlan(cut, clusters or tiles, blocks).rest(tiles) <= (clusters or tiles):
                forced(monkeypatch, cut, clusters, blocks)
                p.check(NAMES[cut.bits])


@hopper
def test_every_size_of_clusters_that_the_card_holds(problem, monkeypatch, cut):
    p = problem(NAMES[cut.bits], cut.rows, 8 * cut.outputs + 40, 2048 + 64, 64)
    for blocks in wide.held(torch.cuda.current_device()):
        forced(monkeypatch, cut, 0, blocks)
        p.check(NAMES[cut.bits])


@hopper
def test_clusters_that_the_card_holds():
    """What the driver says of one cut is true of all, and plans count on it."""
    device = torch.cuda.current_device()
    held = wide.held(device)
    assert held[1] == multiprocessors(device)
    assert 2 in held
    assert all(1 <= blocks * count <= held[1] for blocks, count in held.items())
    assert all(held_clusters(OPS[cut.name], cut.shared, device) == held for cut in WIDE_CUTS)


@hopper
def test_twice_is_the_same_bits(problem, monkeypatch, cut):
    p = problem(NAMES[cut.bits], cut.rows, 700, 4096, 128)
    for clusters, blocks in ((0, 1), (0, 4), (0, 7)):
        forced(monkeypatch, cut, clusters, blocks)
        first = p.run(NAMES[cut.bits])
        assert all(torch.equal(p.run(NAMES[cut.bits]), first) for _ in range(10))


@hopper
def test_one_hot_activations_return_the_weights(problem, monkeypatch, cut):
    p = problem(NAMES[cut.bits], 1, 241, 160, 32)
    for blocks in (1, 2):
        forced(monkeypatch, cut, 0, blocks)
        p.check_one_hot(NAMES[cut.bits], cut.rows - 1)


@hopper
def test_nan_and_infinity_propagate_as_in_the_reference(problem, monkeypatch, cut):
    for k, group in ((96, 32), (192, 64)):
        p = problem(NAMES[cut.bits], 11, 71, k, group)
        for blocks, column, value in ((1, 0, torch.inf), (2, 37, -torch.inf), (3, k - 1, torch.nan)):
            forced(monkeypatch, cut, 0, blocks)
            p.check_propagation(NAMES[cut.bits], column, value)


@hopper
@pytest.mark.parametrize("m", [17, 64, 130])
def test_memory_around_the_output_is_left_alone(problem, m):
    p = problem(NAME, m, 67, 128, 64)
    buffer = torch.full((m * 67 + 4097,), 7.0, dtype=torch.float16, device="cuda")
    for begin in (2048, 2049):  # aligned, and not
        out = buffer[begin : begin + m * 67].view(m, 67)
        assert p.run(NAME, out=out) is out
        assert torch.equal(out, p.run(NAME))
        out.fill_(7.0)
        assert (buffer == 7).all()


@hopper
def test_captured_one_after_the_other_each_waits_for_the_one_before(problem, monkeypatch, cut):
    """Captured launches may begin while the kernel before them still runs: activations are its output, and arranged where those
    of the product before may lie."""
    forced(monkeypatch, cut, 0, 3)
    name = NAMES[cut.bits]
    first, second = problem(name, cut.rows - 5, 512, 1024, 64), problem(name, cut.rows - 5, 512, 512, 64)
    tiled = [to_tiles(p.weight) for p in (first, second)]
    launch, x = kernels.TILED_LAUNCHERS[name], first.x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        middle = launch(x, tiled[0].tiles, tiled[0].scales, 512, 64)
        other = launch(middle, tiled[1].tiles, tiled[1].scales, 512, 64)
        out = launch(other, tiled[1].tiles, tiled[1].scales, 512, 64)
    for seed in range(10):
        x.copy_(torch.randn(x.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") * 0.05)
        for written in (middle, other):
            written.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected = type(first)(x, first.weight).run(name)
        for _ in range(2):
            expected = type(second)(expected, second.weight).run(name)
        assert torch.equal(out, expected)


@hopper
@pytest.mark.parametrize("name", NAMES.values())
def test_two_streams_at_once_with_other_shapes(problem, name):
    """Each has memory of its own to arrange activations in; clusters of both share the card."""
    problems = [problem(name, m, n, k, 128) for m, n, k in ((64, 1000, 4096), (200, 700, 2048), (33, 5632, 1024))]
    expected = [p.run(name) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[] for _ in problems]
    for _ in range(20):
        for stream, p, results in zip(streams, problems, outs, strict=True):
            with torch.cuda.stream(stream):
                results.append(p.run(name))
    torch.cuda.synchronize()
    for results, right in zip(outs, expected, strict=True):
        assert all(torch.equal(result, right) for result in results)


@hopper
def test_replays_beside_launches_of_other_shapes(problem):
    captured, eager = problem(NAME, 64, 2560, 2048, 128, bias=True), problem(NAME, 300, 777, 1024, 64)
    right, other = captured.run(NAME), eager.run(NAME)
    tiled, side = to_tiles(captured.weight), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.w4_wide(captured.x, tiled.tiles, tiled.scales, 2560, 128, captured.bias)
    torch.cuda.synchronize()
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        with torch.cuda.stream(side):
            beside = eager.run(NAME)
        torch.cuda.synchronize()
        assert torch.equal(out, right)
        assert torch.equal(beside, other)


@hopper
def test_a_thread_may_begin_with_it(problem):
    """Clusters are launched by the driver itself, which wants a context in each thread."""
    p = problem(NAME, 64, 512, 1024, 64)
    tiled, right, results = to_tiles(p.weight), p.run(NAME), []
    torch.cuda.synchronize()
    thread = threading.Thread(
        target=lambda: results.append(kernels.w4_wide(p.x, tiled.tiles, tiled.scales, 512, 64, p.bias))
    )
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(results[0], right)


@hopper
def test_what_lies_around_activations_is_not_used(problem, monkeypatch, cut):
    """Rows are read as they lie: neither those beyond M nor, where K ends inside a unit, the next row's counts."""
    forced(monkeypatch, cut, 0, 2)
    for m in (5, cut.rows, cut.rows + 1):
        p = problem(NAMES[cut.bits], m, 3 * cut.outputs - 8, 1056, 32)
        right = p.run(NAMES[cut.bits])
        around = torch.full((m + 600, 1056), torch.nan, dtype=torch.float16, device="cuda")
        for first in (0, 300):
            x = around[first : first + m]
            x.copy_(p.x)
            assert torch.equal(type(p)(x, p.weight).run(NAMES[cut.bits]), right)


@hopper
def test_activations_that_are_not_dense_or_aligned(problem):
    problem(NAME, 20, 50, 128, 64).check_loose_activations(NAME)


@pytest.mark.skipif(has_wgmma(), reason="this device has them")
def test_devices_without_them_are_refused(problem):
    p = problem(NAME, 20, 50, 128, 64)
    with pytest.raises(KernelError, match=r"must be 9\.0"):
        p.run(NAME)
