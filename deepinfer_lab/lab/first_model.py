"""The two experiments of notebook 00: a real model served under load, and the same model with fewer bits."""

import time
from collections.abc import Iterator
from typing import Any

import torch

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.serving import Load, Server
from deepinfer_lab.metrics.bandwidth import read_bandwidth
from deepinfer_lab.metrics.quality import teacher_forced
from deepinfer_lab.model.load import load_model
from deepinfer_lab.model.reference_text import reference_text, text_version


def _serve(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    model = load_model(params["model"], bits=params["bits"], group=params["group"])
    decoder = model.decoder
    yield {
        "row": "machine",
        "device": decoder.device.type,
        "threads": torch.get_num_threads(),
        "read_bytes_per_s": read_bandwidth(decoder.device),
        "step_bytes": decoder.step_bytes,
        "kv_bytes_per_token": decoder.kv_shape.bytes_per_token,
    }
    config = EngineConfig(policy=params["policy"], chunk_tokens=params["chunk_tokens"])
    with Server(model, config) as server:
        sampling = SamplingParams(max_tokens=params["answer_tokens"])
        for question in params["questions"]:
            answer = server.engine.generate([server.engine.render_chat(question)], sampling)[0]
            yield {"row": "answer", "question": question, "text": answer.text, "reason": answer.reason.value}
        for concurrency in params["concurrency"]:
            load = Load(concurrency, params["prompt_tokens"], params["output_tokens"], params["requests_per_client"])
            for row in server.serve(load).rows():
                yield {**row, "policy": params["policy"], "chunk": params["chunk_tokens"], "bits": params["bits"]}


SERVE_REAL_MODEL = Experiment(
    name="serve_real_model",
    measure=_serve,
    defaults={
        "model": "smollm2-135m",
        "bits": "w4",
        "group": 64,
        "policy": "serial",
        "chunk_tokens": 64,
        "concurrency": [1, 8],
        "prompt_tokens": 128,
        "output_tokens": 64,
        "requests_per_client": 2,
        "questions": ["What is the capital of France?", "Write one sentence about the sea."],
        "answer_tokens": 48,
    },
    runs_on_cpu=True,
    description="SmolLM2-135M under a closed loop: what clients saw, and what the lane ran",
)


def _few_bits(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    reference = reference_tokens = None
    for bits in params["bits"]:
        started = time.perf_counter()
        model = load_model(params["model"], bits=bits, group=params["group"])
        load_s = time.perf_counter() - started
        text = model.tokenizer.encode(reference_text())[: params["text_tokens"]]
        read = teacher_forced(model.decoder, text, params["window"])
        # Raw text, not a chat: greedy decoding after the same beginning, compared token by token.
        sampling = SamplingParams(max_tokens=params["new_tokens"], ignore_eos=True)
        with Engine(model.decoder, model.tokenizer, EngineConfig()) as engine:
            done = engine.generate([params["beginning"]], sampling)[0]
        if reference is None or reference_tokens is None:
            reference, reference_tokens = read, done.tokens
        same = [a == b for a, b in zip(done.tokens, reference_tokens, strict=True)]
        yield {
            "bits": bits,
            "group": params["group"] if bits != "none" else None,
            "text": text_version(),
            "load_s": load_s,
            "linear_bytes": model.decoder.linear_bytes,
            "step_bytes": model.decoder.step_bytes,
            "perplexity": read.perplexity,
            "top1_agreement": read.agreement(reference),
            "same_beginning_tokens": same.index(False) if False in same else len(same),
            "continuation": done.text,
            "token_times_s": [t - done.token_times[0] for t in done.token_times],
        }


FEW_BITS = Experiment(
    name="few_bits",
    measure=_few_bits,
    defaults={
        "model": "smollm2-135m",
        "bits": ["none", "w4", "mixed", "w3"],  # the first is what the others are compared with
        "group": 64,
        "text_tokens": 4096,
        "window": 1024,
        "beginning": "The three primary colours are",
        "new_tokens": 48,
    },
    runs_on_cpu=True,
    description="SmolLM2-135M rounded to nearest in W4, W3 and mixed: size, speed, perplexity, agreement",
)
