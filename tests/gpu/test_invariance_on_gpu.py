"""A token's logits, bit for bit: alone and in a batch, its prompt in one chunk and in many, prefilled and decoded. On a GPU."""

import dataclasses

import pytest
import torch

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.errors import SettingError
from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.model import invariance
from deepinfer_lab.model.attention import torch_attention
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.load import load_model
from deepinfer_lab.model.ops import CudaOps
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SyntheticSource
from deepinfer_lab.quant.linear import DenseLinear, QuantLinear
from deepinfer_lab.quant.plan import plan_named

BASE = ModelConfig(
    architecture="llama", vocab_size=500, hidden_size=256, intermediate_size=512, num_layers=3, num_heads=6, num_kv_heads=2,
    head_dim=64, max_context=512, rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
CONFIGS = {
    "llama": BASE,
    "qwen2": dataclasses.replace(BASE, architecture="qwen2", qkv_bias=True, num_heads=7, num_kv_heads=1, head_dim=128),
    "qwen3": dataclasses.replace(BASE, architecture="qwen3", qk_norm=True, head_dim=80, tied_embeddings=False),
}
BLOCK_SIZE = 16
TEXT = torch.randint(0, 500, (300,), generator=torch.Generator().manual_seed(0)).tolist()  # more than one split
TEXT_BLOCKS = torch.randperm(19, generator=torch.Generator().manual_seed(1)).tolist()
CACHES = pytest.mark.parametrize("quantised", [False, True], ids=["f16", "i8"])


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def build(name: str, bits: str) -> Decoder:
    source = SyntheticSource(CONFIGS[name], "random")
    where = {"device": here(), "dtype": torch.float16}
    return build_decoder(source, plan_named(bits), group=32, batch_invariant=True, **where)


def pool_of(decoder: Decoder, beside: int, quantised: bool) -> KVPool:
    shape = dataclasses.replace(decoder.kv_shape, quantised=quantised)
    return KVPool(shape, len(TEXT_BLOCKS) + beside, BLOCK_SIZE, decoder.device)


def forward(decoder: Decoder, pool: KVPool, start: int, end: int, beside: int) -> torch.Tensor:
    """Logits of the text's tokens from start to end, computed in one step with chunks and decodes of other requests."""
    text = Span(TEXT[start:end], start, TEXT_BLOCKS[: -(-end // BLOCK_SIZE)], all_logits=True)
    others = [
        Span([(start + i) % 500] * (5 if i % 3 == 0 else 1), (start + i) % 11, [len(TEXT_BLOCKS) + i])
        for i in range(beside)
    ]
    before = beside // 2
    spans = [*others[:before], text, *others[before:]]
    logits = decoder.forward(StepInput.build(spans, BLOCK_SIZE, decoder.device), pool)
    return logits[before : before + end - start]


def read(decoder: Decoder, chunks: list[int], *, beside: int = 0, quantised: bool = False) -> torch.Tensor:
    """Logits after each token of the text, float32 [300, vocab]."""
    assert sum(chunks) == len(TEXT)
    pool, at, parts = pool_of(decoder, beside, quantised), 0, []
    for chunk in chunks:
        parts.append(forward(decoder, pool, at, at + chunk, beside))
        at += chunk
    return torch.cat(parts)


def check(found: torch.Tensor, expected: torch.Tensor, label: str) -> None:
    assert expected.isfinite().all()
    differs = (found != expected).any(dim=-1)
    assert torch.equal(found, expected), (
        f"{label}: {int(differs.sum())} of {len(differs)} tokens, the first at {int(differs.nonzero()[0])}, by up to "
        f"{(found - expected).abs().max().item()}"
    )


@CACHES
@pytest.mark.parametrize(
    ("name", "bits"),
    [("llama", "w4"), ("llama", "w3"), ("llama", "none"), ("qwen2", "mixed"), ("qwen3", "w4"), ("qwen3", "none")],
)
def test_any_chunking_and_any_company(name, bits, quantised):
    decoder = build(name, bits)
    assert decoder.batch_invariant
    whole = read(decoder, [300], quantised=quantised)
    for chunks in ([1] * 300, [7] * 42 + [6], [64] * 4 + [44], [257, 43], [280] + [1] * 20):
        check(read(decoder, chunks, quantised=quantised), whole, f"chunks of {chunks[0]}")
    for chunks in ([300], [64] * 4 + [44], [280] + [1] * 20):
        found = read(decoder, chunks, beside=9, quantised=quantised)
        check(found, whole, f"chunks of {chunks[0]}, beside 9 others")


@CACHES
@pytest.mark.parametrize("bits", ["w4", "w3", "none"])
def test_a_decode_step_of_1_to_40_requests(bits, quantised):
    decoder = build("llama", bits)
    pool = pool_of(decoder, 39, quantised)
    alone = forward(decoder, pool, 0, 300, 0)[-1:]
    for requests in range(1, 41):
        found = forward(decoder, pool, 299, 300, requests - 1)  # writes the same K and V again
        check(found, alone, f"{requests} requests")


def test_it_is_close_to_the_model_that_is_not_invariant():
    source = SyntheticSource(BASE, "random")
    plain = build_decoder(source, plan_named("w4"), group=32, device=here(), dtype=torch.float16)
    assert not plain.batch_invariant
    expected = read(plain, [64] * 4 + [44])
    assert ((read(build("llama", "w4"), [300]) - expected).norm() / expected.norm()).item() < 0.02


@CACHES
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 2, 128), (9, 3, 64), (32, 32, 80)])
def test_attention_of_a_chunk_is_that_of_decode_steps(heads, kv_heads, dim, quantised):
    """5,000 positions are 20 splits; 300 queries are more than one launch takes."""
    blocks, end = torch.randperm(313, generator=torch.Generator().manual_seed(2)).tolist(), 5000
    pool = KVPool(KVShape(1, kv_heads, dim, torch.float16, quantised), 313, BLOCK_SIZE, here())
    slots = torch.arange(313 * BLOCK_SIZE, device=here())
    pool.write(0, slots, *torch.randn(2, len(slots), kv_heads, dim, device=here()).half())
    q, ops = torch.randn(300, heads, dim, device=here()).half(), CudaOps(invariance.FIXED_SPLIT)
    chunk = StepInput.build([Span([1] * 300, end - 300, blocks)], BLOCK_SIZE, here())
    together = ops.step(chunk, pool, None)._attention(0, q)
    expected = torch_attention(chunk, pool)(0, q).float()
    assert ((together.float() - expected).norm() / expected.norm()).item() < 4e-3
    for i in (0, 1, 44, 45, 150, 255, 256, 299):
        position = end - 300 + i
        step = StepInput.build([Span([1], position, blocks[: position // BLOCK_SIZE + 1])], BLOCK_SIZE, here())
        alone = ops.step(step, pool, None)._attention(0, q[i : i + 1].contiguous())
        check(alone, together[i : i + 1], f"position {position}")


@pytest.mark.parametrize(("n", "k"), [(500, 256), (1728, 576), (2560, 2048), (2048, 11_008), (49_152, 576)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_of_a_dense_product_does_not_depend_on_its_place(n, k, biased):
    weight, x = torch.randn(n, k, device=here()).half() * k**-0.5, torch.randn(200, k, device=here()).half()
    bias = torch.randn(n, device=here()).half() if biased else None
    layer = DenseLinear(weight, bias, invariance.FIXED_ROWS)
    whole = layer(x)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert ((whole.double() - exact).norm() / exact.norm()).item() < 2e-3
    for shift in (1, 17, 32, 63, 64, 101):
        check(layer(x.roll(shift, 0)).roll(-shift, 0), whole, f"moved by {shift}")
    for rows in (1, 2, 8, 63, 64, 65):
        check(layer(x[100 : 100 + rows]), whole[100 : 100 + rows], f"{rows} rows")


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("n", "k"), [(960, 576), (2560, 2048), (2048, 11_008)])
def test_a_row_of_a_few_bit_product_does_not_depend_on_its_place(problem, bits, n, k):
    p = problem(f"w{bits}_tiled_gemm_split_k", 200, n, k, 64, bias=True)
    layer = QuantLinear(p.weight, p.bias, invariance.TABLE)
    whole = layer(p.x)
    for shift in (1, 17, 32, 101):
        check(layer(p.x.roll(shift, 0)).roll(-shift, 0), whole, f"moved by {shift}")
    for rows in (1, 2, 8, 9, 31, 32, 33, 65):
        check(layer(p.x[100 : 100 + rows]), whole[100 : 100 + rows], f"{rows} rows")


def test_tokens_of_an_engine_do_not_depend_on_company_or_chunk_size():
    decoder, params = build("llama", "w4"), SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [TEXT[i : i + 10 + 23 * i] for i in range(9)]

    def serve(batches: list[list[list[int]]], chunk_tokens: int) -> list[tuple[int, ...]]:
        config = EngineConfig(chunk_tokens=chunk_tokens, max_batch=16, kv_cache_mib=64)
        with Engine(decoder, None, config) as engine:
            return [done.tokens for batch in batches for done in engine.generate(batch, params)]

    alone = serve([[prompt] for prompt in prompts], 256)
    for chunk_tokens in (16, 100, 256):
        assert serve([prompts], chunk_tokens) == alone


def test_what_a_gpu_refuses():
    source = SyntheticSource(dataclasses.replace(BASE, head_dim=16), "random")
    settings = {"group": 32, "device": here(), "batch_invariant": True}
    with pytest.raises(SettingError, match="batch_invariant: head_dim = 16, must be one of 64, 80, 96, 128"):
        build_decoder(source, plan_named("w4"), dtype=torch.float16, **settings)
    with pytest.raises(SettingError, match=r"batch_invariant: torch.bfloat16, must be torch.float16"):
        build_decoder(SyntheticSource(BASE, "random"), plan_named("w4"), dtype=torch.bfloat16, **settings)
    with pytest.raises(SettingError, match="batch_invariant: head_dim = 16"):
        load_model("synthetic:tiny", bits="w4", group=32, device="cuda", batch_invariant=True)
