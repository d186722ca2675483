"""Which layer gets how many bits."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from deepinfer_lab.errors import SettingError
from deepinfer_lab.quant.layout import BITS

TABLES = EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


class Plan(Protocol):
    """Bits for each linear layer and each of `TABLES`; None leaves it dense. Norms and biases always stay dense.

    Tables are rounded to nearest, by whatever method layers are quantised. Tied ones are one table and must agree. Packing
    them costs quality, too: SmolLM2-135M (group 64, tied) has perplexity 16.9 with `w4` and 19.8 with `w4-all`.
    """

    @property
    def name(self) -> str: ...

    def bits_for(self, layer: str) -> int | None:
        """Bits for a linear layer or a table by its canonical name, such as `model.layers.0.mlp.down_proj`."""
        ...


@dataclass(frozen=True)
class QuantPlan:
    """The same bits for all layers of a kind, and for both tables: token embedding and output head."""

    name: str
    attention_bits: int | None
    mlp_bits: int | None
    tables_bits: int | None = None

    def bits_for(self, layer: str) -> int | None:
        if ".self_attn." in layer:
            return self.attention_bits
        if ".mlp." in layer:
            return self.mlp_bits
        return self.tables_bits if layer in TABLES else None


@dataclass(frozen=True)
class LayerPlan:
    """Bits by layer. Layers that read the same input (q, k, v; gate, up) are one product and must agree."""

    name: str
    bits: Mapping[str, int | None]

    def bits_for(self, layer: str) -> int | None:
        return self.bits.get(layer)


PLANS = MappingProxyType(
    {
        plan.name: plan
        for plan in (
            QuantPlan("none", None, None),
            QuantPlan("w4", 4, 4),
            QuantPlan("w3", 3, 3),
            QuantPlan("mixed", 4, 3),  # the article's plan for 7B: MLP W3, attention W4
            QuantPlan("w4-all", 4, 4, tables_bits=4),
            QuantPlan("mixed-all", 4, 3, tables_bits=4),  # with which 7B fits into 4 GiB
        )
    }
)


def plan_named(name: str) -> Plan:
    """The plan called `name`, or the one in a .json file that `save_plan` wrote.

    Raises:
        SettingError: no such plan, or a file that holds none.
    """
    if name.endswith(".json"):
        return _read(Path(name))
    if name not in PLANS:
        raise SettingError(f"bits '{name}': allowed are {', '.join(PLANS)}, or a plan's .json file")
    return PLANS[name]


def save_plan(plan: LayerPlan, path: Path) -> None:
    """Write a plan as JSON: {"name": ..., "bits": {layer: 3, 4 or null}}."""
    path.write_text(json.dumps({"name": plan.name, "bits": dict(plan.bits)}, indent=1) + "\n", encoding="utf-8")


def _read(path: Path) -> LayerPlan:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        plan = LayerPlan(str(document["name"]), dict(document["bits"]))
    except FileNotFoundError:
        raise SettingError(f"bits '{path}': no such file") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SettingError(f"bits '{path}': not a plan ({type(error).__name__}: {error})") from error
    for layer, bits in plan.bits.items():
        if bits is not None and bits not in BITS:
            raise SettingError(f"bits '{path}': {layer} has {bits!r} bits; allowed are 3, 4 and null")
    return plan
