"""The kernel for Hopper's own tensor cores: the CUDA source, run on the CPU through its launcher, against float64."""

import re
from functools import partial

import pytest
import torch
from block_products import H200, Arrivals, activations, check_every_value, check_propagation, error, run

from deepinfer_lab.errors import KernelError, MissingDependency
from deepinfer_lab.kernels import compiler, dispatch, mma_block, resources, tiles_check, wgmma
from deepinfer_lab.kernels.catalogue import SOURCES
from deepinfer_lab.kernels.dispatch import FALLBACK, Row
from deepinfer_lab.kernels.mma_block import tiles_of, units_of
from deepinfer_lab.kernels.wgmma import plan
from deepinfer_lab.kernels.wgmma_cuts import WGMMA_CUTS
from deepinfer_lab.quant.tiles import to_tiles

BY_NAME = {cut.name: cut for cut in WGMMA_CUTS}
NAMES = pytest.mark.parametrize("name", BY_NAME)


@pytest.fixture
def arrivals(monkeypatch):
    own = Arrivals()
    monkeypatch.setattr(mma_block, "counters", lambda _: own)
    return own


@pytest.fixture
def on_host(host_ops, monkeypatch, arrivals):
    """The launcher, sending its work to the CPU program."""
    monkeypatch.setattr(mma_block, "launch_op", host_ops.launch)
    return host_ops


@NAMES
@pytest.mark.parametrize(
    ("n", "k", "group", "m"), [(1, 32, 32, 1), (67, 192, 64, -7), (130, 416, 32, 5), (32, 128, 128, 1)]
)
def test_matches_reference_on_every_edge(on_host, make_weight, name, n, k, group, m):
    """N, K and M that end inside whatever they can end in. m: so many rows less or more than a block's."""
    cut = BY_NAME[name]
    m = 1 if m == 1 else cut.rows + m
    weight, x = make_weight(cut.bits, n, k, group, seed=m), activations(m, k)
    bias = activations(1, n)[0] if group == 32 else None
    blocks = 3 if m > cut.rows else 0  # they go from one tile's rows to the next one's
    assert error(run(cut, blocks, x, weight, bias), x, weight, bias) < 6e-4


