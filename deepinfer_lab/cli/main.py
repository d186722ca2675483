"""The command group, and how errors reach the user."""

import sys

import click

from deepinfer_lab.cli.bench import bench
from deepinfer_lab.cli.check import check
from deepinfer_lab.cli.compare import compare
from deepinfer_lab.cli.info import info, list_
from deepinfer_lab.cli.kernels import kernels
from deepinfer_lab.cli.models import fetch, generate, quantise
from deepinfer_lab.cli.notebooks import publish, run
from deepinfer_lab.cli.quality import quality
from deepinfer_lab.cli.report import report
from deepinfer_lab.cli.site import site
from deepinfer_lab.cli.tune import tune
from deepinfer_lab.errors import DeepInferError


class _Group(click.Group):
    """Shows our own errors as one line, without a traceback; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except DeepInferError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt as interrupt:
            click.echo(f"\nInterrupted. {interrupt}".rstrip(), err=True)
            sys.exit(130)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="deepinfer-lab")
def main() -> None:
    """A laboratory for few-bit LLM inference on one GPU.

    \b
    New here? Try, in this order:
      deepinfer-lab generate "What is a tensor core?"   a 135M model answers, in 4 bits
      deepinfer-lab list                                 notebooks, experiments, models
      deepinfer-lab run --mode replay                    execute all notebooks from recorded results
      deepinfer-lab bench serve --concurrency 1,8        measure serving on this machine
      deepinfer-lab quality --method rtn,gptq            what 4 and 3 bits cost, and what a quantiser saves
    """


for command in (
    generate, fetch, quantise, run, publish, check, bench, quality, compare, report, site, kernels, tune, list_, info,
):  # fmt: skip
    main.add_command(command)
