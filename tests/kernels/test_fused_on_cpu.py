"""A decoder's fused blocks give the bits of the kernels one by one: all CUDA sources of a decode step, run on the CPU."""

import dataclasses

import pytest
import torch
from arrivals import Arrivals
from small_products import stand_in

from deepinfer_lab.kernels import TILED_LAUNCHERS, elementwise, ends, paged_attention
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model import build
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.embedding import DenseEmbedding
from deepinfer_lab.model.ops import CudaOps
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SyntheticSource
from deepinfer_lab.quant.linear import QuantLinear
from deepinfer_lab.quant.plan import plan_named
from deepinfer_lab.quant.tiles import to_tiles

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    architecture="qwen2", vocab_size=80, hidden_size=160, intermediate_size=96, num_layers=2, num_heads=3, num_kv_heads=1,
    head_dim=64, max_context=128, rms_norm_eps=1e-5, rope_theta=1e4, qkv_bias=True,
)  # fmt: skip


class Uneven(SyntheticSource):
    """Norms that are not all ones, so that using the wrong one shows."""

    def tensor(self, name: str) -> torch.Tensor:
        weight = super().tensor(name)
        return weight * (0.5 + torch.rand(weight.shape)) if name.endswith("norm.weight") else weight


class TiledLinear(QuantLinear):
    """In tiles on the CPU, as it would be on a GPU."""

    fused_rows, norm_rows = frozenset(range(1, 9)), frozenset((1, 2))

    def __init__(self, weight, bias=None, table=()):
        self.n, self.k, self.bias = weight.n, weight.k, bias
        self._bits, self._tiled = weight.bits, to_tiles(weight)

    def __call__(self, x):
        w = self._tiled
        return TILED_LAUNCHERS[f"w{self._bits}_mma_small"](x, w.tiles, w.scales, w.n, w.group, self.bias)


@pytest.fixture
def on_host(host_ops, monkeypatch):
    launched, arrivals = [], Arrivals()

    def launch(op, *rest, **more):
        launched.append(op.name)
        host_ops.launch(op, *rest, **more)

    stand_in(monkeypatch, launch)
    for module in (elementwise, ends, paged_attention):
        monkeypatch.setattr(module, "launch_op", launch)
        monkeypatch.setattr(module, "expect", lambda *_, **__: None)
    monkeypatch.setattr(paged_attention, "_slots", lambda *_: 1000)
    monkeypatch.setattr(paged_attention, "counters", lambda _: arrivals)
    monkeypatch.setattr(build, "QuantLinear", TiledLinear)
    monkeypatch.setattr(build, "fused_rows", lambda *_: TiledLinear.fused_rows)
    return launched


@pytest.mark.parametrize(
    ("bits", "qk_norm", "quantised"), [("w4-all", False, False), ("w3", False, True), ("w4", True, True)]
)
def test_fused_blocks_give_the_same_bits(on_host, bits, qk_norm, quantised):
    """Decode steps of sequences of 70 and 3 tokens, and one beside three more tokens of the other."""
    config = dataclasses.replace(CONFIG, qk_norm=qk_norm, qkv_bias=not qk_norm)
    made = build.build_decoder(Uneven(config, "random"), plan_named(bits), group=32, device=CPU, dtype=torch.float16)
    first, second = [4, 2, 5, 0, 1], [3]
    script = [[Span([9 + i], 70 + i, first), Span([i], 3 + i, second)] for i in range(2)]
    script += [[Span([1], 72, first), Span([2, 3, 5], 5, second)]]
    past = torch.randn(2, 2, 96, 1, 64, generator=torch.Generator().manual_seed(0)).half()
    found = []
    for fused in (True, False):
        decoder = Decoder(config, made._embed, made._blocks, made._norm, made._lm_head, CudaOps())
        decoder._fused_rows = decoder._fused_rows if fused else frozenset()
        pool = KVPool(dataclasses.replace(decoder.kv_shape, quantised=quantised), 6, 16, CPU)
        for layer, (k, v) in enumerate(past):
            pool.write(layer, torch.arange(96), k, v)
        found.append([])
        for spans in script:
            on_host.clear()
            found[-1].append(decoder.forward(StepInput.build(spans, 16, CPU), pool))
            if fused and len(spans[-1].tokens) == 1:
                layers = 5 * config.num_layers
                table = isinstance(made.embed, DenseEmbedding)
                assert len(on_host) == table + layers + 1  # the head with its norm, or the norm alone
    for together, apart in zip(*found, strict=True):
        assert together.isfinite().all()
        assert torch.equal(together, apart)
