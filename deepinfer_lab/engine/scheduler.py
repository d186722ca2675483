"""The scheduler: admit, plan, prepare, launch, finish, commit. Single-threaded; whoever calls `cycle` owns all state."""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import torch

from deepinfer_lab.engine.event import Event, FinishEvent, StepEvent, TokenEvent
from deepinfer_lab.engine.flight import Flight
from deepinfer_lab.engine.lane import HostLane, Lane, Mark, Ticket
from deepinfer_lab.engine.memory import SequenceMemory
from deepinfer_lab.engine.planner import Limits, Plan, Planner
from deepinfer_lab.engine.policy import Policy
from deepinfer_lab.engine.queues import Queues
from deepinfer_lab.engine.request import Phase, Request, Sequence
from deepinfer_lab.engine.sampling import Choice
from deepinfer_lab.engine.stopping import FinishReason, Stopper
from deepinfer_lab.engine.tempo import Tempo
from deepinfer_lab.engine.work import KNOWN, Work, finish, fuse, halves, prepare_decode, prepare_prefill
from deepinfer_lab.errors import OutOfDeviceMemory, RequestFailed
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.token_stream import TokenStream


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
        lane: Callable[[str, Decoder, KVPool], Lane] = HostLane,
    ) -> None:
        self.kv, self._policy, self._limits = kv, policy, limits
        self._eos_ids, self._stream = eos_ids, stream
        self.memory = SequenceMemory(kv, prefix_cache=prefix_cache)
        self.queues = Queues(self.memory)
        self.flight = Flight(limits.max_in_flight)
        self.lanes = {name: lane(name, model, kv) for name in policy.placement.lanes}
        self._tempo = Tempo(policy.sizer)
        self._planner = Planner(policy, self.queues, self.flight, self.lanes, kv.block_size)
        self._launched: set[str] = set()  # phases of this cycle's launches
        self._arrivals = 0
        self.counters = {
            "cycles": 0,
            "prefill_steps": 0,
            "decode_steps": 0,
            "prefill_decode_overlap_steps": 0,
            "prefill_decode_stream_overlap_steps": 0,
            "finished_requests": 0,
        }

    def tune(self, **changes: int) -> None:
        """Change `Limits` by name."""
        self._limits = replace(self._limits, **changes)
        self.flight.limit = self._limits.max_in_flight

    def add(self, request: Request) -> None:
        """Queue an admitted request."""
        stream = self._stream() if self._stream is not None and request.params.stop else None
        self.queues.waiting.append(Sequence(request, self._arrivals, Stopper(request.params, self._eos_ids, stream)))
        self._arrivals += 1

    def cancel(self, request_id: str) -> list[Event]:
        """End a request wherever it is. Returns its terminal event, or nothing where it has ended already."""
        for sequence in self.live():
            if sequence.request.id == request_id:
                return [self._end(sequence, FinishReason.CANCELLED)]
        return []

    def live(self) -> list[Sequence]:
        """All requests that have not finished."""
        return [*self.queues.ready, *self.queues.waiting]

    def busy(self) -> bool:
        """Whether a cycle has anything to do: for a request, or to commit work whose requests have ended."""
        return bool(self.queues or self.flight)

    def cycle(self) -> list[Event]:
        """Run one scheduling cycle: commit what has finished, then launch at most one decode batch and one prefill chunk."""
        self.counters["cycles"] += 1
        events = self._commit_finished()
        self.memory.allocator.reclaim()
        self.queues.start(self._limits.max_batch)
        if not self.queues.decoding:
            self._tempo.pause()
        plan = self._planner.plan(self._limits.chunk_tokens)
        self.memory.scrub()
        self._launched = set()
        for work in self._prepare(plan):
            events += self._run(work)
        self._count_overlap()
        if self._policy.join.cycle:
            self.flight.wait_for_all()
            events += self._commit_finished()
        elif not self._launched and self.flight:  # everything waits for what runs already
            self.flight.wait()
            events += self._commit_finished()
        return events

    def drain(self) -> None:
        """Wait for all that was enqueued, by launches that failed too."""
        for lane in self.lanes.values():
            lane.mark().wait()

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one place."""
        self.memory.check_integrity(self.live())

    def status(self) -> dict[str, object]:
        """Queue sizes, blocks by state, counters."""
        prefix = self.memory.prefix
        return {
            "policy": self._policy.name,
            "waiting": len(self.queues.waiting),
            "prefilling": len(self.queues.turns),
            "decoding": self.queues.decoding,
            "in_flight": len(self.flight),
            "blocks": self.memory.counts(),
            "prefix_cache": None if prefix is None else dict(prefix.counters),
            "preemptions": self.queues.preemptions,
            **self.counters,
        }

    def _prepare(self, plan: Plan) -> list[Work]:
        """Decode first: whoever already reads must not wait for a newcomer's prompt."""
        cycle = self.counters["cycles"]
        decode = prepare_decode(plan.decode, cycle, plan.rows) if plan.decode else None
        prefill = prepare_prefill(plan.prefill, plan.prefill_tokens, cycle) if plan.prefill_tokens else None
        if decode and prefill and self._policy.placement.fused:
            return [fuse(prefill, decode)]
        return [work for work in (decode, prefill) if work]

    def _count_overlap(self) -> None:
        """Launched in one cycle, or one while the other was in flight; on two streams, or not."""
        beside = {"decode" if self.flight.batches else None, "prefill" if self.flight.chunks else None}
        if not self._launched or not {"decode", "prefill"} <= self._launched | beside:
            return
        self.counters["prefill_decode_overlap_steps"] += 1
        lanes = self.lanes.values()
        streams = len(lanes) == 2 and all(lane.asynchronous for lane in lanes)
        self.counters["prefill_decode_stream_overlap_steps"] += streams

    def _fences(self, sequence: Sequence) -> list[Mark]:
        """What must pass before a sequence's blocks change hands: nothing where all its work is committed."""
        return self.flight.ends if sequence.in_flight else []

    def _shared(self, work: Work) -> bool:
        """Whether the other phase has work meanwhile, and leaves this one its part only."""
        if work.phase == "decode":
            return bool(self.flight.chunks) and not self._policy.sizer.spreads
        return self.queues.decoding > 0

    def _run(self, work: Work) -> list[Event]:
        """Launch, and wait where the policy says so."""
        lane = self.lanes[self._policy.placement.lane_for(work.phase)]
        failure = None
        try:
            ticket = lane.launch(work, shared=self._shared(work))
        except torch.OutOfMemoryError as error:
            failure = str(error)  # and nothing else: its traceback would hold what the failed pass had allocated
        if failure is not None:
            return self._without_memory(work, lane, failure)
        for sequence, count in zip(work.sequences, work.counts, strict=True):
            sequence.in_flight += 1
            sequence.launched += count
        if work.chunk:
            self.queues.next_turn(work.sequences[0])
        self.flight.add(ticket)
        self._launched |= {"prefill", "decode"} if work.phase == "mixed" else {work.phase}
        self.counters["prefill_steps"] += work.chunk is not None
        self.counters["decode_steps"] += bool(work.decodes)
        if self._policy.join.each:
            ticket.finished.wait()
        return self._commit_finished()

    def _without_memory(self, work: Work, lane: Lane, failure: str) -> list[Event]:
        """Halve a batch for which there is no memory. One request alone that does not fit is ended."""
        if any(row != KNOWN for row in work.sources):
            lane.mark().wait()  # what was enqueued before memory ran out may still write
            return self._commit_finished()  # and now the tokens are known: it is tried again
        if len(work.sequences) == 1:
            name = work.sequences[0].request.id
            cause = OutOfDeviceMemory(f"request {name}: {work.phase} of {work.counts[0]} tokens: {failure}")
            return [self._end(work.sequences[0], FinishReason.ERROR, cause, [lane.mark()])]
        events = []
        for half in halves(work):
            while not self.flight.room:
                self.flight.wait()
                events += self._commit_finished()
            events += self._run(half)
        return events

    def _commit_finished(self) -> list[Event]:
        return [event for ticket in self.flight.take_finished() for event in self._commit(ticket)]

    def _commit(self, ticket: Ticket) -> list[Event]:
        work = ticket.work
        ids = tuple([sequence.request.id for sequence in work.sequences])
        counts = work.counts
        choices = finish(work, ticket.logits, ticket.likeliest)
        now = time.perf_counter()
        events: list[Event] = [
            StepEvent(
                work.phase, ticket.lane, work.cycle, ticket.started.time(), ticket.finished.time(), ids, sum(counts)
            )
        ]
        chosen: dict[Sequence, Choice | RequestFailed] = {}
        block_size = self.kv.block_size
        for sequence, count in zip(work.sequences, counts, strict=True):
            # Where it may have filled a block:
            if sequence.computed % block_size < count and sequence.phase is not Phase.FINISHED:
                full = sequence.computed // block_size
                chosen = chosen or dict(choices)
                if full > sequence.sealed and not isinstance(chosen.get(sequence), RequestFailed):
                    self.memory.seal(sequence, full, self._fences(sequence))
        if work.chunk and any(sequence is work.sequences[0] for sequence, _ in choices):  # the last chunk
            self.queues.turns.remove(work.sequences[0])
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
        self._tempo.observe(ticket, somebody_waits=self.queues.decoding > 0)
        return events

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: Exception | None = None,
        fences: Iterable[Mark] | None = None,
    ) -> FinishEvent:
        self.queues.leave(sequence)
        sequence.phase = Phase.FINISHED
        self.memory.release(sequence, self._fences(sequence) if fences is None else fences)
        self.counters["finished_requests"] += 1
        return FinishEvent(sequence.request.id, reason, time.perf_counter(), error)
