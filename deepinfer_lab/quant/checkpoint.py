"""Quantised weights on disk: one safetensors file of packed and dense tensors, self-describing."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from deepinfer_lab.errors import CheckpointError, QuantisationError
from deepinfer_lab.quant.layout import PackedWeight

FORMAT = "deepinfer-lab-quantised-1"


@dataclass(frozen=True)
class QuantisedTensors:
    """What a quantised checkpoint holds, by canonical layer name (packed) and tensor name (dense)."""

    packed: dict[str, PackedWeight]
    dense: dict[str, torch.Tensor]
    metadata: dict[str, str]


def save(path: Path, tensors: QuantisedTensors) -> None:
    """Write a checkpoint. A layer `L` becomes the tensors `L.packed` and `L.scales`; its bits and group go to the header."""
    flat = {name: tensor.contiguous() for name, tensor in tensors.dense.items()}
    layers = {}
    for name, weight in tensors.packed.items():
        flat[f"{name}.packed"], flat[f"{name}.scales"] = weight.packed.contiguous(), weight.scales.contiguous()
        layers[name] = {"bits": weight.bits, "group": weight.group, "n": weight.n, "k": weight.k}
    assert not tensors.metadata.keys() & {"format", "layers"}
    header = {"format": FORMAT, "layers": json.dumps(layers), **tensors.metadata}
    unfinished = path.with_suffix(".unfinished")
    save_file(flat, unfinished, metadata=header)
    unfinished.replace(path)


def header(path: Path) -> dict[str, str]:
    """The header that `save` wrote: format, layers, and the metadata that it was given; no tensors. For errors see `load`."""
    try:
        with safe_open(path, framework="pt") as file:
            return _header(path, file.metadata())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a readable quantised checkpoint ({error})") from error


def _header(path: Path, found: dict[str, str] | None) -> dict[str, str]:
    found = found or {}
    if found.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format '{found.get('format')}', expected '{FORMAT}'")
    return found


def load(path: Path) -> QuantisedTensors:
    """Read a checkpoint that `save` wrote.

    Raises:
        CheckpointError: missing, truncated, not in this format, or with tensors that do not fit their description.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = _header(path, file.metadata())
            layers = json.loads(metadata.pop("layers"))
            flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not a readable quantised checkpoint ({error})") from error
    packed = {}
    if not isinstance(layers, dict):
        raise CheckpointError(f"{path}: the header's layers are a JSON {type(layers).__name__}, expected an object")
    for name, shape in layers.items():
        try:
            packed[name] = PackedWeight(**shape, packed=flat.pop(f"{name}.packed"), scales=flat.pop(f"{name}.scales"))
        except KeyError as error:
            raise CheckpointError(f"{path}: layer {name} lacks the tensor {error}") from error
        except (TypeError, QuantisationError) as error:
            raise CheckpointError(f"{path}: layer {name} does not fit its description ({error})") from error
    del metadata["format"]
    return QuantisedTensors(packed, flat, metadata)
