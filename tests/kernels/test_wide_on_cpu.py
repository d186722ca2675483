"""The wide kernels: the CUDA sources, run on the CPU, against float64; blocks of clusters read one another's memory."""

import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ADDRESS, HOST, HOST_OPS, HostOps, _running
from small_products import activations, error

from deepinfer_lab.kernels.wide_cuts import UNIT_K, WideCut
from deepinfer_lab.quant.layout import PackedWeight
from deepinfer_lab.quant.tiles import to_tiles

HOST_WIDE = Path(__file__).parent / "host_wide"
STREAMS = (WideCut(4, 2, 1, 32, 3, 3, 4, split=False), WideCut(4, 1, 1, 64, 2, 4, 2, split=False))
SPLITS = (WideCut(4, 1, 2, 32, 3, 3, 4, split=True), WideCut(4, 2, 1, 64, 2, 3, 2, split=True))
CUTS = [WideCut(bits, *list(vars(cut).values())[1:]) for bits in (4, 3) for cut in (*STREAMS, *SPLITS)]
NAMED = {"argvalues": CUTS, "ids": [cut.name for cut in CUTS]}
STREAMED = {"argvalues": [cut for cut in CUTS if not cut.split], "ids": [cut.name for cut in CUTS if not cut.split]}


@dataclass(frozen=True)
class HostWide:
    """A running host_wide/run_wide.cpp."""

    process: subprocess.Popen

    def multiply(
        self, cut: WideCut, blocks: int, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, seed: int = 0
    ) -> torch.Tensor:
        """float16 [M, N]. blocks: of a cluster where those have a tile each, of the grid otherwise; 0 for one a tile."""
        (m, k), n, tiled = x.shape, weight.n, to_tiles(weight)
        units, spans = -(-k // UNIT_K), -(-n // cut.outputs) * -(-m // cut.rows)
        arranged = torch.full((2 * units, -(-m // 8) * 8, 64), torch.nan).half()
        self._run(0, (-(-arranged.numel() // 8 // 256), 1), 256, (x, arranged), (m, k))
        assert arranged[:, :m].isfinite().all() or not x.isfinite().all()
        out, partial, arrived = torch.full((m, n), torch.nan).half(), None, None
        grid = (spans * blocks, blocks) if cut.split else (blocks or spans, 1)
        if not cut.split and spans % grid[0]:
            partial = torch.full((2 * grid[0], cut.rows, cut.outputs), torch.nan)
            arrived = torch.zeros(spans % grid[0], dtype=torch.int32)
        tensors = (arranged, tiled.tiles, tiled.scales, bias, out, partial, arrived)
        self._run(1 + CUTS.index(cut), grid, cut.threads, tensors, (m, n, k, weight.group), cut.shared, seed)
        assert arrived is None or (arrived == 0).all(), "as the next launch finds them"
        return out

    def _run(self, kernel, grid, threads, tensors, numbers, shared=16, seed=0) -> None:
        spans = [None if t is None else HostOps._storage(t) for t in tensors]
        request = [struct.pack("8i", kernel, *grid, threads, len(tensors), len(numbers), shared, seed)]
        for span in spans:
            request += [struct.pack("q", -1)] if span is None else [struct.pack("q", span.nbytes), span.tobytes()]
        request.append(struct.pack(f"{len(numbers)}d", *numbers))
        try:
            self.process.stdin.write(b"".join(request))
            self.process.stdin.flush()
            for span in spans:
                if span is not None:
                    span[:] = np.frombuffer(self.process.stdout.read(span.nbytes), np.uint8)
        except (BrokenPipeError, ValueError):
            self.process.wait()
            pytest.fail(f"the kernel stopped:\n{self.process.stderr.read().decode()[:4000]}")


@pytest.fixture(scope="module")
def host_wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostWide]:
    with _running(tmp_path_factory.mktemp("wide"), "run_wide", [HOST, HOST_OPS, HOST_WIDE], ADDRESS) as process:
        yield HostWide(process)


def reference(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.double() @ weight.dequantise(torch.float64).T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("cut", **NAMED)
@pytest.mark.parametrize(("n", "k", "group", "m", "blocks"), [(1, 32, 32, 1, 1), (72, 704, 64, -7, 2), (130, 416, 32, 9, 3)])
def test_matches_reference_on_every_edge(host_wide, make_weight, cut, n, k, group, m, blocks):
    """N, K and M that end inside whatever they can end in. m: so many rows less or more than a block's."""
    m = 1 if m == 1 else cut.rows + m
    weight, x = make_weight(cut.bits, n, k, group, seed=m), activations(m, k)
    bias = activations(1, n)[0] if group == 32 else None
    assert error(host_wide.multiply(cut, blocks, x, weight, bias), reference(x, weight, bias)) < 6e-4


@pytest.mark.parametrize("cut", **STREAMED)
def test_rings_go_round_and_blocks_share_tiles(host_wide, make_weight, cut):
    """Any number of blocks, in any order: whole tiles first, then ends amid tiles; as many slots as several times the ring."""
    m, n, k = 13, 2 * cut.outputs + 16, UNIT_K * 7 + 64
    weight, x, bias = make_weight(cut.bits, n, k, 64), activations(m, k), activations(1, n)[0]
    for blocks in (1, 2, 5, 24):
        outs = [host_wide.multiply(cut, blocks, x, weight, bias, seed) for seed in (0, 1)]
        assert error(outs[0], reference(x, weight, bias)) < 6e-4, blocks
        assert torch.equal(*outs), "the order in which blocks arrive must not matter"


@pytest.mark.parametrize("cut", [c for c in CUTS if c.split], ids=lambda c: c.name)
def test_clusters_of_any_size_add_up(host_wide, make_weight, cut):
    """More blocks than units and than shares of sums, too."""
    m, n, k = 40, cut.outputs + 24, UNIT_K * 6
    weight, x = make_weight(cut.bits, n, k, 128), activations(m, k)
    for blocks in (1, 3, 8):
        assert error(host_wide.multiply(cut, blocks, x, weight), reference(x, weight)) < 6e-4, blocks


@pytest.mark.parametrize("cut", **NAMED)
def test_nan_and_infinity_stay_in_their_rows(host_wide, make_weight, cut):
    weight, x = make_weight(cut.bits, 21, 96, 32), activations(11, 96)
    x[3, 0], x[6, 95] = torch.inf, torch.nan
    out = host_wide.multiply(cut, 1, x, weight)
    clean = [row for row in range(11) if row not in (3, 6)]
    assert not out[[3, 6]].isfinite().all(1).any()
    assert error(out[clean], reference(x[clean], weight)) < 6e-4


def test_cuts_are_those_of_the_program():
    text = (HOST_WIDE / "run_wide.cpp").read_text()
    found = re.findall(r"WideCut<Words, (\d+), (\d+), (\d+), (\d+), (\d+), (\d+), (\w+)>", text)
    assert found == [tuple(str(v).lower() for v in list(vars(cut).values())[1:]) for cut in CUTS[:4]]
