"""The parameters that a notebook declares, and values for them from the command line."""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import papermill

from deepinfer_lab.errors import NotebookError

KINDS: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str, "list": list}


@dataclass(frozen=True)
class Parameter:
    """One line of a `parameters` cell.

    Attributes:
        name: the variable.
        kind: "int", "float", "bool", "str" or "list".
        item: kind of a list's items, None where the annotation does not say.
        default: its value in the notebook.
        help: the comment after it.
    """

    name: str
    kind: str
    item: str | None
    default: Any
    help: str


def declared(notebook: Path) -> dict[str, Parameter]:
    """The parameters of a notebook, by name, in its order.

    Raises:
        NotebookError: a default that is no literal of one of `KINDS`.
    """
    found = {}
    for name, line in papermill.inspect_notebook(str(notebook)).items():
        where = f"notebook {notebook.stem!r}: parameter {name!r}"
        try:
            default = ast.literal_eval(line["default"])
        except (ValueError, SyntaxError):
            raise NotebookError(f"{where}: default {line['default']!r} is not a literal") from None
        kind, item = _kind(line["inferred_type_name"], default, where)
        found[name] = Parameter(name, kind, item, default, line["help"])
    return found


def parse(parameter: Parameter, value: Any, where: str) -> Any:
    """`value` as the parameter's kind. Strings are parsed: numbers, `true` or `false`, lists as JSON.

    Args:
        parameter: what it is for.
        value: a string from a command line, or a value of the right kind already.
        where: the notebook's name, for the message.

    Raises:
        NotebookError: a value of another kind; names it and what is allowed.
    """
    result = _from_text(parameter.kind, value) if isinstance(value, str) else value
    if parameter.kind == "float" and type(result) is int:
        result = float(result)
    if parameter.item == "float" and isinstance(result, list):
        result = [float(item) if type(item) is int else item for item in result]
    good = type(result) is KINDS[parameter.kind]  # not isinstance: True is no int here
    if good and parameter.kind == "list" and parameter.item is not None:
        good = all(type(item) is KINDS[parameter.item] for item in result)
    if good:
        return result
    items = f" of {parameter.item}" if parameter.item else ""
    allowed = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "str": "text",
        "list": f"a JSON list{items}, such as {json.dumps(parameter.default)}",
    }
    raise NotebookError(f"notebook {where!r}: parameter {parameter.name!r} is {value!r}, not {allowed[parameter.kind]}")


def _kind(annotation: str, default: Any, where: str) -> tuple[str, str | None]:
    kind = type(default).__name__
    outer, item = re.fullmatch(r"(\w+)(?:\[(\w+)\])?|.*", annotation).groups()
    if kind == "int" and outer == "float":  # `rate: float = 1`
        kind = "float"
    if kind not in KINDS or outer not in (kind, "None"):  # papermill writes "None" where there is no annotation
        raise NotebookError(
            f"{where}: default {default!r} is annotated {annotation!r}; allowed: {', '.join(KINDS)}, annotated as such"
        )
    return kind, item if item in KINDS else None


def _from_text(kind: str, text: str) -> Any:
    """The value that `text` spells, or `text` itself where it spells none of that kind."""
    if kind == "str":
        return text
    try:
        if kind == "list":
            return json.loads(text)
        if kind == "bool":
            return {"true": True, "false": False}.get(text.strip().lower(), text)
        return KINDS[kind](text)
    except ValueError:
        return text
