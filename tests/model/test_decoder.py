"""The paged forward against a plain one: no cache, no blocks, no fused products, float64."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_lab.errors import UnsupportedArchitecture
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.config import Llama3Scaling, ModelConfig
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.quant.plan import plan_named

CPU = torch.device("cpu")
BASE = ModelConfig(
    architecture="llama", vocab_size=97, hidden_size=32, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=16, max_context=128, rms_norm_eps=1e-5, rope_theta=1e4, tied_embeddings=False,
)  # fmt: skip
# The context is so short that all three cases of the scaling occur among 8 or 32 frequencies.
LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)
CONFIGS = {
    "gqa-2": BASE,
    "gqa-1": dataclasses.replace(BASE, num_kv_heads=4),
    "gqa-3": dataclasses.replace(BASE, num_heads=3, num_kv_heads=1, tied_embeddings=True),
    "gqa-4": dataclasses.replace(BASE, num_heads=8, num_kv_heads=2),
    "head-64": dataclasses.replace(BASE, num_heads=2, num_kv_heads=1, head_dim=64),
    "llama3-rope": dataclasses.replace(BASE, rope_scaling=LLAMA3, num_heads=2, num_kv_heads=1, head_dim=64),
    "qwen2": dataclasses.replace(BASE, architecture="qwen2", qkv_bias=True, rms_norm_eps=1e-2),
    "qwen3": dataclasses.replace(BASE, architecture="qwen3", qk_norm=True, rope_theta=1e6),
    "one-layer": dataclasses.replace(BASE, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2),
}


class RandomSource(SyntheticSource):
    """Synthetic weights whose norms are not all ones, so that using the wrong norm shows."""

    def tensor(self, name: str) -> torch.Tensor:
        weight = super().tensor(name)
        if name.endswith("norm.weight"):
            return 0.5 + torch.rand(weight.shape, generator=self._generator(name))
        return weight


class Case:
    """A random model, its paged decoder and its plain reference."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.source = RandomSource(config, "random")
        self.decoder = build_decoder(self.source, plan_named("none"), group=32, device=CPU, dtype=torch.float32)
        self._doubles: dict[str, torch.Tensor] = {}

    def frequency(self, index: int) -> float:
        """Radians per position of one pair of dimensions, as the Llama 3.1 model card defines them."""
        frequency = self.config.rope_theta ** (-2 * index / self.config.head_dim)
        scaling = self.config.rope_scaling
        if scaling is None:
            return frequency
        wavelength = 2 * math.pi / frequency
        if wavelength < scaling.original_context / scaling.high_freq_factor:
            return frequency
        if wavelength > scaling.original_context / scaling.low_freq_factor:
            return frequency / scaling.factor
        smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        return (1 - smooth) * frequency / scaling.factor + smooth * frequency

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, D]: dimension i and i + D/2 of position t are one complex number, turned by t * frequency(i)."""
        half = self.config.head_dim // 2
        angle = torch.outer(
            torch.arange(x.shape[0]).double(), torch.tensor([self.frequency(i) for i in range(half)]).double()
        )
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
        return torch.cat([turned.real, turned.imag], dim=-1)

    def reference(self, tokens: list[int]) -> torch.Tensor:
        """Logits after every token, float64 [T, vocab]."""
        config, length = self.config, len(tokens)

        def get(name: str) -> torch.Tensor:
            if name not in self._doubles:
                self._doubles[name] = self.source.tensor(name).double()
            return self._doubles[name]

        def normed(x: torch.Tensor, name: str) -> torch.Tensor:
            return x / (x.pow(2).mean(dim=-1, keepdim=True) + config.rms_norm_eps).sqrt() * get(f"{name}.weight")

        def project(x: torch.Tensor, name: str) -> torch.Tensor:
            bias = get(f"{name}.bias") if config.qkv_bias and name[-6:] in ("q_proj", "k_proj", "v_proj") else 0
            return x @ get(f"{name}.weight").t() + bias

        future = torch.ones(length, length).triu(1).bool()
        x = get("model.embed_tokens.weight")[tokens]
        for index in range(config.num_layers):
            layer = f"model.layers.{index}"
            h = normed(x, f"{layer}.input_layernorm")
            q, k, v = (
                project(h, f"{layer}.self_attn.{name}_proj").view(length, -1, config.head_dim)
                for name in ("q", "k", "v")
            )
            if config.qk_norm:
                q, k = normed(q, f"{layer}.self_attn.q_norm"), normed(k, f"{layer}.self_attn.k_norm")
            q, k = self.rotated(q), self.rotated(k)
            heads = []
            for head in range(config.num_heads):
                shared = head // (config.num_heads // config.num_kv_heads)
                scores = q[:, head] @ k[:, shared].t() / config.head_dim**0.5
                heads.append(scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v[:, shared])
            x = x + project(torch.cat(heads, dim=-1), f"{layer}.self_attn.o_proj")
            h = normed(x, f"{layer}.post_attention_layernorm")
            gate, up = project(h, f"{layer}.mlp.gate_proj"), project(h, f"{layer}.mlp.up_proj")
            x = x + project(gate / (1 + (-gate).exp()) * up, f"{layer}.mlp.down_proj")
        head = "model.embed_tokens" if config.tied_embeddings else "lm_head"
        return normed(x, "model.norm") @ get(f"{head}.weight").t()


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {name: Case(config) for name, config in CONFIGS.items()}


def random_tokens(length: int, seed: int = 0, vocab: int = BASE.vocab_size) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def used_pool(decoder: Decoder, num_blocks: int, block_size: int) -> KVPool:
    """A pool in which every slot holds what an earlier request might have left."""
    pool = KVPool(decoder.kv_shape, num_blocks, block_size, CPU)
    shape = (num_blocks * block_size, decoder.config.num_kv_heads, decoder.config.head_dim)
    for layer in range(decoder.config.num_layers):
        k, v = 30 * torch.randn((2, *shape), generator=torch.Generator().manual_seed(layer))
        pool.write(layer, torch.arange(shape[0]), k, v)
    return pool


def scrambled(num_blocks: int, seed: int = 0) -> list[int]:
    return torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()


def close(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    assert ours.dtype == torch.float32
    return ours.shape == expected.shape and torch.allclose(ours.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_logit_of_a_whole_prompt(cases, name, block_size):
    case, tokens = cases[name], random_tokens(37)
    blocks = scrambled(-(-37 // block_size) + 2)
    pool = used_pool(case.decoder, len(blocks), block_size)
    step = StepInput.build([Span(tokens, 0, blocks, all_logits=True)], block_size, CPU)
    assert close(case.decoder.forward(step, pool), case.reference(tokens))


@pytest.mark.parametrize("name", CONFIGS)
@given(
    splits=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    block_size=st.sampled_from((1, 4, 16)),
    all_logits=st.booleans(),
)
@settings(deadline=None, max_examples=15)
def test_any_chunking(cases, name, splits, block_size, all_logits):
    case, tokens = cases[name], random_tokens(sum(splits), seed=len(splits))
    blocks = scrambled(-(-len(tokens) // block_size) + 1, seed=len(tokens))
    pool, expected, at = used_pool(case.decoder, len(blocks), block_size), case.reference(tokens), 0
    for split in splits:
        end = at + split
        held = blocks[: -(-end // block_size)]  # no more than it needs
        step = StepInput.build([Span(tokens[at:end], at, held, all_logits)], block_size, CPU)
        assert close(case.decoder.forward(step, pool), expected[at:end] if all_logits else expected[end - 1 : end])
        at = end


@pytest.mark.parametrize("name", CONFIGS)
@given(
    requests=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.booleans()), min_size=1, max_size=5),
    block_size=st.sampled_from((1, 4, 16)),
)
@settings(deadline=None, max_examples=10)
def test_any_mixture_in_one_step(cases, name, requests, block_size):
    """Each request is (tokens in the cache already, new tokens, whether all logits are wanted)."""
    case = cases[name]
    order = scrambled(sum(-(-(old + new) // block_size) for old, new, _ in requests) + 2, seed=len(requests))
    pool, spans, expected = used_pool(case.decoder, len(order), block_size), [], []
    for seed, (old, new, all_logits) in enumerate(requests):
        tokens = random_tokens(old + new, seed)
        blocks = [order.pop() for _ in range(-(-len(tokens) // block_size))]
        if old:
            case.decoder.forward(StepInput.build([Span(tokens[:old], 0, blocks)], block_size, CPU), pool)
        spans.append(Span(tokens[old:], old, blocks, all_logits))
        expected.append(case.reference(tokens)[old if all_logits else -1 :])
    logits = case.decoder.forward(StepInput.build(spans, block_size, CPU), pool)
    assert close(logits, torch.cat(expected))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("lengths", [(1,), (16, 1, 17), (4, 5, 3, 40), (32, 32)])
def test_decode_batches(cases, block_size, lengths):
    case = cases["gqa-4"]
    order = scrambled(sum(-(-(length + 3) // block_size) for length in lengths), seed=1)
    pool = used_pool(case.decoder, len(order), block_size)
    texts = [random_tokens(length + 3, seed) for seed, length in enumerate(lengths)]
    held = [[order.pop() for _ in range(-(-len(text) // block_size))] for text in texts]
    for text, blocks, length in zip(texts, held, lengths, strict=True):
        case.decoder.forward(StepInput.build([Span(text[:length], 0, blocks)], block_size, CPU), pool)
    for ahead in range(3):
        ends = [length + ahead for length in lengths]
        spans = [Span(t[e : e + 1], e, blocks) for t, e, blocks in zip(texts, ends, held, strict=True)]
        logits = case.decoder.forward(StepInput.build(spans, block_size, CPU), pool)
        expected = [case.reference(text[: end + 1])[-1] for text, end in zip(texts, ends, strict=True)]
        assert close(logits, torch.stack(expected))


def test_a_step_writes_no_slot_but_its_own(cases):
    decoder, blocks = cases["gqa-2"].decoder, [5, 1, 3]
    pool = used_pool(decoder, 7, 4)
    everything = torch.tensor([list(range(7))])
    before = [[tensor.clone() for tensor in pool.gather(layer, everything)] for layer in range(3)]
    step = StepInput.build([Span(random_tokens(5), 2, blocks)], 4, CPU)
    decoder.forward(step, pool)
    written = {5 * 4 + 2, 5 * 4 + 3, 1 * 4, 1 * 4 + 1, 1 * 4 + 2}
    assert set(step.slot_mapping.tolist()) == written
    for layer in range(3):
        for old, new in zip(before[layer], pool.gather(layer, everything), strict=True):
            changed = (old[0] != new[0]).flatten(1).any(dim=1)
            assert set(changed.nonzero().flatten().tolist()) == written


def test_step_input_fields():
    spans = [Span([7, 8, 9], 2, [4, 1, 9]), Span([5], 9, [0, 6, 2]), Span([3, 3], 0, [8], all_logits=True)]
    step = StepInput.build(spans, 4, CPU)
    assert step.token_ids.tolist() == [7, 8, 9, 5, 3, 3]
    assert step.positions.tolist() == [2, 3, 4, 9, 0, 1]
    assert step.slot_mapping.tolist() == [18, 19, 4, 9, 32, 33]
    assert step.query_start.tolist() == [0, 3, 4, 6]
    assert step.seq_lens.tolist() == [5, 10, 2]
    assert step.block_table.shape == (3, 3)
    assert [row[:used] for row, used in zip(step.block_table.tolist(), (2, 3, 1), strict=True)] == [
        [4, 1],
        [0, 6, 2],
        [8],
    ]
    assert step.logits_index.tolist() == [2, 3, 4, 5]
    assert (step.query_lens, step.context_lens) == ((3, 1, 2), (5, 10, 2))
    integers = {value.dtype for value in vars(step).values() if isinstance(value, torch.Tensor)}
    assert integers == {torch.int64}


@pytest.mark.parametrize("span", [Span([], 0, [0]), Span([1], 4, [0]), Span([1] * 5, 0, [0]), Span([1], 0, [])])
def test_spans_that_do_not_fit_their_blocks(span):
    with pytest.raises(AssertionError, match="does not fit"):
        StepInput.build([span], 4, CPU)


def test_the_last_position_of_the_context(cases):
    case, tokens = cases["llama3-rope"], random_tokens(BASE.max_context)
    pool = KVPool(case.decoder.kv_shape, 8, 16, CPU)
    step = StepInput.build([Span(tokens, 0, list(range(8)))], 16, CPU)
    assert close(case.decoder.forward(step, pool), case.reference(tokens)[-1:])


@pytest.mark.parametrize("bits", ["w4", "w3", "mixed"])
def test_a_quantised_model_is_the_dense_one_with_dequantised_weights(bits):
    """The same packed weights, read by the decoder and by the reference."""
    plan = plan_named(bits)

    class Dequantised(RandomSource):
        def tensor(self, name: str) -> torch.Tensor:
            layer = name.removesuffix(".weight")
            kind = plan.bits_for(layer) if name.endswith("_proj.weight") else None
            return super().tensor(name) if kind is None else self.packed(layer, kind, 32).dequantise(torch.float32)

    case = Case(CONFIGS["qwen2"])
    case.source = Dequantised(case.config, "random")
    decoder = build_decoder(case.source, plan, group=32, device=CPU, dtype=torch.float32)
    tokens = random_tokens(20)
    pool = KVPool(decoder.kv_shape, 5, 4, CPU)
    step = StepInput.build([Span(tokens, 0, scrambled(5), all_logits=True)], 4, CPU)
    assert close(decoder.forward(step, pool), case.reference(tokens))


def test_bytes_of_linear_weights():
    shape = SHAPES["tiny"]
    source = SyntheticSource(shape, "tiny")
    values = shape.num_layers * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128)

    def linear_bytes(bits: str) -> int:
        return build_decoder(source, plan_named(bits), group=64, device=CPU, dtype=torch.float32).linear_bytes

    assert linear_bytes("none") == values * 4
    assert linear_bytes("w4") == values // 2 + values // 64 * 2
    assert linear_bytes("w3") == values * 3 // 8 + values // 64 * 2


@pytest.mark.parametrize(
    ("change", "message"), [({"num_kv_heads": 3}, "4 query heads over 3"), ({"head_dim": 15}, "15")]
)
def test_sizes_that_cannot_belong_together(change, message):
    with pytest.raises(UnsupportedArchitecture, match=message):
        dataclasses.replace(BASE, **change)
