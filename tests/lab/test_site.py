"""The site needs no network, every link in it leads to a file of it, and every picture says what it is."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from bs4 import BeautifulSoup

from deepinfer_lab.errors import NotebookError
from deepinfer_lab.lab import site

ROOT = Path(__file__).parents[2]
V4 = nbformat.v4
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}


def check(folder: Path) -> dict[str, BeautifulSoup]:
    """Holds every page to the rules; returns them by their place in the site."""
    pages = {path: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser") for path in folder.rglob("*.html")}
    assert folder / "index.html" in pages
    for path, page in pages.items():
        for element in page.find_all([*LOADS]):
            assert element.get(LOADS[element.name], "data:").startswith("data:"), element
        assert not page.find_all(["script", "iframe", "object", "base", "form"])
        assert not [name for element in page.find_all(True) for name in element.attrs if name.startswith("on")]
        assert not re.search(r"url\((?!data:)|@import", "".join(style.text for style in page.find_all("style")))
        (policy,) = page.find_all("meta", {"http-equiv": "Content-Security-Policy"})
        assert policy["content"] == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
        assert page.find("meta", {"name": "viewport"})
        for picture in page.find_all("img"):
            assert len(picture["alt"]) > 1 or picture["class"] == ["formula"], picture["alt"]
            assert "description" not in picture["alt"]  # nbconvert's "No description has been provided"
        ids = [element["id"] for element in page.find_all(id=True)]
        assert len(ids) == len(set(ids))
        for anchor in page.find_all("a", href=True):
            parts = urlsplit(anchor["href"])
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), anchor
            assert target.is_relative_to(folder.resolve()), anchor
            if parts.fragment and target in pages:
                assert pages[target].find(id=[parts.fragment, unquote(parts.fragment)]), anchor
    return {path.relative_to(folder).as_posix(): page for path, page in pages.items()}


def says(page: BeautifulSoup, words: str) -> bool:
    return " ".join(words.split()) in " ".join(page.text.split())


def test_the_project_s_own_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEPINFER_HOME", str(ROOT))
    site.write(tmp_path)
    pages = check(tmp_path)
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert pages.keys() == {"index.html", "report.html", *(f"notebooks/{path.stem}.html" for path in notebooks)}
    for path in notebooks:
        notebook, page = nbformat.read(path, as_version=4), pages[f"notebooks/{path.stem}.html"]
        address = f"notebooks/{path.stem}.html"
        title = notebook.cells[0].source.splitlines()[0].removeprefix("# ")
        assert pages["index.html"].find("a", href=address).text == title
        assert pages["report.html"].find("a", href=address)
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        shown = sum("image/png" in output.get("data", {}) for output in outputs)
        described = [picture["alt"] for picture in page.select(".output_png img")]
        assert len(described) == len(set(described)) == shown
        assert all(re.fullmatch(r"Figure \d\d_\w+: .+", alt) for alt in described)
        for output in outputs:
            if output.output_type == "stream":
                assert says(page, output.text)
        assert not re.search(r"\$\$|\\(text|frac|sigma|ge)\b", page.text)  # every formula became a picture


def a_notebook(home: Path, name: str, *cells: nbformat.NotebookNode) -> None:
    nbformat.write(V4.new_notebook(cells=list(cells)), home / "notebooks" / f"{name}.ipynb")


def test_links_become_links_between_pages_and_their_targets_come_along(home: Path):
    (home / "data" / "a card").mkdir()
    (home / "data" / "a card" / "x.json").write_text('{"samples": []}')
    (home / "README.md").write_text("# Read me")
    text = (
        "# A\n\n[b](<01 b.ipynb#part>), [raw](https://example.org/c.ipynb), [here](#A), [readme](../README.md), "
        "[x](<../data/a card/x.json>)"
    )
    a_notebook(home, "00_a", V4.new_markdown_cell(text))
    a_notebook(home, "01 b", V4.new_markdown_cell("# B\n\n<p id='part'>x</p> [a](00_a.ipynb)\n\n## part"))
    site.write(home / "build" / "site")
    page = check(home / "build" / "site")["notebooks/00_a.html"]
    assert [unquote(anchor["href"]) for anchor in page.select("main p a")] == [
        "01 b.html#part", "https://example.org/c.ipynb", "#A", "../README.md", "../data/a card/x.json",
    ]  # fmt: skip
    assert (home / "build" / "site" / "README.md").read_text() == "# Read me"


@pytest.mark.parametrize("target", ["gone.ipynb", "../../outside.txt", "../data"])
def test_a_link_to_no_file_of_the_project_is_an_error_and_leaves_the_old_site(home: Path, target: str):
    (home.parent / "outside.txt").write_text("")
    a_notebook(home, "00_a", V4.new_markdown_cell("# A"))
    index = site.write(home / "build" / "site")
    a_notebook(home, "00_a", V4.new_markdown_cell(f"# A [x]({target})"))
    with pytest.raises(NotebookError, match=r"'00_a' links to .*, which is no file of the project"):
        site.write(home / "build" / "site")
    assert index.is_file()


def test_a_page_of_a_notebook_that_is_gone_goes_too(home: Path):
    a_notebook(home, "00_a", V4.new_markdown_cell("# A"))
    a_notebook(home, "01_b", V4.new_markdown_cell("# B"))
    site.write(home / "site")
    (home / "notebooks" / "00_a.ipynb").unlink()
    site.write(home / "site")
    assert check(home / "site").keys() == {"index.html", "report.html", "notebooks/01_b.html"}


def test_markup_formulas_and_pictures_of_a_notebook(home: Path):
    picture = V4.new_output("display_data", data={"image/png": "AAAA", "text/plain": "a figure"})
    other = V4.new_output("stream", text="<b>not bold</b>\n")
    a_notebook(
        home,
        "00_a",
        V4.new_markdown_cell("# <i>A</i>\n\n<script>alert(1)</script>\n\n$a \\ge b$ and $\\unknown{1}$\n\n$$x^2$$"),
        V4.new_code_cell("show()  # <script>", outputs=[picture, other]),
    )
    site.write(home / "site")
    page = check(home / "site")["notebooks/00_a.html"]
    assert says(page, "<script>alert(1)</script>")
    assert says(page, "<b>not bold</b>")
    assert [image["alt"] for image in page.select("main img")] == [r"a \ge b", "x^2", "Figure 1: <i>A</i>"]
    assert page.find("code", string=r"\unknown{1}")


def test_the_same_project_gives_the_same_pages(home: Path):
    a_notebook(home, "00_a", V4.new_markdown_cell("# A $\\frac{a}{b}$"), V4.new_code_cell("1 + 1"))
    written = [(site.write(home / name).parent / "notebooks" / "00_a.html").read_bytes() for name in ("one", "two")]
    assert written[0] == written[1]
