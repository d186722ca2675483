"""The wide kernels: the CUDA sources, run on the CPU, against float64; blocks of clusters read one another's memory."""

import re
from pathlib import Path

import pytest
import torch
from block_products import check_every_value, check_propagation
from small_products import activations, error
from wide_products import CUTS, KINDS

from deepinfer_lab.errors import KernelError, MissingDependency
from deepinfer_lab.kernels import compiler, dispatch, resources, tiles_check, wide
from deepinfer_lab.kernels.catalogue import SOURCES
from deepinfer_lab.kernels.dispatch import FALLBACK, Row
from deepinfer_lab.kernels.ops_catalogue import Op
from deepinfer_lab.kernels.wide_cuts import UNIT_K, WIDE_CUTS, WideCut
from deepinfer_lab.kernels.wide_plan import WidePlan, tiles_of
from deepinfer_lab.quant.layout import PackedWeight
from deepinfer_lab.quant.tiles import to_tiles

OPS = {cut.name: Op(cut.name, cut.threads, "for a CPU") for cut in CUTS}
NAMED = pytest.mark.parametrize("cut", CUTS, ids=[cut.name for cut in CUTS])


@pytest.fixture
def on_host(host_wide, monkeypatch) -> None:
    """The launcher, sending its work to the CPU program."""

    def launch(op, grid, tensors, *numbers, **more):
        if op is wide.ARRANGE:
            tensors[1].fill_(torch.nan)
        host_wide.launch(op, grid, tensors, *numbers, **more)

    monkeypatch.setattr(wide, "launch_op", launch)
    monkeypatch.setattr(wide, "OPS", OPS)


def multiply(
    cut: WideCut, grid: int, cluster: int, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """float16 [M, N]. grid: clusters; 0 for one a tile. cluster: its blocks."""
    tiled, out = to_tiles(weight), torch.full((len(x), weight.n), torch.nan).half()
    chosen = WidePlan(cut, grid or tiles_of(cut, *out.shape), cluster)
    wide.run(chosen, x, tiled.tiles, tiled.scales, bias, out, weight.group)
    return out


def reference(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.double() @ weight.dequantise(torch.float64).T + (0 if bias is None else bias.double())


@NAMED
@pytest.mark.parametrize(
    ("n", "k", "group", "m", "cluster"), [(1, 32, 32, 1, 1), (72, 704, 64, -7, 2), (130, 416, 32, 9, 3)]
)
def test_matches_reference_on_every_edge(on_host, make_weight, cut, n, k, group, m, cluster):
    """N, K and M that end inside whatever they can end in. m: so many rows less or more than a block's."""
    m = 1 if m == 1 else cut.rows + m
    weight, x = make_weight(cut.bits, n, k, group, seed=m), activations(m, k)
    bias = activations(1, n)[0] if group == 32 else None
    assert error(multiply(cut, 0, cluster, x, weight, bias), reference(x, weight, bias)) < 6e-4


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut.teams == 1], ids=lambda cut: cut.name)
@pytest.mark.parametrize(("grid", "cluster"), [(2, 1), (5, 1), (2, 2)])
def test_blocks_have_whole_tiles_and_clusters_the_rest(on_host, make_weight, cut, grid, cluster):
    """Five tiles: two, or one, to each block, and one left over; the ring goes round from one tile to the next."""
    n, k = 4 * cut.outputs + 16, UNIT_K * 3 + 64
    weight, x, bias = make_weight(cut.bits, n, k, 64), activations(13, k), activations(1, n)[0]
    assert error(multiply(cut, grid, cluster, x, weight, bias), reference(x, weight, bias)) < 6e-4


@pytest.mark.parametrize("cut", CUTS[1:2], ids=lambda cut: cut.name)
def test_bands_of_rows(on_host, make_weight, cut):
    """Two, of 16 blocks of rows and of 3: 57 tiles, of which blocks have four each, and a cluster the last."""
    n, m = 2 * cut.outputs + 16, 18 * cut.rows + 40
    weight, x = make_weight(cut.bits, n, 96, 32), activations(m, 96)
    assert error(multiply(cut, 7, 2, x, weight), reference(x, weight)) < 6e-4


@pytest.mark.parametrize("cut", CUTS[:3], ids=lambda cut: cut.name)
def test_the_ring_goes_round_often(on_host, make_weight, cut):
    """Copies that come at once have slots, whatever teams still hold."""
    n, k = 40, UNIT_K * 18 + 32
    weight, x = make_weight(cut.bits, n, k, 32), activations(cut.rows, k)
    assert error(multiply(cut, 0, 1, x, weight), reference(x, weight)) < 6e-4


@pytest.mark.parametrize("cut", CUTS[2:4], ids=lambda cut: cut.name)
def test_clusters_of_more_blocks_than_units(on_host, make_weight, cut):
    n, k = cut.outputs + 24, UNIT_K * 6
    weight, x = make_weight(cut.bits, n, k, 128), activations(17, k)
    assert error(multiply(cut, 0, 8, x, weight), reference(x, weight)) < 6e-4


