"""A small model on a GPU: fused kernels against torch, and both against float32 on the CPU."""

import dataclasses

import pytest
import torch

from deepinfer_lab.kernels.dispatch import Row
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.ops import CudaOps, TorchOps, ops_for
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SyntheticSource
from deepinfer_lab.quant.plan import plan_named

BASE = ModelConfig(
    architecture="llama", vocab_size=500, hidden_size=256, intermediate_size=512, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=64, max_context=512, rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
CONFIGS = {
    "llama": BASE,
    "qwen2": dataclasses.replace(BASE, architecture="qwen2", qkv_bias=True, num_heads=7, num_kv_heads=1, head_dim=128),
    "qwen3": dataclasses.replace(BASE, architecture="qwen3", qk_norm=True, head_dim=80),
    "no kernel for its head_dim": dataclasses.replace(BASE, head_dim=16),
}


def with_ops(decoder: Decoder, ops: CudaOps | TorchOps) -> Decoder:
    return Decoder(decoder.config, decoder._embed, decoder._blocks, decoder._norm, decoder._lm_head, ops)


def steps() -> list[list[Span]]:
    """A prompt, a mixture of a chunk and a decode, then decode steps that cross blocks."""
    random = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, BASE.vocab_size, (count,), generator=random).tolist()

    first, second = [9, 2, 5, 11], [7, 1, 3]
    script = [[Span(tokens(45), 0, first, all_logits=True)], [Span(tokens(1), 45, first), Span(tokens(20), 0, second)]]
    script += [[Span(tokens(1), 46 + i, first), Span(tokens(1), 20 + i, second)] for i in range(8)]
    return script


def logits(decoder: Decoder, *, quantised: bool = False) -> torch.Tensor:
    device = decoder.device
    pool = KVPool(dataclasses.replace(decoder.kv_shape, quantised=quantised), 12, 16, device)
    return torch.cat([decoder.forward(StepInput.build(spans, 16, device), pool).cpu().float() for spans in steps()])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("quantised", [False, True], ids=["f16", "i8"])
def test_logits_of_prompts_mixtures_and_decode_steps(name, quantised):
    source = SyntheticSource(CONFIGS[name], "random")
    device = torch.device("cuda", torch.cuda.current_device())
    made = build_decoder(source, plan_named("none"), group=32, device=device, dtype=torch.float16)
    fused, plain = (logits(with_ops(made, ops), quantised=quantised) for ops in (CudaOps(), TorchOps()))
    exact = logits(
        build_decoder(source, plan_named("none"), group=32, device=torch.device("cpu"), dtype=torch.float32),
        quantised=quantised,
    )
    scale = exact.norm()
    errors = [((x - exact).norm() / scale).item() for x in (fused, plain)]
    assert errors[0] < (0.03 if quantised else 0.01)
    assert errors[0] < 2 * errors[1] + 1e-3  # no further from the truth than torch
    assert ((fused - plain).norm() / scale).item() < (0.03 if quantised else 0.01)


def test_fused_kernels_are_chosen_for_float16_on_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    assert isinstance(ops_for(BASE, device, torch.float16), CudaOps)
    assert isinstance(ops_for(BASE, device, torch.float32), TorchOps)
    assert isinstance(ops_for(dataclasses.replace(BASE, hidden_size=36), device, torch.float16), TorchOps)
    assert isinstance(ops_for(BASE, torch.device("cpu"), torch.float16), TorchOps)


def test_a_row_does_not_depend_on_its_batch_with_fixed_splits():
    """Attention alone: the linear layers' own kernels may add up in another order at another number of rows."""
    config = CONFIGS["llama"]
    device = torch.device("cuda", torch.cuda.current_device())
    made = build_decoder(
        SyntheticSource(config, "random"), plan_named("none"), group=32, device=device, dtype=torch.float16
    )
    pool = KVPool(made.kv_shape, 12, 16, device)
    pool.write(0, torch.arange(192, device=device), *torch.randn(2, 192, 2, 64, device=device).half())
    spans = [Span([1], 100, [0, 3, 5, 7, 9, 11, 1]), Span([2], 5, [2])]
    q = torch.randn(2, 4, 64, device=device).half()
    rope, ops = made._rope, CudaOps(fixed_split=64)
    together = ops.step(StepInput.build(spans, 16, device), pool, rope)._attention(0, q)
    for i, span in enumerate(spans):
        alone = ops.step(StepInput.build([span], 16, device), pool, rope)._attention(0, q[i : i + 1].contiguous())
        assert torch.equal(alone[0], together[i])


