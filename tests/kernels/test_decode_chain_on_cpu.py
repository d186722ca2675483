"""A decode step in one launch: the CUDA source, run on the CPU through its launcher, all blocks at once, against float32."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from chain_models import BLOCK, SLOTS, make, normed, reference

from deepinfer_lab.kernels import decode_chain
from deepinfer_lab.kernels.chain_plan import ChainShape

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
    "one": (SHAPE, 3, (1,), 0),
    "two splits, one unfinished round": (SHAPE, 3, (300,), 1),
    "two rows, a block for all": (SHAPE, 1, (5, 257), 0),
    "three bits in the MLP, eight query heads a KV head": (ChainShape(1, 384, 256, 8, 1, 4, 3), 4, (130, 1), 2),
    "a block for each tile of o and down": (ChainShape(3, 128, 128, 1, 1, 4, 3), 23, (9,), 3),
    "all splits, more of them than blocks": (ChainShape(1, 128, 256, 7, 7, 4, 4), 5, (1000,), 4),
}


@pytest.mark.parametrize("case", CASES)
def test_matches_float32(on_host, case):
    shape, blocks, lengths, seed = CASES[case]
    rows = len(lengths)
    torch.manual_seed(seed)
    model = make(shape, bias=seed % 2 == 0, seed=seed)
    each = SLOTS // BLOCK // rows
    x, table, lengths = (
        torch.randn(rows, shape.hidden).half(),
        torch.randperm(rows * each).view(rows, each),
        torch.tensor(lengths),
    )
    expected = reference(model, x, table, lengths)
    new = table[torch.arange(rows), (lengths - 1) // BLOCK] * BLOCK + (lengths - 1) % BLOCK
    for layer in model.layers:  # nothing of what is there yet may matter
        layer.k[new] = layer.v[new] = torch.nan
    chain = on_host(model.chain(rows, blocks), seed)
    for _ in range(2):  # and a launch finds what the one before it left
        hidden, out = chain(x, table, lengths)
        assert error(hidden, expected[-1].out) < 4e-3
        assert error(out, normed(hidden.float(), model.norm)) < 5e-4
    for layer, tensors in zip(expected, model.layers, strict=True):
        assert error(tensors.k[new], layer.k) < 4e-3
        assert error(tensors.v[new], layer.v) < 4e-3
