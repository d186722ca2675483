import base64
import os
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import nbformat
import pytest

from deepinfer_lab.errors import NotebookError, RecordError
from deepinfer_lab.lab import provenance
from deepinfer_lab.lab.data_files import data_files
from deepinfer_lab.lab.evidence import BANNER
from deepinfer_lab.lab.experiment import banner
from deepinfer_lab.lab.record import Record
from deepinfer_lab.lab.report import section, write

ROOT = Path(__file__).parents[2]
VOID = {"meta", "link", "img", "br", "hr", "input"}
SVG = "<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"


class Page(HTMLParser):
    """Elements, ids, links and pictures of a page; tags must be balanced."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.path = path
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def values(self, tag: str, name: str) -> list[str]:
        return [attrs[name] for each, attrs in self.elements if each == tag and attrs.get(name) is not None]

    def says(self, words: str) -> bool:
        return " ".join(words.split()) in " ".join(self.text.split())


def check(page: Page) -> None:
    """It needs nothing but itself, every picture in it is one, and every link leads somewhere."""
    assert {"script", "iframe", "object", "embed", "base", "form"}.isdisjoint(tag for tag, _ in page.elements)
    assert all(uri.startswith("data:") for tag in ("img", "source", "video") for uri in page.values(tag, "src"))
    assert all(uri.startswith("data:") for uri in page.values("link", "href"))
    assert not [
        name for _, attrs in page.elements for name in attrs if name in ("srcset", "background") or name[:2] == "on"
    ]
    style = re.search(r"<style>(.*)</style>", page.path.read_text(encoding="utf-8"), re.DOTALL)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    for uri in page.values("img", "src"):
        kind, _, content = uri.partition(";base64,")
        assert kind == "data:image/svg+xml"
        assert ElementTree.fromstring(base64.b64decode(content, validate=True)).tag.endswith("svg")
    assert all(alt for alt in page.values("img", "alt"))
    assert len(page.values("img", "alt")) == len(page.values("img", "src"))
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for link in page.values("a", "href"):
        if link.startswith("#"):
            assert unquote(link[1:]) in ids
        else:
            assert (page.path.parent / unquote(link)).is_file(), link


def pictures(page: Page) -> set[bytes]:
    return {base64.b64decode(uri.partition(",")[2]) for uri in page.values("img", "src")}


def test_the_project_s_own_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEPINFER_HOME", str(ROOT))
    page = Page(write(tmp_path / "sub" / "report.html"))
    check(page)
    assert pictures(page) == {path.read_bytes() for path in (ROOT / "figures").glob("*.svg")}
    links = {os.path.normpath(page.path.parent / unquote(link)) for link in page.values("a", "href") if link[0] != "#"}
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    records = [path for path in (ROOT / "data").glob("*/*.json") if path.parent.name != "published"]
    assert links == {str(path) for path in (*notebooks, *records)}
    for path in notebooks:
        first = nbformat.read(path, as_version=4).cells[0].source.splitlines()[0]
        assert page.says(first.removeprefix("# "))
    assert page.says("Question. A pretrained language model, rounded to 4 bits, is served by")
    assert not page.says("not in data/ any more")


def a_notebook(home: Path, name: str, markdown: Sequence[str], printed: Sequence[str] = ()) -> Path:
    v4 = nbformat.v4
    path = home / "notebooks" / f"{name}.ipynb"
    code = v4.new_code_cell("show()", outputs=[v4.new_output("stream", text=text) for text in printed])
    notebook = v4.new_notebook(cells=[*(v4.new_markdown_cell(source) for source in markdown), code])
    nbformat.write(notebook, path)
    return path


def a_record(home: Path, utc: str = "2026-01-02T03:04:05+00:00", **more: object) -> Record:
    origin = {"device": "A <card>", "device_slug": "a", "utc": utc, "driver": "1.2", "commit": "f" * 40, **more}
    record = Record("gemm", {}, origin, "OOM", [{"time_us": [1.0]}] * 3)
    record.save(home / "data" / "a" / "gemm.json")
    return record


def a_figure(home: Path, name: str) -> str:
    (home / "figures").mkdir(exist_ok=True)
    (home / "figures" / f"{name}.svg").write_text(SVG)
    return f"table {name}: 1 rows x 1 columns, sha256 0123456789ab\n"


def test_a_notebook_has_its_question_its_figures_and_its_record(home: Path):
    record = a_record(home, kernels=provenance.kernel_hashes())
    line = a_figure(home, "00_a")
    path = a_notebook(home, "00_b", ["# How *fast*?\n\n**Why** `a < b`?\n\nMore."], [f"{banner(record)}\n{line}", "x"])
    found = section(path, data_files())
    assert (found.title, found.question) == ("How *fast*?", "<strong>Why</strong> <code>a &lt; b</code>?")
    assert [(figure.name, figure.caption) for figure in found.figures] == [("00_a", line.strip())]
    of_another = SVG.replace("/>", "><dc:description>another run's</dc:description></svg>")
    (home / "figures" / "00_a.svg").write_text(of_another)
    (figure,) = section(path, data_files()).figures
    assert figure.caption == f"{line.strip()}; the picture is a later run's, another run's"
    a_figure(home, "00_a")
    (file,) = found.records
    assert (file.name, file.device, file.status, file.rows, file.kernels) == ("gemm", "A <card>", "OOM", 3, "current")
    assert found.missing == []
    page = Page(write(home / "build" / "report.html"))
    check(page)
    assert page.says("A <card>")
    assert page.says("ffffffffffff")
    assert page.says("1.2")
    assert not page.says("Figures of no notebook")


def test_a_record_that_was_replaced_is_missed(home: Path):
    old = a_record(home)
    a_notebook(home, "00_b", ["# T"], [banner(old) + "\n"])
    a_record(home, utc="2027-01-01T00:00:00+00:00")
    page = Page(write(home / "build" / "report.html"))
    assert page.says("a record that is not in data/ any more: gemm, 2026-01-02T03:04:05+00:00")


def test_the_banner_is_recognised_in_the_midst_of_other_lines(home: Path):
    record = a_record(home, cuda="13.0")
    assert BANNER.findall(f"before\n{banner(record)}\nafter: this") == [("gemm", record.provenance["utc"])]


def test_a_figure_that_is_gone_is_an_error_and_one_of_no_notebook_is_shown(home: Path):
    line = a_figure(home, "00_a")
    a_figure(home, "99_alone")
    a_notebook(home, "00_b", ["# T"], [line])
    page = Page(write(home / "report.html"))
    check(page)
    assert page.says("Figures of no notebook")
    assert len(page.values("img", "src")) == 2
    (home / "figures" / "00_a.svg").unlink()
    with pytest.raises(NotebookError, match=r"'00_b' shows 00_a\.svg, which is not in"):
        write(home / "report.html")


def test_markup_in_a_notebook_or_record_stays_text(home: Path):
    a_record(home, commit="<b>x")
    evil = "<script>alert(1)</script> ![p](https://example.org/p.png) <img src=x onerror=y> [other](01_c.ipynb) <https://b.org>"
    a_notebook(home, "00_b", [f"# <i>T</i>\n\n{evil}"])
    page = Page(write(home / "report.html"))
    check(page)
    assert page.says("<script>alert(1)</script>")
    assert page.says("<i>T</i>")
    assert page.says("other https://b.org")


def test_an_empty_project_and_names_with_spaces(home: Path):
    check(Page(write(home / "report.html")))
    a_notebook(home, "00 b#c", ["no heading"])
    page = Page(write(home / "a b" / "report.html"))
    check(page)
    assert page.says("00 b#c")


def test_a_broken_file_is_named(home: Path):
    (home / "notebooks" / "00_b.ipynb").write_text("{")
    with pytest.raises(NotebookError, match=r"00_b\.ipynb: not a notebook"):
        write(home / "report.html")
    for text, message in (("{", "not JSON"), ("[]", "must be a JSON object, not list")):
        (home / "data" / "a").mkdir(exist_ok=True)
        (home / "data" / "a" / "x.json").write_text(text)
        with pytest.raises(RecordError, match=rf"x\.json: {message}"):
            write(home / "report.html")
    assert not (home / "report.html").exists()


def test_what_lies_beside_records_is_listed_too(home: Path):
    folder = home / "data" / "a"
    folder.mkdir()
    (folder / "dispatch.json").write_text('{"rows": [1, 2], "device": "Card", "measured": "2026"}')
    (folder / "sanitizer.json").write_text(
        '{"kernels": {"gone.cu": "1"}, "tests": "words", "provenance": {"driver": "1"}}'
    )
    (folder / "bench.json").write_text('{"results": [1], "provenance": {"driver": null, "kernels": {"gone.cu": "1"}}}')
    (home / "data" / "published").mkdir()
    (home / "data" / "published" / "article.json").write_text("{}")
    found = {file.name: (file.device, file.utc, file.rows, file.kernels) for file in data_files()}
    assert found == {
        "bench": ("a", "-", 1, "none ran"),  # on a CPU
        "dispatch": ("Card", "2026", 2, "none"),
        "sanitizer": ("a", "-", None, "changed since"),
    }
