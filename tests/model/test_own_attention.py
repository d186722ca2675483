"""A prompt chunk's attention, to itself and to what is before it, on the CPU: two torch operators have stand-ins that do what
the real ones do. `tests/gpu/test_prompt_attention.py` has those.
"""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.model import attention, ops, own_attention
from deepinfer_lab.model.attention import FlashChunk, torch_attention
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.ops import CudaOps
from deepinfer_lab.model.own_attention import OwnAttention, OwnChunk
from deepinfer_lab.model.step_input import Span, StepInput

CPU, BLOCK, HEADS, KV_HEADS, DIM = torch.device("cpu"), 4, 6, 2, 16
CUDNN = "_scaled_dot_product_cudnn_attention"
REAL = getattr(torch.ops.aten, CUDNN)
OWN = OwnAttention(HEADS, KV_HEADS, DIM, CPU)
CONFIG = ModelConfig(
    architecture="llama", vocab_size=97, hidden_size=64, intermediate_size=128, num_layers=1, num_heads=HEADS,
    num_kv_heads=KV_HEADS, head_dim=DIM, max_context=128, rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [H, T, D], k and v [KV, L, D] -> [H, T, D], and log-sum-exps [H, T]. NaN in v gets through a mask, as on a GPU."""
    k, v = (x.float().repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = (q.float() @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1)


def cudnn(q, k, v, bias, with_sums, dropout, is_causal):
    assert (bias, with_sums, dropout, is_causal) == (None, True, 0.0, True)
    out, sums = attended(q[0], k[0], v[0], torch.ones(q.shape[2], k.shape[2]).tril().bool())
    return out[None], sums[None, ..., None], *[None] * 7


def flash(q, k, v, q_ends, k_ends, most_queries, most_keys, dropout, is_causal, debug):
    """Ends are aligned. Where there are no keys, nothing is written, and infinity says so."""
    assert (dropout, debug, most_keys) == (0.0, False, len(k))
    out, sums = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.inf)
    for i, (start, end) in enumerate(pairwise(q_ends)):
        assert end - start == most_queries
        keys = slice(k_ends[i], k_ends[i + 1])
        count = keys.stop - keys.start
        if count:
            mask = torch.ones(most_queries, count).bool()
            mask = mask.tril(count - most_queries) if is_causal else mask
            each, sums[:, start:end] = attended(*(x.transpose(0, 1) for x in (q[start:end], k[keys], v[keys])), mask)
            out[start:end] = each.transpose(0, 1)
    return out, sums, None, None, None


def merge(parts, parts_lse, last, last_lse):
    """`merge_attention`, whose CUDA source has tests of its own."""
    tokens, heads, _ = last.shape
    sums = torch.cat((parts_lse.view(heads, -1, tokens), last_lse[:, None]), dim=1).permute(1, 2, 0)
    weights = sums.masked_fill(sums == torch.inf, -torch.inf).softmax(0).unsqueeze(-1)
    every = torch.cat((parts.view(-1, *last.shape), last[None]))
    return torch.where(weights > 0, weights * every, 0).sum(0).to(last.dtype)


@pytest.fixture(scope="module", autouse=True)
def stand_ins():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.aten, CUDNN, cudnn)
        patch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
        for module in (attention, own_attention):
            patch.setattr(module, "merge_attention", merge)
        patch.setattr(own_attention, "OWN_TOKENS", 8)
        patch.setattr(attention, "LEAST_PART", 6)
        patch.setattr(attention, "multiprocessors", lambda _: 12)  # four parts for a chunk of up to 128 tokens
        patch.setattr(ops, "flash_takes", lambda *_: True)
        yield


def step_of(requests: list[tuple[int, int]], padding: int, quantised: bool) -> tuple[StepInput, KVPool]:
    """Requests are (tokens before, new tokens). Where a step is padded, its lengths on the host are what its table can name."""
    needed = [-(-sum(each) // BLOCK) for each in requests]
    order = torch.randperm(sum(needed)).tolist()
    spans = [
        Span([1] * new, past, [order.pop() for _ in range(n)]) for (past, new), n in zip(requests, needed, strict=True)
    ]
    pool = KVPool(KVShape(2, KV_HEADS, DIM, torch.float16, quantised), sum(needed), BLOCK, CPU, scratch=True)
    slots = torch.arange(sum(needed) * BLOCK)
    for layer in (0, 1):
        pool.write(layer, slots, *torch.randn(2, len(slots), KV_HEADS, DIM).half())
    step = StepInput.build(spans, BLOCK, CPU)
    if padding:
        table = torch.cat((step.block_table, step.block_table[:, -1:].expand(-1, padding)), dim=1)
        step = dataclasses.replace(step, block_table=table, context_lens=(table.shape[1] * BLOCK,) * len(spans))
    return step, pool


REQUESTS = st.lists(
    st.tuples(st.sampled_from((0, 1, 5, 11, 12, 40)), st.sampled_from((1, 8, 16, 24))), min_size=1, max_size=3
)


@pytest.mark.parametrize(("own", "kind"), [(OWN, OwnChunk), (None, FlashChunk)])
@given(requests=REQUESTS, padding=st.sampled_from((0, 1, 7)), quantised=st.booleans())
@settings(deadline=None, max_examples=60)
def test_a_chunk_attends_to_itself_and_to_what_is_before_it(own, kind, requests, padding, quantised):
    step, pool = step_of([*requests, (9, 8)], padding, quantised)
    made = CudaOps(own=own).step(step, pool, None)._attention
    assert isinstance(made.parts[-1][1], kind)
    q = torch.randn(len(step.positions), HEADS, DIM).half()
    for layer in (0, 1):
        expected = torch_attention(step, pool)(layer, q)
        assert torch.allclose(made(layer, q).float(), expected.float(), rtol=4e-3, atol=4e-3)


def test_nothing_but_the_chunk_is_read_where_nothing_can_be_before_it(monkeypatch):
    step, pool = step_of([(0, 16)], 0, False)
    rows = []
    monkeypatch.setattr(pool, "read", lambda layer, each: rows.append(each) or KVPool.read(pool, layer, each))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", None)
    OwnChunk(attention.runs(step)[0], pool, OWN)(0, torch.randn(16, HEADS, DIM).half())
    assert [len(each) for each in rows] == [2 * 16]


def test_padding_that_is_not_a_number_stays_where_it_is():
    step, pool = step_of([(12, 16)], 0, False)
    real = 11
    slots = step.slot_mapping.clone()
    slots[real:] = pool.scratch * BLOCK
    bad = torch.full((16 - real, KV_HEADS, DIM), torch.nan).half()
    pool.write(0, slots[real:], bad, bad)
    q = torch.randn(16, HEADS, DIM).half()
    q[real:] = torch.nan
    out = CudaOps(own=OWN).step(dataclasses.replace(step, slot_mapping=slots), pool, None)._attention(0, q)
    assert out[:real].isfinite().all()


def test_other_lengths_and_other_modes_are_left_to_others():
    step, pool = step_of([(4, 12)], 0, False)
    for made in (CudaOps(own=OWN), CudaOps()):
        (each,) = [attend for _, attend in made.step(step, pool, None)._attention.parts]
        assert isinstance(each, FlashChunk)
    (each,) = [attend for _, attend in CudaOps(64).step(step_of([(0, 8)], 0, False)[0], pool, None)._attention.parts]
    assert isinstance(each, ops.PagedTokens)
    assert [tokens for tokens in range(33) if OWN.takes(tokens)] == [8, 16, 24, 32]


def test_what_the_card_or_cudnn_refuses_is_not_asked_for_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    asked = []
    monkeypatch.setattr(torch.ops.aten, CUDNN, lambda *a: asked.append(a) or cudnn(*a))
    assert OwnAttention.of(CONFIG, CPU) == OWN
    assert [tuple(x.shape) for x in asked[0][:3]] == [(1, HEADS, 8, DIM), *[(1, KV_HEADS, 8, DIM)] * 2]

    def refuses(*_):
        raise RuntimeError("cuDNN Frontend error: No execution plans support the graph.")

    monkeypatch.setattr(torch.ops.aten, CUDNN, refuses)
    assert OwnAttention.of(CONFIG, CPU) is None
    monkeypatch.setattr(torch.ops.aten, CUDNN, cudnn)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert OwnAttention.of(CONFIG, CPU) is None


def test_torch_has_the_operator(monkeypatch):
    """Its arguments, and the shapes of its results, for as far as a machine without a GPU can tell."""
    monkeypatch.setattr(torch.ops.aten, CUDNN, REAL)
    q, kv = (torch.empty(512, heads, 64, dtype=torch.float16, device="meta") for heads in (HEADS, KV_HEADS))
    out, sums = OWN(q, kv, kv)
    assert (out.shape, sums.shape) == (q.shape, (HEADS, 512))
