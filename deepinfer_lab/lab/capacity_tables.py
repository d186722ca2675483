"""Tables of notebook 07, from rows of records: the parts of TTFTs, closed loops rebuilt, open loops by Little and by limits."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from deepinfer_lab.engine.event import StepEvent
from deepinfer_lab.lab.record import Record
from deepinfer_lab.lab.serving import trace_of
from deepinfer_lab.metrics.capacity import Slo, closed_loop_times, in_system, little, ttft_parts

Times = tuple[Sequence[float], Sequence[float]]  # when each request was sent, and when it ended, in seconds


def ttft_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a request: clients, name, the parts of its TTFT (`TtftParts`) and ttft, in milliseconds.

    Args:
        rows: of `serve_real_model`, requests and steps.
    """
    split = []
    for clients, its in rows[rows["row"].isin(["request", "step"])].groupby("concurrency"):
        steps = [
            StepEvent(s.phase, s.lane, 0, s.started_s, s.finished_s, tuple(s.requests), int(s.tokens))
            for s in its[its["row"] == "step"].itertuples()
        ]
        for row in its[its["row"] == "request"].to_dict("records"):
            trace = trace_of(row)
            parts = ttft_parts(trace, steps)
            assert parts is not None, f"{trace.request_id} has no tokens, or no steps"
            ms = {name: seconds * 1e3 for name, seconds in vars(parts).items()}
            split.append(
                {
                    "clients": int(clients),
                    "name": trace.request_id,
                    **ms,
                    "ttft": (trace.token_times[0] - trace.sent) * 1e3,
                }
            )
    return pd.DataFrame(split)


def rebuilt(row: pd.Series) -> Times:
    """When a closed loop's requests were sent and ended, from their TTFTs and gaps alone (`closed_loop_times`).

    Args:
        row: of `overlap_sweep`.
    """
    gaps = np.reshape(row["itl_ms"], (row["requests"], -1))
    return closed_loop_times((np.array(row["ttft_ms"]) + gaps.sum(axis=1)) / 1e3, row["concurrency"])


def share_within(slo: Slo, ttft_ms: Sequence[float], tpot_ms: Sequence[float]) -> float:
    """The share of requests that keep both limits."""
    return float(np.mean((np.array(ttft_ms) <= slo.ttft * 1e3) & (np.array(tpot_ms) <= slo.tpot * 1e3)))


def loop_table(record: Record, ttft_times: float, tpot_times: float) -> tuple[pd.DataFrame, Slo]:
    """The loops of a `capacity` record in which no request failed, and the limits that they are held to.

    Args:
        ttft_times, tpot_times: the limits, in medians of the first row, which is one client alone.

    Returns:
        The record's rows, and name (the loop, and its clients or its part of capacity), N and W ms (each side of Little's law
        by itself), served/s, TTFT p50, TTFT max, within %, good/s, and times, as `rebuilt` gives them.
    """
    rows = pd.DataFrame([row for row in record.samples if row["row"] == "loop"])
    assert (rows["errors"] == 0).all(), "a request failed"
    rows["times"] = [(np.array(r.due_ms) / 1e3, np.add(r.due_ms, r.e2e_ms) / 1e3) for r in rows.itertuples()]
    laws = [little(*times) for times in rows["times"]]
    rows["N"], rows["W ms"] = [law.mean_in_system for law in laws], [law.mean_time * 1e3 for law in laws]
    rows["served/s"] = [law.rate for law in laws]
    tpot = [np.subtract(r.e2e_ms, r.ttft_ms) / (r.new_tokens - 1) for r in rows.itertuples()]
    slo = Slo(ttft_times * np.median(rows["ttft_ms"][0]) / 1e3, tpot_times * np.median(tpot[0]) / 1e3)
    kept = np.array([share_within(slo, *pair) for pair in zip(rows["ttft_ms"], tpot, strict=True)])
    rows["TTFT p50"], rows["TTFT max"] = rows["ttft_ms"].map(np.median), rows["ttft_ms"].map(max)
    clients, parts = rows["clients"].map("{:.0f} clients".format), rows["part"].map("{:.0%}".format)
    rows["name"] = rows["loop"] + ", " + np.where(rows["loop"] == "closed", clients, parts)
    rows["within %"], rows["good/s"] = kept * 100, rows["served/s"] * kept
    return rows, slo


def in_system_table(series: str, times: Times) -> pd.DataFrame:
    """Columns series, at_s (from the first arrival) and count: what `draw_in_system` takes."""
    at, count = in_system(*times)
    return pd.DataFrame({"series": series, "at_s": at - at[0], "count": count})
