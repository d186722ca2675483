"""Tests that look through a real browser. They need Chromium on the path and the package `playwright`, and are skipped without.

apt-get install chromium
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Nothing is asked of the network but the pages under test. Root, as in containers, has no sandbox.
OPTIONS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
)


@dataclass
class Seen:
    """A page of the browser, and what went wrong on it: errors of its scripts and requests that failed."""

    page: object
    errors: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser on the path: looked for {', '.join(NAMES)}")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=list(OPTIONS))
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser) -> Iterator[Callable[[int, int], Seen]]:
    """Opens an empty page of that many pixels: opened(width, height)."""
    contexts = []

    def open_page(width: int, height: int = 800) -> Seen:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}))
        seen = Seen(contexts[-1].new_page())
        seen.page.on("console", lambda said: seen.errors.append(said.text) if said.type == "error" else None)
        seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
        seen.page.on("requestfailed", lambda request: seen.errors.append(f"{request.url}: {request.failure}"))
        return seen

    yield open_page
    for context in contexts:
        context.close()
