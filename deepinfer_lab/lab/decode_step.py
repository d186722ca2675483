"""What a whole decode step takes: every layer in its launches, and all layers in one."""

import gc
from collections.abc import Iterator
from itertools import product
from math import isfinite
from typing import Any

import torch

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.cuda_lanes import nothing_collected
from deepinfer_lab.engine.step_graph import StepGraphs
from deepinfer_lab.engine.work import KNOWN, Work
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.kernel_timing import WARM_UP, CudaGpu, Gpu
from deepinfer_lab.lab.overlap_cells import load_for
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.step_input import Span
from deepinfer_lab.progress import bar

LAUNCHES, CHAIN = "launches", "chain"
COLUMNS = (
    "model", "bits", "group", "rows", "context", "way", "time_us", "step_bytes", "floor_us", "rel_err", "correct", "reason",
)  # fmt: skip
MAX_ERROR = 0.1  # of logits, which the roundings of all layers set apart; a step that is wrong is off by about 1


class Steps:
    """Decode steps of one model over random K and V, captured as a lane captures them.

    Args:
        rows, context: the most of each. A context counts the new token.
        seed: of K, V, tokens, and which blocks are whose.
    """

    def __init__(self, model: Decoder, rows: int, context: int, seed: int) -> None:
        device, block_size = model.device, EngineConfig.block_size
        random = torch.Generator().manual_seed(seed)
        columns = -(-context // block_size)
        self._table = torch.randperm(rows * columns, generator=random).view(rows, columns).numpy()
        self._tokens = torch.randint(model.config.vocab_size, (rows,), generator=random).tolist()
        self._kv = KVPool(model.kv_shape, rows * columns, block_size, device, scratch=True)
        there = torch.Generator(device).manual_seed(seed)
        for layer in range(model.config.num_layers):
            memory = self._kv.layer(layer)
            memory.k.normal_(generator=there), memory.v.normal_(generator=there)
        self._stream = None  # on a CPU
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.inference_mode(), torch.cuda.stream(self._stream), nothing_collected():
            self._graphs = StepGraphs(
                model, self._kv, phases=("decode",), chunk_tokens=1, max_batch=rows, max_tokens=context,
                last=torch.zeros(rows, dtype=torch.int64, device=device), chain=model.chain(self._kv),
            )  # fmt: skip
            for shape in self._graphs.shapes():
                self._graphs.capture(shape)

    def timed(
        self, gpu: Gpu, rows: int, context: int, way: str, replays: int
    ) -> tuple[list[float], torch.Tensor] | None:
        """Microseconds of each replay, from the step's numbers on the host to its likeliest tokens there, and its logits
        on the host, float32 [rows, vocab]; None where a step has no such way."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            work = self._work(rows, context)
            graph = self._graphs.for_work(work, alone=way == CHAIN)
            if graph.shape.chained != (way == CHAIN):
                return None
            prepared = graph.prepare(work)
            for _ in range(WARM_UP):
                graph.launch(prepared)
            time_us = gpu.time(lambda: graph.launch(prepared), replays)
            return time_us, graph.logits[:rows].cpu().float()

    def _work(self, rows: int, context: int) -> Work:
        """Without its sequences, which graphs do not ask for."""
        spans = [Span([token], context - 1, self._table[row]) for row, token in enumerate(self._tokens[:rows])]
        return Work("decode", (), tuple(spans), (1,) * rows, 0, (KNOWN,) * rows)


def decode_step_rows(params: dict[str, Any], gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Rows: model, bits, group, rows, context, way ("launches" and, where there is one, "chain"), time_us (raw, one a replay),
    step_bytes (weights with scales, head, K and V, each once), floor_us (what those take at the measured bandwidth), rel_err
    and correct (the chain's logits beside those of the launches, over the same K and V; null for the latter), reason (null).

    A model that does not fit has, after rows that it may have, one with the reason, and null but for its name.

    Args:
        params: as `DECODE_STEP.defaults`.
    """
    bandwidth = gpu.read_bandwidth()
    for case in bar(params["models"], desc="decode steps", unit="model"):
        try:
            yield from _of_model(params, case, gpu, bandwidth)
        except (torch.OutOfMemoryError, MemoryError) as error:  # CuPy's is a MemoryError
            yield {**dict.fromkeys(COLUMNS), **case, "reason": f"{type(error).__name__}: {error}".splitlines()[0]}
        load_for.cache_clear()  # the next one comes with nothing beside it
        gc.collect()
        torch.cuda.empty_cache()


def _of_model(params: dict[str, Any], case: dict[str, Any], gpu: Gpu, bandwidth: float) -> Iterator[dict[str, Any]]:
    model = load_for(case["model"], case["bits"], case["group"]).decoder
    steps = Steps(model, max(params["rows"]), max(params["contexts"]), params["seed"])
    for rows, context in product(params["rows"], params["contexts"]):
        read = model.step_bytes + rows * context * model.kv_shape.bytes_per_token
        expected = None
        for way in (LAUNCHES, CHAIN):
            found = steps.timed(gpu, rows, context, way, params["replays"])
            if found is None:
                continue
            time_us, logits = found
            error = None if expected is None else float((logits - expected).norm() / expected.norm())
            expected = logits
            yield {
                **case, "rows": rows, "context": context, "way": way, "time_us": time_us, "step_bytes": read,
                "floor_us": read / bandwidth * 1e6, "rel_err": error if error is not None and isfinite(error) else None,
                "correct": None if error is None else error < MAX_ERROR, "reason": None,  # NaN is not
            }  # fmt: skip


def _measure(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return decode_step_rows(params, CudaGpu())


DECODE_STEP = Experiment(
    name="decode_step",
    measure=_measure,
    defaults={
        "models": [  # loaded in this order, and one at a time
            {"model": "synthetic:qwen2.5-3b", "bits": "w4", "group": 128},
            {"model": "synthetic:qwen2.5-3b", "bits": "w4-all", "group": 128},
            {"model": "synthetic:qwen2.5-7b", "bits": "mixed", "group": 128},
            {"model": "synthetic:qwen2.5-7b", "bits": "mixed-all", "group": 128},
        ],
        "rows": [1, 8],  # a chain is of one
        "contexts": [128, 512, 1024, 2000],
        "replays": 60,
        "seed": 0,
    },
    runs_on_cpu=False,
    description="a whole decode step of one row and of eight: layers in their launches and, of one row, all in one",
)
