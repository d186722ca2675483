"""Commands about notebooks: run them, publish them."""

import sys
from pathlib import Path

import click

from deepinfer_lab.errors import SettingError


def _assignments(values: tuple[str, ...]) -> dict[str, str]:
    params = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise SettingError(f"--param '{value}': expected name=value, such as --param concurrency=8")
        params[name] = text
    return params


@click.command()
@click.option("--only", multiple=True, metavar="NOTEBOOK", help="A notebook's name or number; may be repeated.")
@click.option(
    "--mode",
    type=click.Choice(["auto", "measure", "replay"]),
    help="measure: on this machine; replay: from records in data/; auto: measure what this machine can. [default: each "
    "notebook's own: auto, or replay where measuring takes long]",
)
@click.option("--param", multiple=True, metavar="NAME=VALUE", help="Set a notebook's parameter; may be repeated.")
@click.option(
    "--again", is_flag=True, help="Measure even what an earlier run finished with the same code and parameters."
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End an experiment that takes longer, as TIMEOUT. [default: 3600]",
)
@click.option(
    "--sweep",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="GRID.yml",
    help="Instead of notebooks: an experiment with every combination of a grid's parameters.",
)
@click.option(
    "--dask",
    metavar="local|ADDRESS",
    help="A sweep's cells side by side, by Dask: `local` starts a process for each GPU of this machine, or for each core where "
    "there is none; an address joins a scheduler's workers.",
)
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="How many processes --dask local starts.")
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    metavar="N",
    help="How often a sweep's cell that failed is measured again. [default: 2]",
)
@click.option("--list", "listing", is_flag=True, help="Only say which cells a sweep has, and which are done.")
def run(
    only: tuple[str, ...],
    mode: str | None,
    param: tuple[str, ...],
    again: bool,
    time_limit: float | None,
    sweep: Path | None,
    dask: str | None,
    workers: int | None,
    retries: int | None,
    listing: bool,
) -> None:
    """Execute notebooks with papermill, or measure a sweep.

    Executed copies go to build/, new records to build/data/, pictures to figures/. Nothing under notebooks/ or data/
    changes: `deepinfer-lab publish` does that.

    A run that was broken off goes on where it was: experiments that it finished are kept. One that runs out of memory or time
    is recorded as such, the notebook that needs it fails and says so, the others run, and the exit status is 1.

    \b
    A sweep is a file, such as this grid.yml:
      experiment: serve_real_model
      grid:                                  # every combination is a cell
        policy: [serial, mixed]
        chunk_tokens: [32, 128]
      leave_out:                             # but these, where there is such a line
        - {policy: mixed, chunk_tokens: 32}
      $ deepinfer-lab run --sweep grid.yml --list
      $ deepinfer-lab run --sweep grid.yml --dask local

    Each cell's record goes to build/sweeps/NAME/. A cell that has one, by the same code and environment, is kept. One that
    fails is tried again, then written down as failed, the others run, and the exit status is 1.
    """
    given = {"--dask": dask, "--workers": workers, "--retries": retries, "--list": listing or None}
    if sweep is None and (alone := [name for name, value in given.items() if value is not None]):
        raise SettingError(f"{alone[0]}: allowed with --sweep only")
    if sweep is not None:
        from deepinfer_lab.cli.sweep import run_sweep

        notebooks_only = {"--only": only, "--mode": mode, "--param": param}
        if refused := [name for name, value in notebooks_only.items() if value]:
            raise SettingError(f"{refused[0]} is about notebooks: leave it out, or --sweep")
        run_sweep(
            sweep, dask=dask, workers=workers, retries=retries, again=again, time_limit=time_limit, listing=listing
        )
        return
    from deepinfer_lab.lab import experiment, journal, notebooks, project
    from deepinfer_lab.lab import time_limit as limits

    environment = {experiment.AGAIN: "1"} if again else {}
    if time_limit is not None:
        environment[limits.VARIABLE] = str(time_limit)

    def told(done: notebooks.NotebookRun) -> None:
        click.echo(f"{done.name}: {done.error or f'{done.seconds:.0f} s -> {done.output}'}")

    runs = notebooks.run(only or None, mode=mode, params=_assignments(param), environment=environment, done=told)
    click.echo(journal.table([(r.name, "FAILED" if r.error else "done", r.seconds, r.outcomes) for r in runs]))
    click.echo(f"pictures: {project.figures()}")
    if new := sorted((project.build() / "data").glob("*/*.json")):
        click.echo("records:  " + "\n          ".join(str(path) for path in new))
    if any(each.error for each in runs):
        sys.exit(1)


@click.command()
@click.option("--only", multiple=True, metavar="NOTEBOOK", help="A notebook's name or number; may be repeated.")
def publish(only: tuple[str, ...]) -> None:
    """Make new records and notebook outputs the committed ones.

    Moves records from build/data/ to data/, executes the notebooks' scripts in replay mode, and writes notebooks/*.ipynb
    with their outputs, cleaned so that the same records always give the same bytes.
    """
    from deepinfer_lab.lab.publish import publish as publish_all

    published = publish_all(only or None)
    for path in (*published.records, *published.notebooks):
        click.echo(path)
