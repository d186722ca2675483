"""A whole model, quantised layer by layer."""

from collections.abc import Iterator, Mapping

import torch

from deepinfer_lab.errors import SettingError
from deepinfer_lab.model.build import build_block, build_outside
from deepinfer_lab.model.calibration import Calibration, Passage, default_calibration
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.source import (
    ATTENTION_IN,
    ATTENTION_OUT,
    MLP_IN,
    MLP_OUT,
    PackedSource,
    WeightSource,
    linear_layers,
)
from deepinfer_lab.model.tokenizer import Tokenizer
from deepinfer_lab.progress import bar
from deepinfer_lab.quant import methods
from deepinfer_lab.quant.layout import PackedWeight
from deepinfer_lab.quant.plan import PLANS, Plan

PARTS = {"qkv": ATTENTION_IN, "o": ATTENTION_OUT, "gate_up": MLP_IN, "down": MLP_OUT}


class PackedModel:
    """A weight source whose linear layers are few-bit, those of `packed`, and whose other tensors are another source's."""

    def __init__(self, source: WeightSource, packed: Mapping[str, PackedWeight]) -> None:
        self._source, self._packed = source, packed
        self.name: str = source.name
        self.config: ModelConfig = source.config
        self.tokenizer: Tokenizer | None = source.tokenizer

    def tensor(self, name: str) -> torch.Tensor:
        return self._source.tensor(name)

    def packed(self, layer: str, bits: int, group: int) -> PackedWeight:
        return self._packed[layer]


def quantise_layers(
    source: WeightSource,
    plan: Plan,
    *,
    group: int,
    method: str,
    sequential: bool = True,
    calibration: Calibration | None = None,
    known: Mapping[str, PackedWeight] | None = None,
    device: torch.device | None = None,
) -> Iterator[tuple[str, PackedWeight]]:
    """Quantise every linear layer that the plan names: (canonical layer name, weight), in the order of the forward pass.

    Not the embedding and the output head: `build_outside` rounds them to nearest, whatever the method.

    No more than one block is dense at a time. Where the method wants activations, calibration texts pass block after block.

    Args:
        source: a float checkpoint. group: values of K that share a scale. method: one of `methods.METHODS`.
        sequential: each block sees what the quantised ones before it, and the plan's embedding, make of the texts, and so
            can make up for their errors; False lets the texts pass the unquantised model.
        calibration: texts; by default the source's tokenizer cuts some from Python's own documentation.
        known: layers that were quantised before, by the same settings; they are not yielded again.
        device: where to compute; the CPU by default.

    Raises:
        SettingError: no such method; a checkpoint that is quantised already; no tokenizer and no calibration.
        CheckpointError, QuantisationError: as the source and the quantiser do.
    """
    known = known or {}
    if not methods.needs_activations(methods.check_method(method)):
        for layer in bar(list(linear_layers(source.config)), desc="quantising", unit="layer"):
            bits = plan.bits_for(layer)
            if bits is not None and layer not in known:
                yield layer, methods.quantise(method, source.tensor(f"{layer}.weight"), bits, group)
        return
    if isinstance(source, PackedSource):
        raise SettingError(
            f"method '{method}': '{source.name}' is quantised already; allowed is rtn, which leaves it so"
        )
    if calibration is None:
        if source.tokenizer is None:
            raise SettingError(f"method '{method}': '{source.name}' has no tokenizer to make calibration texts with")
        calibration = default_calibration(source.tokenizer)
    where = {"device": device or torch.device("cpu"), "dtype": torch.float32}
    outside = build_outside(source, plan if sequential else PLANS["none"], group=group, **where)
    passage = Passage(outside, calibration)
    for index in bar(range(source.config.num_layers), desc=f"quantising by {method}", unit="block"):
        layers = {f"model.layers.{index}.{name}": part for part, names in PARTS.items() for name in names}
        todo = {layer: part for layer, part in layers.items() if plan.bits_for(layer) and layer not in known}
        weights = {layer: known[layer] for layer in layers if layer in known}
        if todo or not sequential:
            dense = build_block(source, PLANS["none"], index, group=group, **where)
            grams = passage.observe(dense, move=not sequential)
        for layer, part in todo.items():
            weight = source.tensor(f"{layer}.weight").to(where["device"])
            weights[layer] = methods.quantise(method, weight, plan.bits_for(layer), group, grams[part])
            yield layer, weights[layer].to("cpu")
        if sequential:
            passage.move(build_block(PackedModel(source, weights), plan, index, group=group, **where))
