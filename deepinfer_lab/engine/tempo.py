"""How long work takes, for those who size it."""

import time

from deepinfer_lab.engine.lane import Ticket
from deepinfer_lab.engine.sizer import Sizer


class Tempo:
    """Tells a sizer how long things took."""

    def __init__(self, sizer: Sizer) -> None:
        self._sizer = sizer
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
            self._sizer.observe_decode(len(work.spans), sum([span.start for span in work.spans]), ms)
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
