"""Every page of the site, as a browser shows it on a desk and on a telephone."""

from pathlib import Path

import pytest

from deepinfer_lab.lab import site

ROOT = Path(__file__).parents[2]
WIDTHS = (1280, 390)
UNSEEN = "images => images.filter(i => !i.complete || i.naturalWidth === 0).map(i => i.alt || i.src.slice(0, 60))"
# Text that leaves the page to the right; what scrolls inside a box of its own does not.
BEYOND = """() => {
    const scrolls = e => e && (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
    return [...document.body.querySelectorAll('*')]
        .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e.parentElement) && !scrolls(e))
        .slice(0, 3).map(e => e.outerHTML.slice(0, 200));
}"""
SMALL = """() => [...document.body.querySelectorAll('p, li, td, pre, code')]
    .filter(e => e.innerText.trim() && parseFloat(getComputedStyle(e).fontSize) < 10)
    .slice(0, 3).map(e => e.outerHTML.slice(0, 200))"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPINFER_HOME", str(ROOT))
        site.write(folder)
    return folder


@pytest.mark.parametrize("width", WIDTHS)
def test_all_pages(folder: Path, opened, width: int):
    pages = sorted(folder.rglob("*.html"))
    assert {"index.html", "report.html"} < {page.name for page in pages}
    seen = opened(width)
    for path in pages:
        seen.page.goto(path.as_uri())
        name = path.relative_to(folder).as_posix()
        assert seen.page.title(), name
        assert seen.page.eval_on_selector_all("img", UNSEEN) == [], name
        assert seen.page.evaluate(BEYOND) == [], name
        assert seen.page.evaluate(SMALL) == [], name
    assert seen.errors == []


def test_a_reader_gets_from_the_index_to_a_notebook_to_its_record_s_report(folder: Path, opened):
    seen = opened(1280)
    seen.page.goto((folder / "index.html").as_uri())
    seen.page.click("a[href*='01_tiled_gemm']")
    assert seen.page.url.endswith("notebooks/01_tiled_gemm.html")
    assert seen.page.locator("img").count() > 0
    seen.page.click("a[href$='report.html'] >> nth=0")
    assert seen.page.url.endswith("report.html")
    assert seen.errors == []


def test_a_page_with_faults_is_found_out(tmp_path: Path, opened):
    """The tests above can fail: on a lost picture, a wide table, tiny text, a script that throws."""
    path = tmp_path / "bad.html"
    path.write_text(
        "<title>x</title><body><img src='lost.png' alt='lost'><p style='width: 3000px'>wide</p>"
        "<p style='font-size: 6px'>tiny</p><script>throw new Error('thrown')</script>"
    )
    seen = opened(390)
    seen.page.goto(path.as_uri())
    assert seen.page.eval_on_selector_all("img", UNSEEN) == ["lost"]
    assert "wide" in "".join(seen.page.evaluate(BEYOND))
    assert "tiny" in "".join(seen.page.evaluate(SMALL))
    assert any("thrown" in error for error in seen.errors)
    assert any("lost.png" in error for error in seen.errors)
