"""Publish: promote new records, and write every notebook, from its script, with the outputs of a replay."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from deepinfer_lab.errors import NotebookError, RecordError
from deepinfer_lab.kernels import dispatch
from deepinfer_lab.lab import kernel_dispatch, mode, project, record, seal
from deepinfer_lab.lab.notebooks import execute, select

PAPERMILL_TAGS = frozenset({"injected-parameters", "papermill-error-cell-tag"})  # of cells that papermill adds
PAPERMILL_METADATA = ("papermill", "execution")


@dataclass(frozen=True)
class Published:
    """What one call wrote: records and dispatch tables moved into `data/`, and notebooks."""

    records: list[Path]
    notebooks: list[Path]


def publish(names: Sequence[str] | None = None) -> Published:
    """Move finished records from `build/data/` to `data/`, seal them, and write `notebooks/NN_title.ipynb` from the scripts.

    Each notebook is made from `notebooks/scripts/NN_title.py`, executed in replay mode with its default parameters, and
    cleaned. Doing it twice gives identical bytes.

    Args:
        names: which notebooks, whole names or numbers; None for all.

    Raises:
        RecordError: a malformed record (before anything moves).
        NotebookError: an unknown notebook, a script without a kernelspec header, or a notebook that fails.
    """
    scripts = {path.stem: path for path in sorted(project.scripts().glob("*.py"))}
    chosen = select(list(scripts), names)
    sources = {name: read_script(scripts[name]) for name in chosen}
    records = promote()
    seal.update(records)
    written = []
    for name, unexecuted in sources.items():
        source, executed = (project.build() / "publish" / kind / f"{name}.ipynb" for kind in ("source", "executed"))
        record.write_atomically(source, nbformat.writes(unexecuted))
        execute(source, executed, environment={mode.VARIABLE: "replay"}, parameters={})
        target = project.notebooks() / f"{name}.ipynb"
        notebook = clean(nbformat.read(executed, as_version=4))
        record.write_atomically(target, nbformat.writes(notebook) + "\n")
        written.append(target)
    return Published(records, written)


def promote() -> list[Path]:
    """Move the whole records under `build/data/<device>/` to `data/<device>/`, and dispatch tables with them; records that are
    cut short stay.

    Raises:
        RecordError: a malformed record, or one in another device's folder; nothing has moved then.
        KernelError: a malformed dispatch table; likewise.
    """
    origin = project.build() / "data"
    paths = sorted(origin.glob("*/*.json"))
    tables = [path for path in paths if path.name == kernel_dispatch.FILE]
    for path in tables:
        dispatch.load(path)
    records = {path: record.load(path) for path in paths if path not in tables}
    for path, found in records.items():
        filed, belongs = f"{path.parent.name}/{path.stem}", f"{found.provenance['device_slug']}/{found.experiment}"
        if filed != belongs:
            raise RecordError(f"{path}: holds the record of {belongs}, not of {filed}")
    targets = []
    for path, found in records.items():
        if not found.whole:
            continue
        target = project.data() / path.relative_to(origin)
        found.save(target)
        path.unlink()
        targets.append(target)
    for path in tables:
        target = project.data() / path.relative_to(origin)
        record.write_atomically(target, path.read_text(encoding="utf-8"))
        path.unlink()
        targets.append(target)
    return targets


def read_script(script: Path) -> NotebookNode:
    """The notebook that a py:percent script describes: no outputs, stable cell ids, the kernelspec its only metadata.

    Raises:
        NotebookError: no kernelspec in the script's header, without which Jupyter asks every reader for a kernel.
    """
    notebook = jupytext.read(script, fmt="py:percent")
    if "kernelspec" not in notebook.metadata:
        raise NotebookError(
            f"{script}: no kernelspec in its header; add one with `jupytext --set-kernel python3 {script.name}`"
        )
    return clean(notebook)


def clean(notebook: NotebookNode) -> NotebookNode:
    """A copy without what papermill, nbclient and jupytext add: injected cells, timings, versions, empty tags.

    Cells are numbered: ids `cell-01` ..., execution counts 1..n over those that ran. Neighbouring pieces of one stream,
    whose borders depend on timing, are joined.
    """
    result = nbformat.from_dict({**notebook, "cells": []})
    result.nbformat, result.nbformat_minor = 4, 5
    kernelspec = notebook.metadata.get("kernelspec")
    result.metadata = nbformat.from_dict({"kernelspec": kernelspec} if kernelspec else {})
    numbers = count(1)
    kept = [cell for cell in notebook.cells if not PAPERMILL_TAGS & set(cell.metadata.get("tags", []))]
    for position, original in enumerate(kept, start=1):
        cell = nbformat.from_dict({**original, "id": f"cell-{position:02}"})
        for key in PAPERMILL_METADATA:
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags"):
            cell.metadata.pop("tags", None)
        if cell.cell_type == "code":
            if cell.execution_count is not None:
                cell.execution_count = next(numbers)
            cell.outputs = _outputs(cell)
        result.cells.append(cell)
    return result


def _outputs(cell: NotebookNode) -> list[NotebookNode]:
    joined: list[NotebookNode] = []
    for output in cell.outputs:
        if output.output_type == "execute_result":
            output.execution_count = cell.execution_count
        before = joined[-1] if joined else None
        if before is not None and output.output_type == before.output_type == "stream" and output.name == before.name:
            before.text += output.text
        else:
            joined.append(output)
    return joined
