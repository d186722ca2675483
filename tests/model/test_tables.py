"""Token embedding and output head in few bits: the same model as one whose tables hold the rounded values."""

import dataclasses

import pytest
import torch

from deepinfer_lab.errors import QuantisationError
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.metrics.footprint import footprint
from deepinfer_lab.model import build, quantised
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.embedding import DenseEmbedding, PackedEmbedding
from deepinfer_lab.model.load import load_model
from deepinfer_lab.model.quantise import quantise_layers
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.quant import rtn
from deepinfer_lab.quant.linear import DenseLinear, QuantLinear
from deepinfer_lab.quant.plan import EMBEDDING, HEAD, PLANS, TABLES, LayerPlan, QuantPlan

CPU = torch.device("cpu")
WHERE = {"group": 32, "device": CPU, "dtype": torch.float32}
TABLES_3 = QuantPlan("tables-3", None, None, tables_bits=3)


def random_source(*, tied: bool) -> SyntheticSource:
    """Packs its blocks' layers by itself. 251 tokens divide nothing."""
    return SyntheticSource(dataclasses.replace(SHAPES["tiny"], vocab_size=251, tied_embeddings=tied), "random")


class Rounded:
    """A source's tensors, with tables of the values that a plan's bits round them to."""

    def __init__(self, source: SyntheticSource, bits: int) -> None:
        self._source, self._bits = source, bits
        self.name, self.config, self.tokenizer = source.name, source.config, None
        self.packed = source.packed

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._source.tensor(name)
        if name.removesuffix(".weight") not in TABLES:
            return tensor
        return rtn.quantise(tensor, self._bits, 32).dequantise(torch.float32)


def logits(decoder: Decoder) -> torch.Tensor:
    tokens = [0, 250, 7, 7, 0, 128, 250, 3]
    step = StepInput.build([Span(tokens, 0, [1, 0], all_logits=True)], 16, CPU)
    return decoder.forward(step, KVPool(decoder.kv_shape, 2, 16, CPU))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("plan", "blocks"), [(PLANS["w4-all"], "w4"), (PLANS["mixed-all"], "mixed"), (TABLES_3, "none")]
)
def test_packed_tables_are_the_rounded_ones(tied, plan, blocks, monkeypatch):
    monkeypatch.setattr(build, "ROWS_AT_ONCE", 100)  # three slices of a table
    source = random_source(tied=tied)
    found = build_decoder(source, plan, **WHERE)
    expected = build_decoder(Rounded(source, plan.tables_bits), PLANS[blocks], **WHERE)
    assert torch.allclose(logits(found), logits(expected), rtol=1e-5, atol=1e-5)
    unrounded = build_decoder(source, PLANS[blocks], **WHERE)
    assert not torch.allclose(logits(found), logits(unrounded), rtol=1e-2, atol=1e-2)
    assert found.linear_bytes == unrounded.linear_bytes
    assert found.uses_kernels


@pytest.mark.parametrize("tied", [True, False])
def test_tied_tables_are_one_weight(tied):
    decoder = build_decoder(random_source(tied=tied), TABLES_3, **WHERE)
    assert isinstance(decoder._lm_head, QuantLinear)
    assert (decoder.embed.weight is decoder._lm_head._stored) == tied


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_lookup(bits, dtype):
    weight = rtn.quantise(torch.randn(37, 96, generator=torch.Generator().manual_seed(bits)), bits, 32)
    packed, dense = PackedEmbedding(weight, dtype), DenseEmbedding(weight.dequantise(dtype))
    for ids in ([0], [36], [5, 5, 5], [36, 0, 36, 1], list(range(37)), []):
        rows = packed(torch.tensor(ids, dtype=torch.int64))
        assert rows.dtype == dtype
        assert torch.equal(rows, dense(torch.tensor(ids, dtype=torch.int64)))
    assert (packed.dtype, packed.device, packed.nbytes) == (dtype, CPU, weight.nbytes)
    for wrong in (-1, 37):
        with pytest.raises((IndexError, RuntimeError)):
            packed(torch.tensor([wrong]))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["none", "w4", "w4-all", "mixed-all"])
def test_footprint_is_what_the_parts_hold(tied, name):
    """Scales are float16 everywhere; what is dense takes twice as much here."""
    source = random_source(tied=tied)
    decoder = build_decoder(source, PLANS[name], **WHERE)
    found = footprint(source.config, PLANS[name], group=32)
    assert (found.attention + found.mlp + found.scales) * (2 if name == "none" else 1) == decoder.linear_bytes
    wider = 1 if name.endswith("-all") else 2
    assert found.embedding * wider == decoder.embed.nbytes
    assert found.head * wider == (0 if tied else decoder._lm_head.nbytes)


def test_one_table_alone():
    plan = LayerPlan("head", {HEAD: 4})
    decoder = build_decoder(random_source(tied=False), plan, **WHERE)
    assert isinstance(decoder.embed, DenseEmbedding)
    assert isinstance(decoder._lm_head, QuantLinear)
    decoder = build_decoder(random_source(tied=False), LayerPlan("embedding", {EMBEDDING: 3}), **WHERE)
    assert isinstance(decoder.embed, PackedEmbedding)
    assert isinstance(decoder._lm_head, DenseLinear)
    with pytest.raises(QuantisationError, match=r"plan 'head'.* are one table"):
        build_decoder(random_source(tied=True), plan, **WHERE)


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_keeps_dense_tables_and_rounds_them_when_loaded(tied, tmp_path):
    source, plan = random_source(tied=tied), PLANS["mixed-all"]
    quantised.write(source, plan, 32, tmp_path / "first")
    read = quantised.QuantisedSource(tmp_path / "first")
    assert torch.equal(read.tensor(f"{EMBEDDING}.weight"), source.tensor(f"{EMBEDDING}.weight"))
    expected = logits(build_decoder(source, plan, **WHERE))
    assert torch.equal(
        logits(load_model(str(tmp_path / "first"), bits="mixed-all", group=32, device="cpu").decoder), expected
    )
    dense = load_model(str(tmp_path / "first"), bits="mixed", group=32, device="cpu").decoder
    assert torch.equal(logits(dense), logits(build_decoder(source, PLANS["mixed"], **WHERE)))
    quantised.write(read, plan, 32, tmp_path / "second")
    assert torch.equal(logits(build_decoder(quantised.QuantisedSource(tmp_path / "second"), plan, **WHERE)), expected)
    with pytest.raises(QuantisationError, match="plan 'mixed-all'"):
        load_model(str(tmp_path / "first"), bits="w4-all", group=32, device="cpu")


def test_tables_are_no_layers_to_quantise():
    layers = dict(quantise_layers(random_source(tied=False), PLANS["w4-all"], group=32, method="rtn"))
    assert not layers.keys() & set(TABLES)
