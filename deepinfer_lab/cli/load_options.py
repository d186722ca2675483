"""The options of `bench serve` that say what load to send."""

from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from deepinfer_lab.cli import options
from deepinfer_lab.cli.options import Command
from deepinfer_lab.lab.load_spec import InsertionLoad, Load, OpenLoad

Loads = list[Load] | list[OpenLoad] | list[InsertionLoad]

LOADS = ("closed", "poisson", "gamma", "trace", "insertion")
CLOSED_REQUESTS, OPEN_REQUESTS = 2, 32  # of each client; in all

# Options that not every load takes, and the loads that do. --against is the command's own.
TAKEN_BY: Mapping[str, tuple[str, ...]] = {
    "concurrency": ("closed",),
    "against": ("closed",),
    "requests": ("closed", "poisson", "gamma"),
    "prompt_tokens": ("closed", "poisson", "gamma", "insertion"),
    "output_tokens": ("closed", "poisson", "gamma"),
    "rate": ("poisson", "gamma"),
    "burstiness": ("gamma",),
    "max_concurrency": ("poisson", "gamma", "trace"),
    "trace_csv": ("trace",),
    "speed_up": ("trace",),
    "limit": ("trace",),
    "readers": ("insertion",),
    "document_tokens": ("insertion",),
}


def loads(command: Command) -> Command:
    """--load and what belongs to each. The command receives `loads: Loads`, of which only a closed loop can be several."""

    @wraps(command)
    def with_loads(
        load: str,
        concurrency: list[int],
        requests: int | None,
        prompt_tokens: int,
        output_tokens: int,
        rate: float,
        burstiness: float,
        max_concurrency: int | None,
        trace_csv: Path | None,
        speed_up: float,
        limit: int | None,
        readers: int,
        document_tokens: int,
        **others: Any,
    ) -> Any:
        _refuse_what_is_not_taken(click.get_current_context(), load)
        if load == "closed":
            each = CLOSED_REQUESTS if requests is None else requests
            made = [Load(clients, prompt_tokens, output_tokens, each) for clients in concurrency]
        elif load == "trace":
            if trace_csv is None:
                raise click.UsageError("--load trace needs --trace-csv FILE, the trace to replay")
            made = [OpenLoad.replayed(trace_csv, limit=limit, speed_up=speed_up, max_concurrency=max_concurrency)]
        elif load == "insertion":
            made = [InsertionLoad(readers, prompt_tokens, document_tokens)]
        else:
            count = OPEN_REQUESTS if requests is None else requests
            cv = burstiness if load == "gamma" else 1.0
            made = [OpenLoad.drawn(load, rate, cv, count, prompt_tokens, output_tokens, max_concurrency)]
        return command(loads=made, **others)

    for option in (
        click.option("--document-tokens", default=2048, show_default=True, help="insertion: length of the document."),
        click.option("--readers", default=8, show_default=True, help="insertion: requests that decode meanwhile."),
        click.option("--limit", type=int, help="trace: only the first so many requests. [default: all]"),
        click.option("--speed-up", default=1.0, show_default=True, help="trace: 2 sends them twice as fast."),
        click.option(
            "--trace-csv",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="trace: columns timestamp, input_tokens, output_tokens, or those of Azure's or BurstGPT's traces.",
        ),
        click.option(
            "--max-concurrency",
            type=click.IntRange(min=1),
            help="poisson, gamma, trace: the most requests at a time; others are sent late. [default: no limit]",
        ),
        click.option(
            "--burstiness",
            default=2.0,
            show_default=True,
            help="gamma: standard deviation of the gaps over their mean; 1 would be poisson.",
        ),
        click.option("--rate", default=1.0, show_default=True, help="poisson, gamma: requests a second."),
        click.option(
            "--requests",
            type=int,
            help=f"closed: of each client, one after the other; poisson, gamma: in all. [default: {CLOSED_REQUESTS}; "
            f"{OPEN_REQUESTS}]",
        ),
        click.option(
            "--output-tokens",
            default=64,
            show_default=True,
            help="closed, poisson, gamma: tokens that every request generates.",
        ),
        click.option(
            "--prompt-tokens",
            default=128,
            show_default=True,
            help="Length of every prompt, but for a trace's and the document.",
        ),
        click.option(
            "--concurrency",
            default="1,8",
            show_default=True,
            callback=options.integers,
            help="closed: clients at a time; a list sweeps.",
        ),
        click.option(
            "--load", type=click.Choice(LOADS), default="closed", show_default=True, help="Who sends, and when."
        ),
    ):
        with_loads = option(with_loads)
    return with_loads


def _refuse_what_is_not_taken(ctx: click.Context, load: str) -> None:
    """An option that would do nothing is a mistake: its user believes to have measured something else."""
    for name, takers in TAKEN_BY.items():
        if load not in takers and ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} does nothing with --load {load}: it is for {', '.join(takers)}")
