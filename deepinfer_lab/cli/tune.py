"""The command that measures which kernel is the fastest for what."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deepinfer_lab.cli import options

if TYPE_CHECKING:
    from deepinfer_lab.kernels.dispatch import Row
    from deepinfer_lab.lab.kernel_tune import Timing


@click.command()
@click.option("--model", help=f"Tune for the linear layers of a model. {options.MODEL_HELP}")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    callback=options.shapes,
    metavar="NxK",
    help="Tune for a weight; may be repeated.",
)
@click.option("--bits", default="w4,w3", show_default=True, callback=options.few_bits, help="w4, w3 or both.")
@click.option(
    "--m",
    "every_m",
    default="1,2,4,8,16,32,64,128,256,512,2048",
    show_default=True,
    callback=options.integers,
    help="Numbers of rows to measure at: 1, and larger ones.",
)
@options.group
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=options.in_a_folder,
    help="The dispatch table to write, or to merge into. [default: build/data/GPU/dispatch.json]",
)
def tune(
    model: str | None,
    shapes: list[tuple[int, int]],
    bits: list[int],
    every_m: list[int],
    group: int,
    output: Path | None,
) -> None:
    """Time every kernel on the shapes of a model, and write which is the fastest for how many rows. Needs a GPU.

    Each time is a median with nothing in the L2, of a result that was checked first. floor is the share of memory's speed that
    the kernel reaches. Of two kernels within 3% of each other, the one in use for fewer rows stays, or else the simpler one is
    taken. What the table says of other shapes stays as it is; `publish` moves it to data/.
    """
    import torch

    from deepinfer_lab.errors import SettingError
    from deepinfer_lab.lab import kernel_tune, project, provenance
    from deepinfer_lab.lab.kernel_dispatch import FILE
    from deepinfer_lab.lab.kernel_timing import CudaGpu
    from deepinfer_lab.model.load import open_source
    from deepinfer_lab.model.source import product_shapes

    if (model is None) == (not shapes):
        raise click.UsageError("give either --model or --shape: what to tune for")
    if 1 not in every_m or max(every_m) == 1:
        given = ",".join(map(str, every_m))
        raise click.BadParameter(f"'{given}': a table needs 1 and at least one larger number", param_hint="--m")
    if not torch.cuda.is_available():
        raise SettingError(f"tune measures on a CUDA GPU, and torch {torch.__version__} finds none here")
    if model is not None:
        shapes = list(product_shapes(open_source(model).config))
    origin = provenance.collect()
    name = Path(origin["device_slug"]) / FILE
    path = project.build() / "data" / name if output is None else output
    base_path = path if path.is_file() or output is not None else project.data() / name
    base = kernel_tune.read_base(base_path, origin["device"])  # before the minutes, not after
    found = list(kernel_tune.timings(CudaGpu(), list(dict.fromkeys(shapes)), bits, sorted(set(every_m)), group))
    for timing in found:
        if timing.fault is not None:
            click.echo(f"left out: {timing.kernel}, M x N x K = {timing.m} x {timing.n} x {timing.k}: {timing.fault}")
    table = kernel_tune.table_from(found, base)
    _show(found, table)
    kernel_tune.write_table(path, table, origin)
    click.echo(f"\nwritten: {path}; --dispatch {path} serves with it")


def _show(found: Sequence["Timing"], table: Sequence["Row"]) -> None:
    """A paragraph for each weight: what was chosen for each M, how fast it is, and what the next best takes."""
    from deepinfer_lab.kernels.dispatch import choose

    weight = None
    for bits, n, k, group, m in dict.fromkeys((t.bits, t.n, t.k, t.group, t.m) for t in found):
        if weight != (bits, n, k):
            weight = bits, n, k
            click.echo(f"\nW{bits}, {n} x {k}, group {group}")
            click.echo(f"{'M':>6}  {'kernel':<26} {'us':>9} {'floor':>6}  next best")
        cell = {t.kernel: t for t in found if (t.bits, t.n, t.k, t.m) == (bits, n, k, m) and t.us is not None}
        if not cell:
            click.echo(f"{m:>6}  nothing is right here")
            continue
        chosen = cell.pop(choose(bits, m, table=table, n=n, k=k))
        others = sorted(cell.values(), key=lambda t: t.us)
        following = f"{others[0].kernel} {others[0].us / chosen.us:.2f}x" if others else "-"
        click.echo(f"{m:>6}  {chosen.kernel:<26} {chosen.us:>9.2f} {chosen.floor_us / chosen.us:>6.0%}  {following}")
