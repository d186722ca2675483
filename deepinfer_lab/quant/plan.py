"""Which layer gets how many bits."""

from dataclasses import dataclass

from deepinfer_lab.errors import SettingError


@dataclass(frozen=True)
class QuantPlan:
    """Bits for the two kinds of linear layer in a decoder block; None leaves a layer dense.

    Embeddings, the output head and norms always stay dense.
    """

    name: str
    attention_bits: int | None
    mlp_bits: int | None

    def bits_for(self, layer: str) -> int | None:
        """Bits for a linear layer by its canonical name, such as `model.layers.0.mlp.down_proj`."""
        if ".self_attn." in layer:
            return self.attention_bits
        if ".mlp." in layer:
            return self.mlp_bits
        return None


PLANS = {
    plan.name: plan
    for plan in (
        QuantPlan("none", None, None),
        QuantPlan("w4", 4, 4),
        QuantPlan("w3", 3, 3),
        QuantPlan("mixed", 4, 3),  # the article's plan for 7B: MLP W3, attention W4
    )
}


def plan_named(name: str) -> QuantPlan:
    """The plan called `name`.

    Raises:
        SettingError: no such plan.
    """
    if name not in PLANS:
        raise SettingError(f"bits '{name}': allowed are {', '.join(PLANS)}")
    return PLANS[name]
