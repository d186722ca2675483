"""A decoder-only transformer (Llama, Qwen2, Qwen3) over the paged cache: one forward for prefill, decode and mixes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import rms_norm

from deepinfer_lab.kernels.decode_chain import DecodeChain
from deepinfer_lab.kernels.mma_small import Norm
from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.model.chained_steps import chain_of
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.embedding import Embedding
from deepinfer_lab.model.fused_block import fused_block, fused_rows, normed_product
from deepinfer_lab.model.ops import CudaOps, Ops, StepOps, TorchOps, ops_for
from deepinfer_lab.model.rope import Rope
from deepinfer_lab.model.step_input import StepInput
from deepinfer_lab.quant.linear import DenseLinear, QuantLinear

Linear = DenseLinear | QuantLinear


@dataclass(frozen=True)
class Block:
    """One transformer block. Q, K and V are one product, and so are gate and up: each input is read once."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Linear  # hidden -> q_size + 2 * kv_size
    q_norm: torch.Tensor | None  # [head_dim], Qwen3
    k_norm: torch.Tensor | None
    o: Linear  # q_size -> hidden
    post_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear  # intermediate -> hidden

    @property
    def interleaved(self) -> bool:
        """Whether gate_up's outputs are (`quant.interleave`), instead of gate's before up's: where it may ever be fused."""
        return bool(self.gate_up.fused_rows)


class Decoder:
    """Weights of a model and its forward pass.

    Args:
        config: sizes.
        embed: token embedding, ids -> hidden.
        blocks: one per layer.
        norm: final norm [hidden].
        lm_head: hidden -> vocab.
        ops: what runs between the linear layers; None: what `ops_for` finds fit.
        batch_invariant: whether all of these give a token the same bits in any batch (`model.invariance`).
    """

    def __init__(
        self,
        config: ModelConfig,
        embed: Embedding,
        blocks: list[Block],
        norm: torch.Tensor,
        lm_head: Linear,
        ops: Ops | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.config, self.batch_invariant = config, batch_invariant
        self._embed, self._blocks, self._norm, self._lm_head = embed, blocks, norm, lm_head
        self._rope = Rope(config, embed.device, embed.dtype)
        self._ops = ops or ops_for(config, embed.device, embed.dtype)
        self._fused_rows = fused_rows(blocks) if isinstance(self._ops, CudaOps) else frozenset()

    @property
    def embed(self) -> Embedding:
        """The token embedding: ids [T] -> [T, hidden]."""
        return self._embed

    @property
    def device(self) -> torch.device:
        return self._embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embed.dtype

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim, self.dtype)

    @property
    def linear_bytes(self) -> int:
        """Bytes of all linear weights in the blocks, as stored: what quantisation shrinks."""
        return sum(linear.nbytes for linear in self._linears())

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that one forward pass must read, however few its tokens: the roofline's numerator. The embedding
        does not count, since a pass reads one row of it a token."""
        return sum(linear.read_bytes for linear in self._linears()) + self._lm_head.read_bytes

    @property
    def uses_kernels(self) -> bool:
        """Whether its forward pass launches kernels of this package."""
        return not isinstance(self._ops, TorchOps) or any(
            isinstance(each, QuantLinear) for each in (*self._linears(), self._lm_head)
        )

    @property
    def reaches_host(self) -> bool:
        """As its `Ops`."""
        return self._ops.reaches_host

    def _linears(self) -> Iterator[Linear]:
        return (linear for b in self._blocks for linear in (b.qkv, b.o, b.gate_up, b.down))

    def prepare(self, tokens: int) -> None:
        """What must come, in the same thread, before `forward` of a step with a chunk of so many tokens is captured."""
        self._ops.prepare(tokens)

    def chain(self, kv: KVPool) -> DecodeChain | None:
        """What `forward` can take for decode steps of one sequence over this cache; None where anything stands against it. Each
        call makes a new one, and one at a time may run on a device."""
        if self.batch_invariant or not isinstance(self._ops, CudaOps):
            return None
        return chain_of(self.config, self._blocks, self._norm, self._rope, kv)

    def forward(self, step: StepInput, kv: KVPool, chain: DecodeChain | None = None) -> torch.Tensor:
        """Run new tokens through the model, writing their K and V into the cache.

        Args:
            chain: what `chain` made, for a step of one new token of one sequence.

        Returns:
            logits [L, vocab], as the head makes them, for the rows named by `step.logits_index`.
        """
        if chain is not None:
            assert step.query_lens == (1,)
            _, normed = chain(self._ops.embed(self._embed, step), step.block_table, step.seq_lens)
            return self._lm_head(normed)
        ops, eps = self._ops, self.config.rms_norm_eps
        on_step = ops.step(step, kv, self._rope)
        x = ops.embed(self._embed, step)
        if len(x) in self._fused_rows:
            for layer, block in enumerate(self._blocks):
                x = fused_block(block, x, eps, partial(self._attend, layer, block, on_step))
            return self._fused_logits(x if len(step.logits_index) == len(x) else x[step.logits_index])
        normed = ops.norm(x, self._blocks[0].input_norm, eps)
        for layer, block in enumerate(self._blocks):
            attended = block.o(self._attend(layer, block, on_step, block.qkv(normed)))
            x, normed = ops.add_norm(x, attended, block.post_norm, eps)
            delta = block.down(ops.silu_mul(block.gate_up(normed), block.interleaved))
            if layer + 1 < len(self._blocks):
                x, normed = ops.add_norm(x, delta, self._blocks[layer + 1].input_norm, eps)
        if len(step.logits_index) < len(x):  # otherwise all rows are wanted, and they are in order
            x, delta = x[step.logits_index], delta[step.logits_index]
        _, last = ops.add_norm(x, delta, self._norm, eps)
        return self._lm_head(last)

    def likeliest(
        self, logits: torch.Tensor, last: torch.Tensor | None = None, host: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What `Ops.likeliest` says of what `forward` returned."""
        return self._ops.likeliest(logits, last, host)

    def pass_block(self, block: Block, x: torch.Tensor, step: StepInput, kv: KVPool) -> torch.Tensor:
        """One block by itself: hidden states x [T, hidden] -> [T, hidden]. K and V go to the pool's first layer."""
        ops, eps = self._ops, self.config.rms_norm_eps
        qkv = block.qkv(ops.norm(x, block.input_norm, eps))
        attended = block.o(self._attend(0, block, ops.step(step, kv, self._rope), qkv))
        x, normed = ops.add_norm(x, attended, block.post_norm, eps)
        return x + block.down(ops.silu_mul(block.gate_up(normed), block.interleaved))

    def _fused_logits(self, x: torch.Tensor) -> torch.Tensor:
        """What the last block makes [L, hidden] -> [L, vocab]."""
        head, eps = self._lm_head, self.config.rms_norm_eps
        if len(x) in head.fused_rows:
            return normed_product(head, x, Norm(self._norm, eps))
        return head(self._ops.norm(x, self._norm, eps))

    def _attend(self, layer: int, block: Block, on_step: StepOps, qkv: torch.Tensor) -> torch.Tensor:
        """[T, q_size + 2 * kv_size] -> [T, q_size]."""
        config = self.config
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        if block.q_norm is not None:
            q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
            heads = torch.cat((self._normed(q, block.q_norm), self._normed(k, block.k_norm), v), dim=1)
        return on_step.attend(layer, heads)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)
