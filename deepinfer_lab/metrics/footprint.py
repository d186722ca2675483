"""What a model takes of a card's memory, from its config and plan alone: nothing is loaded."""

from dataclasses import dataclass

import torch

from deepinfer_lab.kv.pool import KVShape
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.source import dense_shapes, linear_layers, linear_shape
from deepinfer_lab.quant.layout import check_shape, packed_columns
from deepinfer_lab.quant.plan import EMBEDDING, HEAD, Plan

DENSE_BYTES = 2  # of a float16 value, which scales are too


@dataclass(frozen=True)
class Footprint:
    """Bytes on a GPU, where all that is not packed is float16. `workspace` is an estimate, the others are exact.

    Attributes:
        attention, mlp: packed values of linear layers; dense ones where the plan has no bits. scales: theirs.
        embedding: [vocab, hidden], values and scales. head: the same again where it is not tied to the embedding, else 0.
        small: norms, biases, and the cosines and sines of every position.
        kv_token: K and V of one token, in all layers.
        workspace: what one forward pass holds beside all that; see `workspace_bytes`.
    """

    attention: int
    mlp: int
    scales: int
    embedding: int
    head: int
    small: int
    kv_token: int
    workspace: int

    @property
    def weights(self) -> int:
        """All that is loaded."""
        return self.attention + self.mlp + self.scales + self.embedding + self.head + self.small

    def kv_tokens(self, budget: int) -> int:
        """Tokens whose K and V fit into what a budget of bytes leaves; negative where not even the weights do."""
        return (budget - self.weights - self.workspace) // self.kv_token


def linear_bytes(n: int, k: int, bits: int | None, group: int) -> tuple[int, int]:
    """Values and scales of a weight [N, K]: N K bits / 8 and 2 N K / group (`quant.layout`); N K float16 without bits.

    Raises:
        QuantisationError: a shape that the layout cannot hold.
    """
    if bits is None:
        return n * k * DENSE_BYTES, 0
    check_shape(k, bits, group)
    return n * packed_columns(k, bits), n * (k // group) * DENSE_BYTES


def workspace_bytes(config: ModelConfig, chunk: int, sequences: int) -> int:
    """About what a forward pass of `chunk` tokens holds at its widest: in the MLP, of each token gate and up, their product,
    and six vectors of the hidden size; and the logits of `sequences` rows as float16 and float32. What the blocks of chained
    decode steps leave for one another (`kernels.decode_chain`) is below 1 MiB, and not in it."""
    widest = 3 * config.intermediate_size + 6 * config.hidden_size
    return chunk * widest * DENSE_BYTES + sequences * config.vocab_size * (DENSE_BYTES + 4)


def footprint(
    config: ModelConfig,
    plan: Plan,
    *,
    group: int,
    int8_kv: bool = False,
    chunk: int = 256,
    sequences: int = 8,
) -> Footprint:
    """A model's bytes by part.

    Args:
        plan, group: of the linear layers, the embedding and the head.
        int8_kv: K and V in one byte a value, with a scale a vector.
        chunk, sequences: the largest forward pass.

    Raises:
        QuantisationError: a shape that a layout cannot hold.
    """
    values, scales = {"self_attn": 0, "mlp": 0}, 0
    for layer in linear_layers(config):
        n, k = linear_shape(config, layer)
        packed, its = linear_bytes(n, k, plan.bits_for(layer), group)
        values[layer.split(".")[3]] += packed
        scales += its
    table = config.vocab_size, config.hidden_size
    embedding = sum(linear_bytes(*table, plan.bits_for(EMBEDDING), group))
    head = 0 if config.tied_embeddings else sum(linear_bytes(*table, plan.bits_for(HEAD), group))
    vectors = sum(shape[0] for _, shape in dense_shapes(config) if len(shape) == 1)
    kv = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, torch.float16, quantised=int8_kv)
    return Footprint(
        attention=values["self_attn"],
        mlp=values["mlp"],
        scales=scales,
        embedding=embedding,
        head=head,
        small=(vectors + config.max_context * config.head_dim) * DENSE_BYTES,
        kv_token=kv.bytes_per_token,
        workspace=workspace_bytes(config, chunk, sequences),
    )
