"""The command that writes the report."""

from pathlib import Path

import click


@click.command()
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="[default: build/report.html]"
)
def report(output: Path | None) -> None:
    """Write everything that was found as one HTML file: questions, figures, and the records behind them.

    The file needs no network and no scripts. It speaks of the notebooks as they were last published.
    """
    from deepinfer_lab.lab import project
    from deepinfer_lab.lab.report import write

    click.echo(f"written: {write(output or project.build() / 'report.html')}")
