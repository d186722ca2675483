"""Commands that measure from the command line."""

import json
import time
from pathlib import Path
from typing import Any

import click

from deepinfer_lab.cli import load_options, options
from deepinfer_lab.cli.bench_kernels import kernels
from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.lab.load_spec import InsertionLoad, OpenLoad


@click.group()
def bench() -> None:
    """Measure this machine."""


bench.add_command(kernels)


@bench.command(epilog=options.POLICY_EPILOG)
@options.model
@options.engine
@load_options.loads
@click.option("--rounds", default=3, show_default=True, help="Repeat everything; medians over rounds are shown.")
@click.option(
    "--against",
    type=click.Choice(["transformers"]),
    help="closed: measure single-stream `generate` of Hugging Face transformers beside, on the unquantised checkpoint.",
)
@options.json_file
def serve(
    model: str,
    weights: dict[str, Any],
    config: EngineConfig,
    trace: Path | None,
    loads: load_options.Loads,
    rounds: int,
    against: str | None,
    json_file: Path | None,
) -> None:
    """Serve a load and print throughput and latency.

    \b
    --load closed     each of --concurrency clients sends a request, reads it to its last token, sends the next
    --load poisson    requests come at --rate a second, whether earlier ones have ended or not
    --load gamma      the same in bursts
    --load trace      requests come when those of a CSV file came, and are as long
    --load insertion  a long document comes in while --readers requests decode: what they wait, and what it waits

    Prompts are cut from Python's own documentation; models without a tokenizer get random token ids. Every request
    generates exactly as many tokens as asked for. An option that the chosen load does not take is refused.
    """
    from deepinfer_lab.cli import serve_tables
    from deepinfer_lab.lab import provenance, serve_bench
    from deepinfer_lab.model.load import load_model

    if rounds < 1:
        raise click.BadParameter(f"{rounds}: allowed is 1 or more", param_hint="--rounds")
    started = time.perf_counter()
    loaded = load_model(model, **weights)
    load_s, peak = time.perf_counter() - started, serve_bench.peak_memory_bytes()
    click.echo(
        f"{loaded.name}, bits {weights['bits']}: loaded in {load_s:.1f} s"
        + (f", peak {peak / 1e9:.2f} GB" if peak else "")
    )
    if loaded.decoder.device.type == "cpu" and config.policy != "serial":
        click.echo(f"policy {config.policy}: nothing overlaps without a GPU; one lane, decode first")
    with options.traced(trace) as listener:
        if isinstance(loads[0], OpenLoad):
            results = [serve_bench.measure_open(loaded, config, loads[0], rounds, listener)]
            serve_tables.show_open(results[0])
        elif isinstance(loads[0], InsertionLoad):
            results = [serve_bench.measure_insertion(loaded, config, loads[0], rounds, listener)]
            serve_tables.show_insertion(results[0])
        else:
            results = list(serve_bench.measure(loaded, config, loads, rounds, against, model, listener))
            serve_tables.show_closed(results)
    if json_file is not None:
        settings = {
            **{name: getattr(config, name) for name in options.ENGINE_SETTINGS},
            "device": loaded.decoder.device.type,
            "batch_invariant": loaded.decoder.batch_invariant,
            "load_s": load_s,
            "peak_memory_bytes": peak,
        }
        rows = [{**settings, "model": loaded.name, **r.row()} for r in results]
        content = {"provenance": provenance.collect(), "results": rows}
        json_file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        click.echo(f"written: {json_file}")


@bench.command()
@click.option(
    "--running",
    default="1,8,16,32,64,128,256",
    show_default=True,
    callback=options.integers,
    help="Requests that decode at a time; a list sweeps.",
)
@click.option("--cycles", default=200, show_default=True, help="Cycles to time; the median is shown.")
def scheduler(running: list[int], cycles: int) -> None:
    """Time the scheduler by itself, on one thread: forward passes take no time and their logits lie ready.

    "plan + finish" is planning, reserving blocks, greedy sampling, committing and reporting; "prepare" makes the tensors
    of a step. All prompts have 512 tokens.
    """
    import torch

    from deepinfer_lab.lab import scheduler_bench

    if cycles < 1:
        raise click.BadParameter(f"{cycles}: allowed is 1 or more", param_hint="--cycles")
    torch.set_num_threads(1)
    click.echo(f"{'running':>7} {'plan + finish':>14} {'prepare':>10} {'cycle':>10} {'a request':>10}")
    for found in scheduler_bench.measure(running, cycles):
        each = found.plan_and_finish / found.running
        prepare = found.cycle - found.plan_and_finish
        click.echo(
            f"{found.running:>7} {found.plan_and_finish:>11.0f} us {prepare:>7.0f} us {found.cycle:>7.0f} us {each:>7.1f} us"
        )
