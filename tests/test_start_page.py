"""What JupyterLab opens: the start page leads everywhere, the workspace is one, and pairs work both ways."""

import json
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from jupyter_server.services.contents.largefilemanager import LargeFileManager

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
LINK = re.compile(r"\]\(([^)]+)\)")


def test_the_start_page_leads_to_every_notebook_and_nowhere_in_vain():
    cells = nbformat.read(NOTEBOOKS / "index.ipynb", as_version=4).cells
    links = [link for cell in cells if cell.cell_type == "markdown" for link in LINK.findall(cell.source)]
    for link in links:
        assert (NOTEBOOKS / link).is_file(), link
    others = {path.name for path in NOTEBOOKS.glob("*.ipynb")} - {"index.ipynb"}
    assert {link for link in links if link.endswith(".ipynb")} == others


def test_each_title_on_the_start_page_begins_as_its_notebook_does():
    cells = nbformat.read(NOTEBOOKS / "index.ipynb", as_version=4).cells
    headings = re.findall(r"^## \[(.+)\]\((.+)\)$", "\n".join(cell.source for cell in cells), re.MULTILINE)
    assert headings
    for title, target in headings:
        whole = nbformat.read(NOTEBOOKS / target, as_version=4).cells[0].source.splitlines()[0]
        assert whole.startswith(f"# {title}"), target


def test_make_lab_opens_the_start_page():
    (line,) = re.findall(r"^\t\$\(BIN\)/jupyter lab .*$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line.endswith(" --notebook-dir=. notebooks/index.ipynb")


def test_the_workspace_opens_files_that_exist():
    workspace = json.loads((NOTEBOOKS / "deepinfer-lab.jupyterlab-workspace").read_text())
    assert workspace["metadata"] == {"id": "deepinfer-lab"}
    data = workspace["data"]
    opened = data["layout-restorer:data"]["main"]["dock"]["widgets"]
    assert opened
    for name in opened:
        assert (ROOT / data[name]["data"]["path"]).is_file()
        assert name == f"notebook:{data[name]['data']['path']}"
    assert (ROOT / data["file-browser-filebrowser:cwd"]["path"]).is_dir()


def test_pairs_work_both_ways_in_jupyterlab(tmp_path: Path):
    contents = pytest.importorskip("jupytext.sync_contentsmanager", reason="another layout of jupytext")
    name = "00_serve_a_real_model"
    notebook, script = Path("notebooks") / f"{name}.ipynb", Path("notebooks/scripts") / f"{name}.py"
    (tmp_path / script).parent.mkdir(parents=True)
    for path in (notebook, script, Path("pyproject.toml")):
        shutil.copyfile(ROOT / path, tmp_path / path)
    manager = contents.build_sync_jupytext_contents_manager_class(LargeFileManager)(root_dir=str(tmp_path))

    text = (tmp_path / script).read_text()
    (tmp_path / script).write_text(text.replace("# ## It speaks", "# ## It was edited in an editor"))
    model = manager.get(notebook.as_posix())
    cells = model["content"]["cells"]
    assert any("## It was edited in an editor" in cell["source"] for cell in cells)
    assert sum(bool(cell.get("outputs")) for cell in cells) > 5  # of the notebook, which were kept

    cells[0]["source"] = "# It was edited in JupyterLab"
    manager.save(model, notebook.as_posix())
    saved = (tmp_path / script).read_text()
    assert "# # It was edited in JupyterLab\n" in saved
    assert "# ## It was edited in an editor\n" in saved
    assert saved[: saved.index("# %%")] == text[: text.index("# %%")]  # the header stays