# What goes to the kernels for few rows, and to others, beyond.
FEW = tuple(
    row
    for bits in (4, 3)
    for row in (Row(bits, 1, 32, f"w{bits}_mma_small"), Row(bits, 33, None, f"w{bits}_dequantise_cublas"))
)
WIDE = dataclasses.replace(
    BASE, hidden_size=512, intermediate_size=1536, vocab_size=1200
)  # several blocks of each kernel
FUSED = {
    "llama": WIDE,
    "biased": dataclasses.replace(WIDE, architecture="qwen2", qkv_bias=True, num_heads=7, num_kv_heads=1, head_dim=128),
    "norms of q and k": dataclasses.replace(WIDE, architecture="qwen3", qk_norm=True, head_dim=80),
}


class Uneven(SyntheticSource):
    """Norms that are not all ones, so that using the wrong one shows."""

    def tensor(self, name: str) -> torch.Tensor:
        weight = super().tensor(name)
        return weight * (0.5 + torch.rand(weight.shape)) if name.endswith("norm.weight") else weight


def decode_steps(rows: int, context: int) -> list[StepInput]:
    """A prompt for each of `rows` sequences, decode steps of all of them, into a new block, and three more tokens of the first
    sequence beside one of each other."""
    device = torch.device("cuda", torch.cuda.current_device())
    random = torch.Generator().manual_seed(rows)
    columns = -(-(context + 7) // 16)
    blocks = torch.randperm(rows * columns, generator=random).view(rows, columns).tolist()

    def spans(start: int, *counts: int) -> list[Span]:
        tokens = [torch.randint(0, BASE.vocab_size, (count,), generator=random).tolist() for count in counts]
        return [Span(new, start, held) for new, held in zip(tokens, blocks, strict=True)]

    ones = [1] * (rows - 1)
    script = [
        spans(0, *[context] * rows),
        *(spans(context + i, 1, *ones) for i in range(4)),
        spans(context + 4, 3, *ones),
    ]
    return [StepInput.build(each, 16, device) for each in script]


@pytest.mark.parametrize("bits", ["w4-all", "w3"])  # with a packed head, and without
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("quantised", [False, True], ids=["f16", "i8"])
@pytest.mark.parametrize(("rows", "context"), [(1, 13), (2, 430), (3, 430), (8, 200), (32, 40)])
def test_fused_blocks_give_the_same_bits(name, bits, quantised, rows, context):
    device = torch.device("cuda", torch.cuda.current_device())
    source = Uneven(FUSED[name], "random")
    made = build_decoder(source, plan_named(bits), group=64, device=device, dtype=torch.float16, table=FEW)
    assert all(block.interleaved for block in made._blocks)
    assert rows in made._fused_rows
    plain = with_ops(made, CudaOps())
    plain._fused_rows = frozenset()
    found = []
    for decoder in (made, plain):
        pool = KVPool(dataclasses.replace(decoder.kv_shape, quantised=quantised), 300, 16, device)
        found.append([decoder.forward(step, pool) for step in decode_steps(rows, context)])
    assert found[0][0].isfinite().all()
    for step, (fused, expected) in enumerate(zip(*found, strict=True)):
        assert torch.equal(fused, expected), f"step {step}"


def test_interleaved_gate_and_up_are_those_that_lie_side_by_side():
    """At all numbers of rows, with and without kernels for what lies between."""
    device = torch.device("cuda", torch.cuda.current_device())
    source = SyntheticSource(WIDE, "random")
    build = {"group": 64, "device": device, "dtype": torch.float16}
    tiled = build_decoder(source, plan_named("w4"), table=FEW, **build)
    stored = build_decoder(source, plan_named("w4"), table=(Row(4, 1, None, "w4_dequantise_cublas"),), **build)
    assert tiled._blocks[0].interleaved
    assert not stored._blocks[0].interleaved
    expected = logits(stored)
    for decoder in (tiled, with_ops(tiled, TorchOps())):
        assert ((logits(decoder) - expected).norm() / expected.norm()).item() < 0.01


def test_a_captured_step_is_fused_alike():
    """Kernels that begin before those before them are done, over and over."""
    device = torch.device("cuda", torch.cuda.current_device())
    decoder = build_decoder(
        SyntheticSource(WIDE, "random"), plan_named("w4"), group=64, device=device, dtype=torch.float16, table=FEW
    )
    pool = KVPool(decoder.kv_shape, 300, 16, device)
    steps = decode_steps(3, 430)
    for step in steps[:4]:
        decoder.forward(step, pool)
    expected = decoder.forward(steps[4], pool)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decoder.forward(steps[4], pool)
    for _ in range(5):
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
