"""The scheduler: admit, plan, prepare, launch, finish, commit. Single-threaded; whoever calls `cycle` owns all state."""

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from operator import attrgetter

import torch

from deepinfer_lab.engine.event import Event, FinishEvent, StepEvent, TokenEvent
from deepinfer_lab.engine.lane import Lane, Mark, Ticket
from deepinfer_lab.engine.memory import SequenceMemory
from deepinfer_lab.engine.policy import Policy
from deepinfer_lab.engine.request import Phase, Request, Sequence
from deepinfer_lab.engine.stopping import FinishReason, Stopper
from deepinfer_lab.engine.work import Work, finish, halves, prepare_decode, prepare_prefill
from deepinfer_lab.errors import OutOfDeviceMemory, RequestFailed
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.token_stream import TokenStream


@dataclass(frozen=True)
class Limits:
    """How much at a time.

    Attributes:
        chunk_tokens: the most tokens that one cycle prefills.
        max_batch: the most requests that hold blocks.
        max_in_flight: the most pieces of work that are launched and not committed.
    """

    chunk_tokens: int = 256
    max_batch: int = 64
    max_in_flight: int = 4


@dataclass(frozen=True)
class Plan:
    """What one cycle will run. Either part may be empty."""

    decode: tuple[Sequence, ...]
    prefill: Sequence | None
    prefill_tokens: int


