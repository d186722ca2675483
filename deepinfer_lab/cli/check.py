"""The command that says whether what is committed hangs together."""

import sys

import click


@click.command()
@click.option("--strict", is_flag=True, help="Warnings count as failures: one device, one commit, one environment.")
def check(strict: bool) -> None:
    """Say where the notebooks' numbers come from, and whether everything committed hangs together. Runs nothing.

    For each notebook: the records that it reads, the table behind each figure, and how many of its printed numbers follow
    from which records. "typed" numbers stand in the text of the cell that prints them; "code" is computed without a record.

    Exit status 1 if anything is wrong.
    """
    from deepinfer_lab.lab.check import check as look

    found = look()
    for notebook in found.notebooks:
        click.echo(notebook.name)
        for file in notebook.records:
            click.echo(
                f"  record   {file.name:<21} {file.path.parent.name:<22} {file.commit:<12} {file.utc[:16].replace('T', ' ')}  "
                f"{file.status}, {file.rows} rows, kernels {file.kernels}"
            )
        for name, line in notebook.evidence.figures.items():
            table = line.partition(": ")[2].replace(" columns, sha256", "")
            click.echo(f"  figure   {name:<21} {table:<35} <- {_named(notebook.evidence.figure_sources.get(name))}")
        for sources, count in notebook.evidence.numbers.most_common():
            click.echo(f"  numbers  {count:>5} <- {_named(sources)}")
    for kind, lines in (("warning", found.warnings), ("FAILURE", found.failures)):
        for line in lines:
            click.echo(f"{kind}: {line.splitlines()[0]}")
    bad = bool(found.failures or (strict and found.warnings))
    click.echo(
        f"{len(found.notebooks)} notebooks, {len(found.failures)} failure(s), {len(found.warnings)} warning(s): "
        + ("something is wrong" if bad else "hangs together")
    )
    sys.exit(bad)


def _named(sources: frozenset[str] | None) -> str:
    return ", ".join(sorted(sources)) if sources else "code"
