"""The tensor-core kernel for some dozens of rows: the CUDA source, run on the CPU through its launcher, against float64."""

import re
from functools import partial

import pytest
import torch
from block_products import H200, Arrivals, activations, check_every_value, check_propagation, error, run
from tile_operands import GOOD, REFUSED

from deepinfer_lab.errors import KernelError, MissingDependency
from deepinfer_lab.kernels import dispatch, mma_block, resources, tiles_check
from deepinfer_lab.kernels.catalogue import SOURCES
from deepinfer_lab.kernels.dispatch import FALLBACK, Row
from deepinfer_lab.kernels.mma_block import plan, tiles_of, units_of, w3_mma_block, w4_mma_block
from deepinfer_lab.kernels.mma_cuts import CUTS
from deepinfer_lab.quant.tiles import to_tiles

BY_NAME = {cut.name: cut for cut in CUTS}
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
    for module in (mma_block, tiles_check):
        monkeypatch.setattr(module, "expect", lambda *_, **__: None)  # it asks for a CUDA device
    return host_ops


@NAMES
@pytest.mark.parametrize(("n", "k", "group", "m"), [(1, 32, 32, 1), (67, 192, 64, -7), (130, 160, 32, 1)])
def test_matches_reference_on_every_edge(on_host, make_weight, name, n, k, group, m):
    """N, K and M that end inside whatever they can end in. m: so many rows less or more than a block's."""
    cut = BY_NAME[name]
    m = 1 if n == 1 else cut.rows + m
    weight, x = make_weight(cut.bits, n, k, group, seed=m), activations(m, k)
    bias = activations(1, n)[0] if group == 32 else None
    assert error(run(cut, 0, x, weight, bias), x, weight, bias) < 6e-4


