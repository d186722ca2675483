"""Hugging Face transformers serving the same file: the baseline that everybody has."""

import time
from pathlib import Path
from typing import Any

import torch

from deepinfer_lab.errors import MissingDependency, ModelNotFound
from deepinfer_lab.metrics.latency import RequestTrace
from deepinfer_lab.model.catalog import CATALOG, obtain
from deepinfer_lab.model.synthetic import PREFIX


def load(spec: str, device: torch.device) -> Any:
    """The same checkpoint in transformers, unquantised, in our engine's dtype for the device.

    Args:
        spec: a catalog name, a folder in Hugging Face format, a .gguf file, or a hub id.

    Raises:
        MissingDependency: transformers is not installed.
        ModelNotFound: a synthetic model, which has no checkpoint.
    """
    if spec.startswith(PREFIX):
        raise ModelNotFound(f"'{spec}' has no checkpoint for transformers to read; compare a real model")
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise MissingDependency(
            f"{error.name} is not installed; `pip install transformers accelerate` adds the baseline"
        ) from error
    logging.disable_progress_bar()
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    path = obtain(spec) if spec in CATALOG else Path(spec)
    if path.is_file():
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(spec, dtype=dtype)
    return model.to(device).eval()


class _Clock:
    """A transformers streamer that keeps the time of each token. Its first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@torch.inference_mode()
def generate(model: Any, prompt: list[int], output_tokens: int, request_id: str) -> RequestTrace:
    """One greedy request of exactly `output_tokens` tokens through `model.generate`."""
    ids = torch.tensor([prompt], device=model.device)
    clock, sent = _Clock(), time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        streamer=clock,
        do_sample=False,
        max_new_tokens=output_tokens,
        min_new_tokens=output_tokens,
        pad_token_id=0,
    )
    return RequestTrace(request_id, len(prompt), 0.0, tuple(t - sent for t in clock.times[1:]))
