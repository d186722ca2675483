"""The experiment of notebook 07: what a machine can do, what it serves in closed loops and in open ones, and what fits."""

import gc
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.event import Event, StepEvent
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.errors import EngineClosed, RequestFailed
from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.kernel_dispatch import newest_table
from deepinfer_lab.lab.overlap_cells import Setting, load_for, random_prompts
from deepinfer_lab.metrics.bandwidth import matrix_rate, read_bandwidth
from deepinfer_lab.metrics.capacity import ttft_parts
from deepinfer_lab.metrics.latency import RequestTrace
from deepinfer_lab.model.load import load_model
from deepinfer_lab.progress import bar
from deepinfer_lab.workload.arrivals import gamma
from deepinfer_lab.workload.closed_loop import closed_loop
from deepinfer_lab.workload.open_loop import open_loop

MIB = 1 << 20
PARTS = ("queue", "prefill", "beside", "idle", "first_token")


def machine_row(device: torch.device) -> dict[str, Any]:
    """The two numbers of a roofline, measured."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    return {
        "row": "machine", "device": device.type, "dtype": str(dtype).removeprefix("torch."),
        "read_bytes_per_s": read_bandwidth(device), "flops_per_s": matrix_rate(device, dtype),
    }  # fmt: skip


def request_columns(traces: Sequence[RequestTrace], steps: Sequence[StepEvent]) -> dict[str, Any]:
    """What came of each request, in the order of the traces: milliseconds, null where a request never got that far."""

    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1e3, 3)

    parts = [ttft_parts(trace, steps) for trace in traces]
    return {
        "requests": len(traces),
        "errors": sum(trace.error is not None for trace in traces),
        "due_ms": [ms(trace.sent) for trace in traces],
        "ttft_ms": [ms(trace.ttft) for trace in traces],
        "e2e_ms": [ms(trace.e2e) for trace in traces],
        "longest_gap_ms": [ms(max(trace.itl, default=None)) for trace in traces],
        **{f"{name}_ms": [ms(part and getattr(part, name)) for part in parts] for name in PARTS},
    }


def loop_rows(case: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """Closed loops of every policy, then open ones of every policy, all at the same rates.

    Rates are parts of what the first policy serves to the most clients, so that one list of them suits any machine.
    """
    model = load_for(case["model"], case["bits"], case["group"])
    prompt, new, most = case["prompt_tokens"], case["new_tokens"], max(case["clients"])
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    heard: list[StepEvent] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepEvent):
            heard.append(event)

    capacity = None
    for policy in bar(case["policies"], desc="policies", unit="policy"):
        setting = Setting(policy, case["chunk"], most)
        columns = {**setting.columns(model), "prompt_tokens": prompt, "new_tokens": new}
        with setting.engine(model, prompt + new, listen) as engine:
            for clients in case["clients"]:
                count = clients * case["requests_per_client"]
                prompts = random_prompts(model, count, prompt, seed)
                closed_loop(
                    engine, prompts[:clients], SamplingParams(max_tokens=4, ignore_eos=True), clients, "warm-up"
                )
                heard.clear()
                origin = time.perf_counter()
                traces = closed_loop(engine, prompts, params, clients, f"c{clients}-{origin}", origin)
                row = request_columns(traces, _since(heard, origin))
                span = max((trace.token_times[-1] for trace in traces if trace.token_times), default=0.0)
                capacity = count / span if policy == case["policies"][0] and span else capacity
                yield {"row": "loop", "loop": "closed", **columns, "clients": clients, **row}
            assert capacity is not None, "no client of the first policy was served"
            for loop, cv, part in [(each["loop"], each["cv"], part) for each in case["open"] for part in each["parts"]]:
                rate = part * capacity
                due = gamma(rate, case["requests"], cv, seed)
                prompts = random_prompts(model, case["requests"], prompt, seed + 1)
                heard.clear()
                origin = time.perf_counter()
                seen = open_loop(engine, [(p, new) for p in prompts], due, name=f"{loop}-{origin}", origin=origin)
                row = request_columns(seen.traces, _since(heard, origin))
                late = {
                    "offered_per_s": seen.offered_rate,
                    "sent_per_s": seen.achieved_rate,
                    "late_ms": seen.max_lateness * 1e3,
                }
                yield {
                    "row": "loop",
                    "loop": loop,
                    **columns,
                    "cv": cv,
                    "part": part,
                    "asked_per_s": rate,
                    **late,
                    **row,
                }


def budget_row(case: dict[str, Any], cap_mib: int, seed: int) -> dict[str, Any]:
    """A model loaded and served while torch's allocator may take no more than `cap_mib`, or how far it got.

    The cap holds for all of torch's memory: weights, KV, graphs, workspaces. CUDA's own context and the code of kernels lie
    beside it. KV gets what the loaded model leaves, less the reserve.
    """
    gc.collect()  # engines that are gone
    torch._C._cuda_clearCublasWorkspaces()  # and what cuBLAS keeps of each of their streams, 32 MiB on Hopper
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    row = {
        "row": "budget",
        "cap_mib": cap_mib,
        **case,
        "reached": "nothing",
        "reason": None,
        "kv_mib": None,
        "kv_pool_tokens": None,
    }
    torch.cuda.set_per_process_memory_fraction(cap_mib * MIB / total)
    try:
        model = load_model(case["model"], bits=case["bits"], group=case["group"], dispatch=newest_table())
        row |= {"reached": "loaded", "loaded_bytes": torch.cuda.memory_allocated()}
        torch.cuda.empty_cache()  # what loading was done with; while a graph is captured, nothing is given back
        kv_mib = cap_mib - torch.cuda.memory_reserved() // MIB - case["reserve_mib"]
        if kv_mib >= 1:
            config = EngineConfig(
                policy=case["policy"], chunk_tokens=case["chunk"], max_batch=case["clients"], prefix_cache=False,
                kv_cache_mib=kv_mib, max_context=case["prompt_tokens"] + case["new_tokens"],
            )  # fmt: skip
            with Engine(model.decoder, model.tokenizer, config) as engine:
                row |= {"kv_mib": kv_mib, "kv_pool_tokens": engine.kv.num_blocks * engine.kv.block_size}
                prompts = random_prompts(model, 2 * case["clients"], case["prompt_tokens"], seed)
                params = SamplingParams(max_tokens=case["new_tokens"], ignore_eos=True)
                traces = closed_loop(engine, prompts, params, case["clients"], "budget")
            row |= {"reached": "served", **request_columns(traces, [])}
    except (torch.cuda.OutOfMemoryError, EngineClosed, RequestFailed) as error:
        row["reason"] = f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    free, _ = torch.cuda.mem_get_info()
    return row | {"peak_bytes": torch.cuda.max_memory_reserved(), "device_used_bytes": total - free}


def capacity_rows(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of three kinds, told apart by `row`: machine, loop, budget. The last only on a GPU."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    yield machine_row(torch.device(kind))
    yield from loop_rows(params[kind], params["seed"])
    if kind == "cuda":
        load_for.cache_clear()  # or the last model would count
        for case in params["budgets"]:
            yield budget_row(case, params["cap_mib"], params["seed"])


def _since(steps: Sequence[StepEvent], origin: float) -> list[StepEvent]:
    return [step._replace(started=step.started - origin, finished=step.finished - origin) for step in list(steps)]


OPEN = [{"loop": "poisson", "cv": 1.0, "parts": [0.5, 0.9, 1.5]}, {"loop": "bursty", "cv": 3.0, "parts": [0.5]}]
BUDGET = {
    "group": 128, "policy": "serial", "chunk": 256, "clients": 4, "prompt_tokens": 256, "new_tokens": 32,
    "reserve_mib": 256,
}  # fmt: skip

CAPACITY = Experiment(
    name="capacity",
    measure=capacity_rows,
    defaults={
        "cuda": {
            "model": "synthetic:qwen2.5-3b", "bits": "w4", "group": 128, "policies": ["serial", "priority", "mixed"],
            "chunk": 512, "prompt_tokens": 512, "new_tokens": 32, "clients": [1, 16, 64], "requests_per_client": 2,
            "open": OPEN, "requests": 64,
        },
        "cpu": {  # so small a model that what is measured is the scheduler
            "model": "synthetic:tiny", "bits": "w4", "group": 32, "policies": ["serial", "mixed"], "chunk": 64,
            "prompt_tokens": 192, "new_tokens": 24, "clients": [1, 4, 16], "requests_per_client": 12,
            "open": OPEN, "requests": 192,
        },
        "cap_mib": 4096,  # the article's card
        "budgets": [
            {"model": "synthetic:qwen2.5-3b", "bits": "w4", **BUDGET},
            {"model": "synthetic:qwen2.5-7b", "bits": "mixed", **BUDGET},
            {"model": "synthetic:qwen2.5-7b", "bits": "mixed-all", **BUDGET},
        ],
        "seed": 0,
    },
    runs_on_cpu=True,
    description="bandwidth and matrix rate, closed loops beside open ones, and what fits into 4 GiB",
)  # fmt: skip
