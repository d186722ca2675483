"""What measured values stand beside: the numbers that the DeepInfer-SM86 article, part 7, prints, data sheets, and this
project's own measurements of other people's kernels and of what it tried and dropped."""

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from deepinfer_lab.errors import RecordError
from deepinfer_lab.lab import project

FILE = "deepinfer_sm86_part7.json"
PEERS_FILE = "peers_h200_gemm.json"
PEERS_DEVICE, PEERS_GROUP = "nvidia-h200", 128  # the slug of the card, and the weights that share a scale
DATA_SHEETS = "data_sheets.json"
KEYS = frozenset({"section", "title", "hardware", "method", "rows", "notes"})


def tables(file: str = FILE) -> dict[str, dict[str, Any]]:
    """Every table of a file by its section: `title`, `hardware`, `method`, `rows` (units in the key names), `notes`.

    The numbers are as printed; where the article disagrees with itself, a note says so.

    Raises:
        RecordError: the file is missing or malformed.
    """
    path = project.data() / "published" / file
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"{path}: no such file") from None
    except ValueError as error:
        raise RecordError(f"{path}: not JSON: {error}") from None
    found = content.get("tables") if isinstance(content, Mapping) else None
    if not isinstance(found, list):
        raise RecordError(f"{path}: field tables must be a list")
    for number, entry in enumerate(found):
        if not isinstance(entry, Mapping) or set(entry) != KEYS:
            raise RecordError(f"{path}: tables[{number}] must have exactly the fields {', '.join(sorted(KEYS))}")
    return {entry["section"]: dict(entry) for entry in found}


def table(section: str, file: str = FILE) -> pd.DataFrame:
    """One table; `attrs` holds its title, hardware, method and notes.

    Args:
        section: of the article, "2.7" (tiled GEMM), "3.2" (W3 batch tile), "5.1" (end to end), "5.2" (overlap on and off) or
            "5.3" (ITL). file: another file of `data/published/`, with sections of its own.

    Raises:
        RecordError: another section, or a malformed file.
    """
    known = tables(file)
    if section not in known:
        raise RecordError(f"{file} has no table in section {section!r}; allowed: {', '.join(known)}")
    entry = known[section]
    frame = pd.DataFrame(entry["rows"])
    frame.attrs.update({key: entry[key] for key in ("section", "title", "hardware", "method", "notes")})
    return frame


def best_peers() -> dict[tuple[int, int, int, int], tuple[float, str]]:
    """(bits, m, n, k) -> microseconds and name of the fastest few-bit kernel of other people, on `PEERS_DEVICE`.

    Raises:
        RecordError: the file is missing or malformed.
    """
    found = table("gemm", PEERS_FILE).query("bits != 16").sort_values("time_us", ascending=False)
    return {(row.bits, row.m, row.n, row.k): (row.time_us, row.peer) for row in found.itertuples()}


def data_sheets() -> dict[str, dict[str, Any]]:
    """What makers print of their cards, by record folder: bytes_per_s, flops_per_s, memory_bytes and source.

    Raises:
        RecordError: the file is missing or malformed.
    """
    path = project.data() / "published" / DATA_SHEETS
    try:
        return {entry["card"]: entry for entry in json.loads(path.read_text(encoding="utf-8"))["cards"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: not a list of cards: {type(error).__name__}: {error}") from error
