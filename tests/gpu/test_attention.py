"""Attention over the paged cache against float32 attention on the same cached values, on a GPU."""

import dataclasses
import os
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import elementwise
from deepinfer_lab.kernels.paged_attention import paged_decode, rotate_write_decode
from deepinfer_lab.kv.int8 import dequantise
from deepinfer_lab.kv.pool import KVPool, KVShape

RATIOS = (1, 2, 3, 4, 7, 8, 12, 16)
CACHES = pytest.mark.parametrize("quantised", [False, True], ids=["f16", "i8"])


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences in scattered blocks. Every slot that is not theirs holds NaN: tails of last blocks and all other blocks."""

    pool: KVPool
    table: torch.Tensor
    lengths: torch.Tensor
    q: torch.Tensor

    def run(self, **more: object) -> torch.Tensor:
        memory = self.pool.layer(0)
        if "max_context" not in more:  # asking the device for it would end a graph's capture
            more["max_context"] = int(self.lengths.max())
        given = {
            "block_size": self.pool.block_size,
            "out": torch.full_like(self.q, torch.nan),  # an output that is not written shows
        } | more
        return paged_decode(
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
        memory, rows = self.pool.layer(0), []
        for q, table, length in zip(self.q, self.table, self.lengths.tolist(), strict=True):
            k = self._cached(memory.k, memory.k_scale, table, length)
            v = self._cached(memory.v, memory.v_scale, table, length)
            folded = q.double().view(k.shape[0], -1, q.shape[-1])
            rows.append(scaled_dot_product_attention(folded, k, v).view(q.shape))
        return torch.stack(rows)

    def _cached(
        self, values: torch.Tensor, scales: torch.Tensor | None, table: torch.Tensor, length: int
    ) -> torch.Tensor:
        """[kv_heads, length, D], with no rounding that the kernel would not do: an int8 value times its scale is exact."""
        at = torch.arange(length, device=table.device)
        slots = table[at // self.pool.block_size] * self.pool.block_size + at % self.pool.block_size
        exact = values[slots].double() if scales is None else dequantise(values[slots], scales[slots], torch.float64)
        return exact.transpose(0, 1)

    def check(self, **more: object) -> None:
        out, reference = self.run(**more).double(), self.reference()
        label = f"lengths {self.lengths.tolist()[:8]}, q {tuple(self.q.shape)}, {self.pool.shape}, {more}"
        assert not out.isnan().any(), f"{label}: NaN, or an output that was not written"
        error = ((out - reference).norm() / reference.norm()).item()
        assert error < 2e-3, f"{label}: relative error {error}"
        assert torch.allclose(out, reference, rtol=1e-2, atol=1e-2), label

    def row(self, i: int) -> "Case":
        part = slice(i, i + 1)
        return Case(
            self.pool, self.table[part].contiguous(), self.lengths[part].contiguous(), self.q[part].contiguous()
        )


@pytest.fixture
def make():
    seed = int(os.environ.get("DEEPINFER_SEED") or torch.seed() % 2**31)
    random = torch.Generator("cuda").manual_seed(seed)
    print(f"repeat with DEEPINFER_SEED={seed}")

    def case(lengths, heads, kv_heads, dim, *, block_size=16, quantised=False) -> Case:
        device = torch.device("cuda", torch.cuda.current_device())
        columns = -(-max(lengths) // block_size)
        blocks = len(lengths) * columns + 3
        pool = KVPool(KVShape(1, kv_heads, dim, torch.float16, quantised), blocks, block_size, device)
        memory = pool.layer(0)
        for tensor in (memory.k_scale, memory.v_scale) if quantised else (memory.k, memory.v):
            tensor.fill_(torch.nan)
        table = torch.randperm(blocks, generator=random, device=device)[: len(lengths) * columns].view(-1, columns)
        at = torch.cat([torch.arange(length, device=device) for length in lengths])
        row = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device))
        slots = table[row, at // block_size] * block_size + at % block_size
        k, v = torch.randn(2, len(slots), kv_heads, dim, generator=random, device=device).half()
        pool.write(0, slots, 1.5 * k, v)
        q = torch.randn(len(lengths), heads, dim, generator=random, device=device).half()
        return Case(pool, table.contiguous(), torch.tensor(lengths, device=device), q)

    return case


@CACHES
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("ratio", RATIOS)
def test_head_dims_and_ratios(make, quantised, dim, ratio):
    for block_size in (16, 32):
        case = make([1, 15, 16, 17, 255, 600], 2 * ratio, 2, dim, block_size=block_size, quantised=quantised)
        case.check()
        case.check(fixed_split=64)


@CACHES
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4096, 32768])
def test_one_sequence_of_any_length(make, quantised, length):
    for kv_heads in (1, 3):
        make([length], 7 * kv_heads, kv_heads, 128, quantised=quantised).check()


@CACHES
def test_a_large_ragged_batch(make, quantised):
    lengths = [1 + 37 * i % 1000 for i in range(256)]
    make(lengths, 9, 3, 64, quantised=quantised).check()
    make([4096, 3, 2000, 64], 16, 2, 128, quantised=quantised).check()


@pytest.mark.parametrize("block_size", [4, 8, 12, 24, 80, 256])
def test_other_block_sizes(make, block_size):
    make([1, 333, 1024], 8, 2, 96, block_size=block_size).check()


@CACHES
def test_large_scores_do_not_overflow(make, quantised):
    case = make([300, 70], 8, 2, 128, quantised=quantised)
    case.q.mul_(300)  # softmax is close to one-hot, scores in the thousands
    out, reference = case.run().double(), case.reference()
    assert ((out - reference).norm() / reference.norm()).item() < 5e-3


@CACHES
def test_a_row_is_the_same_bits_in_any_batch(make, quantised):
    case = make([700, 1, 4096, 130], 16, 2, 128, quantised=quantised)
    together = case.run(fixed_split=256)
    for i in range(4):
        assert torch.equal(case.row(i).run(fixed_split=256)[0], together[i])
    assert torch.equal(case.run(fixed_split=256, max_context=case.table.shape[1] * 16), together)


@CACHES
def test_graph_replay_follows_lengths_tables_and_values(make, quantised):
    case = make([500, 900, 64], 8, 2, 128, quantised=quantised)
    q, table, lengths = case.q.clone(), case.table.clone(), case.lengths.clone()
    captured = dataclasses.replace(case, q=q, table=table, lengths=lengths)
    bound = case.table.shape[1] * 16
    captured.run(max_context=bound)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.run(max_context=bound)
    for change in (lambda x: x, lambda x: x - 63, lambda x: torch.full_like(x, 1)):
        lengths.copy_(change(case.lengths))
        q.copy_(torch.randn_like(q))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.allclose(out.double(), captured.reference(), rtol=1e-2, atol=1e-2)
    lengths.copy_(case.lengths[[1, 0, 2]])
    table.copy_(case.table[[1, 0, 2]])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(out.double(), captured.reference(), rtol=1e-2, atol=1e-2)


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """A case whose last positions are yet to be written: their q, K and V as the product gives them."""

    case: Case
    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, case: Case) -> "NewTokens":
        memory, (sequences, heads, dim) = case.pool.layer(0), case.q.shape
        qkv = torch.randn(sequences, heads + 2 * memory.k.shape[1], dim, device="cuda").half()
        angle = torch.rand(int(case.lengths.max()), dim // 2, device="cuda") * 6
        return cls(case, qkv, angle.cos().half(), angle.sin().half())

    def both(self, **more: object) -> torch.Tensor:
        """Two launches."""
        case, heads, kv_heads = self.case, self.case.q.shape[1], self.case.pool.shape.num_kv_heads
        memory, last, size = case.pool.layer(0), case.lengths - 1, case.pool.block_size
        slots = case.table.gather(1, (last // size).unsqueeze(1)).squeeze(1) * size + last % size
        parts = self.qkv.split((heads, kv_heads, kv_heads), dim=1)
        caches = (memory.k, memory.v, memory.k_scale, memory.v_scale)
        q = elementwise.rope_write(*parts, self.cos, self.sin, last, slots, *caches)
        return dataclasses.replace(case, q=q).run(**more)

    def one(self, **more: object) -> torch.Tensor:
        case, memory = self.case, self.case.pool.layer(0)
        given = {"max_context": len(self.cos), "out": torch.full_like(case.q, torch.nan)} | more
        return rotate_write_decode(
            self.qkv, self.cos, self.sin, memory.k, memory.v, case.table, case.lengths,
            block_size=case.pool.block_size, k_scale=memory.k_scale, v_scale=memory.v_scale, **given,
        )  # fmt: skip

    def cached(self) -> list[torch.Tensor]:
        memory = self.case.pool.layer(0)
        every = (memory.k, memory.v, memory.k_scale, memory.v_scale)
        return [tensor.nan_to_num(9.0) for tensor in every if tensor is not None]

    def spoil(self) -> None:
        """What the last positions hold is junk again."""
        kept, self.qkv[:] = self.qkv.clone(), torch.randn_like(self.qkv) * 3
        self.both()
        self.qkv[:] = kept

    def check(self, **more: object) -> None:
        expected = self.both(**more)
        cache = self.cached()
        self.spoil()
        assert not all(torch.equal(now, wanted) for now, wanted in zip(self.cached(), cache, strict=True))
        assert torch.equal(self.one(**more), expected), more
        assert all(torch.equal(now, wanted) for now, wanted in zip(self.cached(), cache, strict=True)), more


@CACHES
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("ratio", RATIOS)
def test_rotating_and_writing_first_gives_the_same_bits(make, quantised, dim, ratio):
    """As a split's first position (65), its last (64, 128) and between, and in the only one (1)."""
    tokens = NewTokens.of(make([1, 16, 17, 64, 65, 128, 256, 257, 600], 2 * ratio, 2, dim, quantised=quantised))
    for split in (None, 64, 640):
        tokens.check(fixed_split=split)


