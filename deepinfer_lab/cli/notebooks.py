"""Commands about notebooks: run them, publish them."""

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
def run(only: tuple[str, ...], mode: str | None, param: tuple[str, ...]) -> None:
    """Execute notebooks with papermill.

    Executed copies go to build/, new records to build/data/, pictures to figures/. Nothing under notebooks/ or data/
    changes: `deepinfer-lab publish` does that.
    """
    from deepinfer_lab.lab import notebooks, project

    for done in notebooks.run(only or None, mode=mode, params=_assignments(param)):
        click.echo(f"{done.name}: {done.seconds:.0f} s -> {done.output}")
    click.echo(f"pictures: {project.figures()}")
    if new := sorted((project.build() / "data").glob("*/*.json")):
        click.echo("records:  " + "\n          ".join(str(path) for path in new))


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
