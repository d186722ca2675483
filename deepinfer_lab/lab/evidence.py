"""What a notebook stands on: the records that it names, its figures, and which of them each printed number can come from.

Nothing runs here. A notebook's code is followed by name, cell after cell: what is computed from a record, or from what was
computed from it, follows from that record. A number that a cell printed then counts for all records from which the names in
the cell's printing statements follow.

This never leaves out a record that a number comes from by name, and it may name one too many: `a + b` follows from both. It
knows nothing of values. A number that was typed into a cell which prints records, too, counts for them, unless it stands in
one of the cell's texts: then it counts as `TYPED`. That outputs are those of the records is for `pytest --nbval` to say.
"""

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from nbformat import NotebookNode

from deepinfer_lab.figures.style import FINGERPRINT

BANNER = re.compile(r"^([a-z0-9_-]+): .+\nmeasured (\S+), commit .*$", re.MULTILINE)  # as `experiment.banner` prints it
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
DECIMAL = re.compile(r"[\d,]+\.\d+")
PUBLISHED = "published"  # follows from numbers of `data/published/`
TYPED = "typed"  # stands in a text of the cell that prints it
MUTATORS = frozenset(
    {"append", "extend", "insert", "update", "add", "setdefault"}
)  # the object then follows from arguments

Sources = frozenset[str]
NOTHING: Sources = frozenset()


@dataclass(frozen=True)
class Evidence:
    """What one notebook's outputs stand on.

    Attributes:
        banners: (experiment, UTC time) of every record whose banner it prints.
        experiments: that its code names.
        figures: name -> the line that stands for its table, for every one that it prints.
        figure_sources: name -> what the statement that saves the figure follows from.
        numbers: how many printed numbers, by what they follow from: names of experiments, `PUBLISHED`, `TYPED`; of no
            source, what is computed from code alone.
    """

    banners: list[tuple[str, str]]
    experiments: list[str]
    figures: dict[str, str]
    figure_sources: dict[str, Sources]
    numbers: Counter[Sources]


def printed(notebook: NotebookNode) -> str:
    """All that its cells wrote."""
    return "\n".join(text for cell in notebook.cells for text in _texts(cell))


def fingerprints(text: str) -> dict[str, str]:
    """Figure's name -> the line that stands for its table."""
    return {match[1]: match[0] for match in filter(None, map(FINGERPRINT.fullmatch, text.splitlines()))}


def unfounded(notebook: NotebookNode, published: str) -> list[str]:
    """Numbers with a decimal point in the notebook's prose that stand nowhere else, rounded as the prose rounds them.

    A weak guard: a wrong number may stand somewhere by chance. Whole numbers are left out, since most of them do.

    Args:
        published: the text of published tables, whose numbers count as well as those of outputs and of code.
    """
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    found = {float(number.replace(",", "")) for number in NUMBER.findall(f"{printed(notebook)}\n{code}\n{published}")}
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    missing = []
    for number in filter(DECIMAL.fullmatch, NUMBER.findall(prose)):
        digits = len(number.partition(".")[2])
        if float(number.replace(",", "")) not in {round(value, digits) for value in found}:
            missing.append(number)
    return missing


def gather(notebook: NotebookNode, experiments: Collection[str]) -> Evidence:
    """Follow a notebook with outputs.

    Args:
        experiments: all names that an experiment may have.

    Raises:
        SyntaxError: a cell is not Python.
    """
    text = printed(notebook)
    names = _Names(experiments)
    numbers: Counter[Sources] = Counter()
    figures = fingerprints(text)
    figure_sources: dict[str, Sources] = {}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse(cell.source)
        names.follow(tree.body)
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        prints = NOTHING.union(*map(names.sources, statements))
        typed = {number for text in _constants(tree) for number in NUMBER.findall(text)}
        for output in _texts(cell):
            lines = [line for line in BANNER.sub("", output).splitlines() if not FINGERPRINT.fullmatch(line)]
            for number in NUMBER.findall("\n".join(lines)):
                numbers[frozenset({TYPED}) if number in typed else prints] += 1
        for statement in statements:
            for name in figures.keys() & set(_constants(statement)):
                figure_sources[name] = figure_sources.get(name, NOTHING) | names.sources(statement)
    return Evidence(list(dict.fromkeys(BANNER.findall(text))), sorted(names.named), figures, figure_sources, numbers)


class _Names:
    """Which sources each name of a notebook follows from, so far."""

    def __init__(self, experiments: Collection[str]) -> None:
        self._experiments = experiments
        self._known: dict[str, Sources] = {}
        self.named: set[str] = set()

    def follow(self, statements: list[ast.stmt]) -> None:
        """Take in what the statements assign, in their order."""
        for node in statements:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    if alias.name.split(".")[-1] == PUBLISHED:
                        self._known[alias.asname or alias.name] = frozenset({PUBLISHED})
            elif isinstance(node, ast.FunctionDef):
                self._known[node.name] = self.sources(node)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assign(node.target, node.value)
            elif isinstance(node, ast.AugAssign):
                self._add(node.target, node.value)
            elif isinstance(node, ast.For):
                self._assign(node.target, node.iter)
            for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
                if isinstance(call.func, ast.Attribute) and call.func.attr in MUTATORS:
                    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                        self._add(call.func, argument)
            for block in ("body", "orelse", "finalbody"):
                if not isinstance(node, ast.FunctionDef):
                    self.follow(getattr(node, block, []))

    def sources(self, node: ast.AST) -> Sources:
        """What an expression or statement follows from: every source of every name in it, and experiments named by it."""
        if isinstance(node, ast.Name):
            return self._known.get(node.id, NOTHING)
        if isinstance(node, ast.Constant):
            if node.value == PUBLISHED:
                return frozenset({PUBLISHED})
            if not isinstance(node.value, str) or node.value not in self._experiments:
                return NOTHING
            self.named.add(node.value)
            return frozenset({node.value})
        found = NOTHING.union(*map(self.sources, ast.iter_child_nodes(node)))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in found:
            return frozenset({node.slice.value})  # records["one"], of many
        return found

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            same = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            for position, element in enumerate(target.elts):
                self._assign(element, value.elts[position] if same else value)
        elif isinstance(target, ast.Name):
            self._known[target.id] = self.sources(value)
        else:
            self._add(target, value)

    def _add(self, target: ast.expr, value: ast.expr) -> None:
        """`table["column"] = value`, `rows.append(value)`, `total += value`: the whole now follows from the value, too."""
        root = target
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Starred | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name):
            self._known[root.id] = self._known.get(root.id, NOTHING) | self.sources(value)


def _texts(cell: NotebookNode) -> Iterator[str]:
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            yield output.text
        elif output.output_type == "execute_result":
            yield output.data.get("text/plain", "")


def _constants(tree: ast.AST) -> Iterator[str]:
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
