"""Commands that only tell."""

import json

import click

from deepinfer_lab.cli import options


@click.command("list")
def list_() -> None:
    """List notebooks, experiments and their records, models, and policies."""
    from deepinfer_lab.lab import notebooks, project
    from deepinfer_lab.lab.experiments import EXPERIMENTS
    from deepinfer_lab.model.catalog import CATALOG
    from deepinfer_lab.model.synthetic import PREFIX, SHAPES

    click.echo("Notebooks (deepinfer-lab run --only NAME)")
    for notebook in notebooks.discover():
        click.echo(f"  {notebook.name}")
    click.echo("Experiments, and the devices that have a record")
    for experiment in EXPERIMENTS.values():
        found = sorted(p.parent.name for p in project.data().glob(f"*/{experiment.name}.json"))
        click.echo(f"  {experiment.name}: {experiment.description} [{', '.join(found) or 'no record yet'}]")
    click.echo("Models")
    for entry in CATALOG.values():
        click.echo(f"  {entry.name}: {entry.title}, {entry.licence}")
    for shape in SHAPES:
        click.echo(f"  {PREFIX}{shape}: random weights")
    click.echo("Policies (--policy NAME)")
    for line in options.policy_lines():
        click.echo(line)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
def info(as_json: bool) -> None:
    """Show this machine, its GPU, versions, folders, and the records found."""
    from deepinfer_lab.lab import project, provenance
    from deepinfer_lab.model.catalog import cache_dir

    facts = provenance.collect()
    facts["model cache"] = str(cache_dir())
    facts["project folder"] = str(project.root())
    facts["records"] = sorted(str(p.relative_to(project.data())) for p in project.data().glob("*/*.json"))
    if as_json:
        click.echo(json.dumps(facts, indent=2, sort_keys=True))
        return
    del facts["kernels"], facts["command"]
    for name, value in facts.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        click.echo(f"{name.replace('_', ' '):>16}: {'-' if shown in (None, '') else shown}")
