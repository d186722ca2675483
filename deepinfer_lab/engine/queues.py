"""Where requests stand: waiting for blocks, or ready, and of those who is next to read its prompt."""

from bisect import insort
from collections import deque
from operator import attrgetter

from deepinfer_lab.engine.memory import SequenceMemory
from deepinfer_lab.engine.request import Phase, Sequence


class Queues:
    """Every live request is in `waiting` or in `ready`.

    Attributes:
        waiting: by arrival. ready: they hold blocks; by arrival.
        turns: those who are ready and still reading their prompts, whose turn is next first.
        preemptions: so far.
    """

    def __init__(self, memory: SequenceMemory) -> None:
        self._memory = memory
        self.waiting: deque[Sequence] = deque()
        self.ready: list[Sequence] = []
        self.turns: deque[Sequence] = deque()
        self.preemptions = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.ready)

    @property
    def decoding(self) -> int:
        """How many have read their prompts."""
        return len(self.ready) - len(self.turns)

    def start(self, max_batch: int) -> None:
        """Move waiting requests to ready, first come first served, while the pool holds what they begin with.

        A block for the next token of everybody who is ready stays spare, so that a newcomer is not preempted at once.
        """
        while self.waiting and len(self.ready) < max_batch:
            sequence = self.waiting[0]
            if not self._memory.start(sequence, spare=len(self.ready)):
                return
            self.waiting.popleft()
            sequence.phase = Phase.PREFILL
            insort(self.ready, sequence, key=attrgetter("arrival"))  # it may have been there before, and preempted
            self.turns.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take a request out."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
            return
        self.ready.remove(sequence)
        if sequence in self.turns:
            self.turns.remove(sequence)

    def next_turn(self, sequence: Sequence) -> None:
        """Its next chunk comes after everybody else's."""
        self.turns.remove(sequence)
        self.turns.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a ready sequence's blocks and queue it again. It will read all its tokens anew, or find them cached."""
        assert not sequence.in_flight
        self.leave(sequence)
        self._memory.release(sequence, ())
        sequence.phase = Phase.WAITING
        insort(self.waiting, sequence, key=attrgetter("arrival"))
        self.preemptions += 1

    def grow(self, sequence: Sequence) -> bool:
        """Make room for the next token of a sequence, if need be with blocks of those that arrived later."""
        while not self._memory.grow(sequence):
            victim = self.victim(sequence)
            if victim is None:
                return False
            self.preempt(victim)
        return True

    def victim(self, sequence: Sequence) -> Sequence | None:
        """The latest arrival after this one that would free a block at once. One in flight, or all shared, frees none."""
        later = [s for s in self.ready if s.arrival > sequence.arrival and not s.in_flight]
        return next((s for s in reversed(later) if self._memory.gain(s)), None)
