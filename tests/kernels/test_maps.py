"""The maps against the kernels' own code, thread by thread, and against a product assembled from them."""

import numpy as np
import pytest
import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import maps
from deepinfer_lab.quant.layout import PackedWeight, unpack


@pytest.mark.parametrize("bits", [4, 3])
def test_unpack_map_is_what_each_thread_of_the_kernel_does(host, make_weight, bits):
    weight = make_weight(bits, 64, 32, 32)
    dense = weight.dequantise(torch.float16).numpy()
    cells = maps.unpack_map(bits)
    for thread in range(maps.THREADS):
        written = host.unpack(thread, weight)
        assert np.count_nonzero(~np.isnan(written)) == 8
        k, n = cells.k[thread], cells.n[thread]
        assert np.array_equal(written[k, n], dense[n, k])


@pytest.mark.parametrize("bits", [4, 3])
def test_unpack_map_names_the_bytes_that_matter(host, make_weight, bits):
    """Flipping all bits of one byte changes exactly the cells that the map says the byte feeds."""
    weight = make_weight(bits, 64, 32, 32)
    cells = maps.unpack_map(bits)
    for thread in (0, 1, 17, 38, 255):
        before = host.unpack(thread, weight)
        row = cells.n[thread, 0]
        for byte in range(32 * bits // 8):
            packed = weight.packed.clone()
            packed[row, byte] ^= 0xFF
            after = host.unpack(thread, PackedWeight(bits, 32, 64, 32, packed, weight.scales))
            changed = {(k, n) for k, n in np.argwhere(~np.isnan(before) & (before != after)).tolist()}
            of_row = cells.n[thread] == row
            touched = of_row & (cells.first_byte[thread] <= byte) & (byte <= cells.last_byte[thread])
            assert changed == set(
                zip(cells.k[thread][touched].tolist(), cells.n[thread][touched].tolist(), strict=True)
            )


@pytest.mark.parametrize("bits", [4, 3])
def test_every_cell_of_the_weight_tile_is_written_once(bits):
    cells = maps.unpack_map(bits)
    hits = np.zeros((maps.BK, maps.BN), dtype=int)
    np.add.at(hits, (cells.k, cells.n), 1)
    assert (hits == 1).all()


def test_every_activation_and_every_output_has_one_thread():
    for cells, shape in (
        (maps.activation_map(), (maps.BM, maps.BK)),
        (maps.output_map(), (maps.BM, maps.BN)),
    ):
        hits = np.zeros(shape, dtype=int)
        np.add.at(hits, (cells.row, cells.column), 1)
        assert (hits == 1).all()


def test_w3_values_two_and_five_of_a_unit_straddle_bytes():
    cells = maps.unpack_map(3)
    straddles = cells.first_byte != cells.last_byte
    assert np.array_equal(straddles, np.isin(cells.k % 8, (2, 5)))
    assert (maps.unpack_map(4).first_byte == maps.unpack_map(4).last_byte).all()


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize(("m", "n", "k", "group"), [(1, 1, 32, 32), (37, 67, 96, 32), (33, 130, 128, 64)])
def test_product_assembled_from_the_maps(make_weight, bits, m, n, k, group):
    """The kernel's loops with arrays for threads: fill both tiles through the maps, multiply, store through the map."""
    weight = make_weight(bits, n, k, group)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(2)).half().numpy()
    packed, scales = weight.packed.numpy().astype(np.uint32), weight.scales.numpy().astype(np.float32)
    a_cells, b_cells, outputs = maps.activation_map(), maps.unpack_map(bits), maps.output_map()
    out = np.full((m, n), np.nan, dtype=np.float16)
    for m0 in range(0, m, maps.BM):
        for n0 in range(0, n, maps.BN):
            total = np.zeros((maps.THREADS, 8), dtype=np.float32)
            for k0 in range(0, k, maps.BK):
                shared_a = np.full(maps.BM * maps.BK, np.nan, dtype=np.float16)
                rows = m0 + a_cells.row
                values = np.where(rows < m, x[np.minimum(rows, m - 1), k0 + a_cells.column], np.float16(0))
                shared_a[a_cells.row * maps.BK + a_cells.column] = values

                shared_b = np.full(maps.BK * maps.PADDED, np.nan, dtype=np.float16)
                rows = np.minimum(n0 + b_cells.n, n - 1)
                start = k0 * bits // 8
                word = packed[rows, start + b_cells.first_byte]
                word = np.where(
                    b_cells.first_byte == b_cells.last_byte, word, word | packed[rows, start + b_cells.last_byte] << 8
                )
                field = (word >> (b_cells.k * bits % 8).astype(np.uint32)) & (2**bits - 1)
                q = (field.astype(np.int32) ^ 2 ** (bits - 1)) - 2 ** (bits - 1)
                values = np.where(n0 + b_cells.n < n, q * scales[rows, k0 // group], 0).astype(np.float16)
                shared_b[b_cells.k * maps.PADDED + b_cells.n] = values
                for kk in range(maps.BK):
                    a = shared_a[outputs.row * maps.BK + kk].astype(np.float32)
                    total += a * shared_b[kk * maps.PADDED + outputs.column].astype(np.float32)
            om, on = m0 + outputs.row, n0 + outputs.column
            inside = (om < m) & (on < n)
            out[om[inside], on[inside]] = total[inside]
    reference = x.astype(np.float64) @ weight.dequantise(torch.float64).numpy().T
    assert np.linalg.norm(out - reference) / np.linalg.norm(reference) < 2e-3


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize(("n", "k", "group"), [(1, 32, 32), (3, 96, 32), (17, 1152, 128)])
def test_gemv_lanes_cover_k(make_weight, bits, n, k, group):
    """The GEMV's loops with arrays for lanes: lane, lane + 32, ... units of eight; a butterfly adds the lanes up."""
    weight = make_weight(bits, n, k, group)
    x = torch.randn(k, generator=torch.Generator().manual_seed(3)).half().float().numpy()
    q = unpack(weight.packed, bits, k).numpy().astype(np.float32)
    scales = weight.scales.numpy().astype(np.float32)
    lane = np.arange(32)
    out = np.full(n, np.nan, dtype=np.float32)
    for row0 in range(0, 16 * (-(-n // 16)), 2):
        for row in range(row0, min(row0 + 2, n)):
            total = np.zeros(32, dtype=np.float32)
            for first in range(0, k // 8, 32):
                unit = first + lane[first + lane < k // 8]
                columns = unit[:, None] * 8 + np.arange(8)
                total[: len(unit)] += scales[row, unit * 8 // group] * (q[row, columns] * x[columns]).sum(1)
            for distance in (16, 8, 4, 2, 1):
                total = total + total[lane ^ distance]
            assert (total == total[0]).all()  # every lane holds the sum
            out[row] = total[0]
    reference = x.astype(np.float64) @ weight.dequantise(torch.float64).numpy().T
    assert np.allclose(out, reference, rtol=1e-4, atol=1e-4)


def test_padding_removes_the_bank_conflicts_of_unpacking():
    """The article pads shared_b to 65 columns. Without padding all lanes of a W4 store meet in one bank."""
    ways = {
        (bits, stride): maps.conflict_ways(maps.b_write_offsets(bits, stride))
        for bits in (3, 4)
        for stride in (maps.UNPADDED, maps.PADDED)
    }
    assert (ways[4, maps.UNPADDED] == 16).all()
    assert (ways[3, maps.UNPADDED] == 4).all()
    # Two halves share a word, so an odd k begins in the middle of one: its two rows overlap by one bank.
    assert ways[4, maps.PADDED].tolist() == [[1, 2] * 4] * 8
    assert ways[3, maps.PADDED].tolist() == [[1, 2] * 4] * 8


def test_reads_of_the_multiplication():
    singly = maps.one_by_one()
    assert len(singly) == maps.BK * 6
    # A warp spans two row pairs, 2 rows of 16 words apart: different words of one bank. Weights meet no conflict.
    assert sum(read.turns for read in singly) == maps.BK * (2 * 2 + 4)
    reads = maps.wide()
    assert sum(read.turns for read in reads) == maps.BK * 3


def test_wide_reads_bring_the_same_values_and_are_aligned():
    singly, reads = maps.one_by_one(), maps.wide()
    for array, stride in (("a", maps.BK), ("b", maps.PADDED)):
        of_array = [0, 1] if array == "a" else [2, 3, 4, 5]
        needed = np.stack([singly[k * 6 + i].first.ravel() for k in range(maps.BK) for i in of_array])
        its = [read for read in reads if (read.halves == 8) == (array == "a")]
        brought = np.concatenate([read.first.ravel() + np.arange(read.halves)[:, None] for read in its])
        assert np.array_equal(np.sort(needed, axis=0), np.sort(brought, axis=0))
        assert all((read.first % read.halves == 0).all() for read in its), f"shared_{array} rows are {stride} long"


def test_turns_of_known_reads():
    lanes = np.arange(32).reshape(1, 32)
    assert maps.Read(lanes * 2, 2).turns == 1
    assert maps.Read(lanes * 4, 4).turns == 2  # 256 bytes
    assert maps.Read(lanes * 8, 8).turns == 4  # 512 bytes
    assert maps.Read(lanes * 0, 8).turns == 2  # a broadcast to either half
    assert maps.Read(lanes * 64, 1).turns == 32


def test_conflict_ways_of_known_patterns():
    lanes = np.arange(32)
    assert maps.conflict_ways(lanes * 2) == 1  # one word for each lane
    assert maps.conflict_ways(lanes * 0) == 1  # a broadcast
    assert maps.conflict_ways(lanes * 64) == 32  # every word in bank 0
    assert maps.conflict_ways(np.stack([lanes * 2, lanes * 4])).tolist() == [1, 2]


def test_shared_memory_budget_is_the_articles():
    assert maps.shared_bytes() == {"shared_a": 2048, "shared_b": 4160}


def test_other_bits_are_refused():
    with pytest.raises(KernelError, match="2 bits"):
        maps.unpack_map(2)
