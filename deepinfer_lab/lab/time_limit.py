"""How long an experiment may take before what it has is all there will be."""

import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deepinfer_lab.errors import SettingError

VARIABLE = "DEEPINFER_TIME_LIMIT"
DEFAULT_S = 3600.0


def limit_s() -> float:
    """Seconds for each experiment: `DEEPINFER_TIME_LIMIT` where it is set and not empty, else an hour.

    Raises:
        SettingError: a value that is no positive number.
    """
    text = os.environ.get(VARIABLE) or str(DEFAULT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise SettingError(f"the environment variable {VARIABLE} is {text!r}, not a positive number of seconds")
    return seconds


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in this block once it has lasted so long.

    A timer's signal does it, so only on the main thread, not on Windows, and not before a call into C returns. Elsewhere this
    does nothing: whoever works in pieces asks the clock between them, too.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_signal: int, _frame: object) -> None:
        raise TimeoutError(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
