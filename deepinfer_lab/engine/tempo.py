"""How long work takes, for those who size and pace it."""

import time

from deepinfer_lab.engine.flight import Flight
from deepinfer_lab.engine.lane import Ticket
from deepinfer_lab.engine.policy import Policy


class Tempo:
    """Tells the policy's sizer how long things took, and when the next decode step is due where decode is paced."""

    def __init__(self, policy: Policy, flight: Flight) -> None:
        self._sizer, self._pace_ms, self._flight = policy.sizer, policy.join.pace_ms, flight
        self._decode_ms = 0.0  # of the newest step that did nothing else
        self._decoded_at: float | None = None  # when the last decode result was seen, where somebody waits for the next

    def observe(self, ticket: Ticket, *, somebody_waits: bool) -> None:
        """Note a piece of work that has run.

        Args:
            somebody_waits: for a decode step after this one.
        """
        work, now = ticket.work, time.perf_counter()
        ms = (ticket.finished.time() - ticket.started.time()) * 1e3
        if work.chunk is None:
            self._decode_ms = ms
            self._sizer.observe_decode(len(work.spans), sum(span.start for span in work.spans), ms)
        else:  # a mixed step does what a decode step does, and a chunk
            alone = max(ms - self._decode_ms, 0.0) if work.decodes else ms
            self._sizer.observe_prefill(len(work.chunk.tokens), work.chunk.start, alone)
        if work.decodes:
            if self._decoded_at is not None:
                self._sizer.observe_gap((now - self._decoded_at) * 1e3)
            self._decoded_at = now if somebody_waits else None

    def pause(self) -> None:
        """Nobody decodes: what comes next is no gap."""
        self._decoded_at = None

    def early_by(self) -> float:
        """Seconds until the next decode step may be launched, so that a prompt in flight has its time."""
        if self._pace_ms is None or self._decoded_at is None or not self._flight.chunks:
            return 0.0
        if self._flight.batches:  # its result is to come first
            return self._pace_ms / 1e3
        return self._decoded_at + (self._pace_ms - self._decode_ms) / 1e3 - time.perf_counter()
