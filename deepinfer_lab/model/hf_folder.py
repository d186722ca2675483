"""A folder in Hugging Face format: config.json, safetensors, and perhaps a tokenizer.json."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deepinfer_lab.errors import CheckpointError, UnsupportedArchitecture
from deepinfer_lab.model.hf_config import model_config, quantisation
from deepinfer_lab.model.tokenizer import Tokenizer, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' dtype names
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class HfFolder:
    """Opens one folder. Which tensors it must hold is for a source to say.

    Args:
        path: holds `config.json` and either `model.safetensors` or shards with `model.safetensors.index.json`.
        name: how the model is called in messages and records; the folder's name by default.

    Attributes:
        config: the model's shape. quantisation: the `quantization_config` of `config.json`, None for float weights.
        names: every tensor in the files. where: the file that lists them, for messages.

    Raises:
        CheckpointError: a file is missing, unreadable or truncated.
        UnsupportedArchitecture: another model family, or a feature that the decoder does not implement.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = path.resolve().name if name is None else name
        self.path, self.config_path = path, path / "config.json"
        settings = read_json(self.config_path)
        self.config = model_config(settings, self.config_path)
        self.quantisation = quantisation(settings, self.config_path)
        self._files = {file: _open(path / file) for file in _weight_files(path)}
        self._file_of = {key: file for file, handle in self._files.items() for key in handle.keys()}  # noqa: SIM118
        self.names = self._file_of.keys()
        self.where = str(path / (SINGLE if SINGLE in self._files else INDEX))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The folder's `tokenizer.json`; None where there is none.

        Raises:
            CheckpointError, UnsupportedArchitecture: as `Tokenizer.from_file` does.
        """
        file = self.path / "tokenizer.json"
        return Tokenizer.from_file(file) if file.is_file() else None

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """A tensor's dtype, by safetensors' name, and shape; no values are read."""
        part = self._files[self._file_of[name]].get_slice(name)
        return part.get_dtype(), tuple(part.get_shape())

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, as stored. `lm_head.weight` of a model with tied embeddings is the embedding.

        Raises:
            CheckpointError: its bytes cannot be read.
        """
        if name == HEAD and self.config.tied_embeddings:
            name = EMBEDDING
        file = self._file_of[name]
        try:
            return self._files[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / file}: tensor '{name}' cannot be read ({error})") from error

    def float_shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of those among `names` that a decoder may not ignore.

        Raises:
            UnsupportedArchitecture: one of them is not of a float dtype.
        """
        shapes = {}
        for name in names:
            dtype, shape = self.header(name)
            if name.endswith("rotary_emb.inv_freq"):
                continue  # old exports store what follows from rope_theta
            if name == HEAD and self.config.tied_embeddings:
                continue  # a copy that its own config says not to use
            if dtype not in FLOATS:
                file = self.path / self._file_of[name]
                raise UnsupportedArchitecture(f"{file}: tensor '{name}' is {dtype}, supported are {', '.join(FLOATS)}")
            if name.endswith("o_proj.bias") and not self.read(name).any():
                continue  # attention_bias gives the output projection one too; adding zeros changes nothing
            shapes[name] = shape
        return shapes


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
