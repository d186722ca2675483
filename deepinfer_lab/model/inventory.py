"""Which tensors a checkpoint must hold for its config, and the check that it holds them and nothing else."""

from collections.abc import Mapping

from deepinfer_lab.errors import CheckpointError, UnsupportedArchitecture
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.source import dense_shapes, linear_layers, linear_shape


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this config consists of, with its shape ([out_features, in_features] for projections).

    `lm_head.weight` is listed only where embeddings are not tied.
    """
    linear = {f"{layer}.weight": linear_shape(config, layer) for layer in linear_layers(config)}
    return {**dict(dense_shapes(config)), **linear}


def check_inventory(where: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare shapes by tensor name, in whatever naming both arguments share.

    Args:
        where: the file or folder, for messages.
        expected: what the decoder will read.
        found: what the checkpoint holds, less what may be ignored.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        UnsupportedArchitecture: a tensor that the decoder would not use, such as an extra bias: dropping it would
            change the model's answers.
    """
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"{where}: no tensor '{name}', expected with shape {list(shape)}")
        if tuple(found[name]) != shape:
            raise CheckpointError(f"{where}: tensor '{name}' has shape {list(found[name])}, expected {list(shape)}")
    extra = sorted(found.keys() - expected.keys())
    if extra:
        raise UnsupportedArchitecture(
            f"{where}: {len(extra)} tensors that the decoder does not use, such as '{extra[0]}'"
        )
