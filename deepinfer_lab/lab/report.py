"""The report: what the notebooks asked, drew and read, in one HTML file that needs nothing else."""

import base64
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import jinja2
import nbformat
from markdown_it import MarkdownIt
from markdown_it.token import Token
from nbformat import NotebookNode

from deepinfer_lab.errors import NotebookError
from deepinfer_lab.figures.style import described
from deepinfer_lab.lab import project, provenance
from deepinfer_lab.lab.data_files import DataFile, data_files
from deepinfer_lab.lab.evidence import BANNER, fingerprints, printed
from deepinfer_lab.lab.notebooks import discover
from deepinfer_lab.lab.record import write_atomically

TEMPLATE = "report.html.jinja"
LEFT_OUT = ("image", "link_open", "link_close")  # links lead on from the notebook's folder, not from the report's
SHOWN = (*provenance.ENVIRONMENT, "commit", "dirty")


@dataclass(frozen=True)
class Figure:
    """A picture of `figures/`: its name, the table behind it as the notebook prints it, and the file as a data URI."""

    name: str
    caption: str
    uri: str


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
        environment={name: facts[name] for name in SHOWN if facts[name] is not None},
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
    text = printed(content)
    figures = []
    for name, line in fingerprints(text).items():
        path = project.figures() / f"{name}.svg"
        if not path.is_file():
            raise NotebookError(f"notebook {notebook.stem!r} shows {path.name}, which is not in {path.parent}")
        drawn = described(path)
        figures.append(
            _figure(path, line if drawn in (line, None) else f"{line}; the picture is a later run's, {drawn}")
        )
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
