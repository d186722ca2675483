"""INT8 values for the KV cache: one float16 scale per vector, that is per token, head, and K or V.

    scale = float16(max|x| / 127)        q = clamp(round_to_nearest_even(x / scale), -127, 127)        x' = q * scale

The scale is rounded before the values are, so that they are the nearest ones to the scale that is stored. Arithmetic is in
float32. Per value, |x - x'| <= scale / 2. Where the scale is below float16's smallest normal number (max|x| < 0.0078), its own
rounding, at most 2**-25, adds up to 127 * 2**-25 = 3.8e-6 to that.

A vector with NaN or Inf in it, or with values beyond 127 * 65,520, has a scale that is not finite. All its values come back
as NaN or Inf. So does the largest value of a float16 vector, alone, where it is 65,504: 127 * float16(65,504 / 127) is more.
"""

import torch

LEVELS = 127  # -128 is not used: the range is symmetric


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the vectors of x [..., D], of any floating type. Returns int8 [..., D] and float16 scales [...]."""
    x = x.float()
    scale = (x.abs().amax(-1) / LEVELS).to(torch.float16)  # unlike CUDA's fmaxf, amax hands NaN on
    divisor = scale.float().unsqueeze(-1)
    usable = (divisor > 0) & divisor.isfinite()  # else q is 0, and 0 * scale is 0 or NaN
    return torch.where(usable, x / divisor, 0).round_().clamp_(-LEVELS, LEVELS).to(torch.int8), scale


def dequantise(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `quantise`, rounding once, to `dtype`."""
    return (values * scale.float().unsqueeze(-1)).to(dtype)
