"""Batch invariance on a GPU: what makes a token's logits the same bits in any batch and at any chunking of its prompt.

A sum in floating point depends on its order, and kernels choose that order by how many rows they are given. In this mode
nothing does: each sum has one order, which only the model and the card decide (He and others, "Defeating Nondeterminism in
LLM Inference", Thinking Machines Lab, 2025). RMSNorm, rotary embedding and SiLU work by rows anyway; that leaves three:

attention: each new token is a query of its own, in prompts as in decode steps, over splits of `FIXED_SPLIT` positions.
few-bit layers: one kernel for all M, `TABLE`. Its parts of K depend on the weight and the card (`Kernel.splits`).
dense layers: cuBLAS chooses a kernel by shape, so it is only ever given one, of `FIXED_ROWS` rows (`DenseLinear`).

What it costs: queries of a prompt no longer share a read of K and V, one or two rows no longer have kernels of their own, and
a dense layer multiplies up to 63 rows of zeros.
"""

import torch

from deepinfer_lab.errors import SettingError
from deepinfer_lab.kernels.dispatch import Row
from deepinfer_lab.kernels.ops_catalogue import HEAD_DIMS
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.ops import obstacle

# Positions of an attention split. Writing and reading a split's partial sums takes a sixteenth of the traffic of its K and V
# (eight heads on one KV head, float16), and a context of 8,192 still has 32 splits to fill a card with.
FIXED_SPLIT = 256

# Rows of every dense product: so few that reading the weight takes longer than multiplying it, for one row as for all 64.
FIXED_ROWS = 64

# With K split, since a few rows are too few blocks for a large card otherwise.
TABLE = (
    Row(4, 1, None, "w4_tiled_gemm_split_k"),
    Row(3, 1, None, "w3_tiled_gemm_split_k"),
)


def require(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Check that the mode can be had.

    Raises:
        SettingError: naming what stands in the way: device, dtype, a size of the model, or a library that is missing.
    """
    reason = obstacle(config, device, dtype)
    if reason is None and config.head_dim not in HEAD_DIMS:
        reason = f"head_dim = {config.head_dim}, must be one of {', '.join(map(str, HEAD_DIMS))}"
    if reason is None and config.qk_norm and not hasattr(torch.ops.aten, "_fused_rms_norm"):
        reason = f"the norms of Q and K need a torch that has RMSNorm as one kernel, not {torch.__version__}"
    if reason is not None:
        raise SettingError(f"batch_invariant: {reason}")
