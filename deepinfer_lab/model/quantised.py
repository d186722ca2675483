"""A model quantised once and kept: a folder with `quantised.safetensors` and the tokenizer's files."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from deepinfer_lab.errors import CheckpointError, QuantisationError, SettingError
from deepinfer_lab.model.calibration import Calibration
from deepinfer_lab.model.config import Llama3Scaling, ModelConfig
from deepinfer_lab.model.inventory import check_inventory, tensor_shapes
from deepinfer_lab.model.quantise import quantise_layers
from deepinfer_lab.model.source import PackedSource, WeightSource, dense_shapes, linear_layers
from deepinfer_lab.model.tokenizer import Tokenizer
from deepinfer_lab.quant import checkpoint
from deepinfer_lab.quant.layout import PackedWeight
from deepinfer_lab.quant.methods import needs_activations
from deepinfer_lab.quant.plan import Plan

FILE = "quantised.safetensors"


def is_quantised(folder: Path) -> bool:
    """Whether a folder was written by `write`."""
    return (folder / FILE).is_file()


def write(
    source: WeightSource,
    plan: Plan,
    group: int,
    folder: Path,
    *,
    method: str = "rtn",
    calibration: Calibration | None = None,
    device: torch.device | None = None,
) -> Path:
    """Quantise a model and write it to a folder. Returns the file of its weights.

    Embedding and output head are written as the source holds them. A plan that gives them bits has them rounded whenever the
    folder is loaded with it, which takes seconds.

    Finished blocks are kept in `folder/unfinished` until all are: the same call takes up an interrupted one where it stopped.

    Raises:
        SettingError: the folder holds something else. Also, with CheckpointError and QuantisationError, as `quantise_layers`.
    """
    settings = {"name": source.name, "plan": plan.name, "group": str(group), "method": method}
    _refuse_another(folder, settings)
    if isinstance(source, PackedSource) and not needs_activations(method):  # written anew as it is
        asked = ((layer, plan.bits_for(layer)) for layer in linear_layers(source.config))
        packed = {layer: source.packed(layer, bits, group) for layer, bits in asked if bits is not None}
    else:
        unfinished = Unfinished(folder / "unfinished", settings)
        known = dict(unfinished.layers)
        layers = quantise_layers(
            source, plan, group=group, method=method, calibration=calibration, known=known, device=device
        )
        for layer, weight in layers:
            unfinished.add(layer, weight)
        packed = unfinished.layers
    dense = {name: source.tensor(name) for name, _ in dense_shapes(source.config)}
    for layer in linear_layers(source.config):
        if plan.bits_for(layer) is None:
            dense[f"{layer}.weight"] = source.tensor(f"{layer}.weight")
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {**settings, "config": json.dumps(dataclasses.asdict(source.config))}
    checkpoint.save(folder / FILE, checkpoint.QuantisedTensors(packed, dense, metadata))
    if source.tokenizer is not None:
        source.tokenizer.save(folder)
    shutil.rmtree(folder / "unfinished", ignore_errors=True)
    return folder / FILE


def _refuse_another(folder: Path, settings: Mapping[str, str]) -> None:
    """What somebody has in a folder is not written over, nor mixed with a model's files."""
    if is_quantised(folder):
        with suppress(CheckpointError):  # cut off while it was written
            found = checkpoint.header(folder / FILE)
            other = {name: found.get(name) for name in settings if found.get(name) != settings[name]}
            if other:
                said = ", ".join(f"{name} {value}" for name, value in other.items())
                raise SettingError(
                    f"folder '{folder}': holds a model of {said}; delete it first, or name another folder"
                )
    elif folder.is_dir() and any(path.name != "unfinished" for path in folder.iterdir()):
        raise SettingError(
            f"folder '{folder}': holds other files; allowed are a new folder, an empty one, and one that quantise wrote"
        )


class Unfinished:
    """Layers that are quantised already, by name, and a file for each block of them.

    Args:
        folder: where the files are. settings: what the layers depend on; files of other settings are ignored.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._folder, self._settings = folder, dict(settings)
        self.layers: dict[str, PackedWeight] = {}
        for file in sorted(folder.glob("*.safetensors")):
            try:
                tensors = checkpoint.load(file)
            except CheckpointError:  # cut off while it was written
                continue
            if tensors.metadata == self._settings:
                self.layers |= tensors.packed

    def add(self, layer: str, weight: PackedWeight) -> None:
        """Keep a layer. Its block's file is written anew."""
        self.layers[layer] = weight
        block = ".".join(layer.split(".")[:3])  # model.layers.N
        its = {name: held for name, held in self.layers.items() if name.startswith(f"{block}.")}
        self._folder.mkdir(parents=True, exist_ok=True)
        checkpoint.save(self._folder / f"{block}.safetensors", checkpoint.QuantisedTensors(its, {}, self._settings))


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
