"""The experiments of notebooks 03 and 04: every policy under the same loads."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from deepinfer_lab.engine.placement import PRIORITY_LANES, TWO_LANES
from deepinfer_lab.engine.policy import ASYMMETRIC, BARRIER, POLICIES, Policy
from deepinfer_lab.engine.sizer import Fixed
from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.overlap_cells import (
    Setting,
    insertion_row,
    latency_columns,
    load_for,
    physical_columns,
    random_prompts,
    served,
)
from deepinfer_lab.progress import bar

QWEN_3B = {"model": "synthetic:qwen2.5-3b", "bits": "w4", "group": 128}
SMOLLM2 = {"model": "smollm2-135m", "bits": "w4", "group": 64}
QWEN_7B = {"model": "synthetic:qwen2.5-7b", "bits": "mixed", "group": 128}


def _target(settings: dict[str, Any], policy: str) -> float:
    """What a policy is to hold between two tokens. On one lane a chunk comes on top of a decode step, which takes more."""
    return settings["one_lane_target_ms" if policy == "time-sliced" else "itl_target_ms"]


def overlap_sweep_rows(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each protocol, policy and number of clients.

    The load runs three times: to warm up, timed, and, where the protocol says so, under the profiler. Rows hold the second
    run's times and the third's kernels.
    """
    for protocol in params["protocols"]:
        model = load_for(protocol["model"], protocol["bits"], protocol["group"])
        prompt, new, chunk = protocol["prompt_tokens"], protocol["new_tokens"], protocol["chunk"]
        most = max(protocol["concurrency"])
        for policy in bar(protocol["policies"], desc=protocol["name"], unit="policy"):
            setting = Setting(policy, chunk, most, itl_target_ms=_target(params, policy))
            with setting.engine(model, prompt + new) as engine:
                for clients in protocol["concurrency"]:
                    prompts = random_prompts(model, clients * protocol["requests_per_client"], prompt, params["seed"])
                    served(engine, prompts[:clients], min(new, 8), clients)
                    traces, counted = served(engine, prompts, new, clients)
                    physical = dict.fromkeys(("physical_overlap_ms", "gpu_idle_share"))
                    if clients == protocol["profiled_concurrency"] and policy in protocol["profiled"]:
                        short = min(new, params["profiled_tokens"])
                        physical = physical_columns(partial(served, engine, prompts[: 2 * clients], short, clients))
                    yield {
                        "protocol": protocol["name"], **setting.columns(model), "concurrency": clients,
                        "prompt_tokens": prompt, "new_tokens": new, **latency_columns(traces), **counted, **physical,
                    }  # fmt: skip


