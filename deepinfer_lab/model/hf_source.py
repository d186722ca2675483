"""A weight source that reads a Hugging Face folder of float weights."""

from pathlib import Path

import torch

from deepinfer_lab.errors import CheckpointError, UnsupportedArchitecture
from deepinfer_lab.model.hf_folder import HEAD, HfFolder
from deepinfer_lab.model.inventory import check_inventory, tensor_shapes
from deepinfer_lab.model.tokenizer import Tokenizer


class HfSource:
    """Reads one folder. Tensors come in the dtype in which they are stored.

    Args:
        folder, name: as for `HfFolder`.

    Raises:
        CheckpointError: as `HfFolder` does, or a tensor is missing or of another shape than expected.
        UnsupportedArchitecture: as `HfFolder` does, or the weights are quantised, or there are tensors without a use.
    """

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self._folder = HfFolder(folder, name)
        self.name, self.config = self._folder.name, self._folder.config
        if self._folder.quantisation is not None:
            method = self._folder.quantisation.get("quant_method", "unnamed")
            raise UnsupportedArchitecture(
                f"{self._folder.config_path}: quantised by '{method}', expected float weights"
            )
        self._shapes = tensor_shapes(self.config)
        check_inventory(self._folder.where, self._shapes, self._folder.float_shapes(self._folder.names))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """As `HfFolder.tokenizer`."""
        return self._folder.tokenizer

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, as stored. `lm_head.weight` of a model with tied embeddings is the embedding.

        Raises:
            CheckpointError: the model has no such tensor, or its bytes cannot be read.
        """
        if name not in self._shapes and name != HEAD:
            raise CheckpointError(f"{self._folder.path}: a model of this config has no tensor '{name}'")
        return self._folder.read(name)
