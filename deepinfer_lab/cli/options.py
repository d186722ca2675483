"""Options that several commands share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import click

from deepinfer_lab.engine.config import KV_DTYPES, EngineConfig
from deepinfer_lab.engine.event import Event
from deepinfer_lab.engine.policy import POLICIES, PRESETS
from deepinfer_lab.quant.layout import BITS, GROUPS
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
        help="w4, w3: all linear layers; mixed: MLP 3 bits, attention 4; "
        "w4-all, mixed-all: those, and embedding and output head 4 bits; none: as in the checkpoint; or a plan's .json file.",
    )(command)


def method(command: Command) -> Command:
    """--method."""
    return click.option(
        "--method",
        type=click.Choice(METHODS),
        default="rtn",
        show_default=True,
        help="rtn rounds to nearest, at once. scale-search and gptq read some text first and lose less; gptq least. "
        "Embedding and output head are rounded to nearest by all.",
    )(command)


def group(command: Command, default: str = "64") -> Command:
    """--group."""
    return click.option(
        "--group",
        type=click.Choice([str(g) for g in GROUPS]),
        default=default,
        show_default=True,
        callback=lambda _ctx, _param, value: int(value),
        help="Weights along K that share one scale.",
    )(command)


def json_file(command: Command) -> Command:
    """--json."""
    return click.option(
        "--json",
        "json_file",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=in_a_folder,
        help="Write all results here.",
    )(command)


def dispatch(command: Command) -> Command:
    """--dispatch."""
    return click.option(
        "--dispatch",
        callback=_table,
        metavar="FILE",
        help="Which kernel takes how many rows on a GPU, as in data/nvidia-h200/dispatch.json; or 'article', for the article's "
        "choice. [default: the card's own table in data/, or else kernels on tensor cores]",
    )(command)


def _table(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value not in (None, "article") and not Path(value).is_file():
        raise click.BadParameter(f"File '{value}' does not exist, and it is not 'article'.")
    return value


def batch_invariant(command: Command) -> Command:
    """--batch-invariant."""
    return click.option(
        "--batch-invariant",
        is_flag=True,
        help="On a GPU: the same logits, bit for bit, for a request alone, in any batch and at any chunk size. It costs time: "
        "a prompt's tokens no longer share a read of K and V, and one row takes the kernel of many. No effect on a CPU.",
    )(command)


WEIGHT_SETTINGS = ("bits", "method", "group", "device", "dispatch", "batch_invariant")


def model(command: Command) -> Command:
    """--model, --bits, --method, --group, --device, --dispatch and --batch-invariant. The command receives the first as
    `model: str` and the others as `weights: dict`, as `load_model` and `Engine.load` take them."""

    @wraps(command)
    def with_weights(**given: Any) -> Any:
        import torch

        weights = {name: given.pop(name) for name in WEIGHT_SETTINGS}
        if weights["dispatch"] is None and not weights["batch_invariant"] and torch.cuda.is_available():
            from deepinfer_lab.lab.kernel_dispatch import card_table  # a fifth of a second that only a GPU is worth

            weights["dispatch"] = card_table()
        return command(weights=weights, **given)

    for option in (
        batch_invariant,
        dispatch,
        click.option("--device", help="cpu, cuda or cuda:N. [default: the GPU if there is one]"),
        group,
        method,
        bits,
        click.option("--model", default="smollm2-135m", show_default=True, help=MODEL_HELP),
    ):
        with_weights = option(with_weights)
    return with_weights


def policy_lines() -> list[str]:
    """Each policy and what it does."""
    width = max(map(len, POLICIES))
    return [f"  {name:<{width}}  {preset.summary}" for name, preset in PRESETS.items()]


# What `engine` puts into an EngineConfig; each is an option of the same name.
ENGINE_SETTINGS = (
    "policy", "itl_target_ms", "chunk_tokens", "max_in_flight", "cuda_graphs", "decode_chain", "kv_dtype",
)  # fmt: skip

# Below a command's help. \b keeps click from joining the lines.
POLICY_EPILOG = "\b\n" + "\n".join(
    ["Policies. Without a GPU nothing overlaps: they differ in the size of chunks alone.", *policy_lines()]
)


def engine(command: Command) -> Command:
    """The engine's options and --trace. The command receives them as `config: EngineConfig` and `trace: Path | None`."""

    @wraps(command)
    def with_config(no_prefill_decode_overlap: bool, **given: Any) -> Any:
        config = EngineConfig(**{name: given.pop(name) for name in ENGINE_SETTINGS})
        if no_prefill_decode_overlap and config.policy != "serial":
            raise click.UsageError(
                f"--policy {config.policy} contradicts --no-prefill-decode-overlap, with which serial is allowed: leave one out"
            )
        return command(config=config, **given)

    for option in (
        click.option(
            "--trace",
            type=click.Path(dir_okay=False, path_type=Path),
            callback=in_a_folder,
            metavar="FILE",
            help="Write what every lane and every request did, as a picture to zoom into (ui.perfetto.dev, chrome://tracing).",
        ),
        click.option(
            "--kv-dtype",
            type=click.Choice(KV_DTYPES),
            default=EngineConfig.kv_dtype,
            show_default=True,
            help="int8 keeps K and V in one byte a value; auto in the model's own type.",
        ),
        click.option(
            "--cuda-graphs/--no-cuda-graphs",
            default=EngineConfig.cuda_graphs,
            show_default=True,
            help="On a GPU: capture forward passes at the start, which takes seconds, or launch every kernel from Python.",
        ),
        click.option(
            "--decode-chain/--no-decode-chain",
            default=EngineConfig.decode_chain,
            show_default=True,
            help="On a GPU that can: all layers of a decode step of one sequence in one launch, or in several.",
        ),
        click.option(
            "--max-in-flight",
            default=EngineConfig.max_in_flight,
            show_default=True,
            help="The most chunks and decode steps that are launched before a result is looked at.",
        ),
        click.option(
            "--chunk-tokens",
            default=EngineConfig.chunk_tokens,
            show_default=True,
            help="The most prompt tokens that a cycle prefills.",
        ),
        click.option(
            "--itl-target-ms",
            default=EngineConfig.itl_target_ms,
            show_default=True,
            help="Milliseconds between two tokens of a request that time-sliced and adaptive aim at.",
        ),
        click.option(
            "--no-prefill-decode-overlap", is_flag=True, help="The article's switch: the same as --policy serial."
        ),
        click.option(
            "--policy",
            type=click.Choice(POLICIES),
            default=EngineConfig.policy,
            show_default=True,
            metavar="NAME",
            help="How prefill and decode share the GPU: one of the policies listed below.",
        ),
    ):
        with_config = option(with_config)
    return with_config


