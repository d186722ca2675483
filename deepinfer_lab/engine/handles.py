"""The handles of all live requests: where they come in, how events reach them, and how all of them end."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable

from deepinfer_lab.engine.event import Event, FinishEvent, StepEvent
from deepinfer_lab.engine.handle import RequestHandle
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.errors import DuplicateRequest, EngineClosed

Listener = Callable[[Event], None]


class Handles:
    """Safe to call from any thread, but for `deliver` and `end_all`, which belong to the engine's.

    Args:
        listeners: called with every event before its handle receives it.
    """

    def __init__(self, listeners: Iterable[Listener]) -> None:
        self._listeners = tuple(listeners)
        self._ids = itertools.count()
        self._lock = threading.Lock()  # guards the three fields below
        self._handles: dict[str, RequestHandle] = {}
        self._closed = False
        self._failure: Exception | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    def new_id(self) -> str:
        """A name that nobody has given to a live request."""
        with self._lock:
            return next(name for i in self._ids if (name := f"request-{i}") not in self._handles)

    def live(self) -> list[str]:
        """Names of requests that have not ended."""
        with self._lock:
            return list(self._handles)

    def add(self, request: Request, queue: Callable[[Request], None]) -> RequestHandle:
        """Make a handle, and `queue` the request while nobody can close.

        Raises:
            EngineClosed: as `check_open`. DuplicateRequest: the name belongs to a live request.
        """
        handle = RequestHandle(request)
        with self._lock:
            self.check_open()
            if request.id in self._handles:
                raise DuplicateRequest(f"request id '{request.id}' belongs to a live request; ids must be unique")
            self._handles[request.id] = handle
            queue(request)
        return handle

    def check_open(self) -> None:
        """Raise EngineClosed where the engine was closed or has died."""
        if self._closed or self._failure is not None:
            raise EngineClosed("the engine is closed" if self._failure is None else f"the engine died: {self._failure}")

    def close(self) -> None:
        """Take no more requests."""
        with self._lock:
            self._closed = True

    def deliver(self, events: Iterable[Event]) -> None:
        """Hand events to listeners and to the requests that they are about."""
        for event in events:
            try:
                for listener in self._listeners:
                    listener(event)
            finally:  # a listener that fails takes no event from its request, and no second end comes after this one
                self._hand_over(event)

    def _hand_over(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            return
        if isinstance(event, FinishEvent):
            with self._lock:
                handle = self._handles.pop(event.request_id)
        else:
            handle = self._handles[event.request_id]
        handle.put(event)

    def end_all(self, failure: Exception | None) -> None:
        """Close, and give every live request its terminal event.

        Args:
            failure: what the engine died of; None where it was closed.
        """
        with self._lock:
            self._closed, self._failure = True, failure
            handles, self._handles = self._handles, {}
        reason = FinishReason.CANCELLED if failure is None else FinishReason.ERROR
        error = None if failure is None else EngineClosed(f"the engine died: {failure!r}")
        for request_id, handle in handles.items():
            event = FinishEvent(request_id, reason, time.perf_counter(), error)
            handle.put(event)
            for listener in self._listeners:
                with contextlib.suppress(Exception):  # it may be the listener that failed
                    listener(event)
