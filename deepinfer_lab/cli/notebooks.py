"""Commands about notebooks: run them, publish them."""

import sys

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
def run(only: tuple[str, ...], mode: str | None, param: tuple[str, ...], again: bool, time_limit: float | None) -> None:
    """Execute notebooks with papermill.

    Executed copies go to build/, new records to build/data/, pictures to figures/. Nothing under notebooks/ or data/
    changes: `deepinfer-lab publish` does that.

    A run that was broken off goes on where it was: experiments that it finished are kept. One that runs out of memory or time
    is recorded as such, the notebook that needs it fails and says so, the others run, and the exit status is 1.
    """
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
