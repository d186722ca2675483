"""The kernel for Hopper's own tensor cores, on a GPU that has them."""

import pytest
import torch

from deepinfer_lab import kernels
from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import wgmma
from deepinfer_lab.kernels.catalogue import TILED
from deepinfer_lab.kernels.counters import counters
from deepinfer_lab.kernels.loader import multiprocessors
from deepinfer_lab.kernels.mma_block import Plan, tiles_of, units_of
from deepinfer_lab.kernels.wgmma_cuts import WGMMA_CUTS, WgmmaCut
from deepinfer_lab.quant.tiles import to_tiles

NAMES = {4: "w4_wgmma", 3: "w3_wgmma"}
NAME = NAMES[4]
EVERY_M = (1, 9, 17, 33, 64, 65, 127, 128, 129, 257)


def has_wgmma() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == TILED[NAME].capability


hopper = pytest.mark.skipif(not has_wgmma(), reason="needs a device of compute capability 9.0")


def forced(monkeypatch, cut: WgmmaCut, blocks: int) -> None:
    """From now on the launcher takes this cut; blocks 0: one a tile."""

    def plan(bits, m, n, k, *_):
        most = tiles_of(cut, m, n) * units_of(cut, k)
        return Plan(cut, min(blocks, most) or tiles_of(cut, m, n))

    monkeypatch.setattr(wgmma, "plan", plan)


@pytest.fixture(params=WGMMA_CUTS, ids=lambda cut: cut.name)
def cut(request):
    return request.param


@hopper
@pytest.mark.parametrize("name", NAMES.values())
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bias", [False, True])
def test_sweep_over_odd_sizes(problem, name, group, bias):
    for m in EVERY_M:
        for n in (1, 17, 64, 333):
            for k in (group, 3 * group, 9 * group, 2048 + group):
                problem(name, m, n, k, group, bias=bias).check(name)


@hopper
@pytest.mark.parametrize(
    ("n", "k"), [(5632, 2048), (2048, 11008), (2560, 2048), (3584, 18944), (22016, 2048), (37888, 3584)]
)
@pytest.mark.parametrize("name", NAMES.values())
def test_the_shapes_of_real_layers(problem, name, n, k):
    for m in (17, 32, 64, 128, 256):
        problem(name, m, n, k, 128).check(name)


@hopper
def test_every_cut_with_every_kind_of_share(problem, monkeypatch, cut):
    """Whole tiles, several blocks a tile, fewer blocks than tiles, and more blocks than the card holds at once."""
    for m, n, k, group in ((cut.rows - 3, 333, 2048, 128), (cut.rows + 5, 1000, 1056, 32), (cut.rows, 64, 18944, 64)):
        p = problem(NAMES[cut.bits], m, n, k, group, bias=True)
        for blocks in (0, 1, 3, 2 * tiles_of(cut, m, n), 8 * tiles_of(cut, m, n), multiprocessors(0), 1000):
            forced(monkeypatch, cut, blocks)
            p.check(NAMES[cut.bits])


@hopper
def test_twice_is_the_same_bits(problem, monkeypatch, cut):
    p = problem(NAMES[cut.bits], cut.rows, 700, 4096, 128)
    for blocks in (multiprocessors(0), 4 * tiles_of(cut, cut.rows, 700), 3 * multiprocessors(0)):  # some wait in vain
        forced(monkeypatch, cut, blocks)
        first = p.run(NAMES[cut.bits])
        assert all(torch.equal(p.run(NAMES[cut.bits]), first) for _ in range(50))
    torch.cuda.synchronize()
    assert not counters(torch.cuda.current_device()).take(64).any()


@hopper
def test_one_hot_activations_return_the_weights(problem, monkeypatch, cut):
    p = problem(NAMES[cut.bits], 1, 241, 160, 32)
    for blocks in (0, 2):
        forced(monkeypatch, cut, blocks)
        p.check_one_hot(NAMES[cut.bits], cut.rows - 1)


@hopper
@pytest.mark.parametrize(("k", "group"), [(96, 32), (192, 64)])
def test_nan_and_infinity_propagate_as_in_the_reference(problem, monkeypatch, cut, k, group):
    p = problem(NAMES[cut.bits], 11, 71, k, group)
    for blocks, column, value in ((0, 0, torch.inf), (2, 37, -torch.inf), (3, k - 1, torch.nan)):
        forced(monkeypatch, cut, blocks)
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
@pytest.mark.parametrize("blocks", [0, 2])
def test_captured_one_after_the_other_each_waits_for_the_one_before(problem, monkeypatch, cut, blocks):
    """Captured launches may begin while the kernel before them still runs: their activations are its output."""
    forced(monkeypatch, cut, blocks * multiprocessors(0) // 2)
    name = NAMES[cut.bits]
    first, second = problem(name, cut.rows - 5, 512, 1024, 64), problem(name, cut.rows - 5, 256, 512, 64)
    tiled = [to_tiles(p.weight) for p in (first, second)]
    launch, x = kernels.TILED_LAUNCHERS[name], first.x.clone()
    launch(x, tiled[0].tiles, tiled[0].scales, 512, 64)  # counters for captured launches exist from now on
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        middle = launch(x, tiled[0].tiles, tiled[0].scales, 512, 64)
        out = launch(middle, tiled[1].tiles, tiled[1].scales, 256, 64)
    for seed in range(20):
        x.copy_(torch.randn(x.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") * 0.05)
        middle.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected = type(second)(type(first)(x, first.weight).run(name), second.weight).run(name)
        assert torch.equal(out, expected)


@hopper
def test_activations_that_are_not_dense_or_aligned(problem):
    problem(NAME, 20, 50, 128, 64).check_loose_activations(NAME)


@pytest.mark.skipif(has_wgmma(), reason="this device has them")
def test_devices_without_them_are_refused(problem):
    p = problem(NAME, 20, 50, 128, 64)
    with pytest.raises(KernelError, match=r"must be 9\.0"):
        p.run(NAME)
