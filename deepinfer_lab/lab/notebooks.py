"""Run notebooks: into `build/`, with checked parameters, never in place."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import papermill
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError

from deepinfer_lab.errors import NotebookError
from deepinfer_lab.lab import mode as modes
from deepinfer_lab.lab import parameters as params_of
from deepinfer_lab.lab import project


@dataclass(frozen=True)
class Notebook:
    """A notebook of the project: `name` is its file name without the ending, such as "00_serve_a_real_model"."""

    name: str
    path: Path


@dataclass(frozen=True)
class NotebookRun:
    """An executed notebook: what it ran with, how long it took in seconds, and where the copy with outputs lies."""

    name: str
    parameters: dict[str, Any]
    seconds: float
    output: Path


def discover() -> list[Notebook]:
    """The notebooks of the project: the start page, `index`, then the others by name."""
    paths = sorted(project.notebooks().glob("*.ipynb"), key=lambda path: (path.stem != "index", path.stem))
    return [Notebook(path.stem, path) for path in paths]


def select(available: Sequence[str], names: Sequence[str] | None) -> list[str]:
    """The notebooks that `names` mean: a whole name, or its number (`00`). None, or no name at all, means all.

    Raises:
        NotebookError: a name that means no notebook, or more than one.
    """
    if not names:
        return list(available)
    chosen = []
    for asked in names:
        found = [name for name in available if asked in (name, name.split("_")[0])]
        if len(found) != 1:
            problem = "is ambiguous" if found else "does not exist"
            raise NotebookError(f"notebook {asked!r} {problem}; there are: {', '.join(found or available) or 'none'}")
        chosen += [name for name in found if name not in chosen]
    return chosen


def run(
    names: Sequence[str] | None = None,
    *,
    mode: str | None = None,
    params: Mapping[str, Any] | None = None,
    out: Path | None = None,
) -> list[NotebookRun]:
    """Execute notebooks, in their order, into `out`; stops at the first that fails.

    Args:
        names: which, as `select` reads them; None for all.
        mode: "replay", "measure" or "auto" for every notebook, through `DEEPINFER_MODE`. None leaves that variable, and
            else the notebook's own `mode` parameter, to decide.
        params: values by name, as text or typed. Each must be declared by at least one of the notebooks, and goes to
            those alone that declare it.
        out: folder of the executed copies; by default `build/`.

    Raises:
        NotebookError: before anything runs, an unknown notebook or parameter or a malformed value; or a notebook that
            fails.
        KeyboardInterrupt: with a message that says what was finished and where it lies.
    """
    if mode is not None:
        modes.check(mode, "the option `mode`")
    paths = {notebook.name: notebook.path for notebook in discover()}
    chosen = select(list(paths), names)
    if not chosen:
        raise NotebookError(f"no notebooks in {project.notebooks()}")
    folder = (out or project.build()).resolve()
    values = assign({name: params_of.declared(paths[name]) for name in chosen}, params or {})
    finished: list[NotebookRun] = []
    for name in chosen:
        output = folder / f"{name}.ipynb"
        started = time.monotonic()
        try:
            execute(paths[name], output, mode=mode, parameters=values[name])
        except KeyboardInterrupt:
            done = ", ".join(str(each.output) for each in finished) or "none"
            raise KeyboardInterrupt(
                f"interrupted in notebook {name!r}, partly executed in {output}; finished: {done}"
            ) from None
        finished.append(NotebookRun(name, values[name], time.monotonic() - started, output))
    return finished


def assign(
    declared: Mapping[str, Mapping[str, params_of.Parameter]], params: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Which notebook gets which values.

    Args:
        declared: notebook -> its parameters by name.
        params: the values to hand out.

    Raises:
        NotebookError: a parameter that no notebook declares, or a value that one of them cannot take.
    """
    for name in params:
        if not any(name in known for known in declared.values()):
            allowed = "; ".join(f"{notebook}: {', '.join(known) or 'none'}" for notebook, known in declared.items())
            raise NotebookError(f"parameter {name!r} is declared by none of the notebooks; allowed: {allowed}")
    return {
        notebook: {
            name: params_of.parse(known[name], value, notebook) for name, value in params.items() if name in known
        }
        for notebook, known in declared.items()
    }


def execute(source: Path, output: Path, *, mode: str | None, parameters: Mapping[str, Any]) -> None:
    """Execute the notebook file `source` in the folder `notebooks/`, and write it with its outputs to `output`.

    Raises:
        NotebookError: a cell raised, or the kernel died; says which, and where the partly executed copy lies.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)  # an earlier run's copy must not pass for this one's
    environment = {project.VARIABLE: str(project.root())}
    if mode is not None:
        environment[modes.VARIABLE] = mode
    try:
        with _environment(environment):
            papermill.execute_notebook(
                str(source),
                str(output),
                parameters=dict(parameters),
                kernel_name="python3",
                cwd=str(project.notebooks()),
                extra_arguments=["--log-level=ERROR"],  # else each kernel warns that its local sockets are plain TCP
                progress_bar={"desc": source.stem, "leave": False, "disable": not sys.stderr.isatty()},
            )
    except PapermillExecutionError as error:
        first = error.source.strip().splitlines()[0] if error.source.strip() else ""
        raise NotebookError(
            f"notebook {source.stem!r} failed in cell In [{error.exec_count}] ({first}): "
            f"{error.ename}: {error.evalue}. Partly executed: {output}"
        ) from error
    except DeadKernelError as error:
        raise NotebookError(f"notebook {source.stem!r}: the kernel died. Partly executed: {output}") from error


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the kernel, which inherits this process's environment, and put them back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
