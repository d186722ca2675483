"""The scheduler: admit, plan, prepare, launch, finish, commit. Single-threaded; whoever calls `cycle` owns all state."""

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from deepinfer_lab.engine.event import Event, FinishEvent, StepEvent, TokenEvent
from deepinfer_lab.engine.lane import Lane, Ticket
from deepinfer_lab.engine.policy import Policy
from deepinfer_lab.engine.request import FinishReason, Phase, Request, Sequence
from deepinfer_lab.engine.work import Work, finish, prepare_decode, prepare_prefill
from deepinfer_lab.kv.blocks import BlockAllocator
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder


@dataclass(frozen=True)
class Plan:
    """What one cycle will run. Either part may be empty."""

    decode: tuple[Sequence, ...]
    prefill: Sequence | None
    prefill_tokens: int


class Scheduler:
    """Paged, continuously batched, with chunked prefill.

    Args:
        model, kv: what the lanes run on.
        policy: how prefill and decode share the machine.
        eos_ids: tokens that end a sequence.
        chunk_tokens: the most prompt tokens that one cycle prefills.
        max_batch: the most requests that hold blocks at a time.
    """

    def __init__(
        self, model: Decoder, kv: KVPool, policy: Policy, eos_ids: Collection[int], chunk_tokens: int, max_batch: int
    ) -> None:
        self._model, self._kv, self._policy = model, kv, policy
        self._eos_ids, self._chunk_tokens, self._max_batch = eos_ids, chunk_tokens, max_batch
        self.allocator = BlockAllocator(kv.num_blocks)
        self._lanes = {name: Lane(name, model, kv) for name in policy.placement.lanes}
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()  # round-robin
        self._decoding: list[Sequence] = []
        self._last: dict[str, Ticket] = {}  # newest ticket of each lane: the fences of whatever is released now
        self.counters = {
            "cycles": 0,
            "prefill_steps": 0,
            "decode_steps": 0,
            "prefill_decode_overlap_steps": 0,
            "prefill_decode_stream_overlap_steps": 0,
            "finished_requests": 0,
        }

    def add(self, request: Request) -> None:
        """Queue an admitted request."""
        self._waiting.append(Sequence(request))

    def cancel(self, request_id: str) -> list[Event]:
        """End a request wherever it is. Returns its terminal event, or nothing where it has ended already."""
        for sequence in self.live():
            if sequence.request.id == request_id:
                return [self._end(sequence, FinishReason.CANCELLED)]
        return []

    def live(self) -> list[Sequence]:
        """All requests that have not finished."""
        return [*self._waiting, *self._prefilling, *self._decoding]

    def cycle(self) -> list[Event]:
        """Run one scheduling cycle: at most one decode batch and one prefill chunk."""
        self.allocator.reclaim()
        self._start_waiting()
        plan = self._plan()
        events: list[Event] = []
        self.counters["cycles"] += 1
        self.counters["prefill_decode_overlap_steps"] += bool(plan.decode and plan.prefill)
        if plan.decode:  # decode first: whoever already reads must not wait for a newcomer's prompt
            events += self._run(prepare_decode(plan.decode, self._kv.block_size, self._model.device))
        if plan.prefill:
            work = prepare_prefill(plan.prefill, plan.prefill_tokens, self._kv.block_size, self._model.device)
            events += self._run(work)
        return events

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one place."""
        self.allocator.check_integrity(s.blocks for s in self.live())

    def status(self) -> dict[str, object]:
        """Queue sizes, blocks by state, counters."""
        self.allocator.reclaim()  # an idle engine has no cycles that would
        return {
            "policy": self._policy.name,
            "waiting": len(self._waiting),
            "prefilling": len(self._prefilling),
            "decoding": len(self._decoding),
            "blocks": self.allocator.counts(),
            **self.counters,
        }

    def _start_waiting(self) -> None:
        """Move waiting requests to prefill, first come first served, while the pool can hold their longest outcome."""
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._max_batch:
            sequence = self._waiting[0]
            blocks = self.allocator.allocate(-(-sequence.most_tokens // self._kv.block_size))
            if blocks is None:
                return
            self._kv.clear(blocks)
            self._waiting.popleft()
            sequence.blocks, sequence.phase = blocks, Phase.PREFILL
            self._prefilling.append(sequence)

    def _plan(self) -> Plan:
        tokens = self._policy.sizer.tokens(self._chunk_tokens, len(self._decoding))
        return Plan(tuple(self._decoding), self._prefilling[0] if self._prefilling else None, tokens)

    def _run(self, work: Work) -> list[Event]:
        lane = self._lanes[self._policy.placement.lane_for(work.phase)]
        ticket = lane.launch(work)
        self._last[lane.name] = ticket
        ticket.finished.wait()
        finished = time.perf_counter()
        self.counters[f"{work.phase}_steps"] += 1
        gained = finish(work, ticket.logits)
        ids = tuple(s.request.id for s in work.sequences)
        events: list[Event] = [
            StepEvent(work.phase, lane.name, self.counters["cycles"], ticket.launched, finished, ids, sum(work.counts))
        ]
        for sequence in work.sequences:
            self._seal(sequence)
        if work.phase == "prefill":
            self._requeue(work.sequences[0])
        for sequence, token in gained:
            events.append(TokenEvent(sequence.request.id, token, time.perf_counter()))
            if token in self._eos_ids and not sequence.request.params.ignore_eos:
                events.append(self._end(sequence, FinishReason.STOP))
            elif len(sequence.output) >= sequence.request.params.max_tokens:
                events.append(self._end(sequence, FinishReason.LENGTH))
        return events

    def _seal(self, sequence: Sequence) -> None:
        """Blocks that the last step filled are never written again."""
        full = sequence.computed // self._kv.block_size
        self.allocator.seal(sequence.blocks[sequence.sealed : full])
        sequence.sealed = full

    def _requeue(self, sequence: Sequence) -> None:
        self._prefilling.popleft()
        (self._decoding if sequence.phase is Phase.DECODE else self._prefilling).append(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> FinishEvent:
        queue = {
            Phase.WAITING: self._waiting,
            Phase.PREFILL: self._prefilling,
            Phase.DECODE: self._decoding,
        }[sequence.phase]
        queue.remove(sequence)
        sequence.phase = Phase.FINISHED
        if sequence.blocks:
            self.allocator.release(sequence.blocks, [ticket.finished for ticket in self._last.values()])
            sequence.blocks = []
        self.counters["finished_requests"] += 1
        return FinishEvent(sequence.request.id, reason, time.perf_counter())
