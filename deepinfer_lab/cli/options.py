"""Options that several commands share."""

from collections.abc import Callable
from typing import Any

import click

from deepinfer_lab.quant.layout import GROUPS
from deepinfer_lab.quant.methods import METHODS

Command = Callable[..., Any]

MODEL_HELP = (
    "A name from `deepinfer-lab list`, a folder in Hugging Face format, a .gguf file, a hub id such as org/name, a folder "
    "that `deepinfer-lab quantise` wrote, or synthetic:SHAPE for random weights."
)


def bits(command: Command) -> Command:
    """--bits, w4 by default."""
    return click.option(
        "--bits",
        default="w4",
        show_default=True,
        metavar="PLAN",
        help="w4, w3: all linear layers; mixed: MLP 3 bits, attention 4; none: as in the checkpoint; or a plan's .json file.",
    )(command)


def method(command: Command) -> Command:
    """--method."""
    return click.option(
        "--method",
        type=click.Choice(METHODS),
        default="rtn",
        show_default=True,
        help="rtn rounds to nearest, at once. scale-search and gptq read some text first and lose less; gptq least.",
    )(command)


def group(command: Command) -> Command:
    """--group."""
    return click.option(
        "--group",
        type=click.Choice([str(g) for g in GROUPS]),
        default="64",
        show_default=True,
        callback=lambda _ctx, _param, value: int(value),
        help="Weights along K that share one scale.",
    )(command)


def dispatch(command: Command) -> Command:
    """--dispatch."""
    return click.option(
        "--dispatch",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="Which kernel takes how many rows on a GPU, as in data/nvidia-h200/dispatch.json. [default: the article's choice]",
    )(command)


def model(command: Command) -> Command:
    """--model, --bits, --method, --group, --device and --dispatch."""
    for option in (
        dispatch,
        click.option("--device", help="cpu, cuda or cuda:N. [default: the GPU if there is one]"),
        group,
        method,
        bits,
        click.option("--model", default="smollm2-135m", show_default=True, help=MODEL_HELP),
    ):
        command = option(command)
    return command


def integers(_ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """Parse "1,8,64"."""
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(
            f"'{value}': whole numbers of 1 or more, separated by commas, such as 1,8", param=param
        )
    return numbers
