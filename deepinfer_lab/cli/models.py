"""Commands about one model: use it, fetch it, quantise it."""

from pathlib import Path
from typing import Any

import click

from deepinfer_lab.cli import options
from deepinfer_lab.engine.config import EngineConfig


@click.command(epilog=options.POLICY_EPILOG)
@click.argument("prompt")
@options.model
@options.engine
@click.option("--max-tokens", default=128, show_default=True, help="The most tokens to generate.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy; higher is more varied.")
@click.option("--top-k", default=0, show_default=True, help="Sample among the k likeliest tokens; 0 among all.")
@click.option(
    "--top-p", default=1.0, show_default=True, help="Sample among the likeliest tokens that make up this share."
)
@click.option(
    "--min-p", default=0.0, show_default=True, help="Drop tokens below this share of the likeliest's probability."
)
@click.option(
    "--repetition-penalty",
    default=1.0,
    show_default=True,
    help="Above 1, tokens that occurred already are less likely.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same text.")
@click.option(
    "--chat/--raw",
    "chat",
    default=None,
    help="Wrap the prompt in the model's chat template, or feed it as it is. [default: --chat where there is a template]",
)
def generate(
    prompt: str,
    model: str,
    weights: dict[str, Any],
    config: EngineConfig,
    trace: Path | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    stop: tuple[str, ...],
    seed: int,
    chat: bool | None,
) -> None:
    """Generate text after PROMPT and print it as it comes.

    The default model, SmolLM2-135M-Instruct, is downloaded on first use (93 MB).
    """
    from deepinfer_lab.engine.engine import Engine
    from deepinfer_lab.engine.sampling import SamplingParams
    from deepinfer_lab.errors import SettingError

    params = SamplingParams(
        max_tokens, temperature, top_k, top_p, seed, min_p=min_p, repetition_penalty=repetition_penalty, stop=stop
    )
    with (
        options.traced(trace) as listener,
        Engine.load(model, **weights, config=config, listener=listener) as engine,
    ):
        if engine.tokenizer is None:
            raise SettingError(
                f"model '{model}': has no tokenizer, so generate cannot read PROMPT; bench serve takes it"
            )
        has_template = engine.tokenizer.chat_template is not None
        if chat or (chat is None and has_template and prompt):
            prompt = engine.render_chat(prompt)
        for piece in engine.stream(prompt, params):
            click.echo(piece, nl=False)
        click.echo()


@click.command()
@click.argument("name", default="smollm2-135m")
def fetch(name: str) -> None:
    """Download a catalog model into the cache folder, once.

    The cache is the user's cache folder for deepinfer-lab; the environment variable DEEPINFER_CACHE overrides it.
    """
    from deepinfer_lab.model.catalog import obtain

    click.echo(f"{name}: {obtain(name)}")


@click.command()
@click.argument("model")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@options.bits
@options.method
@options.group
@click.option("--device", help="Where to compute: cpu, cuda or cuda:N. [default: cpu]")
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What scale-search and gptq read. [default: a part of Python's own documentation]",
)
def quantise(
    model: str, folder: Path, bits: str, method: str, group: int, device: str | None, text: Path | None
) -> None:
    """Quantise MODEL once and write it to FOLDER, which every --model option then takes.

    MODEL is whatever the other commands' --model takes. An interrupted run goes on where it stopped when it is repeated. FOLDER
    must be new or empty, or hold the same model in the same bits.
    """
    from deepinfer_lab.errors import SettingError
    from deepinfer_lab.model.calibration import calibration_from
    from deepinfer_lab.model.load import open_source, pick_device
    from deepinfer_lab.model.quantised import write
    from deepinfer_lab.quant.plan import PLANS, plan_named

    plan = plan_named(bits)
    if plan is PLANS["none"]:
        allowed = ", ".join(name for name in PLANS if name != "none")
        raise SettingError(f"bits '{bits}' leaves nothing to quantise: allowed are {allowed} or a plan's .json file")
    source, calibration = open_source(model), None
    if text is not None:
        if source.tokenizer is None:
            raise SettingError(f"--text {text}: '{model}' has no tokenizer")
        calibration = calibration_from(source.tokenizer, text.read_text(encoding="utf-8"), windows=32, length=512)
    where = pick_device(device or "cpu")
    path = write(source, plan, group, folder, method=method, calibration=calibration, device=where)
    click.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
