"""A decode step in one launch: the CUDA source, run on the CPU through its launcher, all blocks at once, against float32."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from chain_models import BLOCK, SLOTS, make, normed, reference

from deepinfer_lab.kernels import decode_chain
from deepinfer_lab.kernels.chain_plan import ChainShape
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model import build, chained_steps
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SyntheticSource
from deepinfer_lab.quant.linear import QuantLinear
from deepinfer_lab.quant.plan import plan_named
from deepinfer_lab.quant.tiles import to_tiles

SHAPE = ChainShape(2, 256, 384, 4, 2, 4, 4)


@pytest.fixture
def on_host(host_chain, monkeypatch):
    monkeypatch.setattr(decode_chain, "expect", lambda *_, **__: None)  # it asks for a CUDA device
    monkeypatch.setattr(decode_chain, "max_shared", lambda _: 227 * 1024)

    def launches(chain, seed: int = 0):
        reached = [
            tensor
            for layer in chain._held
            for tensor in (
                *(t for pair in layer.products for t in pair),
                layer.qkv_bias,
                layer.input_norm,
                layer.post_norm,
                layer.k,
                layer.v,
            )
            if tensor is not None
        ]
        monkeypatch.setattr(decode_chain, "launch_op", partial(replace(host_chain, seed=seed).launch, reached=reached))
        return chain

    return launches


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


CASES = {
    "one position": (SHAPE, 3, 1, 0),
    "a split, its second round unfinished": (SHAPE, 3, 230, 1),
    "three splits, the last unfinished": (SHAPE, 7, 300, 2),
    "a split, two rounds": (ChainShape(1, 128, 128, 2, 2, 4, 4), 2, 256, 0),
    "three bits in the MLP, eight query heads a KV head": (ChainShape(1, 384, 256, 8, 1, 4, 3), 4, 130, 2),
    "a block for each tile of o and down": (ChainShape(3, 128, 128, 1, 1, 4, 3), 23, 9, 3),
    "all splits, three bits": (ChainShape(1, 128, 256, 7, 1, 3, 3), 8, 1000, 4),
    "sixteen blocks, more of gated than threads take at once": (ChainShape(1, 256, 8320, 2, 1, 3, 3), 16, 130, 6),
    "as many units of K as there are warps": (ChainShape(1, 2048, 128, 1, 1, 4, 3), 3, 40, 5),
}


@pytest.mark.parametrize("case", CASES)
def test_matches_float32(on_host, case):
    shape, blocks, length, seed = CASES[case]
    torch.manual_seed(seed)
    model = make(shape, bias=seed % 2 == 0, seed=seed)
    x, table = torch.randn(1, shape.hidden).half(), torch.randperm(SLOTS // BLOCK).unsqueeze(0)
    expected = reference(model, x, table, length)
    new = table[:, (length - 1) // BLOCK] * BLOCK + (length - 1) % BLOCK
    for layer in model.layers:  # nothing of what is there yet may matter
        layer.k[new] = layer.v[new] = torch.nan
    chain = on_host(model.chain(blocks), seed)
    for _ in range(2):  # and a launch finds what the one before it left
        hidden, out = chain(x, table, torch.tensor([length]))
        assert error(hidden, expected[-1].out) < 4e-3
        assert error(out, normed(hidden.float(), model.norm)) < 5e-4
    for layer, tensors in zip(expected, model.layers, strict=True):
        assert error(tensors.k[new], layer.k) < 4e-3
        assert error(tensors.v[new], layer.v) < 4e-3


class Uneven(SyntheticSource):
    """Norms that are not all ones, and biases, so that using the wrong one shows."""

    def tensor(self, name: str) -> torch.Tensor:
        tensor = super().tensor(name)
        return tensor + torch.rand(tensor.shape) if tensor.dim() == 1 else tensor


class InTiles(QuantLinear):
    """As on a GPU, beside what multiplies here."""

    def __init__(self, weight, bias, table) -> None:
        super().__init__(weight, bias, table)
        self._tiled, self.fused_rows = to_tiles(weight), frozenset({1})


def test_a_decoders_own_blocks(on_host, monkeypatch):
    """What the chain is given of each: a decode step with it, and through `Decoder.forward`."""
    monkeypatch.setattr(build, "fused_rows", lambda *_: frozenset({1}))  # so that gate_up is interleaved
    monkeypatch.setattr(build, "QuantLinear", InTiles)
    monkeypatch.setattr(chained_steps, "device_obstacle", lambda *_: None)
    monkeypatch.setattr(decode_chain, "multiprocessors", lambda _: 5)
    config = ModelConfig(
        architecture="qwen2", vocab_size=200, hidden_size=256, intermediate_size=384, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=128, max_context=64, rms_norm_eps=1e-5, rope_theta=1e4, qkv_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    decoder = build_decoder(
        Uneven(config, "random"), plan_named("mixed"), group=128, device=torch.device("cpu"), dtype=torch.float32
    )
    pool = KVPool(decoder.kv_shape, 8, 4, torch.device("cpu"))
    halves = KVPool(replace(decoder.kv_shape, dtype=torch.float16), 8, 4, torch.device("cpu"))
    prompt = Span([9, 7, 5, 3, 1], 0, [6, 2])
    decoder.forward(StepInput.build([prompt], 4, torch.device("cpu")), pool)
    halves._values.copy_(pool._values)
    step = StepInput.build([Span([8], 5, [6, 2])], 4, torch.device("cpu"))
    expected = decoder.forward(step, pool)
    rope, blocks = SimpleNamespace(cos=decoder._rope.cos.half(), sin=decoder._rope.sin.half()), []
    for block in decoder._blocks:
        block.qkv.bias = block.qkv.bias.half()
        blocks.append(replace(block, input_norm=block.input_norm.half(), post_norm=block.post_norm.half()))
    chain = on_host(chained_steps.chain_of(config, blocks, decoder._norm.half(), rope, halves))
    _, normed = chain(decoder._embed(step.token_ids).half(), step.block_table, step.seq_lens)
    found = decoder._lm_head(normed.float())
    assert error(found, expected) < 5e-3
    assert error(halves._values, pool._values) < 5e-3
