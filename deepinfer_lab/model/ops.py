"""The operations between a decoder's linear layers, in two implementations: plain torch, and fused CUDA kernels."""

from typing import Protocol

import torch
from torch.nn.functional import rms_norm, silu

from deepinfer_lab.errors import MissingDependency
from deepinfer_lab.kernels import elementwise
from deepinfer_lab.kernels.compiler import load_nvrtc
from deepinfer_lab.kernels.ops_catalogue import MIN_CAPABILITY
from deepinfer_lab.kernels.paged_attention import paged_decode, supports
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.attention import TorchAttention, is_decode
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.rope import Rope, rotate
from deepinfer_lab.model.step_input import StepInput


class StepOps(Protocol):
    """What depends on a step's positions and lengths, prepared once and used by all layers."""

    def rotate_and_write(self, layer: int, qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Apply rotary embedding to qk [T, heads + kv_heads, D], write K and v [T, kv_heads, D] into the cache.

        Returns:
            The rotated q [T, heads, D].
        """
        ...

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Causal attention of q [T, heads, D] over the cache, which holds the step's own K and V: [T, heads * D]."""
        ...


class Ops(Protocol):
    """x and delta are [T, hidden], weights [hidden]."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm."""
        ...

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta, and its RMSNorm."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for gate beside up: [T, 2 * I] -> [T, I]."""
        ...

    def step(self, step: StepInput, kv: KVPool, rope: Rope) -> StepOps: ...


class TorchOps:
    """On any device and in any dtype."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, eps)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + delta
        return total, self.norm(total, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def step(self, step: StepInput, kv: KVPool, rope: Rope) -> StepOps:
        return TorchStep(step, kv, rope)


class TorchStep:
    def __init__(self, step: StepInput, kv: KVPool, rope: Rope) -> None:
        self._slots, self._kv = step.slot_mapping, kv
        self._angles = rope.at(step.positions)
        self._attention = TorchAttention(step, kv)

    def rotate_and_write(self, layer: int, qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kv_heads = v.shape[1]
        q, k = rotate(qk, *self._angles).split((qk.shape[1] - kv_heads, kv_heads), dim=1)
        self._kv.write(layer, self._slots, k, v)
        return q

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        return self._attention(layer, q)


class CudaOps:
    """float16 on one CUDA device. Sums are in float32, and what is fused is rounded once where torch rounds in between.

    Args:
        fixed_split: positions of an attention split, so that a sequence's attention does not depend on its batch
            (`kernels.paged_attention`). None: as fits the batch and the card.
    """

    def __init__(self, fixed_split: int | None = None) -> None:
        self._fixed_split = fixed_split

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return elementwise.add_rms_norm(x, delta, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return elementwise.silu_mul(gate_up)

    def step(self, step: StepInput, kv: KVPool, rope: Rope) -> StepOps:
        return CudaStep(step, kv, rope, self._fixed_split)


class CudaStep:
    """Decode steps go to the paged kernel. A step with a prompt chunk goes to torch: its queries share one read of K and V."""

    def __init__(self, step: StepInput, kv: KVPool, rope: Rope, fixed_split: int | None) -> None:
        self._step, self._kv, self._rope, self._fixed_split = step, kv, rope, fixed_split
        decode = is_decode(step) and supports(kv.shape.head_dim, kv.block_size)
        self._attention = None if decode else TorchAttention(step, kv)

    def rotate_and_write(self, layer: int, qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        memory, kv_heads = self._kv.layer(layer), v.shape[1]
        q, k = qk.split((qk.shape[1] - kv_heads, kv_heads), dim=1)
        return elementwise.rope_write(
            q, k, v, self._rope.cos, self._rope.sin, self._step.positions, self._step.slot_mapping,
            memory.k, memory.v, memory.k_scale, memory.v_scale,
        )  # fmt: skip

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        if self._attention is not None:
            return self._attention(layer, q)
        memory, table, block_size = self._kv.layer(layer), self._step.block_table, self._kv.block_size
        # By the table's width, not by the longest sequence: a captured graph then holds for all that the table can name.
        out = paged_decode(
            q, memory.k, memory.v, table, self._step.seq_lens, block_size=block_size,
            max_context=table.shape[1] * block_size, k_scale=memory.k_scale, v_scale=memory.v_scale,
            fixed_split=self._fixed_split,
        )  # fmt: skip
        return out.flatten(1)


def ops_for(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Ops:
    """CUDA kernels where the model, the card and what is installed allow it, otherwise torch."""
    fits = (
        device.type == "cuda"
        and dtype == torch.float16
        and config.hidden_size % elementwise.VECTOR == 0
        and config.intermediate_size % elementwise.VECTOR == 0
        and config.head_dim <= elementwise.MAX_HEAD_DIM
        and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
    )
    if not fits:
        return TorchOps()
    try:
        load_nvrtc()
    except MissingDependency:
        return TorchOps()
    return CudaOps()