@NAMED
def test_every_value_in_every_place(on_host, cut):
    check_every_value(cut, cut.outputs + 3, 160, run=lambda cut, _, x, weight: multiply(cut, 0, 2, x, weight))


@NAMED
def test_nan_and_infinity_stay_in_their_rows(on_host, make_weight, cut):
    check_propagation(cut, make_weight, run=lambda cut, _, x, weight: multiply(cut, 0, 1, x, weight))


def test_cuts_are_those_of_the_program():
    text = (Path(__file__).parent / "host_wide/run_wide.cpp").read_text()
    found = re.findall(r"WideCut<Words, (\d+), (\d+), (\d+), (\d+), (\d+), (\d+), (\w+)>", text)
    assert [(*map(int, numbers), arranged == "true") for *numbers, arranged in found] == list(KINDS)


@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize("bits", [3, 4])
def test_launcher(on_host, make_weight, monkeypatch, bits, m):
    cut = next(cut for cut in CUTS if cut.bits == bits)
    monkeypatch.setattr(wide, "require_capability", lambda *_: None)
    monkeypatch.setattr(wide, "planned", lambda *_: WidePlan(cut, 2, 2))
    for module in (wide, tiles_check):
        monkeypatch.setattr(module, "expect", lambda *_, **__: None)  # it asks for a CUDA device
    weight, x, bias = make_weight(bits, 140, 320, 64), activations(m, 640)[:, ::2], activations(1, 140)[0]
    tiled, out = to_tiles(weight), torch.full((m, 140), torch.nan).half()
    launch = {4: wide.w4_wide, 3: wide.w3_wide}[bits]
    assert launch(x, tiled.tiles, tiled.scales, 140, 64, bias, out) is out
    assert error(out, reference(x, weight, bias)) < 6e-4


def test_cuts_are_those_of_the_sources():
    assert sorted(path.stem for path in SOURCES.glob("w*_wide_*.cu")) == sorted(cut.name for cut in WIDE_CUTS)
    for cut in WIDE_CUTS:
        text = (SOURCES / f"{cut.name}.cu").read_text()
        pattern = r"WIDE_KERNEL\((\w+), W(\d)Words, " + ", ".join([r"(\d+)"] * 6) + r", (\w+)\)"
        (name, bits, *numbers, arranged), *_ = re.findall(pattern, text)
        assert arranged == str(cut.arranged).lower()
        assert (name, bits) == (cut.name, str(cut.bits))
        assert [*map(int, numbers)] == [cut.across, cut.teams, cut.rows, cut.stages, cut.depth, cut.step]


def test_products_are_not_serialised_and_each_block_fills_a_multiprocessor():
    """Clusters that a device holds are asked for once, for all cuts."""
    names = {cut.name: cut for cut in WIDE_CUTS}
    try:
        rows = resources.report(names)
        logs = [compiler.compile_kernel(name, "sm_90").log for name in names]
    except MissingDependency as missing:
        pytest.skip(str(missing))
    assert [row.arch for row in rows] == ["sm_90"] * len(names)
    for row in rows:
        cut = names[row.kernel]
        assert (row.usage.spill_stores, row.usage.spill_loads, row.usage.stack) == (0, 0, 0), row
        assert row.usage.shared == 0, "the ring starts where shared memory does, or it would not be aligned"
        assert resources.occupancy("sm_90", cut.threads, row.usage.registers, cut.shared).blocks == 1
    assert not [log for log in logs if "C75" in log], "ptxas waits for each product before the next instruction"


def test_other_devices_are_refused(monkeypatch):
    x = torch.zeros(2, 128).half()
    with pytest.raises(KernelError, match="w4_wide: x is on cpu, must be on a CUDA device"):
        wide.w4_wide(x, x, x, 5, 64)

    class OnDevice:
        is_cuda, device = True, "cuda:0"

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    with pytest.raises(KernelError, match=r"w3_wide: cuda:0 has compute capability 12.0, must be 9.0.*w3_mma_block"):
        wide.w3_wide(OnDevice(), x, x, 5, 64)


def test_what_cannot_be_counted_is_refused():
    """Tensors without memory."""
    x, out = torch.empty(2**23, 2**22, device="meta"), torch.empty(2**23, 16, device="meta")
    with pytest.raises(KernelError, match="M x N x K = 8388608 x 16 x 4194304 is too large"):
        wide.run(WidePlan(WIDE_CUTS[0], 1, 1), x, x, x, None, out, 64)


def test_a_table_may_name_it():
    table = (Row(4, 1, 16, "w4_mma_small"), Row(4, 17, 512, "w4_wide"), Row(4, 513, None, FALLBACK))
    dispatch.validate(table, "test")
    assert [dispatch.choose(4, m, table=table) for m in (16, 17, 513)] == ["w4_mma_small", "w4_wide", FALLBACK]
    assert "up to 256 rows" in dispatch.explain(4, 64, 64, 128, 32, table=table)
    assert dispatch.needs_tiles(4, table)
    assert not any(row.kernel.endswith("_wide") for row in dispatch.TENSOR_CORES), "most of these cards lack it"
