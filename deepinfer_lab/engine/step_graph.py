"""Forward passes captured as CUDA graphs: a launch costs microseconds, not one launch for each kernel."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepinfer_lab.engine.padded_step import (
    FEWEST_POSITIONS,
    FEWEST_ROWS,
    FEWEST_TOKENS,
    PaddedInput,
    PaddedShape,
    ladder,
)
from deepinfer_lab.engine.work import Work
from deepinfer_lab.kernels import ends
from deepinfer_lab.kernels.decode_chain import DecodeChain
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.own_attention import OWN_TOKENS


@dataclass(frozen=True)
class Prepared:
    """A launch in pinned host memory, which must live until it has run.

    Attributes:
        memory: of its `PaddedInput`. likeliest: float64 [2, L], where the answer goes.
    """

    memory: torch.Tensor
    likeliest: torch.Tensor


class StepGraph:
    """One padded forward pass, and the choice of the likeliest tokens, captured on the current stream.

    Args:
        last: int64 [sequences], the likeliest tokens of the lane's last step with decode rows.
        pool: memory of another graph's intermediates, to be shared; None takes new memory.
        chain: for a chained shape; it must outlive the graph.
        warm_up: run the pass once before, since libraries must not set themselves up while a graph is captured.
    """

    def __init__(
        self,
        shape: PaddedShape,
        model: Decoder,
        kv: KVPool,
        last: torch.Tensor,
        pool: tuple[int, int] | None,
        chain: DecodeChain | None,
        warm_up: bool,
    ) -> None:
        assert kv.scratch is not None
        self.shape = shape
        self._scratch, self._block_size, self._max_context = kv.scratch, kv.block_size, model.config.max_context
        self._reaches_host, device = model.reaches_host, model.device
        memory = torch.zeros(PaddedInput.length(shape), dtype=torch.int64)
        self._input = PaddedInput(shape, memory.to(device))
        self._idle(PaddedInput(shape, memory))
        self._input.memory.copy_(memory)
        self._graph = torch.cuda.CUDAGraph()
        step = self._input.step(kv.block_size, last)
        model.prepare(shape.chunk)
        torch.cuda.current_blas_handle()  # a forward pass may need it, whether or not the one to warm up does
        if warm_up:
            model.forward(step, kv, chain)
        torch.cuda.current_stream(device).synchronize()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self.logits = model.forward(step, kv, chain)
            answer = self._input.answer if model.reaches_host else None
            self._likeliest = model.likeliest(self.logits, last if shape.rows else None, answer)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is void, and why matters more
                self._graph.capture_end()
            raise
        self._graph.capture_end()

    @property
    def pool(self) -> tuple[int, int]:
        """Memory of its intermediates; a graph that never runs beside this one can share it."""
        return self._graph.pool()

    def prepare(self, work: Work) -> Prepared:
        """What `launch` wants, for work that the shape can hold."""
        memory = torch.empty(self._input.memory.shape, dtype=torch.int64, pin_memory=True)
        best = torch.empty(self._likeliest.shape, dtype=torch.float64, pin_memory=True)
        padded = PaddedInput(self.shape, memory)
        padded.fill(work, self._block_size, self._scratch, self._max_context, best.data_ptr())
        return Prepared(memory, best)

    def launch(self, prepared: Prepared) -> None:
        """Enqueue on the current stream."""
        if self._reaches_host:  # otherwise the copy engine: some microseconds before a step, and after it
            ends.fetch(prepared.memory, self._input.memory)
            self._graph.replay()
        else:
            self._input.memory.copy_(prepared.memory, non_blocking=True)
            self._graph.replay()
            prepared.likeliest.copy_(self._likeliest, non_blocking=True)

    def _idle(self, host: PaddedInput) -> None:
        """Numbers of a step that does nothing, so that what is enqueued before the first launch stays within bounds."""
        host.block_table.fill_(self._scratch)
        host.slot_mapping.fill_(self._scratch * self._block_size)
        host.seq_lens.fill_(max(1, self.shape.chunk))
        host.query_start[1:] = torch.arange(1, self.shape.sequences + 1)


class StepGraphs:
    """The graphs of one lane.

    Args:
        phases: what the lane runs: "prefill", "decode", "mixed".
        chunk_tokens, max_batch: the largest chunk and batch.
        max_tokens: the longest sequence, in tokens.
        last: the lane's, as for `StepGraph`.
        chain: for decode steps of one row that have the device for themselves. Its places are as a launch left them: graphs of
            a lane run in order, and none stops early.
    """

    def __init__(
        self,
        model: Decoder,
        kv: KVPool,
        *,
        phases: tuple[str, ...],
        chunk_tokens: int,
        max_batch: int,
        max_tokens: int,
        last: torch.Tensor,
        chain: DecodeChain | None = None,
    ) -> None:
        self._model, self._kv, self._last, self._chain = model, kv, last, chain
        self._phases = phases
        self._chunks = ladder(min(FEWEST_TOKENS, chunk_tokens), chunk_tokens)
        self._rows = ladder(FEWEST_ROWS, max_batch, 4 if "mixed" in phases else 2)
        columns = -(
            -(max_tokens + chunk_tokens) // kv.block_size
        )  # a chunk's padding may pass the longest sequence's end
        self._columns = ladder(min(max(1, FEWEST_POSITIONS // kv.block_size), columns), columns, 4)
        # Of chained steps: likewise, up to where the chain ends.
        most = 0 if chain is None else min(chain.plan.longest // kv.block_size, columns)
        self._chained_columns = ladder(self._columns[0], most, 4) if most else []
        # Of long chunks that begin a prompt. They have no columns but their own: so the step's shape says that none are before.
        self._first_columns = {
            chunk: chunk // kv.block_size
            for chunk in (self._chunks if "prefill" in phases else ())
            if chunk >= OWN_TOKENS and chunk % kv.block_size == 0
        }
        self._graphs: dict[PaddedShape, StepGraph] = {}
        self._memory: tuple[int, int] | None = None
        self._warm: set[tuple[bool, bool, bool]] = set()

    def shapes(self) -> Iterator[PaddedShape]:
        """All that can be asked for."""
        for columns in self._columns:
            for phase in self._phases:
                chunks = [0] if phase == "decode" else self._chunks
                rows = [0] if phase == "prefill" else self._rows
                fitting = [chunk for chunk in chunks if chunk <= columns * self._kv.block_size]
                yield from (PaddedShape(chunk, count, columns) for chunk in fitting for count in rows)
        for chunk, columns in self._first_columns.items():
            if columns not in self._columns:
                yield PaddedShape(chunk, 0, columns)
        yield from (PaddedShape(0, 1, columns, True) for columns in self._chained_columns)

    def capture(self, shape: PaddedShape) -> StepGraph:
        """The graph of a shape, captured if it is asked for for the first time."""
        if shape not in self._graphs:
            kind = shape.chunk > 0, shape.rows > 0, shape.chained
            chain = self._chain if shape.chained else None
            graph = StepGraph(shape, self._model, self._kv, self._last, self._memory, chain, kind not in self._warm)
            self._warm.add(kind)
            self._memory = self._memory or graph.pool
            self._graphs[shape] = graph
        return self._graphs[shape]

    def for_work(self, work: Work, *, alone: bool = False) -> StepGraph:
        """The smallest graph that holds a piece of work. alone: it has the device for itself."""
        chunk = 0 if work.chunk is None else _fit(self._chunks, len(work.chunk.tokens))
        rows = _fit(self._rows, len(work.decodes)) if work.decodes else 0
        reach = max(span.start + len(span.tokens) for span in work.spans)
        if work.chunk is not None:  # its padding counts, too
            reach = max(reach, work.chunk.start + chunk)
        blocks = -(-reach // self._kv.block_size)
        one_row = alone and work.chunk is None and len(work.decodes) == 1
        if one_row and blocks <= max(self._chained_columns, default=0):
            return self.capture(PaddedShape(0, 1, _fit(self._chained_columns, blocks), True))
        columns = _fit(self._columns, blocks)
        if not work.decodes and work.chunk.start == 0:
            columns = self._first_columns.get(chunk, columns)
        return self.capture(PaddedShape(chunk, rows, columns))


def _fit(steps: list[int], size: int) -> int:
    return next((step for step in steps if step >= size), steps[-1])
