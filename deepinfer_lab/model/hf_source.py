"""A weight source that reads a folder in Hugging Face format: config.json, safetensors, and perhaps a tokenizer.json."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deepinfer_lab.errors import CheckpointError, UnsupportedArchitecture
from deepinfer_lab.model.hf_config import model_config
from deepinfer_lab.model.inventory import check_inventory, tensor_shapes
from deepinfer_lab.model.tokenizer import Tokenizer, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' dtype names
HEAD = "lm_head.weight"


class HfSource:
    """Reads one folder. Tensors come in the dtype in which they are stored.

    Args:
        folder: holds `config.json` and either `model.safetensors` or shards with `model.safetensors.index.json`.
        name: how the model is called in messages and records; the folder's name by default.

    Raises:
        CheckpointError: a file is missing, unreadable or truncated; a tensor is missing or of another shape than expected.
        UnsupportedArchitecture: another model family, or a feature that the decoder does not implement.
    """

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.name = folder.resolve().name if name is None else name
        self._folder = folder
        self.config = model_config(read_json(folder / "config.json"), folder / "config.json")
        self._shapes = tensor_shapes(self.config)
        self._files = {file: _open(folder / file) for file in _weight_files(folder)}
        self._file_of = {key: file for file, handle in self._files.items() for key in handle.keys()}  # noqa: SIM118
        self._check()

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The folder's `tokenizer.json`; None where there is none.

        Raises:
            CheckpointError, UnsupportedArchitecture: as `Tokenizer.from_file` does.
        """
        path = self._folder / "tokenizer.json"
        return Tokenizer.from_file(path) if path.is_file() else None

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, as stored. `lm_head.weight` of a model with tied embeddings is the embedding.

        Raises:
            CheckpointError: the model has no such tensor, or its bytes cannot be read.
        """
        if name == HEAD and self.config.tied_embeddings:
            name = "model.embed_tokens.weight"
        if name not in self._shapes:
            raise CheckpointError(f"{self._folder}: a model of this config has no tensor '{name}'")
        return self._read(name)

    def _read(self, name: str) -> torch.Tensor:
        file = self._file_of[name]
        try:
            return self._files[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._folder / file}: tensor '{name}' cannot be read ({error})") from error

    def _check(self) -> None:
        """Compare what the files hold with what the config promises, reading headers only."""
        where = str(self._folder / (SINGLE if SINGLE in self._files else INDEX))
        found = {}
        for name, file in self._file_of.items():
            part = self._files[file].get_slice(name)
            if name.endswith("rotary_emb.inv_freq"):
                continue  # old exports store what follows from rope_theta
            if name == HEAD and self.config.tied_embeddings:
                continue  # a copy that its own config says not to use
            if part.get_dtype() not in FLOATS:
                raise UnsupportedArchitecture(
                    f"{self._folder / file}: tensor '{name}' is {part.get_dtype()}, supported are {', '.join(FLOATS)}"
                )
            if name.endswith("o_proj.bias") and not self._read(name).any():
                continue  # attention_bias gives the output projection one too; adding zeros changes nothing
            found[name] = tuple(part.get_shape())
        check_inventory(where, self._shapes, found)


def _weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files, the single one first choice, as transformers has it."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if not (folder / INDEX).is_file():
        raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX}; supported are safetensors checkpoints")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX}: no 'weight_map' from tensor names to files")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{folder / INDEX}: tensor '{tensor}' in {file!r}, expected a file name in this folder"
            )
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file}: no such file, expected a shard with tensor '{tensor}'")
    return sorted(set(weight_map.values()))


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated, or not a safetensors file ({error})") from error
