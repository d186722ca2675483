"""Forward passes captured as CUDA graphs: a launch costs microseconds, not one launch for each kernel."""

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

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
from deepinfer_lab.kernels.decode_chain import DecodeChain
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder


class LastTokens:
    """The likeliest tokens of a lane's last step with decode rows: int64 [sequences] on the device."""

    def __init__(self, sequences: int, device: torch.device) -> None:
        self._ids = torch.zeros(sequences, dtype=torch.int64, device=device)

    def fill_in(self, tokens: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Tokens [S] with those replaced whose source [S] is not `KNOWN`."""
        return torch.where(sources >= 0, self._ids[sources.clamp(min=0)], tokens)

    def remember(self, likeliest: torch.Tensor) -> None:
        self._ids[: likeliest.shape[1]] = likeliest[1]


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Of each row the largest logit, and its token: float64 [2, L], which holds both exactly."""
    best, ids = logits.max(dim=-1)
    both = torch.empty(2, len(logits), dtype=torch.float64, device=logits.device)
    both[0], both[1] = best, ids
    return both


class StepGraph:
    """One padded forward pass, and the choice of the likeliest tokens, captured on the current stream.

    Args:
        pool: memory of another graph's intermediates, to be shared; None takes new memory.
        chain: for a chained shape, of as many rows; it must outlive the graph.
        warm_up: run the pass once before, since libraries must not set themselves up while a graph is captured.
    """

    def __init__(
        self,
        shape: PaddedShape,
        model: Decoder,
        kv: KVPool,
        last: LastTokens,
        pool: tuple[int, int] | None,
        chain: DecodeChain | None,
        warm_up: bool,
    ) -> None:
        assert kv.scratch is not None
        self.shape = shape
        self._scratch, self._block_size, self._max_context = kv.scratch, kv.block_size, model.config.max_context
        device = model.device
        memory = torch.zeros(PaddedInput.length(shape), dtype=torch.int64)
        self._input = PaddedInput(shape, memory.to(device))
        self._idle(PaddedInput(shape, memory))
        self._input.memory.copy_(memory)
        self._graph = torch.cuda.CUDAGraph()
        step = self._input.step(kv.block_size)
        if warm_up:
            model.forward(step, kv, chain)
        torch.cuda.current_stream(device).synchronize()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            if shape.rows:
                rows = step.token_ids[shape.chunk :]
                rows.copy_(last.fill_in(rows, self._input.sources))
            self.logits = model.forward(step, kv, chain)
            self.likeliest = likeliest(self.logits)
            if shape.rows:
                last.remember(self.likeliest)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is void, and why matters more
                self._graph.capture_end()
            raise
        self._graph.capture_end()

    @property
    def pool(self) -> tuple[int, int]:
        """Memory of its intermediates; a graph that never runs beside this one can share it."""
        return self._graph.pool()

    def prepare(self, work: Work) -> torch.Tensor:
        """What `launch` wants, in host memory that must live until the launch has run."""
        memory = torch.empty(self._input.memory.shape, dtype=torch.int64, pin_memory=True)
        PaddedInput(self.shape, memory).fill(work, self._block_size, self._scratch, self._max_context)
        return memory

    def launch(self, prepared: torch.Tensor) -> None:
        """Enqueue on the current stream."""
        self._input.memory.copy_(prepared, non_blocking=True)
        self._graph.replay()

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
        last: the lane's.
        chains: by rows, for decode steps that have the device for themselves. Their places are as a launch left them: graphs of
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
        last: LastTokens,
        chains: Mapping[int, DecodeChain] = MappingProxyType({}),
    ) -> None:
        self._model, self._kv, self._last, self._chains = model, kv, last, chains
        self._phases = phases
        self._chunks = ladder(min(FEWEST_TOKENS, chunk_tokens), chunk_tokens)
        self._rows = ladder(FEWEST_ROWS, max_batch, 4 if "mixed" in phases else 2)
        columns = -(
            -(max_tokens + chunk_tokens) // kv.block_size
        )  # a chunk's padding may pass the longest sequence's end
        self._columns = ladder(min(max(1, FEWEST_POSITIONS // kv.block_size), columns), columns, 4)
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
            yield from (PaddedShape(0, rows, columns, True) for rows in self._chains if self._chained(rows, columns))

    def capture(self, shape: PaddedShape) -> StepGraph:
        """The graph of a shape, captured if it is asked for for the first time."""
        if shape not in self._graphs:
            kind = shape.chunk > 0, shape.rows > 0, shape.chained
            chain = self._chains[shape.rows] if shape.chained else None
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
        columns = _fit(self._columns, -(-reach // self._kv.block_size))
        if alone and work.chunk is None and self._chained(len(work.decodes), columns):
            return self.capture(PaddedShape(0, len(work.decodes), columns, True))
        return self.capture(PaddedShape(chunk, rows, columns))

    def _chained(self, rows: int, columns: int) -> bool:
        chain = self._chains.get(rows)
        return chain is not None and rows <= self._rows[-1] and columns * self._kv.block_size <= chain.plan.longest


def _fit(steps: list[int], size: int) -> int:
    return next((step for step in steps if step >= size), steps[-1])
