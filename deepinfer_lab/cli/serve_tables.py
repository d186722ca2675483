"""What `bench serve` prints, for each kind of load."""

from collections.abc import Mapping, Sequence
from statistics import median

import click

from deepinfer_lab.lab.serve_bench import InsertionMeasured, Measured, OpenMeasured
from deepinfer_lab.metrics.latency import RunSummary, Spread


def show_closed(results: Sequence[Measured]) -> None:
    """A line for each system and number of clients."""
    click.echo(f"{'system':<14} {'bits':<5} {'clients':>7} {'tokens/s':>9} {'TPOT':>9} {'TTFT p50':>9} {'roofline':>8}")
    for r in results:
        share = "-" if r.roofline_share is None else f"{r.roofline_share:.0%}"
        tpot = "-" if r.tpot_s is None else f"{r.tpot_s * 1e3:.1f} ms"
        ttft = r.rounds[-1].ttft
        click.echo(
            f"{r.system:<14} {r.bits:<5} {r.load.concurrency:>7} {r.tokens_per_s:>9.1f} {tpot:>9} "
            f"{ttft.p50 * 1e3:>6.0f} ms {share:>8}"
        )
    click.echo("roofline: bytes of weights that a step reads / (TPOT x measured read bandwidth); tokens/s: output only")
    _warn_of_failures([summary for r in results for summary in r.rounds])


def show_open(result: OpenMeasured) -> None:
    """Whether the load was the one asked for, and then what its users saw."""
    load, summaries = result.load, [r.summary for r in result.rounds]
    late = max(r.max_lateness_s for r in result.rounds)
    click.echo(f"{load.name}: {len(load.due)} requests, due within {load.due[-1]:.1f} s")
    if load.skipped:
        click.echo(f"{load.skipped} rows of the trace left out: no input or no output tokens")
    click.echo(
        f"requests/s: offered {_rate(result.offered_rate)}, achieved {_rate(result.achieved_rate)}; "
        f"the latest was sent {late * 1e3:.1f} ms after it was due"
    )
    _show_spreads(
        {
            "TTFT": [s.ttft for s in summaries],
            "TPOT": [s.tpot for s in summaries],
            "ITL": [s.itl for s in summaries],
        }
    )
    click.echo(f"output tokens/s: {median(s.output_tokens_per_s for s in summaries):.1f}")
    click.echo("medians over rounds; TTFT counts from when a request was due, however late it was sent")
    if not result.kept_up:
        click.echo(
            f"warning: {_rate(result.achieved_rate)} requests/s is less than the {_rate(result.offered_rate)} offered: "
            "what you see is the lower rate. A limit of concurrency does this, or a client that cannot send so fast",
            err=True,
        )
    _warn_of_failures(summaries)


def show_insertion(result: InsertionMeasured) -> None:
    """The readers' gaps without and with the document, and how long it waited itself."""
    load, rounds = result.load, result.rounds
    click.echo(f"a document of {load.document_tokens} tokens comes in while {load.readers} requests decode")
    _show_spreads({"steady ITL": [r.steady_itl for r in rounds], "ITL beside it": [r.beside_itl for r in rounds]})
    click.echo(f"document's TTFT: {median(r.document_ttft_s for r in rounds) * 1e3:.1f} ms")
    click.echo(f"tokens/s until then, its prompt included: {median(r.tokens_per_s for r in rounds):.1f}")
    click.echo("medians over rounds; steady: from when all readers decode, without the document")


def _show_spreads(named: Mapping[str, Sequence[Spread | None]]) -> None:
    """Percentiles in milliseconds, each the median over rounds."""
    click.echo(f"{'ms':<14} {'p50':>9} {'p95':>9} {'p99':>9} {'max':>9}")
    for name, spreads in named.items():
        if found := [spread for spread in spreads if spread is not None]:
            cells = (median(getattr(spread, part) for spread in found) * 1e3 for part in ("p50", "p95", "p99", "max"))
            click.echo(f"{name:<14} " + " ".join(f"{cell:>9.1f}" for cell in cells))


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2f}"


def _warn_of_failures(summaries: Sequence[RunSummary]) -> None:
    if errors := sum(summary.errors for summary in summaries):
        asked = errors + sum(summary.requests for summary in summaries)
        click.echo(f"warning: {errors} of {asked} requests failed or were refused; no figure counts them", err=True)
