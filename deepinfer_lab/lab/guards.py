"""What must hold of every committed notebook. Each guard returns its complaints; none means good.

A comparison of outputs alone passes a notebook whose outputs were stripped, and ignores pictures: hence these.
"""

import ast
import io
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import jupytext
import nbformat
from jupytext.compare import NotebookDifference, compare_notebooks
from nbformat import NotebookNode

from deepinfer_lab.errors import NotebookError
from deepinfer_lab.figures.style import FINGERPRINT
from deepinfer_lab.lab.parameters import declared
from deepinfer_lab.lab.publish import PAPERMILL_METADATA, PAPERMILL_TAGS


def check_folder(notebooks: Path) -> list[str]:
    """Complaints about every notebook in a folder, and about notebooks and scripts that lack each other."""
    complaints = pairs(notebooks)
    for path in sorted(notebooks.glob("*.ipynb")):
        complaints += check_notebook(path)
    return complaints


def check_notebook(path: Path) -> list[str]:
    """Complaints about one notebook file, each beginning with its name."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        return [f"{path.stem}: not a notebook: {error}"]
    complaints = [complaint for guard in GUARDS for complaint in guard(notebook)]
    script = path.parent / "scripts" / f"{path.stem}.py"
    if script.is_file():
        complaints += in_sync(notebook, script)
    complaints += parameters_are_readable(path)
    return [f"{path.stem}: {complaint}" for complaint in complaints]


def pairs(notebooks: Path) -> list[str]:
    """Every notebook has its script, and every script its notebook."""
    have = {path.stem for path in notebooks.glob("*.ipynb")}
    sources = {path.stem for path in (notebooks / "scripts").glob("*.py")}
    return [f"{name}: no scripts/{name}.py" for name in sorted(have - sources)] + [
        f"{name}: scripts/{name}.py was never published" for name in sorted(sources - have)
    ]


def executed_in_order(notebook: NotebookNode) -> list[str]:
    """Every code cell ran, and their counts are 1..n from top to bottom."""
    cells = [cell for _, cell in _code(notebook)]
    if not cells:
        return ["has no code cell"]
    counts = [cell.execution_count for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        return [f"execution counts are {counts}, not 1..{len(cells)} in order"]
    return []


def without_errors(notebook: NotebookNode) -> list[str]:
    """No cell ended in an exception, and none wrote to stderr (warnings and progress bars differ from run to run)."""
    complaints = []
    for where, cell in _code(notebook):
        for output in cell.outputs:
            if output.output_type == "error":
                complaints.append(f"{where} ended in {output.ename}: {output.evalue}")
            elif output.output_type == "stream" and output.name == "stderr":
                complaints.append(f"{where} wrote to stderr: {output.text.strip().splitlines()[:1]}")
    return complaints


def without_residue(notebook: NotebookNode) -> list[str]:
    """Nothing that papermill adds to a notebook is left."""
    complaints = [f"notebook metadata holds {key!r}" for key in PAPERMILL_METADATA if key in notebook.metadata]
    for number, cell in enumerate(notebook.cells, start=1):
        complaints += [f"cell {number}: metadata holds {key!r}" for key in PAPERMILL_METADATA if key in cell.metadata]
        tags = cell.metadata.get("tags")
        if tags == []:
            complaints.append(f"cell {number}: empty tags")
        complaints += [f"cell {number}: tag {tag!r}" for tag in sorted(PAPERMILL_TAGS & set(tags or []))]
    return complaints


def one_parameters_cell(notebook: NotebookNode) -> list[str]:
    """Exactly one `parameters` cell, all of it typed one-line assignments of literals, each with a comment after it."""
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        return [f"has {len(cells)} cells tagged 'parameters', not 1"]
    source = cells[0].source
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        return [f"parameters cell is not Python: {error}"]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    complaints = [] if statements else ["parameters cell declares nothing"]
    for statement in statements:
        line = source.splitlines()[statement.lineno - 1]
        if (
            not isinstance(statement, ast.AnnAssign)
            or statement.value is None
            or statement.lineno != statement.end_lineno
        ):
            complaints.append(f"parameters cell: {line!r} is not a typed one-line assignment")
        elif statement.lineno not in commented:
            complaints.append(f"parameters cell: {line!r} has no comment")
    return complaints


def pictures_have_fingerprints(notebook: NotebookNode) -> list[str]:
    """A cell prints one fingerprint line for each picture that it shows: pictures are not compared, their tables are."""
    complaints = []
    for where, cell in _code(notebook):
        pictures = sum(any(mime.startswith("image/") for mime in output.get("data", {})) for output in cell.outputs)
        text = "".join(output.text for output in cell.outputs if output.output_type == "stream")
        lines = sum(FINGERPRINT.fullmatch(line) is not None for line in text.splitlines())
        if pictures != lines:
            complaints.append(f"{where} shows {pictures} picture(s) but prints {lines} table fingerprint(s)")
    return complaints


def in_sync(notebook: NotebookNode, script: Path) -> list[str]:
    """The notebook's cells and kernelspec are those of its script."""
    try:
        compare_notebooks(notebook, jupytext.read(script, fmt="py:percent"), fmt="py:percent")
    except NotebookDifference as difference:
        return [f"differs from {script.name}: {difference}"]
    return []


def parameters_are_readable(path: Path) -> list[str]:
    """papermill, which reads the cell line by line and skips what it cannot read, sees the parameters that Python sees."""
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    try:
        expected = {
            statement.target.id: ast.literal_eval(statement.value)
            for source in sources
            for statement in ast.parse(source).body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value
        }
        seen = {name: parameter.default for name, parameter in declared(path).items()}
    except (SyntaxError, ValueError, NotebookError) as error:
        return [f"parameters cell: {error}"]
    return [] if seen == expected else [f"parameters cell: papermill reads {seen}, Python reads {expected}"]


def _code(notebook: NotebookNode) -> Iterator[tuple[str, NotebookNode]]:
    """Code cells that hold code, each with a name for messages."""
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type == "code" and cell.source.strip():
            yield f"cell {number}", cell


GUARDS: tuple[Callable[[NotebookNode], list[str]], ...] = (
    executed_in_order,
    without_errors,
    without_residue,
    one_parameters_cell,
    pictures_have_fingerprints,
)