@NAMES
def test_rings_go_round_and_several_blocks_add_up(on_host, arrivals, make_weight, monkeypatch, name):
    """More units than slots, and any number of blocks in any order: fewer than tiles, several a tile, ends amid tiles."""
    cut = BY_NAME[name]
    m, n, k = (
        13,
        cut.outputs + 16,
        cut.unit_k * (cut.stages + cut.stages // 2 + 1) + 32,
    )  # a third is more than slots
    weight, x = make_weight(cut.bits, n, k, 32), activations(m, k)
    bias = activations(1, n)[0]
    units = 2 * units_of(cut, k)
    counts, orders = ((1, 3, units // 2 + 1), (0, 1)) if cut.name == "w4_wgmma_64_64" else ((3,), (1,))
    for blocks in counts:
        outs = []
        for shuffle in orders:
            monkeypatch.setattr(mma_block, "launch_op", partial(on_host.launch, shuffle=shuffle))
            outs.append(run(cut, blocks, x, weight, bias))
        assert error(outs[0], x, weight, bias) < 6e-4, blocks
        assert all(torch.equal(out, outs[0]) for out in outs), "the order in which blocks arrive must not matter"
    assert all((zeros == 0).all() for zeros in arrivals.taken)
    assert [len(zeros) for zeros in arrivals.taken] == [2] * len(orders) * len(counts)


@NAMES
def test_every_value_in_every_place(on_host, name):
    check_every_value(BY_NAME[name], BY_NAME[name].outputs - 61, 160)


@NAMES
def test_nan_and_infinity_stay_in_their_rows(on_host, make_weight, name):
    check_propagation(BY_NAME[name], make_weight)


@pytest.mark.parametrize(("name", "blocks"), [("w4_wgmma_64_64", 3), ("w3_wgmma_128_128", 1)])
def test_shared_memory_is_free_of_races(racing_host_ops, make_weight, monkeypatch, arrivals, name, blocks):
    monkeypatch.setattr(mma_block, "launch_op", racing_host_ops.launch)
    cut = BY_NAME[name]
    k = cut.unit_k * (cut.stages + 1)
    weight, x = make_weight(cut.bits, 80, k, 64), activations(5, k)
    assert error(run(cut, blocks, x, weight), x, weight) < 6e-4


@pytest.mark.parametrize("m", [1, 130])
@pytest.mark.parametrize("bits", [3, 4])
def test_launcher(on_host, make_weight, monkeypatch, bits, m):
    monkeypatch.setattr(mma_block, "multiprocessors", lambda _: 5)
    monkeypatch.setattr(mma_block, "max_shared", lambda _: H200[1])
    for module in (mma_block, tiles_check):
        monkeypatch.setattr(module, "expect", lambda *_, **__: None)  # it asks for a CUDA device
    weight, x = make_weight(bits, 140, 320, 64), activations(m, 320)
    tiled, out = to_tiles(weight), torch.full((m, 140), torch.nan).half()
    assert mma_block.multiply(f"w{bits}_wgmma", plan, x, tiled.tiles, tiled.scales, 140, 64, None, out) is out
    assert error(out, x, weight) < 6e-4


def test_cuts_are_those_of_the_sources():
    sources = sorted(path.stem for path in SOURCES.glob("w*_wgmma_*.cu"))
    assert sources == sorted(BY_NAME)
    for cut in WGMMA_CUTS:
        text = (SOURCES / f"{cut.name}.cu").read_text()
        (unpack, *numbers), *_ = re.findall(r"GroupCut<W(\d)Tiles, " + ", ".join([r"(\d+)"] * 5) + ">", text)
        assert unpack == str(cut.bits)
        assert [*map(int, numbers)] == [cut.across, cut.teams, cut.rows, cut.stages, cut.ahead]
        assert cut.shared <= H200[1]


def test_products_are_not_serialised_and_nothing_spills():
    """ptxas says so in an advisory where it has to wait for each product before the next instruction."""
    try:
        rows = resources.report(BY_NAME)
        logs = [compiler.compile_kernel(name, "sm_90").log for name in BY_NAME]
    except MissingDependency as missing:
        pytest.skip(str(missing))
    assert [row.arch for row in rows] == ["sm_90"] * len(BY_NAME)
    for row in rows:
        cut = BY_NAME[row.kernel]
        assert (row.usage.spill_stores, row.usage.spill_loads, row.usage.stack) == (0, 0, 0), row
        assert row.usage.shared == 0, "the ring starts where shared memory does, or it would not be aligned"
        assert resources.occupancy("sm_90", cut.threads, row.usage.registers, cut.shared).blocks == cut.resident
    assert not [log for log in logs if "wgmma" in log.replace("_wgmma_", "")]


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_it_is_compiled_for_no_other_architecture(arch):
    with pytest.raises(KernelError, match=rf"w4_wgmma_64_64 for {arch}: it can be compiled for sm_90 alone"):
        compiler.compile_kernel("w4_wgmma_64_64", arch)


def test_other_devices_are_refused(monkeypatch):
    x = torch.zeros(2, 128).half()
    with pytest.raises(KernelError, match="w4_wgmma: x is on cpu, must be on a CUDA device"):
        wgmma.w4_wgmma(x, x, x, 5, 64)

    class OnDevice:
        is_cuda, device = True, "cuda:0"

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    with pytest.raises(KernelError, match=r"w3_wgmma: cuda:0 has compute capability 12.0, must be 9.0.*w3_mma_block"):
        wgmma.w3_wgmma(OnDevice(), x, x, 5, 64)


@pytest.mark.parametrize("m", [1, 17, 64, 65, 128, 129, 300])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (2560, 2048), (2048, 11008), (37888, 3584), (2**20, 64)])
@pytest.mark.parametrize("multiprocessors", [132, 1])
@pytest.mark.parametrize("bits", [3, 4])
def test_plans_fit_the_card_and_the_work(bits, m, n, k, multiprocessors):
    chosen = plan(bits, m, n, k, multiprocessors, H200[1])
    assert chosen.cut.bits == bits
    assert chosen.cut.shared <= H200[1]
    assert 1 <= chosen.blocks <= tiles_of(chosen.cut, m, n) * units_of(chosen.cut, k)


def test_plans_fill_the_card_where_the_weight_allows():
    for n, k in ((2560, 2048), (2048, 11008), (3584, 18944), (22016, 2048)):
        for m in (32, 64, 128, 256):
            assert plan(4, m, n, k, *H200).blocks >= 0.6 * H200[0]


def test_a_table_may_name_it():
    table = (Row(4, 1, 16, "w4_mma_small"), Row(4, 17, 256, "w4_wgmma"), Row(4, 257, None, FALLBACK))
    dispatch.validate(table, "test")
    assert [dispatch.choose(4, m, table=table) for m in (16, 17, 257)] == ["w4_mma_small", "w4_wgmma", FALLBACK]
    assert "Hopper" in dispatch.explain(4, 64, 64, 128, 32, table=table)
    assert dispatch.needs_tiles(4, table)
