"""A decoder-only transformer (Llama, Qwen2, Qwen3) over the paged cache: one forward for prefill, decode and mixes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, rms_norm, silu

from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.model.attention import AttentionMasks, paged_attention
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.rope import Rope, rotate
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


class Decoder:
    """Weights of a model and its forward pass.

    Args:
        config: sizes.
        embed: token embedding [vocab, hidden].
        blocks: one per layer.
        norm: final norm [hidden].
        lm_head: hidden -> vocab.
    """

    def __init__(
        self, config: ModelConfig, embed: torch.Tensor, blocks: list[Block], norm: torch.Tensor, lm_head: Linear
    ) -> None:
        self.config = config
        self._embed, self._blocks, self._norm, self._lm_head = embed, blocks, norm, lm_head
        self._rope = Rope(config, embed.device, embed.dtype)

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
        """Bytes of weights that one forward pass must read, however few its tokens: the roofline's numerator."""
        return sum(linear.read_bytes for linear in self._linears()) + self._lm_head.read_bytes

    def _linears(self) -> Iterator[Linear]:
        return (linear for b in self._blocks for linear in (b.qkv, b.o, b.gate_up, b.down))

    def forward(self, step: StepInput, kv: KVPool) -> torch.Tensor:
        """Run new tokens through the model, writing their K and V into the cache.

        Returns:
            logits [L, vocab], float32, for the rows named by `step.logits_index`.
        """
        masks = AttentionMasks(step, kv.block_size)
        angles = self._rope.at(step.positions)
        x = embedding(step.token_ids, self._embed)
        for layer, block in enumerate(self._blocks):
            x = x + self._attention(block, self._normed(x, block.input_norm), layer, step, kv, masks, angles)
            gate, up = block.gate_up(self._normed(x, block.post_norm)).chunk(2, dim=-1)
            x = x + block.down(silu(gate) * up)
        last = self._normed(x[step.logits_index], self._norm)
        return self._lm_head(last).float()

    def _attention(
        self,
        block: Block,
        x: torch.Tensor,
        layer: int,
        step: StepInput,
        kv: KVPool,
        masks: AttentionMasks,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        config = self.config
        heads = block.qkv(x).view(x.shape[0], -1, config.head_dim)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if block.q_norm is not None:
            q, k = self._normed(q, block.q_norm), self._normed(k, block.k_norm)
            qk = rotate(torch.cat((q, k), dim=1), *angles)
        else:
            qk = rotate(heads[:, : config.num_heads + config.num_kv_heads], *angles)
        q, k = qk.split((config.num_heads, config.num_kv_heads), dim=1)
        kv.write(layer, step.slot_mapping, k, v)
        return block.o(paged_attention(q, kv, layer, step, masks))

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)
