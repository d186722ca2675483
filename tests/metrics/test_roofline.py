"""Bytes and operations against loaded models, against counts by hand, and against each other."""

import pytest
import torch

from deepinfer_lab.errors import QuantisationError
from deepinfer_lab.metrics import roofline
from deepinfer_lab.metrics.footprint import DENSE_BYTES, footprint
from deepinfer_lab.metrics.roofline import Cost, Machine, Span, forward_costs, total
from deepinfer_lab.model.load import load_model
from deepinfer_lab.model.synthetic import SHAPES
from deepinfer_lab.quant.plan import PLANS

TINY = SHAPES["tiny"]


@pytest.mark.parametrize("bits", ["w4", "w3", "mixed"])
def test_footprint_is_what_a_loaded_model_holds(bits):
    decoder = load_model("synthetic:tiny", bits=bits, group=32, device="cpu").decoder
    found = footprint(TINY, PLANS[bits], group=32)
    assert found.attention + found.mlp + found.scales == decoder.linear_bytes
    assert found.embedding == decoder.embed.weight.numel() * DENSE_BYTES
    assert found.head == 0
    assert found.kv_token * 2 == decoder.kv_shape.bytes_per_token  # float32 on a CPU


def test_dense_footprint_is_every_parameter_twice():
    found = footprint(SHAPES["qwen2.5-7b"], PLANS["none"], group=128)
    rope = SHAPES["qwen2.5-7b"].max_context * 128
    assert found.weights == 2 * (7_615_616_512 + rope)  # Qwen2.5-7B's published number of parameters


def test_few_bit_tables_and_small_kv():
    plain = footprint(SHAPES["qwen2.5-7b"], PLANS["mixed"], group=128)
    packed = footprint(SHAPES["qwen2.5-7b"], PLANS["mixed-all"], group=128, int8_kv=True)
    assert packed.head == packed.embedding == plain.head * (4 + 16 / 128) / 16
    assert packed.kv_token == plain.kv_token * (128 + 2) / 256
    assert packed.kv_tokens(4 << 30) > 0 > plain.kv_tokens(4 << 30)
    head = [
        forward_costs(SHAPES["qwen2.5-7b"], PLANS[bits], 128, [Span(1, 0)])["head"] for bits in ("mixed", "mixed-all")
    ]
    assert head[0].bytes - head[1].bytes == plain.head - packed.head
    assert head[0].flops == head[1].flops
    with pytest.raises(QuantisationError, match="128"):
        footprint(TINY, PLANS["w4"], group=128)


def test_one_token_reads_every_weight_once_and_multiplies_it_once():
    costs = forward_costs(TINY, PLANS["w4"], 32, [Span(1, 0)])
    decoder = load_model("synthetic:tiny", bits="w4", group=32, device="cpu").decoder
    linear = [costs[kind] for kind in roofline.PRODUCTS]
    weights = sum(layer.n * layer.k for layer in decoder._linears())
    assert sum(cost.flops for cost in linear) == 2 * weights
    activations = sum(layer.n + layer.k for layer in decoder._linears()) * DENSE_BYTES
    assert sum(cost.bytes for cost in linear) == decoder.linear_bytes + activations
    assert costs["head"].flops == 2 * TINY.vocab_size * TINY.hidden_size


def test_chunks_of_a_prompt_add_up():
    """The same FLOPs whichever way a prompt is cut, but for the head, which every chunk runs; and more bytes."""
    whole = forward_costs(TINY, PLANS["w4"], 32, [Span(64, 0)])
    parts = [forward_costs(TINY, PLANS["w4"], 32, [Span(16, start)]) for start in range(0, 64, 16)]
    for kind, cost in whole.items():
        if kind != "head":
            assert sum(part[kind].flops for part in parts) == cost.flops
            assert sum(part[kind].bytes for part in parts) > cost.bytes
    assert whole["attention"].flops == 4 * TINY.q_size * TINY.num_layers * 64 * 65 / 2


def test_batch_shares_weights_but_not_the_cache():
    one, many = (forward_costs(TINY, PLANS["w4"], 32, roofline.decode(batch, 100)) for batch in (1, 10))
    assert many["attention"].bytes == 10 * one["attention"].bytes
    assert many["down"].bytes < 2 * one["down"].bytes
    assert total(many).flops == 10 * total(one).flops


def test_roof():
    machine = Machine(bytes_per_s=10.0, flops_per_s=100.0)
    assert machine.ridge == 10
    assert machine.seconds(Cost(flops=100, bytes=20)) == 2
    assert machine.seconds(Cost(flops=300, bytes=20)) == 3
    assert torch.tensor(Cost(6, 3).intensity) == 2
