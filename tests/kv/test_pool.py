"""The pool: to the byte within its budget, and a slot holds what was written to it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_lab.errors import SettingError
from deepinfer_lab.kv.pool import KVPool, KVShape

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (KVShape(30, 3, 64, torch.float32), 30 * 2 * 3 * 64 * 4),
        (KVShape(28, 4, 128, torch.float16), 57_344),  # Qwen2.5-7B: 56 KiB a token
        (KVShape(1, 1, 2, torch.bfloat16), 8),
        (KVShape(28, 4, 128, torch.float16, quantised=True), 28 * 2 * 4 * (128 + 2)),
        (KVShape(3, 2, 64, torch.float32, quantised=True), 3 * 2 * 2 * (64 + 2)),
    ],
)
def test_bytes_per_token(shape, expected):
    assert shape.bytes_per_token == expected


@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from((2, 6, 16)),
    block_size=st.integers(1, 17),
    dtype=st.sampled_from((torch.float32, torch.float16)),
    quantised=st.booleans(),
    blocks=st.integers(1, 9),
    data=st.data(),
)
@settings(deadline=None)
def test_within_a_budget_to_the_byte(layers, heads, head_dim, block_size, dtype, quantised, blocks, data):
    shape = KVShape(layers, heads, head_dim, dtype, quantised)
    block = shape.bytes_per_token * block_size
    spare = data.draw(st.sampled_from((0, 1, block - 1)) | st.integers(0, block - 1))
    pool = KVPool.within(blocks * block + spare, shape, block_size, CPU)
    assert pool.num_blocks == blocks
    layer = pool.layer(layers - 1)
    tensors = [t for t in (layer.k, layer.v, layer.k_scale, layer.v_scale) if t is not None]
    stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert pool.nbytes == sum(stored.values()) == blocks * block


@pytest.mark.parametrize("budget", [0, 1, 511, -1, -512])
def test_a_budget_below_one_block(budget):
    with pytest.raises(SettingError, match=rf"{budget} bytes: one block of 4 tokens takes 512 bytes"):
        KVPool.within(budget, KVShape(1, 1, 16, torch.float32), 4, CPU)


def test_scales_count_towards_a_block():
    shape = KVShape(1, 1, 16, torch.float32, quantised=True)
    assert KVPool.within(144, shape, 4, CPU).num_blocks == 1
    with pytest.raises(SettingError, match="143 bytes: one block of 4 tokens takes 144 bytes"):
        KVPool.within(143, shape, 4, CPU)


@given(
    block_size=st.sampled_from((1, 3, 4, 16)),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=50)
def test_what_was_written_is_gathered_through_scrambled_tables(block_size, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    pool = KVPool(KVShape(2, 2, 4, torch.float32), sum(needed) + 2, block_size, CPU)
    order = torch.randperm(pool.num_blocks, generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    wrote = {}
    for layer in (0, 1):
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            k, v = torch.randn((2, length, 2, 4), generator=generator)
            slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(length)])
            shuffled = torch.randperm(length, generator=generator)  # slots may come in any order
            pool.write(layer, slots[shuffled], k[shuffled], v[shuffled])
            wrote[layer, row] = (k, v)
    columns = max(needed)
    padded = torch.tensor([table + [0] * (columns - len(table)) for table in tables])
    for layer in (0, 1):
        k, v = pool.gather(layer, padded)
        assert k.shape == v.shape == (len(lengths), columns * block_size, 2, 4)
        for row, length in enumerate(lengths):
            assert torch.equal(k[row, :length], wrote[layer, row][0])
            assert torch.equal(v[row, :length], wrote[layer, row][1])
            positions = torch.randperm(length, generator=generator)
            some = pool.read(layer, pool.rows(padded[row], positions))
            for found, expected in zip(some, wrote[layer, row], strict=True):
                assert torch.equal(found, expected[positions])


def test_a_new_pool_holds_zeros():
    pool = KVPool(KVShape(2, 1, 2, torch.float16), 3, 4, CPU)
    for layer in (0, 1):
        for tensor in pool.gather(layer, torch.tensor([[0, 1, 2]])):
            assert not tensor.any()


def test_gathering_copies():
    pool = KVPool(KVShape(1, 1, 2, torch.float32), 2, 2, CPU)
    k, _v = pool.gather(0, torch.tensor([[1]]))
    pool.write(0, torch.tensor([2]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    assert not k.any()
    assert pool.gather(0, torch.tensor([[1]]))[0].any()


def test_a_layer_is_a_view_without_scales():
    pool = KVPool(KVShape(2, 3, 4, torch.float32), 5, 2, CPU)
    layer = pool.layer(1)
    assert (layer.k_scale, layer.v_scale) == (None, None)
    assert layer.k.shape == layer.v.shape == (10, 3, 4)
    assert layer.k.is_contiguous()
    layer.k[7] = 3.0
    layer.v[7] = 4.0
    k, v = pool.gather(1, torch.tensor([[3]]))
    assert k[0, 1].eq(3).all()
    assert v[0, 1].eq(4).all()
    assert not any(tensor.any() for tensor in pool.gather(0, torch.arange(5)[None]))
