"""An engine's run as a picture to zoom into: chrome://tracing or ui.perfetto.dev, in the Trace Event Format (JSON).

Each lane is a row of slices, one for each step. Arrows (flow events) lead from step to step of each request, across lanes.
Each request is a slice of its own (async events), from its first step to its end. Each token is an instant.
Times are µs since the first event, in whole nanoseconds.
"""

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from deepinfer_lab.engine.event import Event, FinishEvent, StepEvent, TokenEvent
from deepinfer_lab.errors import SettingError

PROCESS = 1  # 0 is the idle process to Perfetto
CLIENT = 1  # the row of what clients see; those of the lanes follow

Placed = tuple[StepEvent, int]  # a step and its row


@dataclass(frozen=True)
class _Request:
    """One request's steps in order of start, maybe none, and its end, or None where the events stop before it."""

    name: str
    steps: list[Placed]
    end: FinishEvent | None


class TraceRecorder:
    """A listener for an Engine that keeps all events, for `write`."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)


def write(path: Path, events: Iterable[Event]) -> None:
    """Write the trace of a run.

    Raises:
        SettingError: the file cannot be written.
    """
    trace = {"traceEvents": trace_events(events), "displayTimeUnit": "ms"}
    try:
        path.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        raise SettingError(f"trace {str(path)!r}: cannot be written ({error.strerror})") from error


def trace_events(events: Iterable[Event]) -> list[dict]:
    """The trace of a run, from its events in any order."""
    events = _since_first(list(events))
    steps = sorted((e for e in events if isinstance(e, StepEvent)), key=attrgetter("started", "finished"))
    ends = sorted((e for e in events if isinstance(e, FinishEvent)), key=attrgetter("time"))
    rows, placed = _placed(steps)
    trace = [_metadata("process_name", CLIENT, name="deepinfer_lab")]
    for row, name in enumerate(["client", *rows], start=CLIENT):
        trace += [_metadata("thread_name", row, name=name), _metadata("thread_sort_index", row, sort_index=row)]
    trace += [_slice(step, row) for step, row in placed]
    trace += [_instant(event) for event in events if isinstance(event, TokenEvent)]
    for number, request in enumerate(_requests(placed, ends), start=1):
        trace += _journey(number, request)
    return trace


def _since_first(events: list[Event]) -> list[Event]:
    """The same events with times in µs since the first, whole nanoseconds."""
    origin = min((e.started if isinstance(e, StepEvent) else e.time for e in events), default=0.0)

    def us(seconds: float) -> float:
        return round((seconds - origin) * 1e9) / 1e3

    return [
        event._replace(started=us(event.started), finished=us(event.finished))
        if isinstance(event, StepEvent)
        else event._replace(time=us(event.time))
        for event in events
    ]


def _placed(steps: list[StepEvent]) -> tuple[list[str], list[Placed]]:
    """Rows' names, and each step with its row. Slices of a row must not overlap: a lane has as many rows as steps at once."""
    rows: list[str] = []
    free: dict[str, list[tuple[float, int]]] = defaultdict(list)  # a lane's rows: from when on each is free, and its id
    placed = []
    for step in steps:  # in order of start
        lane = free[step.lane]
        place = next((i for i, (time, _) in enumerate(lane) if time <= step.started), len(lane))
        if place == len(lane):
            rows.append(step.lane if not lane else f"{step.lane} ({len(lane) + 1})")
            lane.append((0.0, CLIENT + len(rows)))
        row = lane[place][1]
        lane[place] = (step.finished, row)
        placed.append((step, row))
    return rows, placed


def _requests(placed: list[Placed], ends: list[FinishEvent]) -> list[_Request]:
    """An id may be used again after its end. A step in flight when its request was cancelled began before that end."""
    ends_of: dict[str, list[FinishEvent]] = defaultdict(list)
    for end in ends:  # in order of time
        ends_of[end.request_id].append(end)
    found = {(name, turn): _Request(name, [], end) for name, each in ends_of.items() for turn, end in enumerate(each)}
    for step, row in placed:
        for name in step.request_ids:
            turn = bisect_right(ends_of[name], step.started, key=attrgetter("time"))
            found.setdefault((name, turn), _Request(name, [], None)).steps.append((step, row))
    return list(found.values())


def _slice(step: StepEvent, row: int) -> dict:
    size = f"{len(step.request_ids)} rows" if step.phase == "decode" else f"{step.tokens} tok"
    args = {"cycle": step.cycle, "requests": list(step.request_ids), "tokens": step.tokens}
    duration = round(step.finished - step.started, 3)
    return _event("X", f"{step.phase} {size}", step.phase, step.started, row, dur=duration, args=args)


def _instant(token: TokenEvent) -> dict:
    return _event("i", token.request_id, "token", token.time, CLIENT, s="t", args={"token": token.token})


def _journey(number: int, request: _Request) -> list[dict]:
    """A request from its first step to its end, and an arrow through its steps if there are several.

    The arrow is tied to the slices in which its stations lie ("bp": "e"), and each lies where its slice starts.
    """
    name, steps, end = request.name, request.steps, request.end
    began = steps[0][0].started if steps else end.time
    ended = end.time if end else max(step.finished for step, _ in steps)
    why = {} if end is None else {"reason": end.reason.value, "error": None if end.error is None else repr(end.error)}
    journey = [
        _event("b", name, "request", began, CLIENT, id=number),
        _event("e", name, "request", ended, CLIENT, id=number, args=why),
    ]
    if len(steps) > 1:
        for ph, (step, row) in zip(["s", *["t"] * (len(steps) - 2), "f"], steps, strict=True):
            journey.append(_event(ph, name, "flow", step.started, row, id=number, bp="e"))
    return journey


def _event(ph: str, name: str, category: str, ts: float, row: int, **more: object) -> dict:
    return {"ph": ph, "name": name, "cat": category, "pid": PROCESS, "tid": row, "ts": ts, **more}


def _metadata(about: str, row: int, **args: object) -> dict:
    return {"ph": "M", "name": about, "pid": PROCESS, "tid": row, "args": args}
