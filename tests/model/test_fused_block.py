"""When blocks are fused, and that interleaved weights change nothing. That the bits are the same: `test_fused_on_cpu.py`."""

from types import SimpleNamespace

import pytest
import torch

from deepinfer_lab.kernels import mma_small
from deepinfer_lab.kernels.dispatch import ARTICLE, Row
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model import build
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.fused_block import fused_rows
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.quant import linear
from deepinfer_lab.quant.linear import NORM_PAYS, norm_rows
from deepinfer_lab.quant.linear import fused_rows as rows_of
from deepinfer_lab.quant.plan import plan_named

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WEIGHT = SimpleNamespace(bits=4, n=512, k=256, group=64)


def test_rows_that_the_table_sends_to_the_kernel_that_can(monkeypatch):
    monkeypatch.setattr(
        mma_small, "fuses", lambda bits, m, n, k, group, device: (bits, n, k, group) == (4, 512, 256, 64) and m < 6
    )
    table = (
        Row(4, 1, 2, "w4_gemv_batch_tile"),
        Row(4, 3, None, "w4_mma_small"),
        Row(4, 4, 4, "w4_mma_block", 512, 256),
    )
    assert rows_of(WEIGHT, table, CUDA) == {3, *range(5, 33)}
    assert norm_rows(WEIGHT, table, CUDA) == frozenset()
    table = (Row(4, 1, 1, "w4_gemv"), Row(4, 2, None, "w4_mma_small"))
    assert norm_rows(WEIGHT, table, CUDA) == {2} == {NORM_PAYS}
    assert rows_of(WEIGHT, table, CPU) == norm_rows(WEIGHT, table, CPU) == frozenset()
    assert rows_of(WEIGHT, ARTICLE, CUDA) == frozenset()


def test_a_model_is_fused_where_all_of_its_layers_are():
    def layer(*rows: int) -> SimpleNamespace:
        return SimpleNamespace(fused_rows=frozenset(rows))

    def block(qkv, o, gate_up, down) -> SimpleNamespace:
        return SimpleNamespace(qkv=qkv, o=o, gate_up=gate_up, down=down)

    whole = block(layer(1, 2, 7), layer(1, 2), layer(1, 2, 7), layer(1, 2))
    assert fused_rows([whole]) == {1, 2}
    assert fused_rows([whole, block(layer(1), layer(1, 2), layer(1, 2), layer(1, 2))]) == {1}
    assert fused_rows([whole, block(layer(2), layer(1, 2), layer(1), layer(1, 2))]) == frozenset()
    assert fused_rows([]) == frozenset()


@pytest.mark.parametrize("bits", ["w4", "w3"])
def test_interleaved_gate_and_up_give_the_same_logits(monkeypatch, bits):
    def logits() -> torch.Tensor:
        decoder = build_decoder(
            SyntheticSource(SHAPES["tiny"], "tiny"), plan_named(bits), group=32, device=CPU, dtype=torch.float32
        )
        step = StepInput.build([Span([3, 1, 4, 1, 5], 0, [1, 0], all_logits=True)], 4, CPU)
        assert all(block.interleaved == interleaved for block in decoder._blocks)
        assert decoder._fused_rows == frozenset()  # not without CUDA kernels between
        return decoder.forward(step, KVPool(decoder.kv_shape, 2, 4, CPU))

    interleaved = False
    expected = logits()
    interleaved = True
    for module in (build, linear):
        monkeypatch.setattr(module, "fused_rows", lambda *_: frozenset({1}))
    assert torch.allclose(logits(), expected, rtol=1e-5, atol=1e-5)
