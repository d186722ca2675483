from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from deepinfer_lab.errors import KernelError, NotebookError, RecordError
from deepinfer_lab.lab.guards import check_folder
from deepinfer_lab.lab.publish import clean, promote, publish
from deepinfer_lab.lab.record import Record, load

HEADER = """\
# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

"""
SCRIPT = (
    HEADER
    + """\
# %% [markdown]
# # How fast?

# %% tags=["parameters"]
mode: str = "auto"  # replay, measure or auto

# %%
import os

from IPython.display import SVG, display

print(mode, os.environ["DEEPINFER_MODE"])
print("second line", flush=True)

# %%
display(SVG("<svg xmlns='http://www.w3.org/2000/svg'/>"))
print("table how_fast: 1 rows x 1 columns, sha256 0123456789ab")

# %%
6 * 7
"""
)


def a_record(device: str = "a-card", experiment: str = "gemm") -> Record:
    return Record(experiment, {}, {"device": "A", "device_slug": device, "utc": "now"}, "OK", [{"a_ms": 1.0}])


def test_publish_executes_the_script_and_is_deterministic(home: Path):
    (home / "notebooks" / "scripts" / "00_how_fast.py").write_text(SCRIPT)
    a_record().save(home / "build" / "data" / "a-card" / "gemm.json")
    target = home.resolve() / "notebooks" / "00_how_fast.ipynb"

    first = publish()
    assert first.notebooks == [target]
    assert first.records == [home.resolve() / "data" / "a-card" / "gemm.json"]
    content = target.read_bytes()
    assert check_folder(home / "notebooks") == []

    notebook = nbformat.read(target, as_version=4)
    assert [cell.id for cell in notebook.cells] == [f"cell-0{n}" for n in range(1, 6)]
    assert [cell.execution_count for cell in notebook.cells[1:]] == [1, 2, 3, 4]
    assert notebook.cells[2].outputs[0].text == "auto replay\nsecond line\n"
    assert notebook.cells[4].outputs[0].data["text/plain"] == "42"
    assert notebook.metadata == {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    assert "papermill" not in content.decode()

    second = publish(["00"])
    assert second.records == []
    assert target.read_bytes() == content


def test_a_notebook_that_fails_leaves_the_published_one_alone(home: Path):
    target = home / "notebooks" / "00_breaks.ipynb"
    target.write_text("as it was")
    (home / "notebooks" / "scripts" / "00_breaks.py").write_text(HEADER + "# %%\n1 / 0\n")
    with pytest.raises(NotebookError, match="ZeroDivisionError"):
        publish()
    assert target.read_text() == "as it was"


def test_a_script_without_a_kernelspec_is_refused_before_anything_happens(home: Path):
    (home / "notebooks" / "scripts" / "00_bare.py").write_text("# %%\n1\n")
    a_record().save(home / "build" / "data" / "a-card" / "gemm.json")
    with pytest.raises(NotebookError, match=r"00_bare\.py: no kernelspec"):
        publish()
    assert not (home / "data" / "a-card").exists()


def test_promote_moves_whole_records_only(home: Path):
    origin = home / "build" / "data" / "a-card"
    a_record().save(origin / "gemm.json")
    for name, status in (("short", "OOM"), ("slow", "TIMEOUT")):
        replace(a_record(experiment=name), status=status).save(origin / f"{name}.json")
    (origin / "gemm.partial.jsonl").write_text("{}")
    assert promote() == [home.resolve() / "data" / "a-card" / "gemm.json"]
    assert load(home / "data" / "a-card" / "gemm.json") == a_record()
    assert sorted(path.name for path in origin.iterdir()) == ["gemm.partial.jsonl", "short.json", "slow.json"]


@pytest.mark.parametrize("bad", ["{}", None])
def test_promote_moves_nothing_when_one_record_is_bad(home: Path, bad: str | None):
    origin = home / "build" / "data" / "a-card"
    a_record().save(origin / "a_good_one.json") if bad is None else a_record().save(origin / "gemm.json")
    if bad is not None:
        (origin / "z.json").write_text(bad)
    with pytest.raises(
        RecordError, match=r"z\.json: missing" if bad else r"a_good_one\.json: holds the record of a-card/gemm"
    ):
        promote()
    assert not (home / "data" / "a-card").exists()


TABLE = '{"schema_version": 2, "rows": [{"bits": 4, "m_min": 1, "m_max": null, "kernel": "w4_tiled_gemm"}]}'


def test_promote_moves_dispatch_tables_with_records(home: Path):
    origin = home / "build" / "data" / "a-card"
    a_record().save(origin / "gemm.json")
    (origin / "dispatch.json").write_text(TABLE)
    folder = home.resolve() / "data" / "a-card"
    assert promote() == [folder / "gemm.json", folder / "dispatch.json"]
    assert (folder / "dispatch.json").read_text() == TABLE
    assert not list(origin.iterdir())


def test_promote_moves_nothing_when_a_dispatch_table_is_bad(home: Path):
    origin = home / "build" / "data" / "a-card"
    a_record().save(origin / "gemm.json")
    (origin / "dispatch.json").write_text(TABLE.replace("w4_tiled_gemm", "magic"))
    with pytest.raises(KernelError, match=r"dispatch\.json: unknown kernel 'magic'"):
        promote()
    assert not (home / "data" / "a-card").exists()


def test_clean_drops_what_papermill_adds_and_renumbers():
    v4 = nbformat.v4
    notebook = v4.new_notebook(
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3"},
            "papermill": {},
            "language_info": {"name": "python", "version": "3.11.2"},
        },
        cells=[
            v4.new_markdown_cell("An Exception was encountered", metadata={"tags": ["papermill-error-cell-tag"]}),
            v4.new_code_cell(
                "a: int = 1  # one", metadata={"tags": ["parameters"], "execution": {}}, execution_count=1
            ),
            v4.new_code_cell("a = 2", metadata={"tags": ["injected-parameters"]}, execution_count=2),
            v4.new_code_cell(
                "a",
                metadata={"tags": [], "papermill": {"duration": 1.0}},
                execution_count=3,
                outputs=[
                    v4.new_output("stream", name="stdout", text="one "),
                    v4.new_output("stream", name="stdout", text="two"),
                    v4.new_output("stream", name="stderr", text="three"),
                    v4.new_output("execute_result", data={"text/plain": "2"}, execution_count=3),
                ],
            ),
        ],
    )
    cleaned = clean(notebook)
    nbformat.validate(cleaned)
    assert [cell.source for cell in cleaned.cells] == ["a: int = 1  # one", "a"]
    assert [cell.metadata for cell in cleaned.cells] == [{"tags": ["parameters"]}, {}]
    assert [cell.execution_count for cell in cleaned.cells] == [1, 2]
    assert [output.get("text") for output in cleaned.cells[1].outputs] == ["one two", "three", None]
    assert cleaned.cells[1].outputs[2].execution_count == 2
    assert cleaned.metadata == {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    assert len(notebook.cells) == 4  # the original stays
