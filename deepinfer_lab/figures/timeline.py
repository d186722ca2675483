"""Where the time goes: one bar per request, from its send to its last token."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deepinfer_lab.figures.style import DECODE, PREFILL, label

WAITING = "#DDDDDD"


def timeline_table(requests: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """What `draw_timeline` shows, one row a request, in milliseconds since the load began.

    Args:
        requests: columns request, sent_s, token_times_s.
        steps: columns phase, started_s, finished_s, requests (list of ids).

    Returns:
        Columns request, sent_ms, prefill_start_ms, first_token_ms, last_token_ms, tokens.
    """
    prefill = steps[steps["phase"] == "prefill"].explode("requests")
    began = prefill.groupby("requests")["started_s"].min()
    table = pd.DataFrame(
        {
            "request": requests["request"],
            "sent_ms": requests["sent_s"],
            "prefill_start_ms": requests["request"].map(began),
            "first_token_ms": requests["token_times_s"].map(lambda times: times[0]),
            "last_token_ms": requests["token_times_s"].map(lambda times: times[-1]),
            "tokens": requests["token_times_s"].map(len),
        }
    )
    times = [column for column in table if column.endswith("_ms")]
    table[times] *= 1e3
    return table.sort_values(["sent_ms", "request"], ignore_index=True)


def draw_timeline(axes: Axes, table: pd.DataFrame, requests: pd.DataFrame) -> None:
    """Draw waiting, prefill and decode of each request, with a tick for every token.

    Args:
        table: as `timeline_table` returns it. requests: the rows that it was made from.
    """
    tokens = requests.set_index("request")["token_times_s"]
    for y, row in enumerate(table.itertuples()):
        for start, end, colour in (
            (row.sent_ms, row.prefill_start_ms, WAITING),
            (row.prefill_start_ms, row.first_token_ms, PREFILL),
            (row.first_token_ms, row.last_token_ms, DECODE),
        ):
            axes.barh(y, end - start, left=start, height=0.62, color=colour, alpha=0.55, linewidth=0)
        times = [t * 1e3 for t in tokens[row.request]]
        axes.plot(times, [y] * len(times), "|", color="black", markersize=5, markeredgewidth=0.7)
    axes.set_yticks(range(len(table)), [name.rpartition("-")[2] for name in table["request"]])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(
        handles=[
            Patch(color=WAITING, label="waiting"),
            Patch(color=PREFILL, alpha=0.55, label="prefill"),
            Patch(color=DECODE, alpha=0.55, label="decode"),
            Line2D([], [], marker="|", color="black", linestyle="none", label="token"),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=4,
    )
    label(axes, "Every request, from send to last token", "time since the load began (ms)", "request")
