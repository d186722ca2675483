"""Attention of prompt chunks by torch: flash attention and cuDNN's against masks, also where a step is padded as graphs are. On
a GPU.
"""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.model import attention
from deepinfer_lab.model.attention import Attention, FlashChunk, MaskedRows, torch_attention
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.ops import CudaOps
from deepinfer_lab.model.own_attention import OWN_CAPABILITY, OwnAttention, OwnChunk
from deepinfer_lab.model.step_input import Span, StepInput

LENGTHS = (
    (45, 45),
    (1, 33),
    (64, 300),
    (17, 18),
    (256, 1024),
    (2, 2),
    (130, 5000),
    (1100, 1100),
)  # (new tokens, all tokens)
OWN_LENGTHS = ((512, 512), (512, 513), (1024, 5000), (1, 33), (2048, 2048), (512, 9001), (1536, 1600))
HEADS = pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (16, 2, 128), (8, 8, 80), (4, 1, 96)])
CACHES = pytest.mark.parametrize("quantised", [False, True], ids=["f16", "i8"])


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def step_of(
    lengths: Sequence[tuple[int, int]], kv_heads: int, dim: int, quantised: bool
) -> tuple[StepInput, StepInput, KVPool]:
    """Random keys and values in scrambled blocks; the same step with its own lengths on the host, and with upper bounds."""
    device = here()
    needed = [-(-context // 16) for _, context in lengths]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(dim)).tolist()
    pool = KVPool(KVShape(1, kv_heads, dim, torch.float16, quantised), sum(needed), 16, device)
    if not attention.flash_takes(pool, device):
        pytest.skip(f"torch {torch.__version__} has no flash attention for this GPU")
    slots = torch.arange(sum(needed) * 16, device=device)
    pool.write(0, slots, *torch.randn(2, len(slots), kv_heads, dim, device=device).half())
    spans = [
        Span([1] * query, context - query, [order.pop() for _ in range(blocks)])
        for (query, context), blocks in zip(lengths, needed, strict=True)
    ]
    step = StepInput.build(spans, 16, device)
    wider = torch.cat((step.block_table, step.block_table[:, -1:].expand(-1, 3)), dim=1)
    bounds = (wider.shape[1] * 16,) * len(lengths)
    return step, dataclasses.replace(step, block_table=wider, context_lens=bounds), pool


def own_attention(heads: int, kv_heads: int, dim: int) -> OwnAttention:
    config = ModelConfig(
        architecture="llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim, max_context=8, rms_norm_eps=1e-5, rope_theta=1e4,
    )  # fmt: skip
    own = OwnAttention.of(config, here())
    if own is None:
        capability = torch.cuda.get_device_capability()
        assert capability != OWN_CAPABILITY or dim not in (64, 128), "cuDNN has refused what Hopper has kernels for"
        pytest.skip(f"no attention of cuDNN's for compute capability {capability} and head_dim {dim}")
    return own


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    out, expected = out.float(), expected.float()
    assert ((out - expected).norm() / expected.norm()).item() < 2e-3
    assert torch.allclose(out, expected, rtol=1e-2, atol=1e-2)


@CACHES
@HEADS
def test_flash_attention_hides_what_masks_hide(heads, kv_heads, dim, quantised):
    step, padded, pool = step_of(LENGTHS, kv_heads, dim, quantised)
    q = torch.randn(len(step.positions), heads, dim, device=here()).half()
    expected = torch_attention(step, pool)(0, q)
    for each in (step, padded):
        check(Attention(each, pool, FlashChunk, MaskedRows)(0, q), expected)


@CACHES
@HEADS
def test_long_chunks_through_cudnn_hide_what_masks_hide(heads, kv_heads, dim, quantised):
    own = own_attention(heads, kv_heads, dim)
    step, padded, pool = step_of(OWN_LENGTHS, kv_heads, dim, quantised)
    q = torch.randn(len(step.positions), heads, dim, device=here()).half()
    expected = torch_attention(step, pool)(0, q)
    for each in (step, padded):
        made = CudaOps(own=own).step(each, pool, None)._attention
        assert sum(isinstance(attend, OwnChunk) for _, attend in made.parts) == len(OWN_LENGTHS) - 1
        check(made(0, q), expected)


@HEADS
def test_log_sum_exps_of_cudnn_are_natural_and_by_head(heads, kv_heads, dim):
    own, device = own_attention(heads, kv_heads, dim), here()
    q, k, v = (3 * torch.randn(512, count, dim, device=device).half() for count in (heads, kv_heads, kv_heads))
    scores = q.float().transpose(0, 1) @ k.float().repeat_interleave(heads // kv_heads, 1).permute(1, 2, 0) / dim**0.5
    hidden = torch.ones(512, 512, device=device).triu(1).bool()
    out, sums = own(q, k, v)
    assert (out.shape, out.is_contiguous(), sums.shape) == (q.shape, True, (heads, 512))
    assert torch.allclose(sums, scores.masked_fill(hidden, -torch.inf).logsumexp(-1), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("queries", [512, 1024])
def test_a_captured_chunk_follows_the_lengths_on_the_device(queries):
    """Captured with nothing before the chunk."""
    heads, kv_heads, dim = 16, 2, 128
    own = own_attention(heads, kv_heads, dim)
    (real, _, pool), columns = step_of([(queries, 3000)], kv_heads, dim, False), 192
    table = torch.nn.functional.pad(real.block_table, (0, columns - real.block_table.shape[1]))
    fixed = dataclasses.replace(
        real, block_table=table, seq_lens=torch.full_like(real.seq_lens, queries), context_lens=(columns * 16,)
    )
    q, ops = torch.randn(queries, heads, dim, device=here()).half(), CudaOps(own=own)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        ops.step(fixed, pool, None)._attention(0, q)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out = ops.step(fixed, pool, None)._attention(0, q)
    for context in (queries, queries + 1, 2000, 3000):
        fixed.seq_lens.fill_(context)
        span = Span([1] * queries, context - queries, table[0, : -(-context // 16)].tolist())
        graph.replay()
        check(out, torch_attention(StepInput.build([span], 16, here()), pool)(0, q))


def test_preparing_is_enough_to_capture_a_plan():
    own = dataclasses.replace(own_attention(16, 2, 128), heads=14)  # of which no test has made a plan
    q, kv = (torch.randn(1024, count, 128, device=here()).half() for count in (14, 2))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        own.prepare(1024)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out, sums = own(q, kv, kv)
    graph.replay()
    expected, expected_sums = own(q, kv, kv)
    assert torch.equal(out, expected)
    assert torch.equal(sums, expected_sums)
