"""Which decoders have their decode steps in one launch, and over which caches. What a chain computes of their blocks:
`tests/kernels/test_decode_chain_on_cpu.py`."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deepinfer_lab.kernels import decode_chain
from deepinfer_lab.kernels.chain_plan import ChainShape
from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.model import chained_steps
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.chained_steps import chain_of, obstacle
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.decoder import Block, Decoder
from deepinfer_lab.model.ops import CudaOps
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.quant.linear import DenseLinear
from deepinfer_lab.quant.plan import plan_named

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CONFIG = ModelConfig(
    architecture="qwen2", vocab_size=200, hidden_size=256, intermediate_size=384, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=128, max_context=64, rms_norm_eps=1e-5, rope_theta=1e4, qkv_bias=True,
)  # fmt: skip
SHAPE = ChainShape(2, 256, 384, 4, 2, 4, 3)


def linear(bits: int = 4, *, group: int = 128, bias: bool = False) -> SimpleNamespace:
    tiled = SimpleNamespace(bits=bits, group=group, tiles=torch.zeros(1), scales=torch.zeros(1))
    return SimpleNamespace(tiled=tiled, bias=torch.zeros(1) if bias else None, fused_rows=frozenset({1}))


def block(**other: object) -> Block:
    fields = {
        "input_norm": torch.ones(1), "qkv": linear(bias=True), "q_norm": None, "k_norm": None, "o": linear(),
        "post_norm": torch.ones(1), "gate_up": linear(3), "down": linear(3),
    }  # fmt: skip
    return Block(**{**fields, **other})


def pool(block_size: int = 16, *, quantised: bool = False, dtype: torch.dtype = torch.float16) -> KVPool:
    return KVPool(KVShape(2, 2, 128, dtype, quantised), 2, block_size, CPU)


def test_nothing_stands_against_it():
    assert obstacle(CONFIG, [block(), block()], pool()) is None
    assert obstacle(CONFIG, [block(qkv=linear())] * 2, pool(4)) is None


BESIDE = linear(3)
BESIDE.fused_rows = frozenset()
AGAINST = {
    "a cache of another type": ({"kv": pool(quantised=True)}, "K and V of torch.int8"),
    "a cache in float32": ({"kv": pool(dtype=torch.float32)}, "K and V of torch.float32"),
    "small blocks of the cache": ({"kv": pool(2)}, "block_size = 2, must be a multiple of 4"),
    "another head_dim": ({"config": replace(CONFIG, head_dim=64)}, "head_dim = 64, must be 128"),
    "norms": ({"config": replace(CONFIG, qk_norm=True)}, "norms of q and k"),
    "no layers": ({"blocks": []}, "no blocks"),
    "a dense layer": ({"blocks": [block(), block(o=DenseLinear(torch.ones(2, 2)))]}, "o as it is stored"),
    "a smaller group": ({"blocks": [block(down=linear(3, group=64))]}, "down in groups of 64, must be 128"),
    "a bias elsewhere": ({"blocks": [block(o=linear(bias=True))]}, "a bias of o"),
    "other bits in the second layer": ({"blocks": [block(), block(o=linear(3))]}, "o of 3 bits after 4"),
    "other bits in o": ({"blocks": [block(o=linear(3))]}, "4, 3, 3, 3 bits"),
    "other bits in down": ({"blocks": [block(down=linear())]}, "4, 4, 3, 4 bits"),
    "gate beside up": ({"blocks": [block(gate_up=BESIDE)]}, "must be interleaved"),
}


@pytest.mark.parametrize("case", AGAINST)
def test_what_stands_against_it(case, monkeypatch):
    other, why = AGAINST[case]
    given = {"config": CONFIG, "blocks": [block(), block()], "kv": pool(), **other}
    assert why in obstacle(**given)
    monkeypatch.setattr(chained_steps, "device_obstacle", lambda *_: pytest.fail("the device was asked"))
    assert chain_of(**given, norm=torch.ones(1), rope=None) is None


def test_a_chain_where_the_device_can(monkeypatch):
    made = []
    monkeypatch.setattr(chained_steps, "DecodeChain", lambda *args, **more: made.append((*args, more)) or "chain")
    monkeypatch.setattr(chained_steps, "device_obstacle", lambda device, shape: reason)
    kv, norm, rope = pool(), torch.ones(1), SimpleNamespace(cos=torch.ones(1), sin=torch.ones(1))
    blocks = [block(), block()]
    reason = "no"
    assert chain_of(CONFIG, blocks, norm, rope, kv) is None
    reason = None
    assert chain_of(CONFIG, blocks, norm, rope, kv) == "chain"
    ((shape, layers, *others, more),) = made
    assert (shape, more) == (SHAPE, {"eps": CONFIG.rms_norm_eps, "block_size": 16})
    assert others == [norm, rope.cos, rope.sin]
    for index, (layer, its) in enumerate(zip(layers, blocks, strict=True)):
        names = [its.qkv, its.o, its.gate_up, its.down]
        assert [tiles is each.tiled.tiles for (tiles, _), each in zip(layer.products, names, strict=True)] == [True] * 4
        assert layer.k.data_ptr() == kv.layer(index).k.data_ptr()
        assert layer.v.data_ptr() == kv.layer(index).v.data_ptr()


def test_devices(monkeypatch):
    reason = decode_chain.device_obstacle
    assert "must be a CUDA GPU" in reason(CPU, SHAPE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(decode_chain, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(decode_chain, "max_shared", lambda _: 227 * 1024)
    monkeypatch.setattr(decode_chain.dependent_launch, "_driver", lambda: object())
    assert reason(CUDA, SHAPE) is None
    assert "3 bits in attention and 4 in the MLP" in reason(CUDA, replace(SHAPE, attention_bits=3, mlp_bits=4))
    monkeypatch.setattr(decode_chain.dependent_launch, "_driver", lambda: None)
    assert "CUDA 11.8" in reason(CUDA, SHAPE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert reason(CUDA, SHAPE) == "compute capability 8.6, must be 9.0"


class Chain:
    """Stands in for one."""

    def __call__(self, x: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.given = x, *more
        return x, x * 2


def test_a_step_through_a_chain():
    decoder = build_decoder(
        SyntheticSource(SHAPES["tiny"], "tiny"), plan_named("none"), group=32, device=CPU, dtype=torch.float32
    )
    kv = KVPool(decoder.kv_shape, 4, 4, CPU)
    step = StepInput.build([Span([7], 5, [2, 0])], 4, CPU)
    chain = Chain()
    logits = decoder.forward(step, kv, chain)
    x, table, lengths = chain.given
    assert torch.equal(x, decoder.embed(torch.tensor([7])))
    assert table is step.block_table
    assert lengths is step.seq_lens
    assert torch.equal(logits, decoder._lm_head(x * 2))
    for spans in ([Span([7], 5, [2, 0]), Span([9], 1, [3])], [Span([7, 8], 5, [2, 0])]):
        with pytest.raises(AssertionError):
            decoder.forward(StepInput.build(spans, 4, CPU), kv, chain)


def test_not_where_bits_must_not_depend_on_the_batch_nor_without_kernels(monkeypatch):
    made = build_decoder(
        SyntheticSource(SHAPES["tiny"], "tiny"), plan_named("none"), group=32, device=CPU, dtype=torch.float32
    )
    monkeypatch.setattr("deepinfer_lab.model.decoder.chain_of", lambda *_: "chain")
    parts = made.config, made._embed, made._blocks, made._norm, made._lm_head
    kv = KVPool(made.kv_shape, 2, 4, CPU)
    assert made.chain(kv) is None
    assert Decoder(*parts, CudaOps()).chain(kv) == "chain"
    assert Decoder(*parts, CudaOps(), batch_invariant=True).chain(kv) is None
