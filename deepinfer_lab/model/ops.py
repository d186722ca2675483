"""The operations around and between a decoder's linear layers, in two implementations: plain torch, and fused CUDA kernels."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn.functional import rms_norm, silu

from deepinfer_lab.errors import MissingDependency
from deepinfer_lab.kernels import elementwise, ends
from deepinfer_lab.kernels.compiler import load_nvrtc
from deepinfer_lab.kernels.ops_catalogue import MIN_CAPABILITY
from deepinfer_lab.kernels.paged_attention import paged_decode, rotate_write_decode, supports
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.attention import (
    Attention,
    FlashChunk,
    MaskedChunk,
    MaskedRows,
    Run,
    flash_takes,
    torch_attention,
)
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.embedding import DenseEmbedding, Embedding
from deepinfer_lab.model.own_attention import OwnAttention, OwnChunk
from deepinfer_lab.model.rope import Rope, rotate
from deepinfer_lab.model.step_input import StepInput
from deepinfer_lab.quant.interleave import interleaved_rows

# Queries of one launch where splits are fixed. They bound its workspace: 64 MiB with 16 heads of 128 at a context of 8,192.
FIXED_SPLIT_QUERIES = 256


class StepOps(Protocol):
    """What depends on a step's positions and lengths, prepared once and used by all layers."""

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Apply rotary embedding to q and K of qkv [T, heads + 2 * kv_heads, D], contiguous, write K and V into the cache, and
        attend to it causally: [T, heads * D]."""
        ...


class Ops(Protocol):
    """x and delta are [T, hidden], weights [hidden]. reaches_host: its kernels can read and write pinned host memory."""

    reaches_host: bool

    def embed(self, embedding: Embedding, step: StepInput) -> torch.Tensor:
        """Rows [T, hidden] of the step's tokens, after those that it carries are in their places."""
        ...

    def likeliest(self, logits: torch.Tensor, last: torch.Tensor | None, host: torch.Tensor | None) -> torch.Tensor:
        """Of each row of logits [L, vocab] the largest, and its token: float64 [2, L], which holds both exactly. NaN is the
        largest, and of equals the first counts. last: int64, at least L, whose first L become the tokens. host: as for
        `ends.likeliest`; None where not `reaches_host`."""
        ...

    def prepare(self, tokens: int) -> None:
        """What must come, in the same thread, before a step with a prompt chunk of so many tokens is captured."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm."""
        ...

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta, and its RMSNorm."""
        ...

    def silu_mul(self, gate_up: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """silu(gate) * up: [T, 2 * I] -> [T, I], for gate beside up, or interleaved (`quant.interleave`)."""
        ...

    def step(self, step: StepInput, kv: KVPool, rope: Rope) -> StepOps: ...


class TorchOps:
    """On any device and in any dtype."""

    reaches_host = False

    def embed(self, embedding: Embedding, step: StepInput) -> torch.Tensor:
        if step.carried is not None:
            step.carried.put_into(step.token_ids)
        return embedding(step.token_ids)

    def likeliest(self, logits: torch.Tensor, last: torch.Tensor | None, host: None = None) -> torch.Tensor:
        best = torch.empty(2, len(logits), dtype=torch.float64, device=logits.device)
        best[0], best[1] = logits.max(dim=-1)
        if last is not None:
            last[: len(logits)] = best[1]
        return best

    def prepare(self, tokens: int) -> None:
        pass

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, eps)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + delta
        return total, self.norm(total, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor, interleaved: bool) -> torch.Tensor:
        if interleaved:
            gate_up = gate_up[:, interleaved_rows(gate_up.shape[1]).argsort().to(gate_up.device)]
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def step(self, step: StepInput, kv: KVPool, rope: Rope) -> StepOps:
        return TorchStep(step, kv, rope)


class TorchStep:
    def __init__(self, step: StepInput, kv: KVPool, rope: Rope) -> None:
        self._slots, self._kv = step.slot_mapping, kv
        self._angles = rope.at(step.positions)
        self._attention = torch_attention(step, kv)

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        kv_heads = self._kv.shape.num_kv_heads
        qk, v = qkv.split((qkv.shape[1] - kv_heads, kv_heads), dim=1)
        q, k = rotate(qk, *self._angles).split((qk.shape[1] - kv_heads, kv_heads), dim=1)
        self._kv.write(layer, self._slots, k, v)
        return self._attention(layer, q)


class CudaOps:
    """float16 on one CUDA device. Sums are in float32, and what is fused is rounded once where torch rounds in between.

    Args:
        fixed_split: positions of an attention split (`kernels.paged_attention`). A token's attention is then the same bits in
            any batch, and in a prompt chunk as in a decode step. None: as fits the batch and the card.
        own: for long prompt chunks where splits are not fixed; None: flash attention for all.
    """

    reaches_host = True

    def __init__(self, fixed_split: int | None = None, own: OwnAttention | None = None) -> None:
        self._fixed_split, self._own = fixed_split, own

    def prepare(self, tokens: int) -> None:
        if self._own is not None:
            self._own.prepare(tokens)

    def embed(self, embedding: Embedding, step: StepInput) -> torch.Tensor:
        if not isinstance(embedding, DenseEmbedding):
            return TorchOps().embed(embedding, step)
        carried = step.carried
        more = () if carried is None else (carried.sources, carried.last)
        return ends.embed(step.token_ids, embedding.weight, *more)

    def likeliest(self, logits: torch.Tensor, last: torch.Tensor | None, host: torch.Tensor | None) -> torch.Tensor:
        return ends.likeliest(logits, last, host=host)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return elementwise.add_rms_norm(x, delta, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor, interleaved: bool) -> torch.Tensor:
        return elementwise.silu_mul(gate_up, interleaved=interleaved)

    def step(self, step: StepInput, kv: KVPool, rope: Rope) -> StepOps:
        return CudaStep(step, kv, rope, self._fixed_split, self._own)


class CudaStep:
    """New tokens by themselves go to the paged kernel. Those of a prompt chunk go to torch: they share one read of K and V.

    With fixed splits all go to the paged kernel, each as a sequence of its own that ends with it. Where every sequence has one
    new token, the paged kernel also rotates and writes.
    """

    def __init__(
        self, step: StepInput, kv: KVPool, rope: Rope, fixed_split: int | None, own: OwnAttention | None
    ) -> None:
        self._step, self._kv, self._rope = step, kv, rope

        def paged(run: Run, kv: KVPool) -> PagedTokens:
            return PagedTokens(run, kv, rope, fixed_split)

        def flash(run: Run, kv: KVPool) -> FlashChunk | OwnChunk:
            long = own is not None and own.takes(run.tokens.stop - run.tokens.start)
            return OwnChunk(run, kv, own) if long else FlashChunk(run, kv)

        chunk = rows = paged
        if fixed_split is None:
            chunk = flash if flash_takes(kv, step.positions.device) else MaskedChunk
            rows = paged if supports(kv.shape.head_dim, kv.block_size) else MaskedRows
        self._attention = Attention(step, kv, chunk, rows)
        only = self._attention.parts[0][1]
        self._decodes = only if set(step.query_lens) == {1} and isinstance(only, PagedTokens) else None

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        if self._decodes is not None:
            return self._decodes.attend_new(layer, qkv)
        memory, kv_heads = self._kv.layer(layer), self._kv.shape.num_kv_heads
        q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        q = elementwise.rope_write(
            q, k, v, self._rope.cos, self._rope.sin, self._step.positions, self._step.slot_mapping,
            memory.k, memory.v, memory.k_scale, memory.v_scale,
        )  # fmt: skip
        return self._attention(layer, q)


class PagedTokens:
    """A run's tokens, each as a sequence that ends with it, through `kernels.paged_attention`."""

    def __init__(self, run: Run, kv: KVPool, rope: Rope, fixed_split: int | None) -> None:
        self._kv, self._rope, self._fixed_split = kv, rope, fixed_split
        # As they were given: what is computed within a captured step must not be read ahead.
        self._table, self._lengths = run.step.block_table[run.sequences], run.step.seq_lens[run.sequences]
        if run.is_chunk:
            self._lengths = run.step.positions[run.tokens] + 1
            self._table = self._table.repeat(len(self._lengths), 1)
        self._at_once = len(self._lengths) if fixed_split is None else FIXED_SPLIT_QUERIES

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q: [T, heads, D], rotated; K and V are in the cache."""
        return self._in_pieces(layer, q, paged_decode)

    def attend_new(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """As `StepOps.attend`. No token may be in another's past."""
        return self._in_pieces(layer, qkv, rotate_write_decode, cos=self._rope.cos, sin=self._rope.sin)

    def _in_pieces(
        self, layer: int, rows: torch.Tensor, kernel: Callable[..., torch.Tensor], **more: object
    ) -> torch.Tensor:
        memory, block_size = self._kv.layer(layer), self._kv.block_size
        # By the table's width, not by the longest sequence: a captured graph then holds for all that the table can name.
        context = self._table.shape[1] * block_size
        pieces = [x.split(self._at_once) for x in (rows, self._table, self._lengths)]
        parts = [
            kernel(
                some, k=memory.k, v=memory.v, block_table=table, seq_lens=lengths, block_size=block_size, max_context=context,
                k_scale=memory.k_scale, v_scale=memory.v_scale, fixed_split=self._fixed_split, **more,
            )
            for some, table, lengths in zip(*pieces, strict=True)
        ]  # fmt: skip
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def ops_for(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Ops:
    """CUDA kernels where the model, the card and what is installed allow it, otherwise torch."""
    return TorchOps() if obstacle(config, device, dtype) else CudaOps(own=OwnAttention.of(config, device))


def obstacle(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `CudaOps` cannot run this model here, and what it would take; None where it can."""
    if device.type != "cuda":
        return f"device '{device}', must be a CUDA GPU"
    if dtype != torch.float16:
        return f"{dtype}, must be torch.float16"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % elementwise.VECTOR:
            return f"{name} = {getattr(config, name)}, must be a multiple of {elementwise.VECTOR}"
    if config.head_dim > elementwise.MAX_HEAD_DIM:
        return f"head_dim = {config.head_dim}, must be at most {elementwise.MAX_HEAD_DIM}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        found, least = (".".join(map(str, pair)) for pair in (capability, MIN_CAPABILITY))
        return f"compute capability {found}, must be {least} or higher"
    try:
        load_nvrtc()
    except MissingDependency as error:
        return str(error)
    return None
