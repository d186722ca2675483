"""The experiment of notebook 05: what a quantiser, its bits, its group and a plan by layer cost, and which layers mind."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.errors import SettingError
from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.metrics.quality import compare
from deepinfer_lab.model.build import build_block, build_outside
from deepinfer_lab.model.calibration import SKIPPED, Calibration
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.load import LoadedModel, load_model, open_source
from deepinfer_lab.model.quantise import PARTS, PackedModel, quantise_layers
from deepinfer_lab.model.reference_text import reference_text, text_version
from deepinfer_lab.model.source import WeightSource, linear_layers, linear_shape
from deepinfer_lab.model.tokenizer import Tokenizer
from deepinfer_lab.quant.layout import check_shape, packed_columns
from deepinfer_lab.quant.plan import LayerPlan, Plan, plan_named
from deepinfer_lab.quant.planner import Unit, plan_for

BEST = "gptq"  # the method of every row in which something else than the method is compared


@dataclass(frozen=True)
class Yardstick:
    """What every version of a model is held against: the unquantised one, on one text and after one beginning.

    Attributes:
        spec, device: as for `load_model`.
        model: unquantised. tokens: of the text. window: of them, as for `metrics.quality.compare`.
        beginning: a text to go on from, greedily. new_tokens: by how many tokens.
    """

    spec: str
    device: str | None
    model: LoadedModel
    tokens: tuple[int, ...]
    window: int
    beginning: str
    new_tokens: int

    @classmethod
    def load(
        cls, spec: str, *, tokens: int, window: int, beginning: str, new_tokens: int, device: str | None = None
    ) -> "Yardstick":
        """Load the unquantised model and cut the text.

        Raises:
            SettingError: no tokenizer, or a number of tokens that `evaluation_tokens` refuses.
            Others: as `load_model` does.
        """
        model = load_model(spec, bits="none", device=device)
        if model.tokenizer is None:
            raise SettingError(f"model '{model.name}' has no tokenizer, so there is no text that it could predict")
        return cls(spec, device, model, evaluation_tokens(model.tokenizer, tokens), window, beginning, new_tokens)

    def unquantised(self) -> dict[str, Any]:
        """The row of the model itself, whose KL must be 0 and whose agreement 1."""
        return self._row(self.model, None, None, None)

    def quantised(self, bits: str | Plan, method: str, group: int) -> dict[str, Any]:
        """Quantise the model and measure what is left of it. For arguments and errors see `load_model`."""
        started = time.perf_counter()
        model = load_model(self.spec, bits=bits, group=group, method=method, device=self.device)
        return self._row(model, method, group, time.perf_counter() - started)

    def _row(self, model: LoadedModel, method: str | None, group: int | None, seconds: float | None) -> dict[str, Any]:
        found = compare(model.decoder, self.model.decoder, self.tokens, self.window)
        greedy = SamplingParams(max_tokens=self.new_tokens, ignore_eos=True)
        with Engine(model.decoder, model.tokenizer, EngineConfig()) as engine:
            sample = engine.generate([self.beginning], greedy)[0].text
        return {
            "row": "quality",
            "bits": model.bits,
            "method": method,
            "group": group,
            **dataclasses.asdict(found),
            "bytes": model.decoder.linear_bytes,
            "quantise_s": seconds,
            "sample": sample,
            "text": text_version(),
        }


def evaluation_tokens(tokenizer: Tokenizer, count: int) -> tuple[int, ...]:
    """The first tokens of the reference text: before those that calibration reads, so that no method has seen them.

    Raises:
        SettingError: a count below 2 or beyond where calibration begins.
    """
    if not 2 <= count <= SKIPPED:
        raise SettingError(f"{count} tokens to evaluate: allowed are 2 to {SKIPPED}, where the calibration text begins")
    return tuple(tokenizer.encode(reference_text())[:count])


def check_groups(config: ModelConfig, groups: Iterable[int]) -> None:
    """Find out before anything is measured whether every layer can have these groups.

    Raises:
        QuantisationError: one cannot.
    """
    for group in groups:
        for layer in linear_layers(config):
            check_shape(linear_shape(config, layer)[1], 4, group)


def sensitivity(
    source: WeightSource,
    reference: Decoder,
    tokens: Sequence[int],
    window: int,
    *,
    group: int,
    method: str = BEST,
    calibration: Calibration | None = None,
) -> Iterator[dict[str, Any]]:
    """What it costs to have one unit alone in W3, and everything else unquantised: a row per unit, in forward order.

    Args:
        source: the reference's weights.
        reference: unquantised. tokens, window: as for `metrics.quality.compare`.
        group, method, calibration: as for `quantise_layers`; activations are those of the unquantised model.

    Raises:
        SettingError, CheckpointError, QuantisationError: as `quantise_layers` does.
    """
    settings = {"group": group, "device": reference.device, "dtype": reference.dtype}
    layers = quantise_layers(
        source, plan_named("w3"), group=group, method=method, sequential=False, calibration=calibration,
        device=reference.device,
    )  # fmt: skip
    blocks = [build_block(source, plan_named("none"), i, **settings) for i in range(source.config.num_layers)]
    for (index, unit), members in groupby(layers, key=lambda layer: _place(layer[0])):
        weights = dict(members)
        plan = LayerPlan(f"{unit} of block {index}", dict.fromkeys(weights, 3))
        block = build_block(PackedModel(source, weights), plan, index, **settings)
        model = build_outside(source, plan, [*blocks[:index], block, *blocks[index + 1 :]], **settings)
        bytes3 = sum(weight.nbytes for weight in weights.values())
        yield {
            "row": "sensitivity",
            "block": index,
            "unit": unit,
            "bytes3": bytes3,
            "bytes4": bytes3 + sum(w.n * (packed_columns(w.k, 4) - packed_columns(w.k, 3)) for w in weights.values()),
            "kl": compare(model, reference, tokens, window).kl,
        }


def _place(layer: str) -> tuple[int, str]:
    """`model.layers.7.mlp.up_proj` is of block 7's gate_up."""
    index, name = layer.removeprefix("model.layers.").split(".", 1)
    return int(index), next(unit for unit, names in PARTS.items() if name in names)


