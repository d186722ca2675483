"""What sweeps of tests measure, also in processes of their own, which import this file."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from deepinfer_lab.lab.experiment import Experiment


def _measure(params: dict) -> Iterator[dict]:
    folder, number = Path(params["folder"]), params["number"]
    with (folder / "begun").open("a") as stream:
        stream.write(f"{number} {os.getpid()}\n")
    yield {"number": number, "part": 0, "scaled": number * params["scale"]}
    if number in params["failing"]:
        raise ValueError(f"number {number} fails")
    if number in params["deadly"]:
        os._exit(1)
    if number in params["hanging_once"] and not (folder / "hung").exists():
        (folder / "hung").touch()
        (folder / "pipe").write_text(str(os.getpid()))  # a named pipe: whoever kills this process waits for the line
        threading.Event().wait()
    if number in params["gpu_lost_once"] and not (folder / "lost").exists():
        (folder / "lost").touch()
        _lose_the_gpu()
    yield {"number": number, "part": 1, "scaled": number * params["scale"]}


def _lose_the_gpu() -> None:
    """As CUDA does after an illegal access: this call fails, and every later one in this process."""

    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = synchronize
    synchronize()


NOBODY = {"failing": [], "deadly": [], "hanging_once": [], "gpu_lost_once": []}
COUNT = Experiment("count_cells", _measure, {"folder": "", "number": 0, "scale": 1.0, **NOBODY}, True, "Counts.")
ON_GPU = Experiment("count_on_gpu", _measure, COUNT.defaults, False, "Counts, where there is a GPU.")


def begun(folder: Path) -> list[tuple[int, int]]:
    """(number, process) of each measurement that began, in their order."""
    path = folder / "begun"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(map(int, line.split())) for line in lines]
