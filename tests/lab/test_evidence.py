"""What a notebook's numbers follow from."""

import nbformat
import pytest
from nbformat import NotebookNode

from deepinfer_lab.lab import evidence

EXPERIMENTS = ("gemm", "serve", "idle")
BANNER = (
    "gemm: NVIDIA H200, driver 550.90\nmeasured 2026-01-02T03:04:05+00:00, commit 0123456789ab, status OK, 33 rows\n"
)
IMPORTS = "from deepinfer_lab.lab import experiment, published"


def a_notebook(*cells: tuple[str, str], prose: str = "") -> NotebookNode:
    """Of (code, what it printed)."""
    v4 = nbformat.v4
    code = [v4.new_code_cell(source, outputs=[v4.new_output("stream", text=text)]) for source, text in cells]
    return v4.new_notebook(cells=[v4.new_markdown_cell(prose), v4.new_code_cell(IMPORTS), *code])


def numbers(*cells: tuple[str, str]) -> dict[str, int]:
    found = evidence.gather(a_notebook(*cells), EXPERIMENTS).numbers
    return {" ".join(sorted(sources)): count for sources, count in found.items()}


ONE = ('one = experiment.obtain(EXPERIMENTS["gemm"])', "")
MANY = ('NAMES = ["gemm", "serve"]\nrecords = obtain_all([EXPERIMENTS[name] for name in NAMES])', "")


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([ONE, ("print(one)", "1.5 2,000 3e-05 w4_gemv")], {"gemm": 3}),
        ([ONE, ("print(len(shapes))", "1 2")], {"": 2}),
        ([ONE, ("rows = one.frame()\nrows['us'] = 1\nshown = rows.head()", ""), ("print(shown)", "7")], {"gemm": 1}),
        ([MANY, ("a, b = records['gemm'], records['serve']", ""), ("print(b.x)", "7"), ("print(a)", "8")],
         {"serve": 1, "gemm": 1}),
        ([MANY, ("for name, record in records.items():\n    print(record)", "7 8")], {"gemm serve": 2}),
        ([ONE, ("theirs = published.table('2.7')\nprint(theirs, one)", "7")], {"gemm published": 1}),
        ([ONE, ("table = []\nfor row in one:\n    table.append({'a': row})", ""), ("print(table)", "7")], {"gemm": 1}),
        ([ONE, ("def show(x):\n    print(x, one)", ""), ("show(3)", "7")], {"gemm": 1}),
        ([ONE, ("both = {'a': one}\nboth |= {'b': records['serve']}", ""), ("print(both)", "7")], {"gemm serve": 1}),
        ([ONE, ("one = 3", ""), ("print(one)", "3")], {"": 1}),
        ([ONE, ("print(f'over 5% of {one}')", "over 5% of 7")], {"typed": 1, "gemm": 1}),
        ([ONE, ("copy = one\nprint('n')", "7")], {"": 1}),
        ([ONE, ("print(one)", BANNER + "table a: 5 rows x 6 columns, sha256 0123456789ab\n")], {}),
    ],
)  # fmt: skip
def test_numbers_follow_from_the_records_that_their_names_do(cells: list[tuple[str, str]], expected: dict[str, int]):
    assert numbers(*cells) == expected


def test_banners_experiments_and_figures_are_found():
    line = "table a: 5 rows x 6 columns, sha256 0123456789ab"
    notebook = a_notebook(ONE, ("print(banner(one))", BANNER), ("print(save(fig, 'a', one)); print(2)", f"{line}\n2\n"))
    found = evidence.gather(notebook, EXPERIMENTS)
    assert found.banners == [("gemm", "2026-01-02T03:04:05+00:00")]
    assert found.experiments == ["gemm"]
    assert found.figures == {"a": line}
    assert found.figure_sources == {"a": {"gemm"}}


@pytest.mark.parametrize(
    ("prose", "missing"),
    [
        ("2.48x and 0.8x, 12 of 13", []),
        ("2.47x", ["2.47"]),
        ("1,234.5 tokens", []),
        ("1,234.6 tokens", ["1,234.6"]),
        ("22.8 in the article, at most 1.05", []),
        ("`w4_1.5` and v2.0.1", []),
    ],
)
def test_a_number_in_prose_stands_somewhere(prose: str, missing: list[str]):
    notebook = a_notebook(("limit = 1.05", "speedup 2.4816, 0.81\n1,234.5"), prose=prose)
    assert evidence.unfounded(notebook, '{"tokens_per_s": 22.8}') == missing
