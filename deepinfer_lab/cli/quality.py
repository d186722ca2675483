"""The command that shows what quantising costs."""

import json
from pathlib import Path

import click

from deepinfer_lab.cli import options

BEGINNING = "The three primary colours are"


def _names(_ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    """Parse "w4,mixed"."""
    names = [part.strip() for part in value.split(",")]
    if not all(names):
        raise click.BadParameter(f"'{value}': names separated by commas", param=param)
    return names


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True, help=options.MODEL_HELP)
@click.option(
    "--bits",
    default="w4,mixed,w3",
    show_default=True,
    callback=_names,
    metavar="PLAN,...",
    help="w4, w3: all linear layers; mixed: MLP 3 bits, attention 4; "
    "w4-all, mixed-all: those, and embedding and output head 4 bits; or a plan's .json file.",
)
@click.option(
    "--method",
    "methods",
    default="rtn,gptq",
    show_default=True,
    callback=_names,
    metavar="METHOD,...",
    help="rtn, scale-search, gptq. All but rtn take about a minute per plan for the default model on two cores.",
)
@options.group
@click.option("--device", help="cpu, cuda or cuda:N. [default: the GPU if there is one]")
@click.option("--tokens", default=4096, show_default=True, help="How much text to predict.")
@click.option("--beginning", default=BEGINNING, show_default=True, help="The text to go on from, greedily.")
@options.json_file
def quality(
    model: str,
    bits: list[str],
    methods: list[str],
    group: int,
    device: str | None,
    tokens: int,
    beginning: str,
    json_file: Path | None,
) -> None:
    """Show what fewer bits cost: quantise a model in several ways, and compare each with the unquantised one.

    \b
    perplexity  how well it predicts Python's own documentation; lower is better, 1 would be certainty
    KL          how far its probabilities are from the unquantised model's, nats per token; 0 is no difference
    top-1       how often both take the same token to be the likeliest
    MB          weights of the blocks' linear layers, as stored; not embedding and head
    seconds     to load and quantise

    KL and top-1 speak of the quantiser alone; perplexity also of the model and the text. The samples at the end show how
    each goes on from the same beginning: a single other token may lead elsewhere, and need not be worse.
    """
    from deepinfer_lab.lab import provenance
    from deepinfer_lab.lab.quantisation_quality import Yardstick, check_groups
    from deepinfer_lab.model.load import open_source
    from deepinfer_lab.model.reference_text import text_version
    from deepinfer_lab.quant.methods import check_method
    from deepinfer_lab.quant.plan import plan_named

    asked = [(check_method(method), plan_named(name)) for method in methods for name in bits]
    config = open_source(model).config
    check_groups(config, [group])
    window = min(1024, config.max_context)
    yardstick = Yardstick.load(model, tokens=tokens, window=window, beginning=beginning, new_tokens=40, device=device)
    click.echo(f"{yardstick.model.name}: {tokens} tokens of {text_version()}, in windows of {window}")
    click.echo(
        f"{'bits':<9} {'method':<13} {'group':>5} {'perplexity':>10} {'KL':>7} {'top-1':>6} {'MB':>8} {'seconds':>8}"
    )
    rows = []

    def show(row: dict) -> None:
        rows.append(row)
        seconds = "-" if row["quantise_s"] is None else f"{row['quantise_s']:.1f}"
        click.echo(
            f"{row['bits']:<9} {row['method'] or '-':<13} {row['group'] or '-':>5} {row['perplexity']:>10.2f} "
            f"{row['kl']:>7.4f} {row['top1']:>6.1%} {row['bytes'] / 1e6:>8.1f} {seconds:>8}"
        )

    show(yardstick.unquantised())
    for method, plan in asked:
        show(yardstick.quantised(plan, method, group))
    click.echo(f"\n{beginning} ...")
    for row in rows:
        click.echo(f"{row['bits']:<9} {row['method'] or '-':<13} {' '.join(row['sample'].split())}")
    if json_file is not None:
        content = {
            "provenance": provenance.collect(),
            "results": [{"model": yardstick.model.name, **row} for row in rows],
        }
        json_file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        click.echo(f"written: {json_file}")
