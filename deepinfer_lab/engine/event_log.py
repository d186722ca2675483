"""Every event as a line of JSON, written by a thread of its own: the engine's thread only appends to a buffer."""

import json
import threading
from collections import deque
from pathlib import Path

from deepinfer_lab.engine.event import Event
from deepinfer_lab.errors import SettingError

CAPACITY = 65_536  # events between two flushes; older ones are dropped, and counted
FLUSH_S = 1.0


class EventLog:
    """Writes events to a file once a second, and the rest when closed.

    Each line holds an event's type and its fields; the last one, {"type": "end", "dropped": N}, how many events the buffer had
    no room for.

    Raises:
        SettingError: the file cannot be written.
    """

    def __init__(self, path: Path, capacity: int = CAPACITY, flush_s: float = FLUSH_S) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise SettingError(f"event_log = {str(path)!r}: cannot be written ({error.strerror})") from error
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._added = self._written = 0
        self._flush_s, self._closing = flush_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name="deepinfer-event-log", daemon=True)
        self._thread.start()

    def add(self, event: Event) -> None:
        """Called by one thread alone. Costs one append."""
        self._ring.append(event)
        self._added += 1

    def close(self) -> None:
        """Write what is left. Nothing may be added afterwards."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        with self._file:
            while not self._closing.wait(self._flush_s):
                self._flush()
            self._flush()
            self._write({"type": "end", "dropped": self._added - self._written})

    def _flush(self) -> None:
        for _ in range(len(self._ring)):  # what comes meanwhile waits for the next time
            try:
                event = self._ring.popleft()
            except IndexError:  # it was dropped a moment ago
                break
            self._write({"type": type(event).__name__, **event._asdict()})
            self._written += 1
        self._file.flush()

    def _write(self, line: dict) -> None:
        self._file.write(json.dumps(line, default=_plain) + "\n")


def _plain(value: object) -> object:
    return getattr(value, "value", None) or repr(value)  # an enum's value; an error's repr
