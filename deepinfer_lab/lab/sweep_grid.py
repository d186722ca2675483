"""The grid of a sweep: an experiment, lists of values for its parameters, and the cells that their combinations make.

    experiment: chunk_inflight
    grid:
      policy: [priority, mixed]
      concurrency: [1, 16]
    leave_out:                            # may be missing
      - {policy: mixed, concurrency: 1}

A parameter that is itself a list has lists for values: [[1, 8]] is one.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deepinfer_lab.errors import SettingError
from deepinfer_lab.lab.experiment import NAME, Experiment, complete
from deepinfer_lab.lab.experiments import EXPERIMENTS

KEYS = ("experiment", "grid", "leave_out")
LABEL_CHARACTERS = 60


@dataclass(frozen=True)
class Cell:
    """One combination.

    Attributes:
        name: of its files: the grid's parameters, made plain and cut short, and a hash of the experiment and all parameters.
            It stays the same when lists of the grid get longer.
        params: all parameters of the experiment, JSON values.
    """

    name: str
    params: dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """A sweep that was asked for. `name` is its file's without the ending; the last parameter of the grid changes fastest."""

    name: str
    experiment: Experiment
    cells: list[Cell]


def read(path: Path) -> Grid:
    """The grid in a YAML file.

    Raises:
        SettingError: no such file, one that is not YAML, or anything in it that is unknown, malformed, doubled or without
            effect; names the file, the value and what is allowed.
    """
    if not NAME.fullmatch(path.stem):
        raise SettingError(f"{path}: the file's name is the sweep's: lower-case letters, digits, - and _ only")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingError(f"{path}: not a YAML file that can be read: {error}") from None
    if not isinstance(content, dict) or not {"experiment", "grid"} <= content.keys() <= set(KEYS):
        found = ", ".join(map(str, content)) if isinstance(content, dict) else repr(content)
        raise SettingError(f"{path}: it has {found}; a sweep has experiment and grid, and may have leave_out")
    if str(content["experiment"]) not in EXPERIMENTS:
        raise SettingError(f"{path}: experiment {content['experiment']!r}; allowed are {', '.join(EXPERIMENTS)}")
    experiment = EXPERIMENTS[content["experiment"]]
    lists = _lists(content["grid"], experiment, str(path))
    combinations = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    left_out = content.get("leave_out") or []
    if not isinstance(left_out, list) or not all(isinstance(each, dict) and each for each in left_out):
        raise SettingError(
            f"{path}: leave_out {left_out!r}: not a list of parameters with values, such as [{{seed: 0}}]"
        )
    for each in left_out:
        if not any(_matches(combination, each) for combination in combinations):
            raise SettingError(f"{path}: leave_out {each!r} matches no combination of the grid")
    kept = [each for each in combinations if not any(_matches(each, out) for out in left_out)]
    if not kept:
        raise SettingError(f"{path}: leave_out leaves no cell")
    return Grid(path.stem, experiment, [_cell(experiment, each) for each in kept])


def _lists(lists: Any, experiment: Experiment, origin: str) -> dict[str, list[Any]]:
    """The grid's lists, checked one by one: each value is one that the experiment's parameter may have, and is there once."""
    if not isinstance(lists, dict) or not lists:
        raise SettingError(f"{origin}: grid {lists!r}: parameters, each with a list of values, such as seed: [0, 1]")
    for name, values in lists.items():
        if not isinstance(values, list) or not values:
            raise SettingError(f"{origin}: grid: {name} is {values!r}, not a list of values, such as [{values}]")
        for value in values:
            complete(experiment, {str(name): value})
            default = complete(experiment, {})[name]
            if not _alike(value, default):
                raise SettingError(f"{origin}: grid: {name} has the value {value!r}; its default is {_text(default)}")
        if len({_json(value) for value in values}) < len(values):
            raise SettingError(f"{origin}: grid: {name} has a value twice: {_text(values)}")
    return lists


def _alike(value: Any, default: Any) -> bool:
    """Of one kind: YAML reads 1e-3 as text and `on` as true, and a list of lists is easily one level short."""
    numbers = (int, float)
    if default is None or (type(value) in numbers and type(default) in numbers):
        return True
    if isinstance(value, list) and isinstance(default, list) and value and default:
        return _alike(value[0], default[0])
    return type(value) is type(default)


def _matches(combination: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    return all(name in combination and _json(combination[name]) == _json(value) for name, value in part.items())


def _cell(experiment: Experiment, combination: Mapping[str, Any]) -> Cell:
    params = complete(experiment, combination)
    plain = {name: re.sub(r"[^A-Za-z0-9._]+", "-", _text(value)).strip("-") for name, value in combination.items()}
    label = ",".join(f"{name}={value}" for name, value in plain.items())[:LABEL_CHARACTERS]
    digest = hashlib.sha256(_json([experiment.name, params]).encode()).hexdigest()
    return Cell(f"{label}-{digest[:8]}", params)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _text(value: Any) -> str:
    """As a person writes it: text without quotes."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
