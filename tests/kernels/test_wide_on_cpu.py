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
KINDS = ((2, 1, 32, 3, 3, 4), (1, 1, 64, 2, 4, 2), (1, 2, 32, 3, 3, 4))
CUTS = [WideCut(bits, *kind) for bits in (4, 3) for kind in KINDS]
NAMED = pytest.mark.parametrize("cut", CUTS, ids=[cut.name for cut in CUTS])


@dataclass(frozen=True)
class HostWide:
    """A running host_wide/run_wide.cpp."""

    process: subprocess.Popen

    def multiply(
        self,
        cut: WideCut,
        grid: int,
        cluster: int,
        x: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float16 [M, N]. grid: clusters; 0 for one a tile. cluster: its blocks."""
        (m, k), n, tiled = x.shape, weight.n, to_tiles(weight)
        arranged = torch.full((-(-k // UNIT_K) * 2, -(-m // 8) * 8, 64), torch.nan).half()
        self._run(0, (-(-arranged.numel() // 8 // 128), 1), 128, (x, arranged), (m, k))
        out = torch.full((m, n), torch.nan).half()
        grid = grid or -(-n // cut.outputs) * -(-m // cut.rows)
        tensors = (arranged, tiled.tiles, tiled.scales, bias, out)
        self._run(
            1 + CUTS.index(cut), (grid * cluster, cluster), cut.threads, tensors, (m, n, k, weight.group), cut.shared
        )
        return out

    def _run(self, kernel, grid, threads, tensors, numbers, shared=16) -> None:
        spans = [None if t is None else HostOps._storage(t) for t in tensors]
        request = [struct.pack("8i", kernel, *grid, threads, len(tensors), len(numbers), shared, 0)]
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


@NAMED
@pytest.mark.parametrize(
    ("n", "k", "group", "m", "cluster"), [(1, 32, 32, 1, 1), (72, 704, 64, -7, 2), (130, 416, 32, 9, 3)]
)
def test_matches_reference_on_every_edge(host_wide, make_weight, cut, n, k, group, m, cluster):
    """N, K and M that end inside whatever they can end in. m: so many rows less or more than a block's."""
    m = 1 if m == 1 else cut.rows + m
    weight, x = make_weight(cut.bits, n, k, group, seed=m), activations(m, k)
    bias = activations(1, n)[0] if group == 32 else None
    assert error(host_wide.multiply(cut, 0, cluster, x, weight, bias), reference(x, weight, bias)) < 6e-4


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut.teams == 1], ids=lambda cut: cut.name)
@pytest.mark.parametrize(("grid", "cluster"), [(2, 1), (5, 1), (2, 2)])
def test_blocks_have_whole_tiles_and_clusters_the_rest(host_wide, make_weight, cut, grid, cluster):
    """Five tiles: two, or one, to each block, and one left over; the ring goes round from one tile to the next."""
    n, k = 4 * cut.outputs + 16, UNIT_K * 3 + 64
    weight, x, bias = make_weight(cut.bits, n, k, 64), activations(13, k), activations(1, n)[0]
    assert error(host_wide.multiply(cut, grid, cluster, x, weight, bias), reference(x, weight, bias)) < 6e-4


@pytest.mark.parametrize("cut", CUTS[2:4], ids=lambda cut: cut.name)
def test_clusters_of_more_blocks_than_units(host_wide, make_weight, cut):
    n, k = cut.outputs + 24, UNIT_K * 6
    weight, x = make_weight(cut.bits, n, k, 128), activations(17, k)
    assert error(host_wide.multiply(cut, 0, 8, x, weight), reference(x, weight)) < 6e-4


@NAMED
def test_nan_and_infinity_stay_in_their_rows(host_wide, make_weight, cut):
    weight, x = make_weight(cut.bits, 21, 96, 32), activations(11, 96)
    x[3, 0], x[6, 95] = torch.inf, torch.nan
    out = host_wide.multiply(cut, 0, 1, x, weight)
    clean = [row for row in range(11) if row not in (3, 6)]
    assert not out[[3, 6]].isfinite().all(1).any()
    assert error(out[clean], reference(x[clean], weight)) < 6e-4


def test_cuts_are_those_of_the_program():
    text = (HOST_WIDE / "run_wide.cpp").read_text()
    found = re.findall(r"WideCut<Words, (\d+), (\d+), (\d+), (\d+), (\d+), (\d+)>", text)
    assert [tuple(map(int, numbers)) for numbers in found] == list(KINDS)
