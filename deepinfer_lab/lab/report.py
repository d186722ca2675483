"""The report: what the notebooks asked, drew and read, in one HTML file that needs nothing else."""

import base64
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import nbformat
from markdown_it import MarkdownIt
from markdown_it.token import Token
from nbformat import NotebookNode

from deepinfer_lab.errors import NotebookError, RecordError
from deepinfer_lab.figures.style import FINGERPRINT
from deepinfer_lab.lab import project, provenance
from deepinfer_lab.lab.notebooks import discover
from deepinfer_lab.lab.record import write_atomically

TEMPLATE = "report.html.jinja"
BANNER = re.compile(r"^([a-z0-9_-]+): .+\nmeasured (\S+), commit ", re.MULTILINE)  # as `experiment.banner` prints it
LEFT_OUT = ("image", "link_open", "link_close")  # links lead on from the notebook's folder, not from the report's
ENVIRONMENT = ("device", "driver", "cuda", "torch", "cupy", "numpy", "python", "platform", "threads", "commit", "dirty")


@dataclass(frozen=True)
class Figure:
    """A picture of `figures/`: its name, the table behind it as the notebook prints it, and the file as a data URI."""

    name: str
    caption: str
    uri: str


@dataclass(frozen=True)
class DataFile:
    """One file of `data/<device>/`: a record, or a table or report that lies beside records.

    Attributes:
        rows: how many samples, results or rows; None where it has none.
        kernels: "current", "changed since" or "none", see `kernel_state`. changed: those that are not the same any more.
    """

    name: str
    path: Path
    device: str
    driver: str | None
    utc: str
    commit: str
    status: str
    rows: int | None
    kernels: str
    changed: list[str]


@dataclass(frozen=True)
class Section:
    """One notebook: its title, its first paragraph as HTML, its figures, and the records whose banners it prints.

    `missing` names banners that no record in `data/` answers to: "experiment, time".
    """

    title: str
    question: str
    path: Path
    figures: list[Figure]
    records: list[DataFile]
    missing: list[str]


def write(output: Path, link: Callable[[Path], str] | None = None) -> Path:
    """Write the report of the project as it is now.

    Args:
        link: the address of a file of the project; by default the way to it from `output`.

    Raises:
        NotebookError: a notebook that cannot be read, or one that shows a figure which is not in `figures/`.
        RecordError: a file in `data/` that is not JSON.
    """
    output = output.resolve()
    files = data_files()
    sections = [section(notebook.path, files) for notebook in discover()]
    used = {figure.name for each in sections for figure in each.figures}
    others = [_figure(path, "") for path in sorted(project.figures().glob("*.svg")) if path.stem not in used]
    facts = provenance.collect()
    text = templates().get_template(TEMPLATE).render(
        sections=sections, others=others, files=files, utc=facts["utc"],
        environment={name: facts[name] for name in ENVIRONMENT if facts[name] is not None},
        link=link or (lambda path: quote(Path(os.path.relpath(path, output.parent)).as_posix())),
    )  # fmt: skip
    write_atomically(output, text)
    return output


def templates() -> jinja2.Environment:
    """The templates beside this file; what they are given is text, unless they say that it is HTML."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def section(notebook: Path, files: Sequence[DataFile]) -> Section:
    """What the report says of one notebook. For errors see `write`."""
    try:
        content = nbformat.read(notebook, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        raise NotebookError(f"{notebook}: not a notebook: {error}") from None
    text = _printed(content)
    figures = []
    for match in filter(None, map(FINGERPRINT.fullmatch, text.splitlines())):
        path = project.figures() / f"{match[1]}.svg"
        if not path.is_file():
            raise NotebookError(f"notebook {notebook.stem!r} shows {path.name}, which is not in {path.parent}")
        figures.append(_figure(path, match[0]))
    banners = list(dict.fromkeys(BANNER.findall(text)))
    title, question = _opening(content)
    return Section(
        title or notebook.stem,
        question,
        notebook,
        figures,
        [file for banner in banners for file in files if (file.name, file.utc) == banner],
        [", ".join(banner) for banner in banners if not any((file.name, file.utc) == banner for file in files)],
    )


def data_files() -> list[DataFile]:
    """Every .json file of `data/<device>/`, but for the article's numbers, by device and name.

    Raises:
        RecordError: a file that is not a JSON object.
    """
    now = provenance.kernel_hashes()
    found = []
    for path in sorted(project.data().glob("*/*.json")):
        if path.parent.name == "published":
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RecordError(f"{path}: not JSON: {error}") from None
        if not isinstance(content, dict):
            raise RecordError(f"{path}: must be a JSON object, not {type(content).__name__}")
        found.append(_data_file(path, content, now))
    return found


def kernel_state(recorded: Mapping[str, str] | None, now: Mapping[str, str]) -> tuple[str, list[str]]:
    """Whether the CUDA sources that a record names are those of this package.

    Returns:
        "current"; or "changed since" with the files that differ or are gone; or "none", where it names none. Files that
        came later change nothing.
    """
    if not recorded:
        return "none", []
    changed = sorted(name for name, digest in recorded.items() if now.get(name) != digest)
    return ("changed since" if changed else "current"), changed


def _data_file(path: Path, content: Mapping[str, Any], now: Mapping[str, str]) -> DataFile:
    origin = content.get("provenance", {})
    parts = [content.get(name) for name in ("samples", "results", "rows", "tests")]
    rows = next((len(part) for part in parts if isinstance(part, list | dict)), None)
    state, changed = kernel_state(content.get("kernels", origin.get("kernels")), now)
    if origin and origin.get("driver") is None:
        state, changed = "none ran", []  # on a CPU
    commit = str(origin.get("commit") or "-")[:12]
    return DataFile(
        path.stem, path,
        origin.get("device", content.get("device", path.parent.name)), origin.get("driver"),
        origin.get("utc", content.get("measured", "-")), commit + (" + local changes" if origin.get("dirty") else ""),
        content.get("status", "-"), rows, state, changed,
    )  # fmt: skip


def _printed(notebook: NotebookNode) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output.text for output in outputs if output.output_type == "stream")


def _opening(notebook: NotebookNode) -> tuple[str, str]:
    """The first heading's text, and the first paragraph as HTML: no pictures, links as their text, raw HTML shown as it is."""
    markdown = MarkdownIt("commonmark", {"html": False})
    source = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    tokens = markdown.parse(source)

    def first(kind: str) -> Token | None:
        return next((content for opening, content in pairwise(tokens) if opening.type == kind), None)

    title, paragraph = first("heading_open"), first("paragraph_open")
    spans = [span for span in (paragraph.children or [] if paragraph else []) if span.type not in LEFT_OUT]
    return title.content if title else "", markdown.renderer.render(spans, markdown.options, {})


def _figure(path: Path, caption: str) -> Figure:
    """As a data URI: pictures within the page would share element ids."""
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    return Figure(path.stem, caption, f"data:image/svg+xml;base64,{encoded}")
