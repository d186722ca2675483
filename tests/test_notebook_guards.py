"""The committed notebooks keep every rule of `lab.guards`, and each guard fails on a notebook that breaks its rule."""

from collections.abc import Callable
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbformat import NotebookNode

from deepinfer_lab.lab import guards

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
COMMITTED = sorted(NOTEBOOKS.glob("*.ipynb"))

SCRIPT = """\
# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Title

# %% tags=["parameters"]
mode: str = "auto"  # replay, measure or auto
# how much of it
count: int = 2  # rows

# %%
show()
"""


def test_at_least_one_notebook_is_committed():
    assert COMMITTED, f"no notebook in {NOTEBOOKS}"


def test_notebooks_and_scripts_come_in_pairs():
    assert guards.pairs(NOTEBOOKS) == []


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_notebook(path: Path):
    assert guards.check_notebook(path) == []


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A folder with one notebook that keeps every rule."""
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "00_good.py"
    script.write_text(SCRIPT)
    notebook = jupytext.read(script, fmt="py:percent")
    del notebook.metadata["jupytext"]
    for number, cell in enumerate(notebook.cells[1:], start=1):
        cell.execution_count = number
    notebook.cells[2].outputs = [
        nbformat.v4.new_output("display_data", data={"image/svg+xml": "<svg/>", "text/plain": "a picture"}),
        nbformat.v4.new_output("stream", name="stdout", text="table a: 2 rows x 1 columns, sha256 0123456789ab\n"),
    ]
    nbformat.write(notebook, tmp_path / "00_good.ipynb")
    return tmp_path


def break_notebook(folder: Path, change: Callable[[NotebookNode], object]) -> list[str]:
    path = folder / "00_good.ipynb"
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    nbformat.write(notebook, path)
    return guards.check_folder(folder)


def parameters(source: str) -> Callable[[NotebookNode], object]:
    return lambda notebook: notebook.cells[1].update(source=source)


def output(kind: str, **content: object) -> Callable[[NotebookNode], object]:
    return lambda notebook: notebook.cells[2].outputs.append(nbformat.v4.new_output(kind, **content))


def test_a_good_notebook_passes(good: Path):
    assert guards.check_folder(good) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda nb: nb.cells[2].update(execution_count=None), "execution counts are [1, None]"),
        (lambda nb: nb.cells[2].update(execution_count=7), "execution counts are [1, 7]"),
        (lambda nb: nb.update(cells=nb.cells[:1]), "has no code cell"),
        (output("error", ename="ValueError", evalue="bad", traceback=[]), "cell 3 ended in ValueError: bad"),
        (output("stream", name="stderr", text="UserWarning: slow\n"), "cell 3 wrote to stderr"),
        (lambda nb: nb.metadata.update(papermill={}), "notebook metadata holds 'papermill'"),
        (lambda nb: nb.cells[0].metadata.update(papermill={}), "cell 1: metadata holds 'papermill'"),
        (lambda nb: nb.cells[2].metadata.update(execution={}), "cell 3: metadata holds 'execution'"),
        (lambda nb: nb.cells[2].metadata.update(tags=[]), "cell 3: empty tags"),
        (lambda nb: nb.cells[2].metadata.update(tags=["injected-parameters"]), "cell 3: tag 'injected-parameters'"),
        (lambda nb: nb.cells[1].metadata.pop("tags"), "has 0 cells tagged 'parameters'"),
        (lambda nb: nb.cells[2].metadata.update(tags=["parameters"]), "has 2 cells tagged 'parameters'"),
        (parameters(""), "parameters cell declares nothing"),
        (parameters("count: int ="), "parameters cell is not Python"),
        (parameters("count = 2  # rows"), "'count = 2  # rows' is not a typed one-line assignment"),
        (parameters("sizes: list = [\n    1\n]  # rows"), "'sizes: list = [' is not a typed one-line assignment"),
        (parameters("import os"), "'import os' is not a typed one-line assignment"),
        (parameters("count: int = 2"), "'count: int = 2' has no comment"),
        (parameters('count: str = "#"'), "has no comment"),
        (parameters("count: int = 2  # a = b"), "papermill reads {}, Python reads {'count': 2}"),
        (parameters("count: int | None = 2  # rows"), "papermill reads {}, Python reads {'count': 2}"),
        (parameters("count: int = 1 + 1  # rows"), "parameters cell: "),
        (lambda nb: nb.cells[2].outputs.pop(), "cell 3 shows 1 picture(s) but prints 0 table fingerprint(s)"),
        (output("display_data", data={"image/png": "AA=="}), "cell 3 shows 2 picture(s) but prints 1"),
        (lambda nb: nb.cells[2].update(source="show(2)"), "differs from 00_good.py"),
        (lambda nb: nb.cells[0].update(source="# Another title"), "differs from 00_good.py"),
        (lambda nb: nb.cells.append(nbformat.v4.new_markdown_cell("More")), "differs from 00_good.py"),
        (lambda nb: nb.metadata.pop("kernelspec"), "differs from 00_good.py"),
    ],
)  # fmt: skip
def test_each_guard_fails_on_a_broken_copy(good: Path, change: Callable[[NotebookNode], object], complaint: str):
    complaints = break_notebook(good, change)
    assert any(complaint in each for each in complaints), complaints
    assert all(each.startswith("00_good: ") for each in complaints)


def test_a_notebook_or_script_alone_is_reported(good: Path):
    (good / "scripts" / "01_new.py").write_text(SCRIPT)
    assert guards.check_folder(good) == ["01_new: scripts/01_new.py was never published"]
    (good / "scripts" / "01_new.py").rename(good / "scripts" / "00_good.py.off")
    (good / "scripts" / "00_good.py").unlink()
    assert guards.check_folder(good) == ["00_good: no scripts/00_good.py"]


def test_what_is_no_notebook_is_reported(good: Path):
    (good / "00_good.ipynb").write_text("{")
    assert guards.check_folder(good)[0].startswith("00_good: not a notebook")
