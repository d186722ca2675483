"""The committed project hangs together, and every edit that breaks it is told."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner
from nbformat import NotebookNode
from redrawn import but_redrawn

from deepinfer_lab.cli import main
from deepinfer_lab.errors import RecordError
from deepinfer_lab.lab import provenance, seal
from deepinfer_lab.lab.check import check

ROOT = Path(__file__).parents[2]
NAME = "02_w3_batch_tile"
H200 = "data/nvidia-h200"


def test_what_is_committed_hangs_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEPINFER_HOME", str(ROOT))
    found = check()
    assert but_redrawn(found.failures) == []
    assert found.warnings == []
    assert {each.name for each in found.notebooks} == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    measured = {path.stem for path in (ROOT / "data").glob("*/*.json")}
    for notebook in found.notebooks:
        assert {file.name for file in notebook.records} == set(notebook.evidence.experiments) & measured
        assert set(notebook.evidence.figure_sources) == set(notebook.evidence.figures)


@dataclass(frozen=True)
class Copy:
    """One notebook of the project with all that belongs to it, in a folder of its own."""

    home: Path
    kernels: Path

    @property
    def script(self) -> Path:
        return self.home / "notebooks" / "scripts" / f"{NAME}.py"

    @property
    def notebook(self) -> Path:
        return self.home / "notebooks" / f"{NAME}.ipynb"

    @property
    def data(self) -> Path:
        return self.home / H200

    def replace(self, path: Path, old: str, new: str) -> None:
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    def change(self, edit: Callable[[NotebookNode], object]) -> None:
        notebook = nbformat.read(self.notebook, as_version=4)
        edit(notebook)
        nbformat.write(notebook, self.notebook)


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    files = [
        *(f"{H200}/{name}.json" for name in ("w3_batch_tile", "tiled_gemm", "dispatch", "verification")),
        "data/published/deepinfer_sm86_part7.json", f"notebooks/{NAME}.ipynb", f"notebooks/scripts/{NAME}.py",
        *(f"figures/{path.name}" for path in (ROOT / "figures").glob("02_*.svg")),
    ]  # fmt: skip
    home, kernels = tmp_path / "home", tmp_path / "cuda"
    for file in files:
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, home / file)
    lines = (ROOT / "data" / seal.FILE).read_text(encoding="utf-8").splitlines()
    sealed = [line for line in lines if (home / "data" / line.split("  ")[1]).is_file()]
    (home / "data" / seal.FILE).write_text("\n".join(sealed) + "\n", encoding="utf-8")
    shutil.copytree(provenance.KERNELS, kernels)
    monkeypatch.setattr(provenance, "KERNELS", kernels)
    monkeypatch.setenv("DEEPINFER_HOME", str(home))
    # As if the GPU tests had just run: this is about what is edited after that.
    verified = home / H200 / "verification.json"
    document = json.loads(verified.read_text(encoding="utf-8"))
    document["kernels"] = provenance.kernel_hashes()
    verified.write_text(json.dumps(document), encoding="utf-8")
    seal.update([verified])
    return Copy(home, kernels)


def edit_record(copy: Copy) -> None:
    copy.replace(copy.data / "w3_batch_tile.json", '"rel_err": ', '"rel_err": 1')


def delete_record(copy: Copy) -> None:
    (copy.data / "w3_batch_tile.json").unlink()


def replace_record(copy: Copy) -> None:
    """Measured again and filed, but the notebook was not published."""
    copy.replace(copy.data / "w3_batch_tile.json", '"utc": "2', '"utc": "3')
    seal.update([copy.data / "w3_batch_tile.json"])


def misfile_record(copy: Copy) -> None:
    shutil.copyfile(copy.data / "tiled_gemm.json", copy.data / "few_bits.json")


def edit_published_number(copy: Copy) -> None:
    path = copy.home / "data" / "published" / "deepinfer_sm86_part7.json"
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")


def edit_printed_table(copy: Copy) -> None:
    line = "table 02_batch: 72 rows x 6 columns, sha256 "
    copy.replace(copy.notebook, line, line.replace("72", "73"))


def edit_picture(copy: Copy) -> None:
    copy.replace(copy.home / "figures" / "02_batch.svg", "columns, sha256 ", "columns, sha256 0")


def delete_picture(copy: Copy) -> None:
    (copy.home / "figures" / "02_batch.svg").unlink()


def add_picture(copy: Copy) -> None:
    shutil.copyfile(copy.home / "figures" / "02_batch.svg", copy.home / "figures" / "02_other.svg")


def append(name: str) -> Callable[[Copy], None]:
    def edit(copy: Copy) -> None:
        path = copy.kernels / name
        path.write_text((path.read_text(encoding="utf-8") if path.is_file() else "") + "// edited\n", encoding="utf-8")

    edit.__name__ = f"edit {name}"
    return edit


def edit_script(copy: Copy) -> None:
    copy.replace(copy.script, "# %%\n", "# %%\nprint(1)\n")


def delete_script(copy: Copy) -> None:
    copy.script.unlink()


def add_script(copy: Copy) -> None:
    shutil.copyfile(copy.script, copy.script.with_name("09_new.py"))


def forget_to_execute(copy: Copy) -> None:
    copy.change(lambda notebook: notebook.cells[-1].update(execution_count=None, outputs=[]))


def print_no_banner(copy: Copy) -> None:
    copy.replace(copy.notebook, "measured 2", "made 2")


def type_a_number(copy: Copy) -> None:
    for path in (copy.script, copy.notebook):
        copy.replace(path, "**Question.**", "**Question.** 1234.5678?")


def edit_dispatch(copy: Copy) -> None:
    copy.replace(copy.data / "dispatch.json", "w4_mma_small", "w4_mma_block")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (edit_record, [f"{H200}/w3_batch_tile.json: differs from what was published"]),
        (delete_record, [f"{H200}/w3_batch_tile.json: missing", f"{NAME}: missing record: data/ has none of w3_batch_tile"]),
        (replace_record, [f"{NAME}: missing record: data/ has none of w3_batch_tile from 2"]),
        (misfile_record, [f"{H200}/few_bits.json: has no line", f"{H200}/few_bits.json: holds the record of nvidia-h200"]),
        (edit_published_number, ["data/published/deepinfer_sm86_part7.json: differs"]),
        (edit_printed_table, [f"{NAME}: figures/02_batch.svg is not the picture of the table printed"]),
        (edit_picture, [f"{NAME}: figures/02_batch.svg is not the picture of the table printed"]),
        (delete_picture, [f"{NAME}: prints the table of figures/02_batch.svg, which is missing"]),
        (add_picture, ["figures/02_other.svg: no notebook prints its table"]),
        (append("w3_gemv_warp_tile.cu"), [
            f"{H200}/tiled_gemm.json: stale, made with other versions of w3_gemv_warp_tile.cu",
            f"{H200}/verification.json: stale, made with other versions of w3_gemv_warp_tile.cu",
            f"{H200}/w3_batch_tile.json: stale, made with other versions of w3_gemv_warp_tile.cu",
        ]),
        (append("rms_norm.cu"), [f"{H200}/verification.json: stale, made with other versions of rms_norm.cu"]),
        (append("new.cu"), [f"{H200}/verification.json: new.cu was never tested"]),
        (edit_script, [f"{NAME}: differs from {NAME}.py"]),
        (delete_script, [f"{NAME}: no scripts/{NAME}.py"]),
        (add_script, ["09_new: scripts/09_new.py was never published"]),
        (forget_to_execute, [f"{NAME}: execution counts are"]),
        (print_no_banner, [f"{NAME}: names the experiment w3_batch_tile, but prints no banner"]),
        (type_a_number, [f"{NAME}: its prose says 1234.5678"]),
        (edit_dispatch, [f"{H200}/dispatch.json: differs from what was published"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)  # fmt: skip
def test_every_edit_without_its_counterpart_is_told(copy: Copy, edit: Callable[[Copy], None], expected: list[str]):
    edit(copy)
    failures = check().failures
    assert len(failures) == len(expected), failures
    assert all(any(failure.startswith(start) for failure in failures) for start in expected), failures


def test_the_command_s_status_and_table(copy: Copy):
    good = CliRunner().invoke(main, ["check"])
    assert (good.exit_code, good.output.splitlines()[-1].split(": ")[-1]) == (0, "hangs together")
    assert good.output.startswith(f"{NAME}\n  record   w3_batch_tile ")
    assert " <- w3_batch_tile\n" in good.output
    assert CliRunner().invoke(main, ["check", "--strict"]).exit_code == 0
    edit_script(copy)
    bad = CliRunner().invoke(main, ["check"])
    assert bad.exit_code == 1
    assert f"FAILURE: {NAME}: differs from {NAME}.py" in bad.output


def test_records_of_other_commits_environments_or_uncommitted_code_are_told(copy: Copy):
    path = copy.data / "tiled_gemm.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    origin = record["provenance"]
    origin.update(dirty=True, commit=origin["commit"][::-1], numpy="0." + origin["numpy"])
    path.write_text(json.dumps(record), encoding="utf-8")
    warnings = check().warnings
    assert any(text.startswith("nvidia-h200: records of 2 commits. ") for text in warnings)
    strict = CliRunner().invoke(main, ["check", "--strict"])
    assert (strict.exit_code, strict.output.count("warning: ")) == (1, len(warnings))
    assert any(text.startswith("nvidia-h200: records of 2 environments: numpy is 0.2.5.2, 2.5.2") for text in warnings)
    assert "nvidia-h200: measured with code that was not committed: tiled_gemm" in warnings


def test_an_experiment_that_no_device_has_measured_is_a_warning_until_one_has(copy: Copy):
    print_no_banner(copy)
    text = f"{NAME}: no device has a record of w3_batch_tile yet"
    assert text not in check().warnings
    delete_record(copy)
    found = check()
    assert text in found.warnings
    assert not any("prints no banner" in failure for failure in found.failures)


def test_what_cannot_be_read_is_told_and_the_rest_is_looked_at(copy: Copy):
    (copy.data / "tiled_gemm.json").write_text("{")
    copy.change(lambda notebook: notebook.cells[-1].update(source="1 +"))
    found = check()
    told = "\n".join(found.failures)
    for part in ("tiled_gemm.json: not JSON", f"{NAME}: a cell is not Python", f"{NAME}: differs from {NAME}.py"):
        assert part in told


def test_publishing_seals_what_it_files_and_what_is_new_but_not_what_was_edited(copy: Copy):
    edit_record(copy)
    (copy.data / "new.json").write_text("{}")
    seal.update([])
    assert seal.complaints() == [f"{H200}/w3_batch_tile.json: differs from what was published"]
    seal.update([copy.data / "w3_batch_tile.json"])
    assert seal.complaints() == []
    (copy.home / "data" / seal.FILE).write_text("nonsense\n")
    with pytest.raises(RecordError, match="'nonsense' is not a SHA-256, two spaces"):
        seal.complaints()


def test_the_seal_is_what_sha256sum_reads(copy: Copy):
    for line in (copy.home / "data" / seal.FILE).read_text().splitlines():
        digest, name = line.split("  ")
        assert len(digest) == 64
        assert json.loads((copy.home / "data" / name).read_text(encoding="utf-8"))
