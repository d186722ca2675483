"""The experiment on a GPU's answers: how near they are to the CPU's, and what it costs to make them the same in any batch."""

from collections.abc import Iterator
from typing import Any

from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.kernel_dispatch import newest_table
from deepinfer_lab.lab.overlap_cells import Setting, latency_columns, random_prompts, served
from deepinfer_lab.metrics.quality import teacher_forced
from deepinfer_lab.model.load import load_model
from deepinfer_lab.model.reference_text import reference_text
from deepinfer_lab.progress import bar


def batch_invariance_rows(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of two kinds, told apart by `row`: agreement and cost."""
    yield from _agreement(params["agreement"])
    yield from _cost(params["cost"])


def _agreement(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The likeliest token at each position of the reference text, on the GPU and, with the same weights, on the CPU in float32.

    A model without a tokenizer reads random tokens.
    """
    variants = {
        "article's kernels": {},
        "card's table": {"dispatch": newest_table()},
        "batch-invariant": {"batch_invariant": True},
    }
    right = load_model(params["model"], bits=params["bits"], group=params["group"], device="cpu")
    count = params["positions"] + 1
    text = right.tokenizer.encode(reference_text()) if right.tokenizer else random_prompts(right, 1, count, 0)[0]
    tokens = text[:count]
    expected = teacher_forced(right.decoder, tokens, count)
    for name, more in bar(variants.items(), desc="variants", unit="variant"):
        found = teacher_forced(
            load_model(params["model"], bits=params["bits"], group=params["group"], **more).decoder, tokens, count
        )
        yield {
            "row": "agreement", "model": right.name, "bits": params["bits"], "variant": name, "positions": params["positions"],
            "top1_agreement": found.agreement(expected), "perplexity": found.perplexity,
            "perplexity_cpu": expected.perplexity,
        }  # fmt: skip


def _cost(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Closed loops of random prompts, with the card's own choice of kernels and with one kernel for all numbers of rows."""
    most = max(params["concurrency"])
    for invariant in bar((False, True), desc="modes", unit="mode"):
        more = {"batch_invariant": True} if invariant else {"dispatch": newest_table()}
        model = load_model(params["model"], bits=params["bits"], group=params["group"], **more)
        setting = Setting(params["policy"], params["chunk"], most)
        with setting.engine(model, params["prompt_tokens"] + params["new_tokens"]) as engine:
            for clients in params["concurrency"]:
                prompts = random_prompts(model, 2 * clients, params["prompt_tokens"], params["seed"])
                served(engine, prompts[:clients], 4, clients)
                traces, _ = served(engine, prompts, params["new_tokens"], clients)
                yield {
                    "row": "cost", **setting.columns(model), "batch_invariant": invariant, "concurrency": clients,
                    "prompt_tokens": params["prompt_tokens"], **latency_columns(traces),
                }  # fmt: skip


BATCH_INVARIANCE = Experiment(
    name="batch_invariance",
    measure=batch_invariance_rows,
    defaults={
        "agreement": {"model": "smollm2-135m", "bits": "w4", "group": 64, "positions": 512},
        "cost": {
            "model": "synthetic:qwen2.5-3b", "bits": "w4", "group": 128, "policy": "priority", "chunk": 512,
            "prompt_tokens": 512, "new_tokens": 64, "concurrency": [1, 8, 32], "seed": 0,
        },
    },
    runs_on_cpu=False,
    description="a GPU's likeliest tokens beside a CPU's, and what the same bits in any batch cost",
)  # fmt: skip
