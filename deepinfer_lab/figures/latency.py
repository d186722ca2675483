"""Distributions of latency."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from deepinfer_lab.figures.style import label, log_axis


def itl_table(requests: pd.DataFrame, by: str) -> pd.DataFrame:
    """All inter-token latencies, one row each, sorted within their group.

    Args:
        requests: columns `by` and token_times_s.
        by: the column that tells lines apart.

    Returns:
        Columns `by`, itl_ms, share: of gaps in the group that are no longer than this one.
    """
    parts = []
    for key, group in requests.groupby(by):
        gaps = np.sort(np.concatenate([np.diff(times) for times in group["token_times_s"]]) * 1e3)
        parts.append(pd.DataFrame({by: key, "itl_ms": gaps, "share": np.arange(1, len(gaps) + 1) / len(gaps)}))
    return pd.concat(parts, ignore_index=True)


def draw_itl_ecdf(axes: Axes, table: pd.DataFrame, by: str) -> None:
    """Empirical distribution of inter-token latency, one line per value of `by`, on a logarithmic axis."""
    for key, group in table.groupby(by):
        axes.step(group["itl_ms"], group["share"], where="post", label=f"{by} {key}", linewidth=2)
    log_axis(axes.xaxis, subs=(1, 1.5, 2, 3, 4, 6, 8))
    axes.set_ylim(0, 1.02)
    axes.legend(loc="lower right")
    label(axes, "Inter-token latency", "gap between tokens (ms, log scale)", "share of gaps no longer")
