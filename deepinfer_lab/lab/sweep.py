"""A sweep: one record for each cell of a grid, in `build/sweeps/<name>/`.

This process alone writes, once for each cell, when the cell's answer has come: `<cell>.json`, whole or not at all, or
`<cell>.failed.json` after the last attempt. Where cells are measured elsewhere, a worker that dies, or is taken for dead and
answers late, costs its cell a second measurement. But Dask gives one answer for each cell that it was given: no record is
missing, and none is there twice. That two processes sweep one grid at the same time is not prevented; the later record stays.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from deepinfer_lab.errors import ClusterError, RecordError, SettingError
from deepinfer_lab.lab import project, provenance
from deepinfer_lab.lab.record import WHOLE, Record, load, write_atomically
from deepinfer_lab.lab.sweep_cell import PARTIAL, SOURCE, Attempt, Job, Machine
from deepinfer_lab.lab.sweep_grid import Cell, Grid
from deepinfer_lab.progress import bar

RETRIES = 2
DONE, FAILED = "done", "failed"  # states; a cell that is done is not measured again


class Runner(Protocol):
    """Where cells are measured: `sweep_cell.Here` or `sweep_dask.Workers`."""

    def machines(self) -> list[Machine]:
        """All that measure, now."""

    def attempts(self, jobs: deque[Job]) -> Iterator[tuple[Job, Attempt]]:
        """One answer for each job, as they come. Jobs may be added until the last answer is taken."""


@dataclass(frozen=True)
class Outcome:
    """One cell in the end. `status` is its record's, "kept" (an earlier run's record stands), or "failed"."""

    cell: str
    status: str
    seconds: float
    worker: str
    error: str | None = None

    @property
    def whole(self) -> bool:
        return self.status in (*WHOLE, "kept")


def folder(grid: Grid) -> Path:
    """Where the sweep's records are."""
    return project.build() / "sweeps" / grid.name


def check(grid: Grid, machines: Sequence[Machine]) -> None:
    """See that every machine can measure the cells, and would do so by the code that runs here.

    Raises:
        ClusterError: one has another package. SettingError: one lacks the GPU that the experiment needs.
    """
    for each in machines:
        if each.source != SOURCE:
            raise ClusterError(
                f"worker {each.name} has deepinfer-lab {each.version}, sources {each.source[:12]}; here is "
                f"{version('deepinfer-lab')}, sources {SOURCE[:12]}. All must have the same: update and restart the worker"
            )
        if not (each.has_gpu or grid.experiment.runs_on_cpu):
            raise SettingError(f"experiment {grid.experiment.name!r} needs a CUDA GPU; there is none: {each.name}")


def state(grid: Grid, cell: Cell, machines: Sequence[Machine]) -> tuple[str, Record | None]:
    """`DONE` and the record that stands: whole, of these parameters and sources, and of an environment that one of the
    machines has. Otherwise why the cell is to be measured, and None.
    """
    path = folder(grid) / f"{cell.name}.json"
    if _failed(path).is_file():
        return FAILED, None
    if not path.is_file():
        return "to run", None
    try:
        record = load(path)
    except RecordError:
        return "malformed", None
    if (record.experiment, record.params) != (grid.experiment.name, cell.params):
        return "malformed", None
    origin = record.provenance
    if not record.whole:
        return record.status, None
    if origin.get("source") != SOURCE:
        return "other sources", None
    if not any(all(origin.get(key) == value for key, value in each.environment.items()) for each in machines):
        return "other machine", None
    return DONE, record


def run(
    grid: Grid,
    runner: Runner,
    *,
    limit_s: float,
    again: bool = False,
    retries: int = RETRIES,
    told: Callable[[Outcome], object] = lambda _: None,
) -> list[Outcome]:
    """Measure the cells that are not done; last of all those that failed before. A failure does not keep others from being
    measured.

    Args:
        limit_s: seconds for each cell, after which its record ends as TIMEOUT.
        again: measure those that are done, too.
        retries: how often a cell that failed is measured again. Lack of memory or time is no failure but a record's status.
        told: called with each outcome as it comes.

    Returns:
        An outcome for each cell, in the grid's order.

    Raises:
        ClusterError: see `check`; also where a worker with another package joins later.
        SettingError: see `check`.
        KeyboardInterrupt: with a message that says how to go on.
    """
    machines = runner.machines()
    check(grid, machines)
    command = provenance.command_line()
    outcomes: dict[str, Outcome] = {}
    jobs: deque[Job] = deque()
    before: deque[Job] = deque()
    for cell in grid.cells:
        found, record = state(grid, cell, machines)
        if record is None or again:
            job = Job(grid.experiment, cell.name, cell.params, SOURCE, command, limit_s)
            (before if found == FAILED else jobs).append(job)
        else:
            outcomes[cell.name] = Outcome(cell.name, "kept", record.provenance["seconds"], "-")
            told(outcomes[cell.name])
    jobs += before
    failures: Counter[str] = Counter()
    try:
        with bar(total=len(jobs), desc=f"sweep {grid.name}", unit="cell") as progress:
            for job, answer in runner.attempts(jobs):
                failures[job.cell] += answer.record is None
                if answer.record is None and answer.again and failures[job.cell] <= retries:
                    jobs.append(job)
                    continue
                outcomes[job.cell] = _file(grid, job, answer, failures[job.cell])
                told(outcomes[job.cell])
                progress.update()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{len(outcomes)} of {len(grid.cells)} cells are in {folder(grid)}; the same command"
            f"{' without --again' if again else ''} goes on with the rest"
        ) from None
    return [outcomes[cell.name] for cell in grid.cells]


def table(outcomes: Sequence[Outcome]) -> str:
    """A summary, one line for each cell."""
    width = max(len("cell"), *(len(each.cell) for each in outcomes))
    lines = [f"{'cell':<{width}}  {'status':<10} {'seconds':>7}  worker"]
    lines += [f"{each.cell:<{width}}  {each.status:<10} {each.seconds:>7.1f}  {each.worker}" for each in outcomes]
    return "\n".join(lines)


def _file(grid: Grid, job: Job, answer: Attempt, failures: int) -> Outcome:
    """Write what came of a cell: its record, or why there is none. An earlier run's record then stays beside that."""
    path = folder(grid) / f"{job.cell}.json"
    if answer.record is not None:
        answer.record.save(path)
        _failed(path).unlink(missing_ok=True)
        path.with_name(f"{job.cell}{PARTIAL}").unlink(missing_ok=True)
        return Outcome(job.cell, answer.record.status, answer.seconds, answer.worker)
    content = {
        "experiment": job.experiment.name, "params": job.params, "error": answer.error, "attempts": failures,
        "worker": answer.worker, "details": answer.details.splitlines(),
    }  # fmt: skip
    write_atomically(_failed(path), json.dumps(content, indent=1) + "\n")
    return Outcome(job.cell, FAILED, answer.seconds, answer.worker, answer.error)


def _failed(path: Path) -> Path:
    return path.with_name(f"{path.name.removesuffix('.json')}.failed.json")
