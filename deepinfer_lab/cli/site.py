"""The command that writes the static site."""

import click


@click.command()
def site() -> None:
    """Write the notebooks as a static site to build/site/: a page for each, an index, and the report.

    Nothing is executed: pages show the outputs as they were last published. They need no network and no scripts.
    """
    from deepinfer_lab.lab import project
    from deepinfer_lab.lab.site import write

    click.echo(f"written: {write(project.build() / 'site')}")
