"""From per-token timestamps to the field's latency figures. All times are in seconds.

TTFT: from the client's send to its first token, so queueing and tokenising count.
ITL: between consecutive tokens of one request; it never contains the TTFT.
TPOT: (E2E - TTFT) / (N - 1) of one request; undefined for N = 1.
E2E: from the client's send to its last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RequestTrace:
    """What a client saw of one request. Times are seconds since an origin that all traces of a run share.

    Attributes:
        request_id: its name. prompt_tokens: length of the prompt.
        sent: when the client sent it. token_times: when each token reached the client.
        error: why it failed or was refused, or None.
    """

    request_id: str
    prompt_tokens: int
    sent: float
    token_times: tuple[float, ...]
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.sent if self.token_times else None

    @property
    def itl(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def e2e(self) -> float | None:
        return self.token_times[-1] - self.sent if self.token_times else None

    @property
    def tpot(self) -> float | None:
        count = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (count - 1) if count > 1 else None


@dataclass(frozen=True)
class Spread:
    """Percentiles of a sample, by linear interpolation between order statistics."""

    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None where there is nothing to describe."""
        if not values:
            return None
        return cls(*(float(q) for q in np.percentile(values, (50, 95, 99, 100))))


@dataclass(frozen=True)
class RunSummary:
    """One run of many requests.

    Attributes:
        output_tokens_per_s: generated tokens over the time from the first send to the last token.
        ttft, tpot, itl, e2e: over requests (ITL: over all gaps of all requests).
        requests, errors: how many ended well, and how many did not.
    """

    requests: int
    errors: int
    output_tokens: int
    output_tokens_per_s: float
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None


def summarise(traces: Sequence[RequestTrace]) -> RunSummary:
    """Summarise the traces of one run. Requests that failed count as errors; their tokens count for nothing."""
    good = [trace for trace in traces if trace.error is None and trace.token_times]
    tokens = sum(len(trace.token_times) for trace in good)
    span = max(t.token_times[-1] for t in good) - min(t.sent for t in good) if good else 0.0
    return RunSummary(
        requests=len(good),
        errors=len(traces) - len(good),
        output_tokens=tokens,
        output_tokens_per_s=tokens / span if span > 0 else 0.0,
        ttft=Spread.of([trace.ttft for trace in good]),
        tpot=Spread.of([trace.tpot for trace in good if trace.tpot is not None]),
        itl=Spread.of([gap for trace in good for gap in trace.itl]),
        e2e=Spread.of([trace.e2e for trace in good]),
    )