@CACHES
def test_rotating_and_writing_first_in_a_graph(make, quantised):
    """Replays follow the tensors, and find the counters of arrived splits at zero."""
    tokens = NewTokens.of(make([700, 64, 1, 900], 16, 2, 128, quantised=quantised))
    tokens.one(fixed_split=64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tokens.one(fixed_split=64)
    for _ in range(4):
        tokens.qkv.copy_(torch.randn_like(tokens.qkv))
        tokens.case.lengths.sub_(torch.tensor([63, 3, 0, 130], device="cuda"))
        expected = tokens.both(fixed_split=64, max_context=len(tokens.cos))
        tokens.spoil()
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@CACHES
def test_steps_that_follow_one_another(make, quantised):
    """Replays back to back: each reads before its wait what those before it have left in the cache, and after it what the
    kernel before has written."""
    tokens = NewTokens.of(make([300, 64, 1, 250], 16, 2, 128, quantised=quantised))
    case, memory, weight = tokens.case, tokens.case.pool.layer(0), torch.ones(128, device="cuda").half()
    cache = [x for x in (memory.k, memory.v, memory.k_scale, memory.v_scale) if x is not None]
    case.lengths.sub_(torch.tensor([40, 40, 0, 40], device="cuda"))
    lengths, before = case.lengths.clone(), [x.clone() for x in cache]
    given, x, out = (
        torch.randn(30, *tokens.qkv.shape, device="cuda").half(),
        tokens.qkv.clone(),
        torch.empty_like(case.q),
    )

    def step() -> None:
        elementwise.rms_norm(x.view(-1, 128), weight, 1e-5, out=tokens.qkv.view(-1, 128))
        rotate_write_decode(
            tokens.qkv, tokens.cos, tokens.sin, memory.k, memory.v, case.table, case.lengths, block_size=16,
            max_context=300, k_scale=memory.k_scale, v_scale=memory.v_scale, out=out,
        )  # fmt: skip

    def outputs(run: Callable[[], None]) -> torch.Tensor:
        case.lengths.copy_(lengths)
        for tensor, old in zip(cache, before, strict=True):
            tensor.copy_(old)
        found = []
        for rows in given:
            x.copy_(rows)
            run()
            found.append(out.clone())
            case.lengths.add_(1)
        return torch.stack(found)

    expected = outputs(step)
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert torch.equal(outputs(graph.replay), expected)


def test_no_positions_give_zeros(make):
    case = make([100, 100], 8, 2, 64)
    case.lengths[0] = 0
    for split in (64, 128):
        out = case.run(fixed_split=split)
        assert (out[0] == 0).all()
        assert out[1].isfinite().all()


def test_two_streams_at_once(make):
    cases = [make([900, 50, 300], 16, 2, 128, quantised=quantised) for quantised in (False, True)]
    right = [case.run(fixed_split=64) for case in cases]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for stream, case, results in zip(streams, cases, outs, strict=True):
            with torch.cuda.stream(stream):
                results.append(case.run(fixed_split=64))
    torch.cuda.synchronize()
    for results, expected in zip(outs, right, strict=True):
        assert all(torch.equal(result, expected) for result in results)


def test_refusals(make):
    case = make([100], 8, 2, 64)
    with pytest.raises(KernelError, match=r"max_context = 113, must be 1 to 112"):
        case.run(max_context=113)
    with pytest.raises(KernelError, match=r"fixed_split = 100, must be a positive multiple of 64"):
        case.run(fixed_split=100)
    with pytest.raises(KernelError, match=r"block_size = 18, must be a multiple of 4"):
        case.run(block_size=18)
    memory = make([100], 8, 2, 64, quantised=True).pool.layer(0)
    with pytest.raises(KernelError, match=r"k_scale is missing for torch.int8"):
        paged_decode(case.q, memory.k, memory.v, case.table, case.lengths, block_size=16, max_context=100)
    with pytest.raises(KernelError, match=r"head_dim = 48, must be one of 64, 80, 96, 128"):
        dataclasses.replace(case, q=case.q[..., :48].contiguous()).run()
    tokens = NewTokens.of(case)
    with pytest.raises(KernelError, match=r"4 rows of qkv, must be more than twice 2 KV heads"):
        dataclasses.replace(tokens, qkv=tokens.qkv[:, :4].contiguous()).one()
    with pytest.raises(KernelError, match=r"cos has shape"):
        dataclasses.replace(tokens, cos=tokens.cos[:, 1:].contiguous()).one()
    with pytest.raises(KernelError, match=r"7 query heads, must be a multiple of 2 KV heads"):
        dataclasses.replace(case, q=case.q[:, :7].contiguous()).run()
    with pytest.raises(KernelError, match=r"q has strides"):
        dataclasses.replace(case, q=case.q.repeat(1, 1, 2)[..., ::2]).run()
    with pytest.raises(KernelError, match=r"block_table has dtype torch.int32, must be torch.int64"):
        dataclasses.replace(case, table=case.table.int()).run()
    with pytest.raises(KernelError, match=r"seq_lens is on cpu, must be on a CUDA device"):
        dataclasses.replace(case, lengths=case.lengths.cpu()).run()
