"""What is not the same about two records of one experiment, besides their numbers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deepinfer_lab.lab.cells import Cell, Kind, Settings
from deepinfer_lab.lab.record import Record

CHARACTERS = 60  # of a value that differs


def differences(
    a: Record,
    b: Record,
    columns: Mapping[str, Kind],
    by: Sequence[str],
    cells_a: Mapping[Settings, Cell],
    cells_b: Mapping[Settings, Cell],
) -> Iterator[str]:
    """One line each: status, parameters, kernels, rows without a counterpart, metrics and words.

    Args:
        columns, by: as `cells.kinds` and `cells.keys` return them. cells_a, cells_b: as `cells.cells` does.
    """
    yield from _origins(a, b)
    yield from _settings(columns, by, cells_a, cells_b)
    yield from _outcomes([(cells_a[settings], cells_b[settings]) for settings in cells_a if settings in cells_b])


def _origins(a: Record, b: Record) -> Iterator[str]:
    """What is not the same about how they were measured."""
    for side, record in (("A", a), ("B", b)):
        if record.status != "OK":
            yield f"{side} is {record.status}"
    for name in sorted(set(a.params) | set(b.params)):
        if name not in a.params or name not in b.params or a.params[name] != b.params[name]:
            of_a, of_b = (_short(r.params[name]) if name in r.params else "absent" for r in (a, b))
            yield f"parameter {name}: {of_a} in A, {of_b} in B"
    hashes_a, hashes_b = (record.provenance.get("kernels") for record in (a, b))
    if not hashes_a or not hashes_b:
        lacking = " and ".join(side for side, hashes in (("A", hashes_a), ("B", hashes_b)) if not hashes)
        yield f"kernels: {lacking} without hashes, so nobody knows whether they are the same"
    else:
        common = set(hashes_a) & set(hashes_b)
        for what, files in (
            ("differ", [name for name in common if hashes_a[name] != hashes_b[name]]),
            ("only in A", set(hashes_a) - common),
            ("only in B", set(hashes_b) - common),
        ):
            if files:
                yield f"kernels {what}: {', '.join(sorted(files))}"


def _settings(
    columns: Mapping[str, Kind],
    by: Sequence[str],
    cells_a: Mapping[Settings, Cell],
    cells_b: Mapping[Settings, Cell],
) -> Iterator[str]:
    """Which rows stand alone, and in which settings one side has values that the other lacks."""
    left_out = [name for name, kind in columns.items() if kind == "setting" and name not in by]
    if left_out:
        yield f"not matched by {', '.join(left_out)}: one side has it, the same in all rows"
    for side, own, other in (("A", cells_a, cells_b), ("B", cells_b, cells_a)):
        if alone := [settings for settings in own if settings not in other]:
            yield f"only in {side}: {len(alone)} of {len(own)} settings"
        for at, name in enumerate(by):
            values = {settings[at][1] for settings in own} - {settings[at][1] for settings in other}
            if values:
                yield f"only in {side}: {name} = {', '.join(sorted(_short(value) for value in values))}"


def _outcomes(matched: Sequence[tuple[Cell, Cell]]) -> Iterator[str]:
    """Metrics that one side lacks, and outcomes that are no numbers, where they differ."""
    for side, own, other in (("A", 0, 1), ("B", 1, 0)):
        if alone := {name for pair in matched for name in pair[own].numbers if name not in pair[other].numbers}:
            yield f"only in {side}, at least in some settings: the metrics {', '.join(sorted(alone))}"
    for name in sorted({name for pair in matched for cell in pair for name in cell.words}):
        found = [[cell.words.get(name) for cell in pair] for pair in matched]
        differing = [(of_a, of_b) for of_a, of_b in found if of_a != of_b]
        if differing:
            of_a, of_b = map(_short, differing[0])
            yield f"{name} differs in {len(differing)} of {len(matched)} settings, such as {of_a} in A, {of_b} in B"


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 3] + "..."
