"""Rotary position embedding in the "rotate half" orientation of Hugging Face checkpoints."""

import math

import torch

from deepinfer_lab.model.config import Llama3Scaling, ModelConfig


def _llama3(inverse_frequency: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Stretch low frequencies, keep high ones, interpolate between (Llama 3.1 model card; `rope_type: llama3`)."""
    wavelength = 2 * math.pi / inverse_frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_context / wavelength - low) / (high - low)).clamp(0, 1)
    return inverse_frequency * (smooth + (1 - smooth) / scaling.factor)


class Rope:
    """Precomputed `cos` and `sin` of every position, [max_context, head_dim / 2] in the model's dtype."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequency = 1.0 / config.rope_theta**exponent
        if config.rope_scaling is not None:
            frequency = _llama3(frequency, config.rope_scaling)
        angle = torch.outer(torch.arange(config.max_context, dtype=torch.float32), frequency)
        self.cos, self.sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for positions [T], each [T, 1, head_dim / 2], ready to broadcast over heads."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, head_dim] by the angles of `Rope.at`."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
