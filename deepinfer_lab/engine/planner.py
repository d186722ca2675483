"""What the next cycle runs: who takes a decode step, and whose prompt goes on, by how much."""

from collections.abc import Mapping
from dataclasses import dataclass

from deepinfer_lab.engine.flight import Flight
from deepinfer_lab.engine.lane import Lane, Ticket
from deepinfer_lab.engine.policy import Policy
from deepinfer_lab.engine.queues import Queues
from deepinfer_lab.engine.request import Phase, Sequence
from deepinfer_lab.engine.sizer import Outlook


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
    """What one cycle will run. Either part may be empty.

    Attributes:
        decode: who takes a decode step. rows: of them, those whose last token only their lane knows, with its row there.
        prefill: whose prompt goes on. prefill_tokens: by how many tokens.
    """

    decode: tuple[Sequence, ...]
    rows: Mapping[Sequence, int]
    prefill: Sequence | None
    prefill_tokens: int


class Planner:
    """Plans, and makes room for the tokens of those who decode. Launches nothing."""

    def __init__(
        self,
        policy: Policy,
        queues: Queues,
        flight: Flight,
        lanes: Mapping[str, Lane],
        block_size: int,
    ) -> None:
        self._policy, self._queues, self._flight = policy, queues, flight
        self._lanes, self._block_size = lanes, block_size

    def plan(self, chunk_tokens: int) -> Plan:
        """What to run now, with chunks of at most so many tokens."""
        room, fused = self._flight.room, self._policy.placement.fused
        decode, rows, stuck = self._with_room_to_grow() if room else ((), {}, None)
        prefill = self._next_to_read() if room else None
        if prefill and stuck and stuck.arrival < prefill.arrival:
            prefill = None  # it may hold what an older one needs: out of flight, it can be preempted
        if fused and not decode and self._flight.batches:
            prefill = None  # alone, it would hold up those who decode for a step in which they get nothing
        if prefill and room == 1 and self._queues.decoding and not fused and not self._policy.join.each:
            # One launch alone is allowed. It is decode's, also where that is not due yet, as long as prefill has one in flight.
            if not self._flight.chunks and (not decode or self._flight.latest == "decode"):
                decode, rows = (), {}
            else:
                prefill = None
        tokens = self._policy.sizer.tokens(self._outlook(chunk_tokens, decode, prefill)) if prefill else 0
        return Plan(decode, rows, prefill, tokens)

    def _outlook(self, chunk_tokens: int, decode: tuple[Sequence, ...], prefill: Sequence) -> Outlook:
        decoding = decode or [s for ticket in self._flight.batches[-1:] for s in ticket.work.sequences]
        return Outlook(chunk_tokens, len(decoding), sum(sequence.launched for sequence in decoding), prefill.launched)

    def _next_to_read(self) -> Sequence | None:
        """Whose prompt goes on. The chunk before may still be in flight: its lane runs them in order."""
        return next((s for s in self._queues.turns if s.launched < len(s.tokens)), None)

    def _with_room_to_grow(self) -> tuple[tuple[Sequence, ...], dict[Sequence, int], Sequence | None]:
        """Those that can take a decode step now, each with a slot for its token; the `rows` of a `Plan`; and the oldest that is
        due and gets no block.

        One batch is in flight at a time, or two where the second goes on from the first: joining it, newcomers need not form
        a batch of their own. In order of arrival, and whoever needs a block may take it from those that arrived later alone:
        the oldest request always goes on, so that nobody starves.
        """
        batches = self._flight.batches
        rows: dict[Sequence, int] = {}
        if batches:
            if len(batches) > 1 or not self._runs_ahead(batches[0]):
                return (), {}, None
            rows = {s: row for row, s in enumerate(batches[0].work.sequences) if _goes_on(s)}
        chosen: list[Sequence] = []
        stuck, decode, block_size = None, Phase.DECODE, self._block_size
        for sequence in list(self._queues.ready):
            if (sequence.phase is not decode or sequence.in_flight) and sequence not in rows:
                continue  # not due, or preempted a moment ago
            if sequence.launched < len(sequence.blocks) * block_size or self._queues.grow(sequence):
                chosen.append(sequence)
            elif batches:
                return (), {}, sequence  # nobody in flight can be preempted: let what runs finish
            else:
                stuck = stuck or sequence
        return tuple(chosen), rows, stuck

    def _runs_ahead(self, ticket: Ticket) -> bool:
        """Whether the next step can be launched before the tokens of this one are known."""
        known_to_the_lane = ticket.work.greedy and ticket.likeliest is not None
        return self._policy.join.runs_ahead and self._lanes[ticket.lane].asynchronous and known_to_the_lane


def _goes_on(sequence: Sequence) -> bool:
    """Whether a sequence whose next token is in flight will want another: surely not where that one is its last."""
    left = sequence.request.params.max_tokens - (len(sequence.tokens) - len(sequence.request.prompt))
    return sequence.phase is not Phase.FINISHED and sequence.launched == len(sequence.tokens) and left > 1
