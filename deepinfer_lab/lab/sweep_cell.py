"""One cell of a sweep, where it is measured: in this process or on a worker. Nothing here writes a record."""

import importlib.metadata
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deepinfer_lab.errors import ClusterError
from deepinfer_lab.lab import experiment as experiments
from deepinfer_lab.lab import provenance
from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.record import Record

PARTIAL = ".partial.jsonl"
# When this module is imported: of the code that this process runs, whatever happens to its files later.
SOURCE = provenance.source_hash()


@dataclass(frozen=True)
class Machine:
    """A process that measures cells.

    Attributes:
        name: "here", or a worker's address.
        source: `provenance.source_hash` of its package. version: that package's.
        has_gpu: it finds a CUDA GPU.
        environment: the part of a record's provenance that `provenance.repeats` compares.
    """

    name: str
    version: str
    source: str
    has_gpu: bool
    environment: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What a process needs to know to measure a cell.

    Attributes:
        source: the hash that its package must have.
        command: for the record's provenance. limit_s: seconds, after which the record ends as TIMEOUT.
    """

    experiment: Experiment
    cell: str
    params: dict[str, Any]
    source: str
    command: str
    limit_s: float


@dataclass(frozen=True)
class Attempt:
    """What came of a job.

    Attributes:
        record: None where it failed; then `error` is one line and `details` a traceback.
        again: whether another attempt may end otherwise.
        gpu_lost: nothing runs on the GPU any more in the process that measured, as after an illegal memory access.
    """

    worker: str
    seconds: float
    record: Record | None
    error: str | None = None
    details: str = ""
    again: bool = True
    gpu_lost: bool = False


def machine(name: str = "here") -> Machine:
    """What this process is."""
    origin = provenance.collect()
    environment = {key: origin[key] for key in provenance.ENVIRONMENT}
    version = importlib.metadata.version("deepinfer-lab")
    return Machine(name, version, SOURCE, torch.cuda.is_available(), environment)


def attempt(job: Job, worker: str = "here", partial: Path | None = None) -> Attempt:
    """Measure a cell. A failure is an answer, too, so that it arrives whatever was raised.

    Args:
        partial: where rows are kept as they come; None: nowhere.

    Raises:
        ClusterError: this process runs another package than the sweep, or lacks the GPU that the experiment needs.
    """
    if job.source != SOURCE:
        raise ClusterError(f"worker {worker} runs other sources of this package ({SOURCE[:12]}, not {job.source[:12]})")
    if not (job.experiment.runs_on_cpu or torch.cuda.is_available()):
        raise ClusterError(f"worker {worker} has no CUDA GPU, which experiment {job.experiment.name!r} needs")
    started = time.monotonic()
    try:
        origin = {**provenance.collect(job.command), "source": SOURCE}
        record = experiments.perform(job.experiment, job.params, origin, job.limit_s, partial)
    except Exception as error:
        line, details = f"{type(error).__name__}: {error}".splitlines()[0], traceback.format_exc()
        return Attempt(worker, time.monotonic() - started, None, line, details, gpu_lost=_gpu_lost())
    return Attempt(worker, time.monotonic() - started, record)


@dataclass(frozen=True)
class Here:
    """Measures in this process, one cell after the other, and keeps rows as they come in `folder`."""

    folder: Path

    def machines(self) -> list[Machine]:
        """This process."""
        return [machine()]

    def attempts(self, jobs: deque[Job]) -> Iterator[tuple[Job, Attempt]]:
        """An answer for each job, from the left. Those that are added meanwhile are run, too.

        Raises:
            ClusterError: a cell has left this process without the GPU. The others wait for the next one.
        """
        while jobs:
            job = jobs.popleft()
            answer = attempt(job, partial=self.folder / f"{job.cell}{PARTIAL}")
            if not answer.gpu_lost:
                yield job, answer
                continue
            yield job, replace(answer, again=False)
            raise ClusterError(f"cell {job.cell} lost this process its GPU; the same command goes on with the others")


def _gpu_lost() -> bool:
    """Whether every call to the GPU fails from now on."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
