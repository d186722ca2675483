"""The attention and element-wise CUDA sources, run on the CPU as C++ under the address sanitizer, against torch.

`host_ops/mma.cuh` does what the PTX ISA says of the tensor-core instructions, so a value in the wrong lane shows.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from deepinfer_lab.errors import MissingDependency
from deepinfer_lab.kernels import elementwise, merge_attention, paged_attention, resources
from deepinfer_lab.kernels.compiler import ARCHS
from deepinfer_lab.kernels.ops_catalogue import HEAD_DIMS, OPS
from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.ops import CudaOps, TorchOps
from deepinfer_lab.model.rope import rotate
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SyntheticSource
from deepinfer_lab.quant.plan import plan_named

CPU = torch.device("cpu")


@pytest.fixture
def on_host(host_ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers, sending their work to the CPU program."""
    for module in (elementwise, merge_attention, paged_attention):
        monkeypatch.setattr(module, "launch_op", host_ops.launch)
        monkeypatch.setattr(module, "expect", lambda *_, **__: None)  # it asks for a CUDA device
    monkeypatch.setattr(paged_attention, "_slots", lambda *_: 1000)


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


@pytest.mark.parametrize("quantised", [False, True], ids=["f16", "i8"])
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 3, 1), (80, 2, 2), (96, 7, 1), (128, 24, 2)])
def test_attention(on_host, quantised, dim, heads, kv_heads):
    """128 with a ratio of 12 takes two groups of heads; 145 is more than one tile for each warp."""
    for block_size, lengths, split in ((16, [145, 1, 17], None), (4, [64, 63, 5], 64), (12, [70, 130, 16], 64)):
        case = Cache.random(lengths, heads, kv_heads, dim, block_size, quantised)
        out = case.kernel(fixed_split=split)
        assert torch.allclose(out.float(), case.reference(), rtol=4e-3, atol=4e-3), (block_size, lengths)


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


@pytest.mark.parametrize("quantised", [False, True], ids=["f16", "i8"])
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
        logits.append(torch.cat([decoder.forward(StepInput.build(spans, 16, CPU), pool) for spans in script]))
    assert (logits[0] - logits[1]).norm() / logits[1].norm() < (0.03 if quantised else 0.005)


@pytest.mark.parametrize("columns", [8, 576, 2056])
def test_rms_norm(on_host, columns):
    random = torch.Generator().manual_seed(columns)
    x, delta, weight = (torch.randn(*s, columns, generator=random).half() for s in ((3,), (3,), ()))
    norm = torch.nn.functional.rms_norm
    out = elementwise.rms_norm(x, weight, 1e-5, torch.full_like(x, torch.nan))
    assert torch.allclose(out.float(), norm(x.float(), (columns,), weight.float(), 1e-5), rtol=1e-3, atol=1e-6)
    total, out = elementwise.add_rms_norm(
        x, delta, weight, 1e-5, torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    )
    assert torch.equal(total, x + delta)
    assert torch.allclose(out.float(), norm(total.float(), (columns,), weight.float(), 1e-5), rtol=1e-3, atol=1e-6)


def test_silu_mul(on_host):
    x = torch.randn(3, 2 * 1032).half() * 4
    out = elementwise.silu_mul(x, torch.full((3, 1032), torch.nan).half())
    gate, up = x.float().chunk(2, dim=1)
    assert torch.allclose(out.float(), silu(gate) * up, rtol=1e-3, atol=1e-6)
    in_turn = x.view(3, 2, -1, 8).transpose(1, 2).flatten(1).contiguous()
    assert torch.equal(elementwise.silu_mul(in_turn, torch.full((3, 1032), torch.nan).half(), interleaved=True), out)


@pytest.mark.parametrize(("splits", "empty"), [(1, ()), (4, (1,)), (3, (0, 1, 2))])
def test_merge_attention(on_host, splits, empty):
    """Of keys that are cut into parts: what attention over each gives, and the log of what it divided by, give it over all."""
    tokens, heads, dim, keys = 5, 3, 40, 7
    scores = torch.randn(splits + 1, heads, tokens, keys, dtype=torch.float64) * 3
    values = torch.randn(splits + 1, heads, keys, dim, dtype=torch.float64)
    used = [part for part in range(splits + 1) if part not in empty]
    results = (scores.softmax(-1) @ values).transpose(1, 2).half().contiguous()
    results[list(empty)] = torch.nan  # not written
    sums = scores.logsumexp(-1).float()
    sums[list(empty)] = torch.inf
    out = merge_attention.merge_attention(
        results[:-1].reshape(splits * tokens, heads, dim), sums[:-1].transpose(0, 1).reshape(heads, -1).contiguous(),
        results[-1], sums[-1].contiguous(), torch.full((tokens, heads, dim), torch.nan).half(),
    )  # fmt: skip
    together = torch.cat([scores[part] for part in used], dim=-1).softmax(-1)
    expected = together @ torch.cat([values[part] for part in used], dim=1)
    assert (out.double() - expected.transpose(0, 1)).abs().max() < 3e-3


def test_merging_lets_nan_through(on_host):
    parts, last = torch.ones(2, 1, 8).half(), torch.ones(2, 1, 8).half()
    sums = torch.tensor([[0.0, torch.nan]])
    assert merge_attention.merge_attention(parts, sums, last, torch.zeros(1, 2)).isnan().any(-1).flatten().tolist() == [
        False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("quantised", [False, True], ids=["f16", "i8"])
@pytest.mark.parametrize("dim", [16, 80, 128, 256])
def test_rope_write(on_host, quantised, dim):
    heads, kv_heads, slots = 3, 2, torch.tensor([9, 0, 14, 7])
    qkv = torch.randn(4, heads + 2 * kv_heads, dim).half()
    qkv[1, heads + kv_heads] = 0  # a V of zeros
    qkv[2, heads + kv_heads, 1] = torch.inf
    qkv[3, heads, 0] = torch.nan
    angle = torch.rand(20, dim // 2) * 6
    cos, sin, positions = angle.cos().half(), angle.sin().half(), torch.tensor([3, 19, 0, 11])
    pools = [KVPool(KVShape(1, kv_heads, dim, torch.float16, quantised), 4, 4, CPU) for _ in range(2)]
    memory = pools[0].layer(0)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    caches = (memory.k, memory.v, memory.k_scale, memory.v_scale)
    out = elementwise.rope_write(
        q, k, v, cos, sin, positions, slots, *caches, torch.full((4, heads, dim), torch.nan).half()
    )
    qk = rotate(qkv[:, : heads + kv_heads].float(), *(x[positions].float().unsqueeze(1) for x in (cos, sin))).half()
    assert torch.equal(out, qk[:, :heads])
    pools[1].write(0, slots, qk[:, heads:], v)
    expected = pools[1].layer(0)
    for name in ("k", "v", "k_scale", "v_scale"):
        ours, theirs = getattr(memory, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours.nan_to_num(5.0), theirs.nan_to_num(5.0)), name


def test_no_op_spills_on_any_architecture():
    try:
        rows = resources.report(kernels=OPS)
    except MissingDependency as error:
        pytest.skip(str(error))
    assert {(row.kernel, row.arch) for row in rows} == {(name, arch) for name in OPS for arch in ARCHS}
    assert [r for r in rows if r.usage.spill_stores or r.usage.spill_loads or r.usage.stack] == []
    for row in rows:  # what the splitting of sequences counts on
        if row.kernel.startswith("paged_decode"):
            resident = paged_attention.RESIDENT[torch.int8 if "i8" in row.kernel else torch.float16]
            assert row.occupancy.blocks >= resident or row.arch == "sm_120", row


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
