"""The command that holds two sets of records side by side."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from deepinfer_lab.lab.compare import Line, Pair

SHOWN = 40  # lines, unless all are asked for


@click.command()
@click.argument("a")
@click.argument("b")
@click.option(
    "--experiment", "experiments", multiple=True, metavar="NAME", help="Only this experiment; may be repeated."
)
@click.option("--tolerance", default=0.03, show_default=True, help="How far from 1 an interval must lie to be flagged.")
@click.option("--all", "show_all", is_flag=True, help=f"Show every line, not only the {SHOWN} farthest from 1.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all lines here.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.svg",
    help="Draw the 30 farthest from 1.",
)
def compare(
    a: str,
    b: str,
    experiments: tuple[str, ...],
    tolerance: float,
    show_all: bool,
    json_file: Path | None,
    picture: Path | None,
) -> None:
    """Compare the records of two machines, or of two commits.

    A and B are devices in data/, such as nvidia-h200, or paths to folders of records, such as build/data/nvidia-h200, or
    to single records. Rows with the same settings are matched. Each line is one metric of one setting: B's number over
    A's, and a 95% interval by bootstrap of the raw samples. A star marks an interval that leaves out 1 by more than the
    tolerance.

    The interval knows how much samples of one run differ, not how much runs do. Before you believe a star, compare two
    runs of the same thing.
    """
    from deepinfer_lab.errors import SettingError
    from deepinfer_lab.lab.compare import compare as compare_records
    from deepinfer_lab.lab.compare import find, ranked

    if picture is not None and picture.suffix != ".svg":
        raise SettingError(f"--picture {picture}: the file's name must end in .svg")
    of_a, of_b = find(a), find(b)
    pairs = compare_records(of_a, of_b, experiments, tolerance)
    for pair in pairs:
        _show_pair(pair)
    for side, alone in (("A", of_a.keys() - of_b.keys()), ("B", of_b.keys() - of_a.keys())):
        if alone and not experiments:
            click.echo(f"only in {side}: {', '.join(sorted(alone))}")
    lines = ranked(pairs)
    _show_lines(lines if show_all else lines[:SHOWN])
    flagged = sum(line.flagged for line in lines)
    if not lines:
        click.echo("nothing to compare: no rows of A and B have the same settings")
    click.echo(f"\n{len(lines)} lines, {flagged} flagged (*): the interval leaves out 1 by more than {tolerance:.1%}")
    if not show_all and len(lines) > SHOWN:
        click.echo(f"the {SHOWN} farthest from 1 are shown; --all shows the rest")
    if json_file is not None:
        _write_json(json_file, a, b, pairs, tolerance)
        click.echo(f"written: {json_file}")
    if picture is not None:
        _draw(picture, a, b, pairs, tolerance)
        click.echo(f"written: {picture}")


def _show_pair(pair: "Pair") -> None:
    from deepinfer_lab.lab.experiment import banner

    click.echo(pair.experiment)
    for side, record in (("A", pair.a), ("B", pair.b)):
        _, _, text = banner(record).replace("\n", ", ").partition(": ")
        click.echo(f"  {side}: {text}")
    for note in pair.notes:
        click.echo(f"  {note}")
    click.echo(f"  matched by {', '.join(pair.matched_by) or 'nothing'}: {len(pair.lines)} lines")


def _show_lines(lines: list["Line"]) -> None:
    click.echo(f"\n  {'B/A':>8} {'95% interval':>17} {'A':>11} {'B':>11} {'samples':>11}  what")
    for line in lines:
        ratio = "-" if line.ratio is None else f"{line.ratio:.3f}x"
        interval = "none" if line.low is None else f"{line.low:.3f} - {line.high:.3f}"
        samples = f"{line.samples_a} | {line.samples_b}"
        click.echo(
            f"{'*' if line.flagged else ' '} {ratio:>8} {interval:>17} {line.a:>11.5g} {line.b:>11.5g} {samples:>11}  "
            f"{line.experiment} {line.label}"
        )
    if any(line.low is None for line in lines):
        click.echo("no interval: fewer than five samples on a side, or some that are not positive. Never flagged")


def _write_json(file: Path, a: str, b: str, pairs: list["Pair"], tolerance: float) -> None:
    from deepinfer_lab.lab.compare import SEED
    from deepinfer_lab.lab.record import write_atomically
    from deepinfer_lab.metrics.bootstrap import CONFIDENCE, RESAMPLES

    content = {
        "a": a, "b": b, "tolerance": tolerance, "confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": SEED,
        "experiments": [
            {
                "experiment": pair.experiment, "provenance_a": pair.a.provenance, "provenance_b": pair.b.provenance,
                "matched_by": pair.matched_by, "notes": pair.notes,
                "lines": [asdict(line) for line in pair.lines],
            }
            for pair in pairs
        ],
    }  # fmt: skip
    write_atomically(file, json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def _draw(file: Path, a: str, b: str, pairs: list["Pair"], tolerance: float) -> None:
    from deepinfer_lab.errors import RecordError
    from deepinfer_lab.figures import style
    from deepinfer_lab.figures.comparison import draw_forest, forest_height_in
    from deepinfer_lab.lab.compare import forest

    table = forest(pairs)
    if table.empty:
        raise RecordError(f"nothing to draw in {file}: no two rows with the same settings have a ratio")
    fig, axes = style.figure(height_in=forest_height_in(table))
    draw_forest(axes[0, 0], table, tolerance, f"A: {a}\nB: {b}")
    style.save(fig, file.parent, file.stem, table)