def long_insertion_rows(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each case, policy, share of decode's multiprocessors, chunk size and number of readers."""
    for case in params["cases"]:
        model = load_for(case["model"], case["bits"], case["group"])
        document_tokens, readers = case["document_tokens"], case["readers"]
        reader_tokens = params["reader_tokens"]
        (document,) = random_prompts(model, 1, document_tokens, params["seed"] + 1)
        ways = list(product(case["policies"], case.get("decode_shares", [None])))
        for policy, share in bar(ways, desc=case["name"], unit="policy"):
            target = _target(case, policy)
            setting = Setting(policy, max(case["chunks"]), max(readers) + 1, itl_target_ms=target, decode_share=share)
            with setting.engine(model, document_tokens + reader_tokens) as engine:
                for chunk, count in product(case["chunks"], readers):
                    engine.tune(chunk_tokens=chunk)
                    prompts = random_prompts(model, count, case["reader_prompt_tokens"], params["seed"])
                    row = insertion_row(engine, prompts, document, reader_tokens)
                    yield {"case": case["name"], **setting.columns(model), "chunk": chunk, **row}


def chunk_inflight_rows(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each chunk size and number of pieces in flight."""
    model = load_for(params["model"], params["bits"], params["group"])
    prompt, new, clients = params["prompt_tokens"], params["new_tokens"], params["concurrency"]
    prompts = random_prompts(model, 2 * clients, prompt, params["seed"])
    setting = Setting(params["policy"], max(params["chunks"]), clients, max(params["max_in_flight"]))
    cells = list(product(params["chunks"], params["max_in_flight"]))
    with setting.engine(model, prompt + new) as engine:
        for chunk, in_flight in bar(cells, desc="chunk by in flight", unit="cell"):
            engine.tune(chunk_tokens=chunk, max_in_flight=in_flight)
            served(engine, prompts[:clients], 8, clients)
            traces, counted = served(engine, prompts, new, clients)
            yield {
                **setting.columns(model), "chunk": chunk, "max_in_flight": in_flight, "concurrency": clients,
                "prompt_tokens": prompt, "new_tokens": new, **latency_columns(traces), **counted,
            }  # fmt: skip


def overlap_ablation_rows(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Two lanes, and every combination of barrier or not, graphs or not, priority or not: which of them buys what."""
    model = load_for(params["model"], params["bits"], params["group"])
    prompts = random_prompts(model, params["readers"], params["reader_prompt_tokens"], params["seed"])
    (document,) = random_prompts(model, 1, params["document_tokens"], params["seed"] + 1)
    cells = [(j, g, p) for j in (BARRIER, ASYMMETRIC) for g in (False, True) for p in (TWO_LANES, PRIORITY_LANES)]
    for join, graphs, placement in bar(cells, desc="combinations", unit="cell"):
        name = f"{join.name}, {'graphs' if graphs else 'eager'}, {'priority' if placement.priority else 'no priority'}"
        made = partial(Policy, name, placement, Fixed(), join)
        setting = Setting(made, params["chunk"], params["readers"] + 1, graphs=graphs)
        with setting.engine(model, params["document_tokens"] + params["reader_tokens"]) as engine:
            row = insertion_row(engine, prompts, document, params["reader_tokens"])
            yield {**setting.columns(model), "priority": placement.priority, **row}


def cpu_gpu_gap_rows(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each policy and number of clients: the share of time in which the GPU ran nothing, under the profiler."""
    model = load_for(params["model"], params["bits"], params["group"])
    prompt, new = params["prompt_tokens"], params["new_tokens"]
    most = max(params["concurrency"])
    cells = [(policy, True) for policy in params["policies"]] + [("serial", False)]
    for policy, graphs in bar(cells, desc="policies", unit="policy"):
        setting = Setting(policy, params["chunk"], most, graphs=graphs)
        with setting.engine(model, prompt + new) as engine:
            for clients in params["concurrency"]:
                prompts = random_prompts(model, 2 * clients, prompt, params["seed"])
                served(engine, prompts[:clients], 4, clients)
                physical = physical_columns(partial(served, engine, prompts, new, clients))
                yield {**setting.columns(model), "concurrency": clients, **physical}


LANES = ["serial", "dual-stream", "dual-stream-async", "priority", "mixed", "partition", "adaptive"]

OVERLAP_SWEEP = Experiment(
    name="overlap_sweep",
    measure=overlap_sweep_rows,
    defaults={
        "protocols": [
            {  # section 5 of the article, which does not say how long its prompts were: three chunks
                "name": "article", **QWEN_3B, "policies": list(POLICIES), "chunk": 32, "prompt_tokens": 96,
                "new_tokens": 16, "concurrency": [1, 2, 4], "requests_per_client": 4,
                "profiled": ["serial", "dual-stream"], "profiled_concurrency": 4,
            },
            {
                "name": "modern", **QWEN_3B, "policies": list(POLICIES), "chunk": 512, "prompt_tokens": 512,
                "new_tokens": 128, "concurrency": [1, 4, 16, 64], "requests_per_client": 2,
                "profiled": LANES, "profiled_concurrency": 4,
            },
            {
                "name": "7b", **QWEN_7B, "policies": ["serial", "priority"], "chunk": 512, "prompt_tokens": 512,
                "new_tokens": 64, "concurrency": [1, 16], "requests_per_client": 2,
                "profiled": [], "profiled_concurrency": 1,
            },
            {
                "name": "smollm2", **SMOLLM2, "policies": ["serial", "priority", "mixed"], "chunk": 512, "prompt_tokens": 512,
                "new_tokens": 128, "concurrency": [1, 16], "requests_per_client": 2,
                "profiled": [], "profiled_concurrency": 1,
            },
        ],
        "profiled_tokens": 16,
        "itl_target_ms": 9.2, "one_lane_target_ms": 16.0,
        "seed": 0,
    },
    runs_on_cpu=False,
    description="every policy under closed loops: throughput, latency and the three counters of overlap",
)  # fmt: skip

LONG_INSERTION = Experiment(
    name="long_insertion",
    measure=long_insertion_rows,
    defaults={
        "cases": [
            {
                "name": "3b", **QWEN_3B, "policies": list(POLICIES), "chunks": [128, 512, 1024, 2048, 8192],
                "readers": [8], "document_tokens": 8192, "reader_prompt_tokens": 128,
                "itl_target_ms": 4.0, "one_lane_target_ms": 12.0,
            },
            {  # how much of the card
                "name": "shares", **QWEN_3B, "policies": ["partition", "adaptive"], "decode_shares": [1 / 8, 3 / 8],
                "chunks": [2048, 8192], "readers": [8], "document_tokens": 8192, "reader_prompt_tokens": 128,
                "itl_target_ms": 8.0, "one_lane_target_ms": 12.0,
            },
            {
                "name": "3b", **QWEN_3B, "policies": LANES, "chunks": [512, 2048],
                "readers": [32], "document_tokens": 8192, "reader_prompt_tokens": 128,
                "itl_target_ms": 9.2, "one_lane_target_ms": 16.0,
            },
            {
                "name": "article", **QWEN_3B, "policies": list(POLICIES), "chunks": [128], "readers": [1],
                "document_tokens": 189, "reader_prompt_tokens": 32, "itl_target_ms": 9.2, "one_lane_target_ms": 16.0,
            },
            {
                "name": "7b", **QWEN_7B, "policies": ["serial", "priority", "mixed", "adaptive"],
                "chunks": [2048], "readers": [8], "document_tokens": 8192, "reader_prompt_tokens": 128,
                "itl_target_ms": 9.0, "one_lane_target_ms": 20.0,
            },
        ],
        "reader_tokens": 1024,
        "seed": 0,
    },
    runs_on_cpu=False,
    description="a long document comes in while others decode: what they wait, and what it waits",
)  # fmt: skip

CHUNK_INFLIGHT = Experiment(
    name="chunk_inflight",
    measure=chunk_inflight_rows,
    defaults={
        **QWEN_3B, "policy": "priority", "chunks": [128, 256, 512, 1024, 2048], "max_in_flight": [1, 2, 4, 8],
        "prompt_tokens": 2048, "new_tokens": 64, "concurrency": 16, "seed": 0,
    },
    runs_on_cpu=False,
    description="chunk size by pieces of work in flight",
)  # fmt: skip

OVERLAP_ABLATION = Experiment(
    name="overlap_ablation",
    measure=overlap_ablation_rows,
    defaults={
        **QWEN_3B, "chunk": 512, "readers": 8, "document_tokens": 8192, "reader_prompt_tokens": 128,
        "reader_tokens": 1024, "seed": 0,
    },
    runs_on_cpu=False,
    description="barrier or not, graphs or not, priority or not",
)  # fmt: skip

CPU_GPU_GAP = Experiment(
    name="cpu_gpu_gap",
    measure=cpu_gpu_gap_rows,
    defaults={
        **QWEN_3B, "policies": ["serial", "dual-stream", "dual-stream-async", "priority", "mixed"], "chunk": 512,
        "prompt_tokens": 512, "new_tokens": 24,
        "concurrency": [1, 16], "seed": 0,
    },
    runs_on_cpu=False,
    description="share of time in which the GPU runs nothing, by policy",
)  # fmt: skip