def unit_of(row: dict[str, Any]) -> Unit:
    """The planner's unit that a "sensitivity" row speaks of."""
    layers = tuple(f"model.layers.{row['block']}.{name}" for name in PARTS[row["unit"]])
    return Unit(layers, row["bytes3"], row["bytes4"], row["kl"])


def planned(units: Sequence[Unit], fraction: float) -> LayerPlan:
    """The best plan whose size lies at `fraction` of the way from all W3 (0) to all W4 (1), or just below it.

    Raises:
        SettingError: a fraction below 0 or over 1.
    """
    if not 0 <= fraction <= 1:
        raise SettingError(f"fraction {fraction}: allowed are 0, all layers in W3, to 1, all in W4")
    least, most = sum(unit.bytes3 for unit in units), sum(unit.bytes4 for unit in units)
    plan = plan_for(least + int(fraction * (most - least)), units)
    return dataclasses.replace(plan, name=f"planned-{fraction:g}")


def _measure(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    group = params["group"]
    source = open_source(params["model"])
    check_groups(source.config, [group, *params["other_groups"]])
    yardstick = Yardstick.load(
        params["model"],
        tokens=params["eval_tokens"],
        window=params["window"],
        beginning=params["beginning"],
        new_tokens=params["new_tokens"],
    )
    yield yardstick.unquantised()
    for method in params["methods"]:
        for bits in params["bits"]:
            yield yardstick.quantised(bits, method, group)
    for other in params["other_groups"]:
        for bits in ("w4", "w3"):
            yield yardstick.quantised(bits, BEST, other)
    units = []
    part = yardstick.tokens[: params["sensitivity_tokens"]]
    for row in sensitivity(source, yardstick.model.decoder, part, params["window"], group=group):
        units.append(unit_of(row))
        yield row
    for fraction in params["fractions"]:
        plan = planned(units, fraction)
        in_w4 = ["{}.{}".format(*_place(unit.layers[0])) for unit in units if plan.bits_for(unit.layers[0]) == 4]
        yield {**yardstick.quantised(plan, BEST, group), "in_w4": in_w4}


QUANTISATION_QUALITY = Experiment(
    name="quantisation_quality",
    measure=_measure,
    defaults={
        "model": "smollm2-135m",
        "methods": ["rtn", "scale-search", "gptq"],
        "bits": ["w4", "mixed", "w3"],
        "group": 64,
        "other_groups": [32],  # 128 does not divide this model's 576
        "fractions": [0.25, 0.5, 0.75],
        "eval_tokens": 4096,
        "window": 1024,
        "sensitivity_tokens": 512,
        "beginning": "The three primary colours are",
        "new_tokens": 40,
    },
    runs_on_cpu=True,
    description="SmolLM2-135M by three quantisers, three plans and by plans that know which layers mind",
)
