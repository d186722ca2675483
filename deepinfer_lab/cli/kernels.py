"""The command about CUDA kernels."""

import click

from deepinfer_lab.cli import options


@click.command()
@click.option(
    "--arch", "archs", multiple=True, metavar="SM", help="Only this architecture, such as sm_90; may be repeated."
)
@click.option(
    "--warm",
    is_flag=True,
    help="Only fill the cache, for this machine's GPU if there is one: serving then compiles nothing.",
)
@click.option("--explain", metavar="BITS,M,N,K", help="Say which kernel takes such a product on a GPU, and why.")
@click.option(
    "--group", default=128, show_default=True, help="With --explain: weights that share a scale: 32, 64 or 128."
)
@options.dispatch
def kernels(archs: tuple[str, ...], warm: bool, explain: str | None, group: int, dispatch: str | None) -> None:
    """Compile every CUDA kernel and show what it costs a multiprocessor. Needs no GPU.

    Registers are per thread, shared memory per block; occupancy is the share of a multiprocessor's warps that can be
    resident, and what limits it.
    """
    from deepinfer_lab.errors import SettingError
    from deepinfer_lab.kernels import resources
    from deepinfer_lab.kernels.compiler import ARCHS
    from deepinfer_lab.kernels.ops_catalogue import COMPILED

    if explain is None and dispatch is not None:
        raise click.UsageError("--dispatch does nothing without --explain")
    if explain is not None:
        if archs or warm:
            raise click.UsageError(f"{'--arch' if archs else '--warm'} does nothing with --explain")
        click.echo(_explained(explain, group, dispatch))
        return
    unknown = [arch for arch in archs if arch not in ARCHS]
    if unknown:
        raise SettingError(f"--arch {unknown[0]}: allowed are {', '.join(ARCHS)}")
    if warm:
        _warm(archs)
        return
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


def _warm(archs: tuple[str, ...]) -> None:
    import torch

    from deepinfer_lab.kernels import compiler
    from deepinfer_lab.kernels.ops_catalogue import COMPILED, runs_on

    if not archs:
        gpu = torch.cuda.is_available()
        archs = (compiler.arch_for(torch.cuda.get_device_capability()),) if gpu else compiler.ARCHS
    pairs = [(name, arch) for arch in archs for name, kernel in COMPILED.items() if runs_on(kernel, arch)]
    compiler.compile_all(pairs)
    click.echo(f"{len({name for name, _ in pairs})} kernels for {', '.join(archs)} are in {compiler.cache_folder()}")


def _explained(product: str, group: int, dispatch: str | None) -> str:
    import torch

    from deepinfer_lab.errors import SettingError
    from deepinfer_lab.kernels import dispatch as tables
    from deepinfer_lab.lab.kernel_dispatch import card_table

    try:
        bits, m, n, k = (int(part) for part in product.split(","))
    except ValueError:
        raise SettingError(f"--explain '{product}': expected four whole numbers, such as 4,16,5632,2048") from None
    gpu = torch.cuda.is_available()
    named = dispatch or (card_table() if gpu else None)
    # Without a GPU as on one that has tensor cores and no table of its own.
    table = tables.table_named(named, torch.device("cuda")) if gpu or named else tables.TENSOR_CORES
    whose = named or "for cards without a table of their own"
    return f"{tables.explain(bits, m, n, k, group=group, table=table)} Table: {whose}."
