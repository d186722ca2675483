"""Random weights in a real model's shape, drawn in packed form: for performance work, where values do not matter."""

import zlib

import torch

from deepinfer_lab.errors import ModelNotFound
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.source import dense_shapes, linear_shape
from deepinfer_lab.model.tokenizer import Tokenizer
from deepinfer_lab.quant.layout import PackedWeight, check_shape, packed_columns

PREFIX = "synthetic:"

# Sizes from the config.json of Qwen/Qwen2.5-3B and -7B and of HuggingFaceTB/SmolLM2-135M on the Hugging Face hub.
SHAPES = {
    "qwen2.5-3b": ModelConfig(
        architecture="qwen2", vocab_size=151_936, hidden_size=2048, intermediate_size=11_008, num_layers=36,
        num_heads=16, num_kv_heads=2, head_dim=128, max_context=32_768, rms_norm_eps=1e-6, rope_theta=1e6,
        qkv_bias=True, tied_embeddings=True,
    ),
    "qwen2.5-7b": ModelConfig(
        architecture="qwen2", vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_layers=28,
        num_heads=28, num_kv_heads=4, head_dim=128, max_context=32_768, rms_norm_eps=1e-6, rope_theta=1e6,
        qkv_bias=True, tied_embeddings=False,
    ),
    "smollm2-135m": ModelConfig(
        architecture="llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30,
        num_heads=9, num_kv_heads=3, head_dim=64, max_context=8192, rms_norm_eps=1e-5, rope_theta=1e5,
        tied_embeddings=True,
    ),
    "tiny": ModelConfig(
        architecture="llama", vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=16, max_context=512, rms_norm_eps=1e-5, rope_theta=1e4,
        tied_embeddings=True,
    ),
}  # fmt: skip


class SyntheticSource:
    """A weight source of normal random values. The same name always gives the same tensor.

    Args:
        config: the shape to fill.
        name: how the model is called in messages and records.
    """

    tokenizer: Tokenizer | None = None

    def __init__(self, config: ModelConfig, name: str) -> None:
        self.config, self.name = config, name
        self._dense = dict(dense_shapes(config))

    def tensor(self, name: str) -> torch.Tensor:
        shape = self._dense.get(name) or linear_shape(self.config, name.removesuffix(".weight"))
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        # Std 1/sqrt(K) keeps activations of order one through any depth.
        return torch.randn(shape, generator=self._generator(name)) * shape[-1] ** -0.5

    def packed(self, layer: str, bits: int, group: int) -> PackedWeight:
        """Uniform random bits with the scale that gives the dense weight's standard deviation; no dense copy is made.

        The integers' mean is -1/2. Scales have random signs, as no real ones have: otherwise all rows would share that mean,
        and activations, whose mean is not zero either, would overflow float16 in a dozen layers.
        """
        n, k = linear_shape(self.config, layer)
        check_shape(k, bits, group)
        random = self._generator(layer)
        packed = torch.randint(0, 256, (n, packed_columns(k, bits)), dtype=torch.uint8, generator=random)
        level_rms = ((4**bits - 1) / 12 + 1 / 4) ** 0.5  # of a uniform distribution over 2**bits integers around -1/2
        signs = torch.randint(0, 2, (n, k // group), generator=random) * 2 - 1
        scales = (signs * (k**-0.5 / level_rms)).half()
        return PackedWeight(bits, group, n, k, packed, scales)

    @staticmethod
    def _generator(name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def synthetic(spec: str) -> SyntheticSource:
    """The source for a spec such as `synthetic:qwen2.5-3b`.

    Raises:
        ModelNotFound: no such shape.
    """
    shape = spec.removeprefix(PREFIX)
    if shape not in SHAPES:
        raise ModelNotFound(f"'{spec}': synthetic shapes are {', '.join(PREFIX + name for name in SHAPES)}")
    return SyntheticSource(SHAPES[shape], spec)
