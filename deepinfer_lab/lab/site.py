"""The static site: a page for each notebook, from its committed outputs, an index of them, and the report.

No page asks the network or runs a script. Folders are the project's, so that links between notebooks and to records hold.
"""

import base64
import html
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import nbformat
from jinja2 import pass_context
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

from deepinfer_lab.errors import NotebookError
from deepinfer_lab.figures.formula import draw_formula
from deepinfer_lab.figures.style import FINGERPRINT
from deepinfer_lab.lab import project, report
from deepinfer_lab.lab.notebooks import discover
from deepinfer_lab.lab.record import write_atomically

HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def write(folder: Path) -> Path:
    """Write the site of the project as it is now, in place of the one that `folder` may hold.

    Returns:
        Its index.

    Raises:
        NotebookError: a notebook that cannot be read, shows a figure that is not in `figures/`, or links to a file that the
            project has not.
        RecordError: a file in `data/` that is not JSON.
    """
    folder = folder.resolve()
    files = report.data_files()
    sections = [report.section(notebook.path, files) for notebook in discover()]
    pages, needed = {}, {file.path for file in files}
    for number, section in enumerate(sections):
        body, linked = body_of(section.path)
        needed |= linked
        page = _page(section.path, folder)
        pages[page] = report.templates().get_template("site_notebook.html.jinja").render(
            section=section, body=body, link=_links(page, folder), index=folder / "index.html",
            report=folder / "report.html", before=sections[number - 1] if number else None,
            after=sections[number + 1] if number + 1 < len(sections) else None, code_style=_code_style(),
        )  # fmt: skip
    index = folder / "index.html"
    pages[index] = report.templates().get_template("site_index.html.jinja").render(
        sections=sections, link=_links(index, folder), report=folder / "report.html"
    )  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    for path, text in pages.items():
        write_atomically(path, text)
    for path in needed:
        copy = _page(path, folder)
        if copy not in pages:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    report.write(folder / "report.html", _links(folder / "report.html", folder))
    return index


def body_of(path: Path) -> tuple[str, set[Path]]:
    """A notebook's cells and outputs as HTML, and the files of the project that it links to.

    Raises:
        NotebookError: one of them does not exist.
    """
    notebook = nbformat.read(path, as_version=4)
    describe_pictures(notebook)
    exporter = _Exporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    body, _ = exporter.from_notebook_node(notebook)
    linked = {(path.parent / unquote(target)).resolve() for target in exporter.targets}
    for target in linked:
        if not target.is_file() or not target.is_relative_to(project.root().resolve()):
            raise NotebookError(f"notebook {path.stem!r} links to {target}, which is no file of the project")
    return body, linked


def describe_pictures(notebook: NotebookNode) -> None:
    """Give each picture of the outputs its alternative text: the figure's name, and the heading that it stands under."""
    heading = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            heading = (HEADING.findall(cell.source) or [heading])[-1]
        outputs = cell.get("outputs", [])
        text = "".join(output.text for output in outputs if output.output_type == "stream")
        names = [found[1] for found in map(FINGERPRINT.fullmatch, text.splitlines()) if found]
        pictures = [output for output in outputs if any(kind.startswith("image/") for kind in output.get("data", {}))]
        for number, output in enumerate(pictures):
            name = names[number] if number < len(names) else str(number + 1)
            output.metadata["alt"] = f"Figure {name}: {heading}"


class _Exporter(HTMLExporter):
    """nbconvert's, with our Markdown. `targets` are the local links that it met."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.targets: set[str] = set()

    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        return MarkdownWithMath(renderer=_Markdown(self.targets)).render(source)


class _Markdown(IPythonRenderer):
    """Links to notebooks become links to pages, formulas pictures. Raw HTML is shown, not obeyed."""

    def __init__(self, targets: set[str]) -> None:
        super().__init__(escape=True)
        self._targets = targets

    def link(self, text: str, url: str, title: str | None = None) -> str:
        parts = urlsplit(url)
        if parts.path and not parts.scheme and not parts.netloc:
            self._targets.add(parts.path)
            url = parts._replace(path=re.sub(r"\.ipynb$", ".html", parts.path)).geturl()
        return super().link(text, url, title)

    def image(self, text: str, url: str, title: str | None = None) -> str:
        raise NotebookError(f"a notebook's text shows the picture {url}; pictures are outputs of cells")

    def inline_math(self, body: str) -> str:
        return _formula(body)

    def block_math(self, body: str) -> str:
        return f'<span class="display">{_formula(body)}</span>'


def _formula(tex: str) -> str:
    alt = html.escape(" ".join(tex.split()))
    try:
        svg, depth = draw_formula(tex)
    except ValueError:  # better its source than nothing
        return f"<code>{alt}</code>"
    uri = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode('ascii')}"
    return f'<img class="formula" style="vertical-align: -{depth:g}pt" src="{uri}" alt="{alt}">'


def _page(path: Path, folder: Path) -> Path:
    """Where in the site a file of the project has its page or copy."""
    path = folder / path.resolve().relative_to(project.root().resolve())
    return path.with_suffix(".html") if path.suffix == ".ipynb" else path


def _links(page: Path, folder: Path) -> Callable[[Path], str]:
    """From a page to files: those of the site, or those of the project by their page or copy."""

    def link(path: Path) -> str:
        target = path if path.is_relative_to(folder) else _page(path, folder)
        return quote(Path(os.path.relpath(target, page.parent)).as_posix())

    return link


def _code_style(themes: Sequence[str] = ("default", "github-dark")) -> tuple[str, str]:
    """CSS of code on a light page, and on a dark one."""
    light, dark = (HtmlFormatter(style=theme, nobackground=True).get_style_defs(".highlight") for theme in themes)
    return light, dark
