"""The command that times few-bit kernels, ours and other people's."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from deepinfer_lab.cli import options


@click.command()
@click.option(
    "--against",
    metavar="PEER,...",
    help="humming, gemlite: they come with `pip install 'deepinfer-lab[peers]'`. torch's tinygemm is always there. [default: "
    "those installed]",
)
@click.option("--bits", default="w4,w3", show_default=True, callback=options.few_bits, help="w4, w3 or both.")
@click.option(
    "--shapes",
    default="5632x2048,2048x5632,3584x18944,37888x3584,11008x2048,2048x11008,2560x2048",
    show_default=True,
    callback=lambda ctx, param, value: options.shapes(ctx, param, tuple(value.split(","))),
    metavar="NxK,...",
    help="N and K of the weights.",
)
@click.option(
    "--m", "every_m", default="1,8,16,64,512", show_default=True, callback=options.integers, help="Numbers of rows."
)
@partial(options.group, default="128")
@click.option("--all", "all_kernels", is_flag=True, help="Every kernel of ours, not only the one that is chosen.")
@options.dispatch
@options.json_file
def kernels(
    against: str | None,
    bits: list[int],
    shapes: list[tuple[int, int]],
    every_m: list[int],
    group: int,
    all_kernels: bool,
    dispatch: str | None,
    json_file: Path | None,
) -> None:
    """Time our kernels beside cuBLAS and other people's, on one GPU in one run.

    Ours is the kernel that the dispatch table chooses. cuBLAS multiplies with fp16 weights. Each time is a median with nothing
    in the L2; the percentage is the share of memory's speed that is reached, the error relative to float32 on the dequantised
    weights, and gain how many times as long as ours the fastest few-bit peer takes. On an H200, this project's record of the
    best peer at group 128 stands beside.
    """
    import torch

    from deepinfer_lab.errors import SettingError
    from deepinfer_lab.kernels import dispatch as tables
    from deepinfer_lab.lab import kernel_peers, peers, provenance
    from deepinfer_lab.lab.experiment import complete
    from deepinfer_lab.lab.kernel_dispatch import card_table
    from deepinfer_lab.lab.kernel_timing import CudaGpu

    chosen = None if against is None else [name.strip() for name in against.split(",")]
    peers.check_names(chosen)
    if not torch.cuda.is_available():
        raise SettingError(f"bench kernels measures on a CUDA GPU, and torch {torch.__version__} finds none here")
    peers.find(chosen)  # before anything that takes time
    asked = {"against": chosen, "bits": bits, "shapes": shapes, "m": sorted(set(every_m)), "group": group}
    file = dispatch or card_table()
    table = tables.table_named(file, torch.device("cuda"))
    params = complete(kernel_peers.KERNEL_PEERS, {**asked, "all_kernels": all_kernels})
    origin = provenance.collect()
    click.echo(f"{origin['device']}, torch {origin['torch']}; ours by {file or 'the usual choice'}")
    for name, peer in peers.PEERS.items():
        if chosen is None and peer.missing() is not None:
            click.echo(f"without {name}: {peer.missing()}")
    rows = list(kernel_peers.peer_rows(params, CudaGpu(), table, lambda text: click.echo(text, err=True)))
    show(rows, origin["device_slug"])
    if json_file is not None:
        content = {"provenance": origin, "params": params, "results": rows}
        json_file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        click.echo(f"written: {json_file}")


def show(rows: list[dict[str, Any]], device_slug: str) -> None:
    """A table for each weight: M down, contestants across; with several kernels of ours, a line for each of them."""
    from deepinfer_lab.lab import published
    from deepinfer_lab.lab.kernel_peers import CUBLAS, OURS, median_us

    known = published.best_peers() if device_slug == published.PEERS_DEVICE else {}
    peers = list(dict.fromkeys(r["peer"] for r in rows if r["peer"] not in (OURS, CUBLAS)))
    for bits, n, k, group in dict.fromkeys((r["bits"], r["n"], r["k"], r["group"]) for r in rows if r["bits"] != 16):
        click.echo(f"\nW{bits}, {n} x {k}, group {group}: microseconds, share of the floor's speed, relative error")
        heads = "".join(f"{name:>22}" for name in (OURS, CUBLAS, *peers))
        click.echo(f"{'M':>6}{heads}{'gain':>8}{'best peer published':>28}  kernel of ours")
        for m in dict.fromkeys(r["m"] for r in rows):
            here = [r for r in rows if (r["m"], r["n"], r["k"]) == (m, n, k) and r["bits"] in (bits, 16)]
            others = {r["peer"]: r for r in here if r["peer"] != OURS}
            us, name = known.get((bits, m, n, k), (None, "")) if group == published.PEERS_GROUP else (None, "")
            printed = "-" if us is None else f"{us:.2f} {name}"
            fastest = min((median_us(r) for r in others.values() if r["correct"] and r["peer"] != CUBLAS), default=None)
            for ours in sorted((r for r in here if r["peer"] == OURS), key=median_us):
                cells = "".join(f"{_cell(r):>22}" for r in (ours, *(others.get(peer) for peer in (CUBLAS, *peers))))
                gain = f"{fastest / median_us(ours):.2f}x" if fastest is not None and ours["correct"] else "-"
                click.echo(f"{m:>6}{cells}{gain:>8}{printed:>28}  {ours['kernel']}")


def _cell(row: dict[str, Any] | None) -> str:
    from deepinfer_lab.lab.kernel_peers import median_us

    if row is None:
        return "-"
    error = "not finite" if row["rel_err"] is None else f"{row['rel_err']:.0e}"
    us = median_us(row)
    return f"{us:.2f} {row['floor_us'] / us:.0%} {error}{'' if row['correct'] else ' WRONG'}"
