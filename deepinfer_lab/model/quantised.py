"""A model quantised once and kept: a folder with `quantised.safetensors` and the tokenizer's files."""

import dataclasses
import json
from pathlib import Path

import torch

from deepinfer_lab.errors import CheckpointError, QuantisationError
from deepinfer_lab.model.build import packed_weight
from deepinfer_lab.model.config import Llama3Scaling, ModelConfig
from deepinfer_lab.model.inventory import check_inventory, tensor_shapes
from deepinfer_lab.model.source import WeightSource, dense_shapes, linear_layers
from deepinfer_lab.model.tokenizer import Tokenizer
from deepinfer_lab.progress import bar
from deepinfer_lab.quant import checkpoint
from deepinfer_lab.quant.layout import PackedWeight
from deepinfer_lab.quant.plan import QuantPlan

FILE = "quantised.safetensors"


def is_quantised(folder: Path) -> bool:
    """Whether a folder was written by `write`."""
    return (folder / FILE).is_file()


def write(source: WeightSource, plan: QuantPlan, group: int, folder: Path) -> Path:
    """Quantise a model and write it to a folder. Returns the file of its weights.

    Raises:
        CheckpointError, QuantisationError: as the source and the quantiser do.
    """
    packed, dense = {}, {name: source.tensor(name) for name, _ in dense_shapes(source.config)}
    for layer in bar(list(linear_layers(source.config)), desc="quantising", unit="layer"):
        bits = plan.bits_for(layer)
        if bits is None:
            dense[f"{layer}.weight"] = source.tensor(f"{layer}.weight")
        else:
            packed[layer] = packed_weight(source, layer, bits, group)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {
        "name": source.name,
        "plan": plan.name,
        "group": str(group),
        "config": json.dumps(dataclasses.asdict(source.config)),
    }
    checkpoint.save(folder / FILE, checkpoint.QuantisedTensors(packed, dense, metadata))
    if source.tokenizer is not None:
        source.tokenizer.save(folder)
    return folder / FILE


class QuantisedSource:
    """Reads a folder that `write` wrote.

    Raises:
        CheckpointError: the folder is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        tensors = checkpoint.load(self._path)
        try:
            self.name, self._plan = tensors.metadata["name"], tensors.metadata["plan"]
            fields = json.loads(tensors.metadata["config"])
            scaling = fields.pop("rope_scaling")
            self.config = ModelConfig(**fields, rope_scaling=Llama3Scaling(**scaling) if scaling else None)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{self._path}: damaged header ({error})") from error
        self._packed, self._dense = tensors.packed, tensors.dense
        found = {name: tuple(tensor.shape) for name, tensor in self._dense.items()}
        found |= {f"{layer}.weight": (weight.n, weight.k) for layer, weight in self._packed.items()}
        check_inventory(str(self._path), tensor_shapes(self.config), found)
        file = folder / "tokenizer.json"
        self.tokenizer = Tokenizer.from_file(file) if file.is_file() else None

    def tensor(self, name: str) -> torch.Tensor:
        if name in self._dense:
            return self._dense[name]
        if name.removesuffix(".weight") in self._packed:
            raise QuantisationError(f"{self._path} is quantised by plan '{self._plan}'; load it with bits={self._plan}")
        raise CheckpointError(f"{self._path} lacks the tensor {name}")

    def packed(self, layer: str, bits: int, group: int) -> PackedWeight:
        weight = self._packed.get(layer)
        if weight is None or (weight.bits, weight.group) != (bits, group):
            held = "dense" if weight is None else f"{weight.bits} bits, group {weight.group}"
            raise QuantisationError(
                f"{self._path} holds {layer} as {held} (plan '{self._plan}'), not as {bits} bits, group {group}"
            )
        return weight
