"""Replay committed records, or measure on the machine at hand."""

import os
from typing import Literal

import torch

from deepinfer_lab.errors import SettingError

MODES = ("replay", "measure", "auto")
VARIABLE = "DEEPINFER_MODE"


def check(mode: str, origin: str) -> str:
    """Return `mode` if it is one of `MODES`.

    Raises:
        SettingError: another value; the message names it and `origin`, the place it came from.
    """
    if mode not in MODES:
        raise SettingError(f"mode {mode!r} from {origin} is not one of {', '.join(MODES)}")
    return mode


def resolve(mode: str, *, runs_on_cpu: bool) -> Literal["replay", "measure"]:
    """Decide between replay and measure.

    The environment variable `DEEPINFER_MODE` wins over `mode` where it is set and not empty. `auto` measures if CUDA
    works or the experiment can run on the CPU, and replays otherwise.

    Args:
        mode: "replay", "measure" or "auto".
        runs_on_cpu: whether the experiment makes sense without a GPU.

    Raises:
        SettingError: a mode that is none of the three, whichever place it came from.
    """
    check(mode, "the parameter `mode`")
    forced = os.environ.get(VARIABLE)
    chosen = check(forced, f"the environment variable {VARIABLE}") if forced else mode
    if chosen == "auto":
        return "measure" if runs_on_cpu or torch.cuda.is_available() else "replay"
    return "replay" if chosen == "replay" else "measure"
