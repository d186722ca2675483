"""Progress bars for anything that may take over two seconds."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

DELAY_S = 2.0  # a bar appears only once the work has lasted this long


def bar(iterable: Iterable[Any] | None = None, *, total: float | None = None, desc: str, unit: str = "it") -> tqdm:
    """A progress bar on stderr, shown on a terminal and in a live notebook, silent in pipes and logs.

    Args:
        iterable: what to walk through, or None to call `.update(n)` by hand.
        total: number of units, where `iterable` has no length.
        desc: what is going on, in two or three words.
        unit: "B" counts bytes and scales them.
    """
    live = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(
        iterable, total=total, desc=desc, unit=unit, unit_scale=unit == "B", unit_divisor=1024,
        delay=DELAY_S, disable=not live, leave=False, file=sys.stderr,
    )  # fmt: skip
