"""Which layer gets how many bits."""

import pytest

from deepinfer_lab.errors import SettingError
from deepinfer_lab.quant.plan import PLANS, plan_named

LAYERS = {
    "attention": [f"model.layers.3.self_attn.{name}_proj" for name in "qkvo"],
    "mlp": [f"model.layers.11.mlp.{name}_proj" for name in ("gate", "up", "down")],
    "tables": ["model.embed_tokens", "lm_head"],
    "dense": [
        "model.norm",
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "lm_head.bias",
    ],
}


@pytest.mark.parametrize(
    ("name", "attention", "mlp", "tables"),
    [
        ("none", None, None, None),
        ("w4", 4, 4, None),
        ("w3", 3, 3, None),
        ("mixed", 4, 3, None),
        ("w4-all", 4, 4, 4),
        ("mixed-all", 4, 3, 4),
    ],
)
def test_plans(name, attention, mlp, tables):
    plan = plan_named(name)
    assert plan.name == name
    assert {plan.bits_for(layer) for layer in LAYERS["attention"]} == {attention}
    assert {plan.bits_for(layer) for layer in LAYERS["mlp"]} == {mlp}
    assert {plan.bits_for(layer) for layer in LAYERS["tables"]} == {tables}
    assert {plan.bits_for(layer) for layer in LAYERS["dense"]} == {None}


@pytest.mark.parametrize("name", ["", "W4", "w2", "int4", "4"])
def test_unknown_plans(name):
    with pytest.raises(SettingError, match=f"bits '{name}': allowed are none, w4, w3, mixed, w4-all, mixed-all, or"):
        plan_named(name)


def test_plans_are_listed_by_their_own_names():
    assert {name: plan.name for name, plan in PLANS.items()} == {name: name for name in PLANS}
