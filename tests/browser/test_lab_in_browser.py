"""JupyterLab as `make lab` starts it: its start page, and a notebook run in replay to its last figure.

Each test has a workspace of its own, since JupyterLab opens again what was open.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NAME = "01_tiled_gemm"
STARTS_S, RUNS_S = 60, 240
# The commands behind "Run All Cells" and "Save Notebook", once the kernel answers: each is done when its promise is.
RUN_ALL_AND_SAVE = """async () => {
    const {commands, shell} = window.jupyterapp;
    await shell.currentWidget.sessionContext.ready;
    await shell.currentWidget.sessionContext.session.kernel.info;
    await commands.execute('notebook:run-all-cells');
    await commands.execute('docmanager:save');
}"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, since JupyterLab saves what it runs; the notebook under test without its outputs."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("notebooks", "data"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copyfile(ROOT / "pyproject.toml", folder / "pyproject.toml")
    path = folder / "notebooks" / f"{NAME}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, path)
    return folder


@pytest.fixture(scope="module")
def lab(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where JupyterLab listens, with settings of nobody's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = tmp_path_factory.mktemp("jupyter")
    places = {
        name: str(own / name)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # As in the Makefile, but for what a test must not do: open a window, ask for updates, want a token.
    command = (
        sys.executable, "-m", "jupyterlab", f"--notebook-dir={project}", "notebooks/index.ipynb", "--no-browser",
        "--allow-root", f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.news_url=None",
        "--LabApp.expose_app_in_browser=True",
    )  # fmt: skip
    log = own / "log"
    with log.open("w") as to:
        server = subprocess.Popen(
            command, cwd=project, stdout=to, stderr=to,
            env={**os.environ, **places, "DEEPINFER_HOME": str(project), "DEEPINFER_MODE": "replay", "PYTHONPATH": path},
        )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        _await_server(f"{address}/api", server, log)
        yield address
    finally:
        server.terminate()
        server.wait(30)


def _await_server(address: str, server: subprocess.Popen, log: Path) -> None:
    until = time.monotonic() + STARTS_S
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except (urllib.error.URLError, TimeoutError):
            assert server.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < until, log.read_text()[-2000:]
            time.sleep(0.2)


def test_it_opens_on_the_start_page(lab: str, opened):
    seen = opened(1280)
    seen.page.goto(f"{lab}/lab/workspaces/start/tree/notebooks/index.ipynb")
    seen.page.wait_for_selector(".jp-Notebook h1", timeout=STARTS_S * 1000)
    first = nbformat.read(ROOT / "notebooks" / "index.ipynb", as_version=4).cells[0].source.splitlines()[0]
    assert seen.page.inner_text(".jp-Notebook h1 >> nth=0") == first.removeprefix("# ")
    seen.page.locator(".jp-Notebook a[href*='01_tiled_gemm.ipynb']").first.click()
    seen.page.wait_for_selector(".jp-Notebook h1:has-text('Tiled')", timeout=STARTS_S * 1000)


def test_a_notebook_runs_in_replay_to_its_last_figure(lab: str, project: Path, opened):
    seen = opened(1280)
    seen.page.goto(f"{lab}/lab/workspaces/run/tree/notebooks/{NAME}.ipynb")
    seen.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=STARTS_S * 1000)
    seen.page.set_default_timeout(RUNS_S * 1000)
    seen.page.evaluate(RUN_ALL_AND_SAVE)
    # Only cells in view are in the document: what all of them gave stands in the file.
    path = project / "notebooks" / f"{NAME}.ipynb"
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    pictures = [cell for cell in cells if any("image/png" in output.get("data", {}) for output in cell.outputs)]
    committed = nbformat.read(ROOT / "notebooks" / f"{NAME}.ipynb", as_version=4).cells
    assert len(pictures) == sum(any("image/png" in o.get("data", {}) for o in c.get("outputs", ())) for c in committed)
    seen.page.locator(".jp-Notebook .jp-WindowedPanel-outer").evaluate("panel => panel.scrollTop = panel.scrollHeight")
    last = seen.page.locator(".jp-Notebook .jp-OutputArea-output img").last
    last.wait_for(timeout=STARTS_S * 1000)
    assert last.evaluate("image => image.complete && image.naturalWidth > 0")
