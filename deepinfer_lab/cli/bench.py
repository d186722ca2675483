"""Commands that measure from the command line."""

import json
import time
from pathlib import Path

import click

from deepinfer_lab.cli import options
from deepinfer_lab.engine.config import KV_DTYPES


@click.group()
def bench() -> None:
    """Measure this machine."""


@bench.command()
@options.model
@click.option("--policy", default="serial", show_default=True, help="How prefill and decode share the machine.")
@click.option("--chunk-tokens", default=256, show_default=True, help="The most prompt tokens that a cycle prefills.")
@click.option(
    "--kv-dtype",
    type=click.Choice(KV_DTYPES),
    default="auto",
    show_default=True,
    help="int8 keeps K and V in one byte a value; auto in the model's own type.",
)
@click.option(
    "--concurrency",
    default="1,8",
    show_default=True,
    callback=options.integers,
    help="Clients at a time; a list sweeps.",
)
@click.option("--prompt-tokens", default=128, show_default=True, help="Length of every prompt.")
@click.option("--output-tokens", default=64, show_default=True, help="Tokens that every request generates.")
@click.option("--requests", default=2, show_default=True, help="Requests that each client sends, one after the other.")
@click.option("--rounds", default=3, show_default=True, help="Repeat everything; medians over rounds are shown.")
@click.option(
    "--against",
    type=click.Choice(["transformers"]),
    help="Measure single-stream `generate` of Hugging Face transformers beside, on the unquantised checkpoint.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all results here.")
def serve(
    model: str,
    bits: str,
    method: str,
    group: int,
    device: str | None,
    dispatch: str | None,
    policy: str,
    chunk_tokens: int,
    kv_dtype: str,
    concurrency: list[int],
    prompt_tokens: int,
    output_tokens: int,
    requests: int,
    rounds: int,
    against: str | None,
    json_file: Path | None,
) -> None:
    """Serve a closed-loop load and print throughput, latency and the roofline fraction.

    Each of C clients sends a request, reads it to its last token, and sends the next. Prompts are cut from Python's
    own documentation; every request generates exactly --output-tokens tokens.
    """
    from deepinfer_lab.engine.config import EngineConfig
    from deepinfer_lab.engine.policy import policy_named
    from deepinfer_lab.lab import provenance, serve_bench
    from deepinfer_lab.lab.serving import Load
    from deepinfer_lab.model.load import load_model

    if rounds < 1:
        raise click.BadParameter(f"{rounds}: allowed is 1 or more", param_hint="--rounds")
    config = EngineConfig(policy=policy_named(policy).name, chunk_tokens=chunk_tokens, kv_dtype=kv_dtype)
    loads = [Load(c, prompt_tokens, output_tokens, requests) for c in concurrency]
    started = time.perf_counter()
    loaded = load_model(model, bits=bits, method=method, group=group, device=device, dispatch=dispatch)
    load_s, peak = time.perf_counter() - started, serve_bench.peak_memory_bytes()
    click.echo(
        f"{loaded.name}, bits {bits}: loaded in {load_s:.1f} s" + (f", peak {peak / 1e9:.2f} GB" if peak else "")
    )
    results = list(serve_bench.measure(loaded, config, loads, rounds, against, model))
    click.echo(f"{'system':<14} {'bits':<5} {'clients':>7} {'tokens/s':>9} {'TPOT':>9} {'TTFT p50':>9} {'roofline':>8}")
    for r in results:
        share = "-" if r.roofline_share is None else f"{r.roofline_share:.0%}"
        ttft = r.rounds[-1].ttft
        click.echo(
            f"{r.system:<14} {r.bits:<5} {r.concurrency:>7} {r.tokens_per_s:>9.1f} {r.tpot_s * 1e3:>6.1f} ms "
            f"{ttft.p50 * 1e3:>6.0f} ms {share:>8}"
        )
    click.echo("roofline: bytes of weights that a step reads / (TPOT x measured read bandwidth); tokens/s: output only")
    if json_file is not None:
        settings = {
            "policy": policy,
            "chunk_tokens": chunk_tokens,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
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
