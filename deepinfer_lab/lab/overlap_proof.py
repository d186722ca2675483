"""The experiment behind the claim that prefill and decode overlap: controls, timelines of real runs, and what it costs each."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import record_function

from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.event import StepEvent
from deepinfer_lab.kernels.spin import MULTIPROCESSORS, spin
from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.overlap_cells import Setting, load_for, random_prompts, traced
from deepinfer_lab.metrics.chrome_trace import TraceRecorder
from deepinfer_lab.metrics.intervals import length, union
from deepinfer_lab.metrics.overlap import Overlap, dilation, speedup
from deepinfer_lab.progress import bar
from deepinfer_lab.workload.insertion import insert_document
from deepinfer_lab.workload.open_loop import open_loop

SPIN_MS = 20.0


def control_rows() -> Iterator[dict[str, Any]]:
    """Two spin kernels that fill half of the GPU each, one called prefill and the other decode: on one stream, and on two."""
    half = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count // 2
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    outs = [torch.zeros(MULTIPROCESSORS, dtype=torch.int32, device="cuda") for _ in range(2)]
    spin(1, 1.0, outs[0])  # loads the kernel
    for streams in ((one, one), (one, other)):

        def both(streams: tuple[torch.cuda.Stream, ...] = streams) -> None:
            for phase, stream, out in zip(("prefill", "decode"), streams, outs, strict=True):
                with torch.cuda.stream(stream), record_function(phase):
                    spin(half, SPIN_MS, out)

        overlap = Overlap.of(traced(both))
        yield {
            "row": "control", "streams": len(set(streams)), "physical_overlap_ms": overlap.physical_overlap_ms,
            "share": overlap.share,
        }  # fmt: skip


def timeline_rows(engine: Engine, heard: TraceRecorder, prompts: Any, document: Any) -> Iterator[dict[str, Any]]:
    """Every step that a lane ran from shortly before a document was sent until shortly after its first token."""
    insert_document(engine, prompts, document, reader_tokens=1024, name="warm-up")
    heard.events.clear()
    origin = time.perf_counter()
    seen = insert_document(engine, prompts, document, reader_tokens=1024, name="timeline", origin=origin)
    sent, first = seen.window
    around = 0.25 * (first - sent)
    for step in [event for event in heard.events if isinstance(event, StepEvent)]:
        started, finished = step.started - origin, step.finished - origin
        if finished >= sent - around and started <= first + around:
            yield {
                "row": "step", "phase": step.phase, "lane": step.lane, "tokens": step.tokens,
                "started_ms": round((started - sent) * 1e3, 4), "finished_ms": round((finished - sent) * 1e3, 4),
            }  # fmt: skip
    yield {"row": "window", "document_ttft_ms": seen.ttft * 1e3}


def dilation_row(engine: Engine, prompts: Any, document: Any, new_tokens: int) -> dict[str, Any]:
    """The same prompts and tokens, alone and together, by kernels. Readers have prompts, too, which count as prefill."""
    readers = [(prompt, new_tokens) for prompt in prompts]
    reading = [(document, 1)]

    def run(requests: list) -> None:
        open_loop(engine, requests, [0.0] * len(requests), name=f"dilation-{time.perf_counter_ns()}")

    run(readers + reading)  # warm-up
    decode, prefill, both = (traced(lambda load=load: run(load)) for load in (readers, reading, readers + reading))
    overlap = Overlap.of(both)
    prefill_alone_ms = sum(length(union(trace.kernels("prefill"))) for trace in (prefill, decode)) / 1e6
    return {
        "row": "dilation",
        "prefill_alone_ms": prefill_alone_ms,
        "decode_alone_ms": length(union(decode.kernels("decode"))) / 1e6,
        "prefill_together_ms": overlap.prefill_busy_ms,
        "decode_together_ms": overlap.decode_busy_ms,
        "physical_overlap_ms": overlap.physical_overlap_ms,
        "decode_covered_p50": None if overlap.decode_covered is None else overlap.decode_covered.p50,
        "dilation_prefill": overlap.prefill_busy_ms / prefill_alone_ms,
        "dilation_decode": dilation(decode, both, "decode"),
        "speedup": speedup(prefill, decode, both),
    }


def overlap_proof_rows(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of four kinds, told apart by `row`: control, step, window, dilation."""
    yield from control_rows()
    model = load_for(params["model"], params["bits"], params["group"])
    prompts = random_prompts(model, params["readers"], params["reader_prompt_tokens"], params["seed"])
    (document,) = random_prompts(model, 1, params["document_tokens"], params["seed"] + 1)
    for policy in bar(params["policies"], desc="policies", unit="policy"):
        setting = Setting(policy, params["chunk"], params["readers"] + 1)
        heard = TraceRecorder()
        columns = setting.columns(model)
        with setting.engine(model, params["document_tokens"] + 1024, heard) as engine:
            for row in timeline_rows(engine, heard, prompts, document):
                yield {**columns, **row}
            if policy in params["dilated"]:
                yield {**columns, **dilation_row(engine, prompts, document, params["new_tokens"])}


OVERLAP_PROOF = Experiment(
    name="overlap_proof",
    measure=overlap_proof_rows,
    defaults={
        "model": "synthetic:qwen2.5-3b", "bits": "w4", "group": 128, "chunk": 512, "readers": 8,
        "document_tokens": 4096, "reader_prompt_tokens": 128, "new_tokens": 48, "seed": 0,
        "policies": ["serial", "dual-stream", "dual-stream-async", "priority", "mixed", "partition"],
        "dilated": ["serial", "dual-stream-async", "priority", "partition"],
    },
    runs_on_cpu=False,
    description="controls, timelines and dilation: proof that prefill and decode overlap, and what it costs each",
)  # fmt: skip
