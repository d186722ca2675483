"""The attention kernels' CUDA sources, run on the CPU as C++ under the address sanitizer, against torch.

`host_ops/mma.cuh` does what the PTX ISA says of the tensor-core instructions, so a value in the wrong lane shows.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from arrivals import Arrivals
from torch.nn.functional import scaled_dot_product_attention

from deepinfer_lab.kernels import elementwise, ends, paged_attention
from deepinfer_lab.kernels.ops_catalogue import HEAD_DIMS, OPS
from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.ops import CudaOps, TorchOps
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SyntheticSource
from deepinfer_lab.quant.plan import plan_named

CPU = torch.device("cpu")
CACHES = pytest.mark.parametrize("quantised", [False, True], ids=["f16", "i8"])


@pytest.fixture
def on_host(host_ops, monkeypatch: pytest.MonkeyPatch):
    """The launchers, sending their work to the CPU program."""
    arrivals = Arrivals()
    for module in (elementwise, ends, paged_attention):
        monkeypatch.setattr(module, "launch_op", host_ops.launch)
        monkeypatch.setattr(module, "expect", lambda *_, **__: None)  # it asks for a CUDA device
    monkeypatch.setattr(paged_attention, "_slots", lambda *_: 1000)
    monkeypatch.setattr(paged_attention, "counters", lambda _: arrivals)
    yield host_ops
    assert not any(taken.any() for taken in arrivals.taken)


@dataclass(frozen=True)
class Cache:
    """Random sequences in a paged cache whose every other slot is NaN."""

    pool: KVPool
    table: torch.Tensor
    lengths: torch.Tensor
    q: torch.Tensor

    @classmethod
    def random(
        cls, lengths: list[int], heads: int, kv_heads: int, dim: int, block_size: int, quantised: bool
    ) -> "Cache":
        random = torch.Generator().manual_seed(len(lengths) + dim)
        columns = max(-(-length // block_size) for length in lengths) + 1
        blocks = len(lengths) * columns
        shape = KVShape(1, kv_heads, dim, torch.float16, quantised)
        pool = KVPool(shape, blocks, block_size, CPU)
        table = torch.randperm(blocks, generator=random).view(len(lengths), columns)
        bad = torch.full((blocks * block_size, kv_heads, dim), torch.nan, dtype=torch.float16)
        pool.write(0, torch.arange(blocks * block_size), bad, bad)
        for row, length in zip(table, lengths, strict=True):
            at = torch.arange(length)
            k, v = torch.randn(2, length, kv_heads, dim, generator=random).half()
            pool.write(0, row[at // block_size] * block_size + at % block_size, k * 2, v)
        q = torch.randn(len(lengths), heads, dim, generator=random).half()
        return cls(pool, table.contiguous(), torch.tensor(lengths), q)

    def kernel(self, **more: object) -> torch.Tensor:
        memory = self.pool.layer(0)
        out = torch.full_like(self.q, torch.nan)
        given = {"block_size": self.pool.block_size, "max_context": int(self.lengths.max()), "out": out} | more
        return paged_attention.paged_decode(
            self.q,
            memory.k,
            memory.v,
            self.table,
            self.lengths,
            k_scale=memory.k_scale,
            v_scale=memory.v_scale,
            **given,
        )

    def reference(self) -> torch.Tensor:
        rows = []
        for q, table, length in zip(self.q, self.table, self.lengths.tolist(), strict=True):
            k, v = (x[0, :length].float().transpose(0, 1) for x in self.pool.gather(0, table[None]))
            repeat = q.shape[0] // k.shape[0]
            k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
            rows.append(scaled_dot_product_attention(q.float().unsqueeze(1), k, v).squeeze(1))
        return torch.stack(rows)


@CACHES
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 3, 1), (80, 2, 2), (96, 7, 1), (128, 24, 2)])
def test_attention(on_host, quantised, dim, heads, kv_heads):
    """128 with a ratio of 12 takes two groups of heads; 145 is more than one tile for each warp; 256 is still one split."""
    cases = ((16, [145, 1, 17], None), (4, [64, 63, 5], 64), (12, [70, 130, 16], 64), (16, [257, 256, 16], None))
    for block_size, lengths, split in cases:
        case = Cache.random(lengths, heads, kv_heads, dim, block_size, quantised)
        out = case.kernel(fixed_split=split)
        assert torch.allclose(out.float(), case.reference(), rtol=4e-3, atol=4e-3), (block_size, lengths)


@CACHES
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 3, 1), (80, 2, 2), (96, 7, 1), (128, 24, 2)])
def test_rotating_and_writing_first(on_host, quantised, dim, heads, kv_heads):
    """The same bits as one launch after the other, in the result and in the cache: as a split's first position (129), its last
    (64) and between, in the only one (1), and for no sequence at all (0)."""
    lengths = [130, 64, 129, 1, 0]
    case = Cache.random([max(length, 1) for length in lengths], heads, kv_heads, dim, 16, quantised)
    case = replace(case, lengths=torch.tensor(lengths))
    qkv = torch.randn(len(lengths), heads + 2 * kv_heads, dim, generator=torch.Generator().manual_seed(dim)).half()
    angle = torch.rand(130, dim // 2) * 6
    cos, sin, last = angle.cos().half(), angle.sin().half(), case.lengths[:4] - 1
    memory = case.pool.layer(0)
    tensors = [x for x in (memory.k, memory.v, memory.k_scale, memory.v_scale) if x is not None]
    before = [x.clone() for x in tensors]
    slots = case.table[torch.arange(4), last // 16] * 16 + last % 16
    q = torch.zeros(5, heads, dim).half()
    parts = qkv[:4].split((heads, kv_heads, kv_heads), dim=1)
    caches = (memory.k, memory.v, memory.k_scale, memory.v_scale)
    q[:4] = elementwise.rope_write(*parts, cos, sin, last, slots, *caches)
    for split in (64, 192, None):
        expected = replace(case, q=q).kernel(fixed_split=split)
        after = [x.clone() for x in tensors]
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        out = paged_attention.rotate_write_decode(
            qkv, cos, sin, memory.k, memory.v, case.table, case.lengths, block_size=16, max_context=130,
            k_scale=memory.k_scale, v_scale=memory.v_scale, fixed_split=split, out=torch.full_like(q, torch.nan),
        )  # fmt: skip
        assert torch.equal(out, expected), split
        for tensor, wanted in zip(tensors, after, strict=True):
            assert torch.equal(tensor.nan_to_num(5.0), wanted.nan_to_num(5.0))


def test_whichever_split_comes_last_adds_them_up_alike(on_host, monkeypatch):
    case = Cache.random([700, 64, 130], 12, 1, 80, 16, False)
    in_order = case.kernel(fixed_split=64)
    assert torch.allclose(in_order.float(), case.reference(), rtol=4e-3, atol=4e-3)
    for seed in range(1, 4):
        monkeypatch.setattr(paged_attention, "launch_op", partial(on_host.launch, shuffle=seed))
        assert torch.equal(case.kernel(fixed_split=64), in_order)


def test_no_races(racing_host_ops, on_host, monkeypatch):
    """Threads of the operating system, under the thread sanitizer."""
    monkeypatch.setattr(paged_attention, "launch_op", racing_host_ops.launch)
    case = Cache.random([70, 1], 3, 1, 64, 16, True)
    memory, qkv = case.pool.layer(0), torch.randn(2, 5, 64).half()
    angles = torch.rand(2, 70, 32).half()
    out = paged_attention.rotate_write_decode(
        qkv, *angles, memory.k, memory.v, case.table, case.lengths, block_size=16, max_context=70,
        k_scale=memory.k_scale, v_scale=memory.v_scale, fixed_split=64,
    )  # fmt: skip
    assert out.isfinite().all()


def test_a_row_alone_is_the_same_bits(on_host):
    case = Cache.random([200, 64, 33], 4, 2, 64, 16, False)
    together = case.kernel(fixed_split=64)
    for i in range(3):
        alone = Cache(case.pool, case.table[i : i + 1], case.lengths[i : i + 1], case.q[i : i + 1])
        assert torch.equal(alone.kernel(fixed_split=64)[0], together[i])


def test_no_positions_give_zeros(on_host):
    case = Cache.random([70, 70], 2, 1, 64, 16, False)
    case.lengths[1] = 0
    for split in (64, 128):
        out = case.kernel(fixed_split=split)
        assert (out[1] == 0).all()
        assert out[0].isfinite().all()


def test_nan_stays_in_its_own_head(on_host):
    case = Cache.random([40], 4, 2, 64, 16, False)
    right = case.kernel()
    case.q[0, 1, 5] = torch.nan
    out = case.kernel()
    assert out[0, 1].isnan().all()
    assert torch.equal(out[0, [0, 2, 3]], right[0, [0, 2, 3]])


@CACHES
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_whole_decoder(on_host, quantised, qk_norm):
    """A prompt, a mixture of a chunk and a decode, and decode steps, with these kernels and with torch."""
    config = ModelConfig(
        architecture="qwen3" if qk_norm else "llama", vocab_size=97, hidden_size=64, intermediate_size=128, num_layers=2,
        num_heads=6, num_kv_heads=2, head_dim=64, max_context=128, rms_norm_eps=1e-5, rope_theta=1e4, qk_norm=qk_norm,
    )  # fmt: skip
    made = build_decoder(
        SyntheticSource(config, "random"), plan_named("none"), group=32, device=CPU, dtype=torch.float16
    )
    first, second = [4, 2, 5], [1, 3]
    script = [[Span(list(range(21)), 0, first, all_logits=True)], [Span([5], 21, first), Span([6, 7, 8], 0, second)]]
    script += [[Span([9 + i], 22 + i, first), Span([i], 3 + i, second)] for i in range(2)]
    logits = []
    for ops in (CudaOps(), TorchOps()):
        decoder = Decoder(config, made._embed, made._blocks, made._norm, made._lm_head, ops)
        pool = KVPool(KVShape(2, 2, 64, torch.float16, quantised), 6, 16, CPU)
        logits.append(torch.cat([decoder.forward(StepInput.build(spans, 16, CPU), pool).float() for spans in script]))
    assert (logits[0] - logits[1]).norm() / logits[1].norm() < (0.03 if quantised else 0.005)


def test_splits_fill_the_card():
    for rows, context, slots in ((64, 4096, 396), (1, 1, 396), (2, 32768, 396), (512, 4096, 396), (5000, 100, 8)):
        size = paged_attention.split_size(rows, context, slots)
        blocks = rows * -(-context // size)
        assert size % 64 == 0
        assert size - 64 < context
        turns = -(-context // 64)
        assert blocks / slots / math.ceil(blocks / slots) > (0.85 if rows * turns >= slots else 0.0), (rows, size)


def test_every_head_dim_has_both_caches():
    assert {f"paged_decode_{stored}_{dim}" for stored in ("f16", "i8") for dim in HEAD_DIMS} <= OPS.keys()
