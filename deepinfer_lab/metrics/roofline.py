"""Operations and bytes of one forward pass, by kind of layer, and the roof that a machine puts over them.

I = FLOPs / bytes is a pass's arithmetic intensity, and nothing is faster than min(peak, I * bandwidth): the roofline
(Williams, Waterman and Patterson, 2009), as the reference sheet has it in its section 3. What runs between the products
(norms, rotation, activation function) is left out, since a fused kernel could leave it in registers: so bytes are lower
bounds, and times made of them too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_lab.metrics.footprint import DENSE_BYTES, linear_bytes
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.source import ATTENTION_IN, ATTENTION_OUT, MLP_IN, MLP_OUT, linear_shape
from deepinfer_lab.quant.plan import HEAD, Plan

PRODUCTS = {"qkv": ATTENTION_IN, "o": ATTENTION_OUT, "gate, up": MLP_IN, "down": MLP_OUT}
LOGIT_BYTES = 4


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence in a pass: `new` of them are computed, `before` lie in the cache."""

    new: int
    before: int


@dataclass(frozen=True)
class Cost:
    """FLOPs (a multiply-add is two) and bytes that must pass between memory and the chip."""

    flops: float
    bytes: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Machine:
    """Bytes per second that memory delivers, and FLOPs per second of its matrix units."""

    bytes_per_s: float
    flops_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte above which arithmetic is the limit."""
        return self.flops_per_s / self.bytes_per_s

    def seconds(self, cost: Cost) -> float:
        """The least time."""
        return max(cost.flops / self.flops_per_s, cost.bytes / self.bytes_per_s)


def decode(batch: int, context: int) -> list[Span]:
    """A decode step of `batch` sequences of `context` tokens each."""
    return [Span(1, context)] * batch


def product(n: int, k: int, rows: int, bits: int | None, group: int) -> Cost:
    """x[rows, K] times a weight [N, K]: 2 N K rows FLOPs; the weight once, x once, the result once."""
    return Cost(2.0 * n * k * rows, sum(linear_bytes(n, k, bits, group)) + rows * (n + k) * DENSE_BYTES)


def forward_costs(config: ModelConfig, plan: Plan, group: int, spans: Sequence[Span]) -> dict[str, Cost]:
    """One pass over all layers: costs of qkv, o, gate and up, down (each all layers together), attention and head.

    Linear layers: `product` with as many rows as there are new tokens. They are 2 P tokens FLOPs for P weights (the
    reference sheet, section 2). Attention, in each layer: 4 heads head_dim FLOPs for every pair of a query and a position
    that it sees, half for the scores and half for the sums; K and V of all positions are read once a sequence, those of new
    tokens written, queries read and results written. Head: one row of logits a sequence.
    """
    tokens = sum(span.new for span in spans)
    costs = dict.fromkeys(PRODUCTS, Cost(0, 0))
    for index in range(config.num_layers):
        for kind, names in PRODUCTS.items():
            layers = [f"model.layers.{index}.{name}" for name in names]
            n = sum(linear_shape(config, layer)[0] for layer in layers)
            costs[kind] += product(n, linear_shape(config, layers[0])[1], tokens, plan.bits_for(layers[0]), group)
    pairs = sum(span.new * span.before + span.new * (span.new + 1) // 2 for span in spans)
    cached = sum(span.before + 2 * span.new for span in spans)  # new ones are written, then read
    moved = (2 * cached * config.kv_size + 2 * tokens * config.q_size) * DENSE_BYTES
    costs["attention"] = Cost(4.0 * config.q_size * pairs * config.num_layers, moved * config.num_layers)
    head = product(config.vocab_size, config.hidden_size, len(spans), plan.bits_for(HEAD), group)
    costs["head"] = Cost(head.flops, head.bytes + len(spans) * config.vocab_size * (LOGIT_BYTES - DENSE_BYTES))
    return costs


def total(costs: dict[str, Cost]) -> Cost:
    """Of a whole pass."""
    return sum(costs.values(), Cost(0, 0))
