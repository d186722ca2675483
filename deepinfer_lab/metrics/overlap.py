"""Whether prefill and decode ran on the GPU at the same time, and what that was worth.

That two launches share a scheduler cycle or go to two streams proves nothing: the GPU may still run them one after the other.
Only the kernels' own intervals prove it, and only beside two controls: a trace of one stream must give exactly 0, and two
spin kernels that fill half of the GPU each must give nearly all of the shorter one.
"""

from dataclasses import dataclass

import numpy as np

from deepinfer_lab.metrics.intervals import covered, intersection, length, union
from deepinfer_lab.metrics.kernel_trace import KernelTrace
from deepinfer_lab.metrics.latency import Spread


@dataclass(frozen=True)
class Overlap:
    """What a trace proves. P and D are the sets of times in which some kernel of prefill, or of decode, ran.

    Attributes:
        physical_overlap_ms: |P ∩ D|. Control: one stream runs one kernel at a time, so that this must be exactly 0;
            anything else is a fault of the measurement.
        prefill_busy_ms, decode_busy_ms: |P| and |D|. Kernels of one phase that overlap count once.
        span_ms: from the start of the first kernel, copy or fill to the end of the last.
        gpu_idle_share: share of the span in which the GPU ran nothing at all, copies included: `cpu_gpu_gap`. None
            where nothing ran.
        decode_covered: spread, over decode kernels, of `decode_covered_shares`. None where there are none.
        prefill_kernels, decode_kernels: how many there are. other_kernels: those of neither phase; they are in no set, so
            that where there are many the overlap is a lower bound.
    """

    physical_overlap_ms: float
    prefill_busy_ms: float
    decode_busy_ms: float
    span_ms: float
    gpu_idle_share: float | None
    decode_covered: Spread | None
    prefill_kernels: int
    decode_kernels: int
    other_kernels: int

    @classmethod
    def of(cls, trace: KernelTrace) -> "Overlap":
        prefill, decode = trace.kernels("prefill"), trace.kernels("decode")
        p, d = union(prefill), union(decode)
        return cls(
            physical_overlap_ms=length(intersection(p, d)) / 1e6,
            prefill_busy_ms=length(p) / 1e6,
            decode_busy_ms=length(d) / 1e6,
            span_ms=trace.span_ms,
            gpu_idle_share=1 - length(union(trace.times)) / 1e6 / trace.span_ms if trace.span_ms else None,
            decode_covered=Spread.of(decode_covered_shares(trace).tolist()),
            prefill_kernels=len(prefill),
            decode_kernels=len(decode),
            other_kernels=len(trace.kernels(None)),
        )

    @property
    def share(self) -> float | None:
        """Overlap over the shorter phase's busy time, 0 to 1. None where a phase did not run.

        Control: for two spin kernels of half the GPU each, launched together on two streams, about 1. Less, and the tool
        or the machine serialises, and no 0 that it reports elsewhere says anything about a policy.
        """
        shorter = min(self.prefill_busy_ms, self.decode_busy_ms)
        return self.physical_overlap_ms / shorter if shorter else None


def decode_covered_shares(trace: KernelTrace) -> np.ndarray:
    """For each decode kernel, the share of its time in which some prefill kernel ran, 0 to 1, float64 [D].

    Kernels shorter than the clock's tick have no share and are left out.
    """
    kernels = trace.kernels("decode")
    kernels = kernels[kernels[:, 0] < kernels[:, 1]]
    return covered(kernels, union(trace.kernels("prefill"))) / (kernels[:, 1] - kernels[:, 0])


def dilation(alone: KernelTrace, together: KernelTrace, phase: str) -> float | None:
    """A phase's busy time in company over its busy time alone, for the same work: what sharing the GPU costs it.

    1 means that it runs as fast as alone. None where it did not run alone.
    """
    before, after = (length(union(trace.kernels(phase))) for trace in (alone, together))
    return after / before if before else None


def speedup(prefill_alone: KernelTrace, decode_alone: KernelTrace, together: KernelTrace) -> float | None:
    """(T_P alone + T_D alone) / T_both, each T a trace's span, for the same work: what overlap gains in the end.

    Overlapping by much gains nothing where both dilate by as much: 1 means that running one after the other is as good.
    None where nothing ran together.
    """
    both = together.span_ms
    return (prefill_alone.span_ms + decode_alone.span_ms) / both if both else None
