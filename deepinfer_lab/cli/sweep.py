"""What `run --sweep` does."""

import sys
from contextlib import nullcontext
from pathlib import Path

import click
from tqdm import tqdm

from deepinfer_lab.errors import SettingError


def run_sweep(
    file: Path,
    *,
    dask: str | None,
    workers: int | None,
    retries: int | None,
    again: bool,
    time_limit: float | None,
    listing: bool,
) -> None:
    """Measure a sweep's cells, or list them. Exit status 1 where one has no whole record in the end."""
    from deepinfer_lab.lab import sweep, sweep_grid
    from deepinfer_lab.lab import time_limit as limits
    from deepinfer_lab.lab.sweep_cell import Here

    grid = sweep_grid.read(file)
    folder = sweep.folder(grid)
    if dask is None:
        if workers is not None:
            raise SettingError(f"--workers {workers}: needs --dask local")
        cluster = nullcontext(Here(folder))
    else:
        from deepinfer_lab.lab import sweep_dask

        cluster = sweep_dask.workers(dask, workers, len(grid.cells))
    with cluster as runner:
        if listing:
            machines = runner.machines()
            states = [sweep.state(grid, cell, machines)[0] for cell in grid.cells]
            for cell, state in zip(grid.cells, states, strict=True):
                click.echo(f"{cell.name}: {state}")
            click.echo(f"{states.count(sweep.DONE)} of {len(states)} cells are done; records: {folder}")
            return

        def told(outcome: sweep.Outcome) -> None:
            what = outcome.error or f"{outcome.status}, {outcome.seconds:.1f} s"
            tqdm.write(f"{outcome.cell}: {what}")  # past the bar

        limit_s = limits.limit_s() if time_limit is None else time_limit
        tries = sweep.RETRIES if retries is None else retries
        outcomes = sweep.run(grid, runner, limit_s=limit_s, again=again, retries=tries, told=told)
    click.echo(sweep.table(outcomes))
    click.echo(f"records: {folder}")
    if not all(outcome.whole for outcome in outcomes):
        sys.exit(1)
