"""The command about CUDA kernels."""

import click

from deepinfer_lab.cli import options


@click.command()
@click.option(
    "--arch", "archs", multiple=True, metavar="SM", help="Only this architecture, such as sm_90; may be repeated."
)
@click.option("--explain", metavar="BITS,M,N,K", help="Say which kernel takes such a product on a GPU, and why.")
@options.dispatch
def kernels(archs: tuple[str, ...], explain: str | None, dispatch: str | None) -> None:
    """Compile every CUDA kernel and show what it costs a multiprocessor. Needs no GPU.

    Registers are per thread, shared memory per block; occupancy is the share of a multiprocessor's warps that can be
    resident, and what limits it.
    """
    from deepinfer_lab.errors import SettingError
    from deepinfer_lab.kernels import dispatch as tables
    from deepinfer_lab.kernels import resources
    from deepinfer_lab.kernels.compiler import ARCHS
    from deepinfer_lab.kernels.ops_catalogue import COMPILED

    if explain is not None:
        try:
            bits, m, n, k = (int(part) for part in explain.split(","))
        except ValueError:
            raise SettingError(f"--explain '{explain}': expected four whole numbers, such as 4,16,5632,2048") from None
        table = tables.ARTICLE if dispatch is None else tables.load(dispatch)
        click.echo(tables.explain(bits, m, n, k, group=128, table=table))
        return
    unknown = [arch for arch in archs if arch not in ARCHS]
    if unknown:
        raise SettingError(f"--arch {unknown[0]}: allowed are {', '.join(ARCHS)}")
    click.echo(
        f"{'kernel':<22} {'arch':<7} {'threads':>7} {'regs':>5} {'shared':>7} {'spills':>6} {'occupancy':>9}  limited by"
    )
    rows = resources.report(COMPILED, archs or ARCHS)
    for row in rows:
        used, held = row.usage, row.occupancy
        click.echo(
            f"{row.kernel:<22} {row.arch:<7} {row.threads:>7} {used.registers:>5} {used.shared:>7} "
            f"{used.spill_stores + used.spill_loads:>6} {held.fraction:>9.0%}  {held.limiter}"
        )
    for arch, cards in {row.arch: row.cards for row in rows}.items():
        click.echo(f"{arch}: {', '.join(cards)}")
