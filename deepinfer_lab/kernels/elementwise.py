"""Launchers of the fused element-wise kernels. float16 in and out, float32 between, enqueued on torch's current stream.

All raise KernelError, naming the argument, its value and the limit. Whatever can be given to write into may be left out.
"""

import numpy as np
import torch

from deepinfer_lab.kernels.loader import launch_op
from deepinfer_lab.kernels.ops_catalogue import OPS
from deepinfer_lab.kernels.ops_check import expect, require

Maybe = torch.Tensor | None
VECTOR = 8  # values of one 16-byte access: row lengths are multiples of it
MAX_HEAD_DIM = 256  # cuda/rope_write.cuh: MAX_PAIRS
ROPE_WARPS = 4  # heads that a thread block takes


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: Maybe = None) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight. x, out: [T, N], N a multiple of 8; weight: [N]."""
    return _norm(x, None, weight, eps, None, out)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, total: Maybe = None, out: Maybe = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """total = x + delta, and out = its RMSNorm as `rms_norm` has it, in one pass. All [T, N]."""
    total = torch.empty_like(x) if total is None else total
    return total, _norm(x, delta, weight, eps, total, out)


def _norm(x: torch.Tensor, delta: Maybe, weight: torch.Tensor, eps: float, total: Maybe, out: Maybe) -> torch.Tensor:
    name = "rms_norm"
    rows, columns = _matrix(name, x)
    out = torch.empty_like(x) if out is None else out
    for label, tensor in (("x", x), ("delta", delta), ("total", total), ("out", out)):
        if tensor is not None:
            expect(name, label, tensor, torch.float16, (rows, columns), x.device, aligned=True)
    expect(name, "weight", weight, torch.float16, (columns,), x.device, aligned=True)
    if rows:
        launch_op(OPS[name], (rows,), (x, delta, weight, total, out), columns, np.float32(eps))
    return out


def silu_mul(x: torch.Tensor, out: Maybe = None, interleaved: bool = False) -> torch.Tensor:
    """silu(gate) * up, where x [T, 2 * I] is gate beside up; out: [T, I], I a multiple of 8.

    interleaved: x has eight values of gate, then eight of up, and so on, as of a weight of `quant.interleave`.
    """
    name = "silu_mul"
    require(x.dim() == 2 and x.shape[1] % 2 == 0, f"{name}: x has shape {tuple(x.shape)}, must be [T, 2 * I]")
    rows, columns = x.shape[0], x.shape[1] // 2
    require(columns % VECTOR == 0, f"{name}: I = {columns}, must be a multiple of {VECTOR}")
    out = x.new_empty(rows, columns) if out is None else out
    expect(name, "x", x, torch.float16, (rows, 2 * columns), x.device, aligned=True)
    expect(name, "out", out, torch.float16, (rows, columns), x.device, aligned=True)
    if out.numel():
        blocks = -(-columns // (OPS[name].threads * VECTOR))
        launch_op(OPS[name], (rows, blocks), (x, out), columns, interleaved)
    return out


def rope_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: Maybe = None,
    v_scale: Maybe = None,
    out: Maybe = None,
) -> torch.Tensor:
    """Rotate q and k ("rotate half") and write k and v into the cache, quantised as `kv.int8` does where it is int8.

    Args:
        q: [T, heads, D]; k, v: [T, kv_heads, D]: parts of one larger tensor or not, heads of a token side by side.
        cos, sin: [max_context, D / 2]. positions, slots: int64 [T].
        k_cache, v_cache: float16 or int8 [slots, kv_heads, D]. k_scale, v_scale: float16 [slots, kv_heads] where int8.

    Returns:
        The rotated q, float16 [T, heads, D], contiguous; in `out` if given.
    """
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    stored = k_cache.dtype
    require(
        stored in (torch.float16, torch.int8), f"rope_write: cache has dtype {stored}, must be torch.float16 or int8"
    )
    name = "rope_write_i8" if stored == torch.int8 else "rope_write_f16"
    require(dim % 2 == 0 and dim <= MAX_HEAD_DIM, f"{name}: head_dim = {dim}, must be even and at most {MAX_HEAD_DIM}")
    out = torch.empty(tokens, heads, dim, dtype=torch.float16, device=q.device) if out is None else out
    for label, tensor, count in (("q", q, heads), ("k", k, kv_heads), ("v", v, kv_heads)):
        require(tensor.dtype == torch.float16, f"{name}: {label} has dtype {tensor.dtype}, must be torch.float16")
        found, wanted = tuple(tensor.shape), (tokens, count, dim)
        require(found == wanted, f"{name}: {label} has shape {found}, must be {wanted}")
        inner = tensor.stride()[1:]
        require(inner == (dim, 1), f"{name}: {label} has strides {tensor.stride()}, must end in {(dim, 1)}")
        require(tensor.device == out.device, f"{name}: {label} is on {tensor.device}, must be on {out.device}")
    for label, tensor in (("cos", cos), ("sin", sin)):
        expect(name, label, tensor, torch.float16, (cos.shape[0], dim // 2), q.device)
    for label, tensor in (("positions", positions), ("slots", slots)):
        expect(name, label, tensor, torch.int64, (tokens,), q.device)
    for label, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        expect(name, label, tensor, stored, (k_cache.shape[0], kv_heads, dim), q.device)
    for label, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        wanted_scale = stored == torch.int8
        require((scale is not None) == wanted_scale, f"{name}: {label} is {'missing' if wanted_scale else 'given'}")
        if scale is not None:
            expect(name, label, scale, torch.float16, (k_cache.shape[0], kv_heads), q.device)
    expect(name, "out", out, torch.float16, (tokens, heads, dim), q.device)
    if tokens:
        blocks = -(-(heads + 2 * kv_heads) // ROPE_WARPS)
        tensors = (q, k, v, cos, sin, positions, slots, out, k_cache, v_cache, k_scale, v_scale)
        strides = (q.stride(0), k.stride(0), v.stride(0))
        launch_op(OPS[name], (tokens, blocks), tensors, heads, kv_heads, dim, *strides)
    return out


def _matrix(name: str, x: torch.Tensor) -> tuple[int, int]:
    require(x.dim() == 2, f"{name}: x has shape {tuple(x.shape)}, must be [T, N]")
    rows, columns = x.shape
    require(columns > 0 and columns % VECTOR == 0, f"{name}: N = {columns}, must be a positive multiple of {VECTOR}")
    return rows, columns