@contextmanager
def traced(file: Path | None) -> Iterator[Callable[[Event], None] | None]:
    """A listener whose events are written to `file` at the end; None where there is no file."""
    from deepinfer_lab.metrics.chrome_trace import TraceRecorder, write

    if file is None:
        yield None
        return
    recorder = TraceRecorder()
    yield recorder
    write(file, recorder.events)
    click.echo(f"trace: {file}; open it in https://ui.perfetto.dev or chrome://tracing", err=True)


def in_a_folder(_ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Check that a file to be written has a folder, before hours of measuring and not after."""
    if value is not None and not value.parent.is_dir():
        raise click.BadParameter(
            f"'{value}': '{value.parent}' is no folder; allowed are files in a folder that exists", param=param
        )
    return value


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


def shapes(_ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> list[tuple[int, int]]:
    """Parse "5632x2048" of an option that may be repeated."""
    found = []
    for text in value:
        parts = text.lower().split("x")
        if len(parts) != 2 or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
            raise click.BadParameter(f"'{text}': N and K of a weight, such as 5632x2048", param=param)
        found.append((int(parts[0]), int(parts[1])))
    return found


def few_bits(_ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """Parse "w4,w3"."""
    allowed = {f"w{bits}": bits for bits in BITS}
    names = value.split(",")
    for name in names:
        if name not in allowed:
            raise click.BadParameter(f"'{name}': allowed are {', '.join(allowed)}, separated by commas", param=param)
    return [allowed[name] for name in dict.fromkeys(names)]