@NAMES
def test_rings_go_round_and_several_blocks_add_up(on_host, arrivals, make_weight, monkeypatch, name):
    """More units than slots, and any number of blocks in any order: fewer than tiles, several a tile, ends amid tiles."""
    cut = BY_NAME[name]
    slots = cut.teams * cut.stages
    m, n, k = (
        5,
        cut.outputs + 1,
        cut.unit_k * (slots + slots // 2 + 1) + 32,
    )  # a third of two tiles is more than the slots
    weight, x = make_weight(cut.bits, n, k, 32), activations(m, k)
    bias = activations(1, n)[0]
    units = 2 * units_of(cut, k)
    thorough = (cut.outputs, cut.rows) == (64, 16)
    counts, orders = ((1, 3, units // 2 + 1), (0, 1)) if thorough else ((3,), (1,))
    for blocks in counts:
        outs = []
        for shuffle in orders:
            monkeypatch.setattr(mma_block, "launch_op", partial(on_host.launch, shuffle=shuffle))
            outs.append(run(cut, blocks, x, weight, bias))
        assert error(outs[0], x, weight, bias) < 6e-4, blocks
        assert all(torch.equal(out, outs[0]) for out in outs), "the order in which blocks arrive must not matter"
    assert all((zeros == 0).all() for zeros in arrivals.taken)
    assert [len(zeros) for zeros in arrivals.taken] == [2] * len(orders) * len(counts)


@pytest.mark.parametrize(("parts", "group"), [(1, 32), (2, 64), (3, 128), (5, 32), (7, 64), (8, 128)])
@pytest.mark.parametrize("bits", [3, 4])
def test_equal_parts_of_every_tile(on_host, make_weight, monkeypatch, bits, parts, group):
    cut = BY_NAME[f"w{bits}_mma_block_64_16"]
    m, n, k = 17, 65, 896
    weight, x = make_weight(bits, n, k, group, parts), activations(m, k, parts)
    monkeypatch.setattr(mma_block, "launch_op", partial(on_host.launch, shuffle=parts))
    assert error(run(cut, min(parts, units_of(cut, k)) * tiles_of(cut, m, n), x, weight), x, weight) < 6e-4


@NAMES
def test_every_value_in_every_place(on_host, name):
    check_every_value(BY_NAME[name], 67, 96)


@NAMES
def test_nan_and_infinity_stay_in_their_rows(on_host, make_weight, name):
    check_propagation(BY_NAME[name], make_weight)


def test_sums_beyond_float16_are_no_matter_unless_the_output_is(on_host, make_weight):
    cut, weight = BY_NAME["w4_mma_block_64_16"], make_weight(4, 16, 128, 128)
    x = torch.full((3, 128), 60000.0).half()
    weight.scales.fill_(2.0**-10)
    expected = x.double() @ weight.dequantise(torch.float64).T
    assert torch.allclose(run(cut, 0, x, weight).double(), expected, rtol=1e-3)
    weight.scales.fill_(8.0)
    expected = x.double() @ weight.dequantise(torch.float64).T
    large = expected.abs() > 70000
    assert large.any()
    assert torch.equal(run(cut, 2, x, weight)[large], expected.half()[large])


@NAMES
def test_shared_memory_is_free_of_races(racing_host_ops, make_weight, monkeypatch, arrivals, name):
    """Also where a block's teams wait unequally often, which racecheck misreads (tests/gpu/sanitize.py)."""
    monkeypatch.setattr(mma_block, "launch_op", racing_host_ops.launch)
    cut = BY_NAME[name]
    k = cut.unit_k * (cut.teams * cut.stages + 1)
    weight, x = make_weight(cut.bits, 80, k, 64), activations(5, k)
    assert error(run(cut, 2 if cut.teams > 1 else 3, x, weight), x, weight) < 6e-4


@pytest.mark.parametrize("m", [9, 130])
@pytest.mark.parametrize(("bits", "launcher"), [(4, w4_mma_block), (3, w3_mma_block)])
def test_launcher(on_host, make_weight, monkeypatch, bits, launcher, m):
    monkeypatch.setattr(mma_block, "multiprocessors", lambda _: 5)
    monkeypatch.setattr(mma_block, "max_shared", lambda _: 99 * 1024)
    weight, x = make_weight(bits, 140, 320, 64), activations(m, 320)
    tiled, out = to_tiles(weight), torch.full((m, 140), torch.nan).half()
    assert launcher(x, tiled.tiles, tiled.scales, 140, 64, None, out) is out
    assert error(out, x, weight) < 6e-4


def test_cuts_are_those_of_the_sources():
    sources = sorted(path.stem for path in SOURCES.glob("w*_mma_block_*.cu"))
    assert sources == sorted(BY_NAME)
    for cut in CUTS:
        text = (SOURCES / f"{cut.name}.cu").read_text()
        (unpack, *numbers), *_ = re.findall(r"Cut<W(\d)Tiles, " + ", ".join([r"(\d+)"] * 6) + ">", text)
        assert unpack == str(cut.bits)
        assert [*map(int, numbers)] == [cut.outputs, cut.rows, cut.across, cut.down, cut.teams, cut.stages]
        assert re.search(rf"THREADS, {cut.resident}\)", text)


@pytest.mark.parametrize(
    "arch", ["sm_86", "sm_90"]
)  # 99 KiB and 227 KiB of shared memory a block; others: test_ops_on_cpu
def test_no_spills_and_as_many_blocks_as_the_plan_counts_on(arch):
    try:
        rows = resources.report(BY_NAME, [arch])
    except MissingDependency as missing:
        pytest.skip(str(missing))
    for row in rows:
        cut = BY_NAME[row.kernel]
        assert (row.usage.spill_stores, row.usage.spill_loads) == (0, 0), row
        shared = row.usage.shared + cut.shared
        if cut.outputs == 64 or arch == "sm_90":  # narrow blocks fit every card
            blocks = resources.occupancy(arch, cut.threads, row.usage.registers, shared).blocks
            assert blocks >= (cut.resident if arch == "sm_90" else 1), row


@pytest.mark.parametrize("m", [1, 16, 33, 64, 129, 300])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (2560, 2048), (22016, 2048), (2048, 11008), (3584, 18944), (2**20, 64)])
@pytest.mark.parametrize("card", [H200, (16, 99 * 1024), (1, 99 * 1024)])
@pytest.mark.parametrize("bits", [3, 4])
def test_plans_fit_the_card_and_the_work(bits, m, n, k, card):
    chosen = plan(bits, m, n, k, *card)
    assert chosen.cut.bits == bits
    assert chosen.cut.shared <= card[1]
    assert chosen.cut.rows >= min(m, 128)
    assert 1 <= chosen.blocks <= tiles_of(chosen.cut, m, n) * units_of(chosen.cut, k)


def test_plans_fill_the_card_where_the_weight_allows():
    for n, k in ((2560, 2048), (2048, 11008), (3584, 18944), (22016, 2048)):
        for m in (16, 64, 128):
            assert plan(4, m, n, k, *H200).blocks >= 0.85 * H200[0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        *REFUSED,
        ({}, r"w4_mma_block: tiles is on cpu, must be on a CUDA device"),
        ({"n": 0}, r"N = 0, must be 1 to"),
    ],
)
def test_wrong_arguments(change, complaint):
    with pytest.raises(KernelError, match=complaint):
        w4_mma_block(**{**GOOD, **change})


def test_a_table_may_name_it():
    table = (Row(4, 1, 8, "w4_mma_small"), Row(4, 9, 256, "w4_mma_block"), Row(4, 257, None, FALLBACK))
    dispatch.validate(table, "test")
    assert [dispatch.choose(4, m, table=table) for m in (8, 9, 257)] == ["w4_mma_small", "w4_mma_block", FALLBACK]
    assert "128 rows share" in dispatch.explain(4, 64, 64, 128, 32, table=table)
    assert dispatch.needs_tiles(4, table)
