"""Attention of prompt chunks by torch: flash attention against masks, also where a step is padded as graphs are. On a GPU."""

import dataclasses

import pytest
import torch

from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.model import attention
from deepinfer_lab.model.attention import Attention, FlashChunk, MaskedRows, torch_attention
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


@pytest.mark.parametrize("quantised", [False, True], ids=["f16", "i8"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (16, 2, 128), (8, 8, 80), (4, 1, 96)])
def test_flash_attention_hides_what_masks_hide(heads, kv_heads, dim, quantised):
    device = torch.device("cuda", torch.cuda.current_device())
    needed = [-(-context // 16) for _, context in LENGTHS]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(dim)).tolist()
    pool = KVPool(KVShape(1, kv_heads, dim, torch.float16, quantised), sum(needed), 16, device)
    if not attention.flash_takes(pool, device):
        pytest.skip(f"torch {torch.__version__} has no flash attention for this GPU")
    slots = torch.arange(sum(needed) * 16, device=device)
    pool.write(0, slots, *torch.randn(2, len(slots), kv_heads, dim, device=device).half())
    spans = [
        Span([1] * query, context - query, [order.pop() for _ in range(blocks)])
        for (query, context), blocks in zip(LENGTHS, needed, strict=True)
    ]
    step = StepInput.build(spans, 16, device)
    q = torch.randn(len(step.positions), heads, dim, device=device).half()

    expected = torch_attention(step, pool)(0, q).float()
    wider = torch.cat((step.block_table, step.block_table[:, -1:].expand(-1, 3)), dim=1)
    padded = dataclasses.replace(step, block_table=wider, context_lens=(wider.shape[1] * 16,) * len(LENGTHS))
    for each in (step, padded):
        out = Attention(each, pool, FlashChunk, MaskedRows)(0, q).float()
        assert ((out - expected).norm() / expected.norm()).item() < 2e-3
        assert torch.allclose(out, expected, rtol=1e-2, atol=1e-2)