class Scheduler:
    """Paged, continuously batched, with chunked prefill, a prefix cache, and preemption when the pool is full.

    Args:
        model, kv: what the lanes run on.
        policy: how prefill and decode share the machine.
        eos_ids: tokens that end a sequence.
        limits: how much at a time.
        prefix_cache: reuse blocks of earlier requests that begin alike.
        stream: makes the text of a request with stop strings; None where there is no tokenizer.
        lane: makes a lane from its name, the model and the pool.
    """

    def __init__(
        self,
        model: Decoder,
        kv: KVPool,
        policy: Policy,
        eos_ids: Collection[int],
        limits: Limits,
        *,
        prefix_cache: bool = True,
        stream: Callable[[], TokenStream] | None = None,
        lane: Callable[[str, Decoder, KVPool], Lane] = Lane,
    ) -> None:
        self._model, self._kv, self._policy = model, kv, policy
        self._eos_ids, self._limits, self._stream = eos_ids, limits, stream
        self.memory = SequenceMemory(kv, prefix_cache=prefix_cache)
        self._lanes = {name: lane(name, model, kv) for name in policy.placement.lanes}
        self._waiting: deque[Sequence] = deque()  # by arrival
        self._ready: list[Sequence] = []  # hold blocks; by arrival
        self._turns: deque[Sequence] = deque()  # those of them that are reading their prompts, whose turn is next first
        self._in_flight: list[Ticket] = []  # in order of launch
        self._last: dict[
            str, Mark
        ] = {}  # end of the newest launch of each lane: the fences of what is released in flight
        self._arrivals = 0
        self.counters = {
            "cycles": 0,
            "prefill_steps": 0,
            "decode_steps": 0,
            "prefill_decode_overlap_steps": 0,
            "prefill_decode_stream_overlap_steps": 0,
            "preemptions": 0,
            "finished_requests": 0,
        }

    def add(self, request: Request) -> None:
        """Queue an admitted request."""
        stream = self._stream() if self._stream is not None and request.params.stop else None
        self._waiting.append(Sequence(request, self._arrivals, Stopper(request.params, self._eos_ids, stream)))
        self._arrivals += 1

    def cancel(self, request_id: str) -> list[Event]:
        """End a request wherever it is. Returns its terminal event, or nothing where it has ended already."""
        for sequence in self.live():
            if sequence.request.id == request_id:
                return [self._end(sequence, FinishReason.CANCELLED)]
        return []

    def live(self) -> list[Sequence]:
        """All requests that have not finished."""
        return [*self._ready, *self._waiting]

    def busy(self) -> bool:
        """Whether a cycle has anything to do: for a request, or to commit work whose requests have ended."""
        return bool(self._ready or self._waiting or self._in_flight)

    def cycle(self) -> list[Event]:
        """Run one scheduling cycle: commit what has finished, then launch at most one decode batch and one prefill chunk."""
        self.counters["cycles"] += 1
        events = self._commit_finished()
        self.memory.allocator.reclaim()
        self._start_waiting()
        plan = self._plan()
        self.memory.scrub()
        launched = 0
        where = (self.counters["cycles"], self._kv.block_size, self._model.device)
        if plan.decode:  # decode first: whoever already reads must not wait for a newcomer's prompt
            events += self._run(prepare_decode(plan.decode, *where))
            launched += 1
        if plan.prefill and self._has_room():
            events += self._run(prepare_prefill(plan.prefill, plan.prefill_tokens, *where))
            launched += 1
        self.counters["prefill_decode_overlap_steps"] += launched == 2
        if not launched and self._in_flight:  # everything waits for what runs already
            self._in_flight[0].finished.wait()
            events += self._commit_finished()
        return events

    def preempt(self, sequence: Sequence) -> None:
        """Take a ready sequence's blocks and queue it again. It will read all its tokens anew, or find them cached."""
        assert not sequence.in_flight
        self._leave_ready(sequence)
        self.memory.release(sequence, self._fences(sequence))
        sequence.phase = Phase.WAITING
        insort(self._waiting, sequence, key=attrgetter("arrival"))
        self.counters["preemptions"] += 1

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one place."""
        self.memory.check_integrity(self.live())

    def status(self) -> dict[str, object]:
        """Queue sizes, blocks by state, counters."""
        prefix = self.memory.prefix
        return {
            "policy": self._policy.name,
            "waiting": len(self._waiting),
            "prefilling": len(self._turns),
            "decoding": len(self._ready) - len(self._turns),
            "in_flight": len(self._in_flight),
            "blocks": self.memory.counts(),
            "prefix_cache": None if prefix is None else dict(prefix.counters),
            **self.counters,
        }

    def _start_waiting(self) -> None:
        """Move waiting requests to ready, first come first served, while the pool holds what they begin with.

        A block for the next token of everybody who is ready stays spare, so that a newcomer is not preempted at once.
        """
        while self._waiting and len(self._ready) < self._limits.max_batch:
            sequence = self._waiting[0]
            if not self.memory.start(sequence, spare=len(self._ready)):
                return
            self._waiting.popleft()
            sequence.phase = Phase.PREFILL
            insort(self._ready, sequence, key=attrgetter("arrival"))  # it may have been there before, and preempted
            self._turns.append(sequence)

    def _plan(self) -> Plan:
        decode = self._with_room_to_grow() if self._has_room() else ()
        prefill = next((s for s in self._turns if not s.in_flight), None)
        decoding = len(self._ready) - len(self._turns)
        return Plan(decode, prefill, self._policy.sizer.tokens(self._limits.chunk_tokens, decoding))

    def _with_room_to_grow(self) -> tuple[Sequence, ...]:
        """Those that can take a decode step now, each with a slot for its token.

        In order of arrival, and whoever needs a block may take it from those that arrived later alone: the oldest request
        always goes on, so that nobody starves.
        """
        chosen: list[Sequence] = []
        block_size = self._kv.block_size
        for sequence in list(self._ready):
            if sequence.phase is not Phase.DECODE or sequence.in_flight:
                continue  # not due, or preempted a moment ago
            if len(sequence.tokens) <= len(sequence.blocks) * block_size or self._grow(sequence):
                chosen.append(sequence)
        return tuple(chosen)

    def _grow(self, sequence: Sequence) -> bool:
        while not self.memory.grow(sequence):
            victim = self._victim(sequence)
            if victim is None:
                return False
            self.preempt(victim)
        return True

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The latest arrival after this one that would free a block at once. One in flight, or all shared, frees none."""
        later = [s for s in self._ready if s.arrival > sequence.arrival and not s.in_flight]
        return next((s for s in reversed(later) if self.memory.gain(s)), None)

    def _has_room(self) -> bool:
        return len(self._in_flight) < self._limits.max_in_flight

    def _fences(self, sequence: Sequence) -> list[Mark]:
        """What must pass before a sequence's blocks change hands: nothing where all its work is committed."""
        return list(self._last.values()) if sequence.in_flight else []

    def _run(self, work: Work) -> list[Event]:
        """Launch, and wait where the policy says so."""
        lane = self._lanes[self._policy.placement.lane_for(work.phase)]
        failure = None
        try:
            ticket = lane.launch(work)
        except torch.OutOfMemoryError as error:
            failure = str(error)  # and nothing else: its traceback would hold what the failed pass had allocated
        if failure is not None:
            return self._without_memory(work, lane, failure)
        for sequence in work.sequences:
            sequence.in_flight = True
        if work.phase == "prefill":  # its next chunk comes after everybody else's
            self._turns.remove(work.sequences[0])
            self._turns.append(work.sequences[0])
        self._in_flight.append(ticket)
        self._last[lane.name] = ticket.finished
        self.counters[f"{work.phase}_steps"] += 1
        if self._policy.join.waits:
            ticket.finished.wait()
        return self._commit_finished()

    def _without_memory(self, work: Work, lane: Lane, failure: str) -> list[Event]:
        """Halve a batch for which there is no memory. One request alone that does not fit is ended."""
        if len(work.sequences) == 1:
            name = work.sequences[0].request.id
            cause = OutOfDeviceMemory(f"request {name}: {work.phase} of {work.counts[0]} tokens: {failure}")
            return [self._end(work.sequences[0], FinishReason.ERROR, cause, [lane.mark()])]
        events = []
        for half in halves(work, self._kv.block_size, self._model.device):
            while not self._has_room():
                self._in_flight[0].finished.wait()
                events += self._commit_finished()
            events += self._run(half)
        return events

    def _commit_finished(self) -> list[Event]:
        done = [ticket for ticket in self._in_flight if ticket.finished.query()]
        self._in_flight = [ticket for ticket in self._in_flight if ticket not in done]
        return [event for ticket in done for event in self._commit(ticket)]

    def _commit(self, ticket: Ticket) -> list[Event]:
        work = ticket.work
        ids = tuple([sequence.request.id for sequence in work.sequences])
        choices = finish(work, ticket.logits)
        now = time.perf_counter()
        events: list[Event] = [
            StepEvent(work.phase, ticket.lane, work.cycle, ticket.launched, now, ids, sum(work.counts))
        ]
        failed = [sequence for sequence, choice in choices if isinstance(choice, RequestFailed)]
        block_size = self._kv.block_size
        for sequence, count in zip(work.sequences, work.counts, strict=True):
            if (
                sequence.computed % block_size < count and sequence.phase is not Phase.FINISHED
            ):  # it may have filled a block
                full = sequence.computed // block_size
                if full > sequence.sealed and sequence not in failed:
                    self.memory.seal(sequence, full)
        if work.phase == "prefill" and choices:  # the last chunk
            self._turns.remove(work.sequences[0])
        for sequence, choice in choices:
            request_id = sequence.request.id
            if isinstance(choice, RequestFailed):
                events.append(self._end(sequence, FinishReason.ERROR, choice))
                continue
            sequence.tokens.append(choice.token)
            events.append(TokenEvent(request_id, choice.token, now, choice.logprob, choice.top))
            reason = sequence.stopper.push(choice.token)
            if reason is not None:
                events.append(self._end(sequence, reason))
        return events

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: Exception | None = None,
        fences: Iterable[Mark] | None = None,
    ) -> FinishEvent:
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        else:
            self._leave_ready(sequence)
        sequence.phase = Phase.FINISHED
        self.memory.release(sequence, self._fences(sequence) if fences is None else fences)
        self.counters["finished_requests"] += 1
        return FinishEvent(sequence.request.id, reason, time.perf_counter(), error)

    def _leave_ready(self, sequence: Sequence) -> None:
        self._ready.remove(sequence)
        if sequence in self._turns:
            self._turns.remove(sequence)
