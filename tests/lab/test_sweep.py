"""Sweeps in this process; `test_sweep_dask.py` has those of several."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from sweep_experiments import COUNT, ON_GPU, begun

from deepinfer_lab.cli import main
from deepinfer_lab.errors import ClusterError, SettingError
from deepinfer_lab.lab import sweep, sweep_cell, sweep_grid
from deepinfer_lab.lab.experiments import EXPERIMENTS
from deepinfer_lab.lab.record import load
from deepinfer_lab.lab.sweep_cell import Here
from deepinfer_lab.lab.sweep_grid import Grid

SAMPLES = Path(__file__).parents[2] / "sweeps"


@pytest.fixture(autouse=True)
def _known(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(EXPERIMENTS, COUNT.name, COUNT)
    monkeypatch.setitem(EXPERIMENTS, ON_GPU.name, ON_GPU)


def written(home: Path, grid: dict, name: str = "small", **more) -> Path:
    path = home / f"{name}.yml"
    path.write_text(yaml.safe_dump({"experiment": COUNT.name, "grid": {"folder": [str(home)], **grid}, **more}))
    return path


def swept(grid: Grid, **settings) -> list[sweep.Outcome]:
    return sweep.run(grid, Here(sweep.folder(grid)), limit_s=60, **settings)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *map(str, arguments)])


def test_each_combination_is_a_cell_but_those_left_out(home: Path):
    out = [{"number": 2, "scale": 0.5}, {"scale": 2.0, "number": 1}]
    grid = sweep_grid.read(written(home, {"number": [1, 2], "scale": [0.5, 1, 2.0]}, leave_out=out))
    found = [(cell.params["number"], cell.params["scale"]) for cell in grid.cells]
    assert found == [(1, 0.5), (1, 1), (2, 1), (2, 2.0)]
    assert len({cell.name for cell in grid.cells}) == 4
    assert all(cell.params.keys() == COUNT.defaults.keys() for cell in grid.cells)


def test_longer_lists_and_their_order_leave_a_cells_name(home: Path):
    few = sweep_grid.read(written(home, {"number": [1], "scale": [1.0]})).cells
    many = sweep_grid.read(written(home, {"number": [3, 1, 2], "scale": [2.0, 1.0]})).cells
    assert {cell.name for cell in few} < {cell.name for cell in many}


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.yml")), ids=lambda path: path.stem)
def test_the_samples_are_sweeps(path: Path):
    assert len(sweep_grid.read(path).cells) > 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", ["not a YAML file"]),
        ("- 1", ["[1]", "experiment and grid"]),
        ("experiment: x\ngrid: {}\nwhere: 1", ["where", "leave_out"]),
        ("experiment: nope\ngrid: {a: [1]}", ["'nope'", "serve_real_model"]),
        ("experiment: count_cells\ngrid: {}", ["{}", "a list of values"]),
        ("experiment: count_cells\ngrid: {speed: [1]}", ["speed", "number"]),
        ("experiment: count_cells\ngrid: {number: 1}", ["number is 1", "[1]"]),
        ("experiment: count_cells\ngrid: {number: []}", ["number is []"]),
        ("experiment: count_cells\ngrid: {number: [1, 1]}", ["number", "twice"]),
        ("experiment: count_cells\ngrid: {number: [yes]}", ["True", "default is 0"]),
        ("experiment: count_cells\ngrid: {scale: [1e-3]}", ["'1e-3'", "default is 1.0"]),
        ("experiment: count_cells\ngrid: {number: [1]}\nleave_out: [{number: 3}]", ["{'number': 3}", "no combination"]),
        ("experiment: count_cells\ngrid: {number: [1]}\nleave_out: [{number: 1}]", ["leaves no cell"]),
        ("experiment: count_cells\ngrid: {number: [1]}\nleave_out: {number: 1}", ["{'number': 1}", "not a list"]),
    ],
)
def test_a_malformed_grid_is_refused_by_name(home: Path, text: str, said: list[str]):
    path = home / "bad.yml"
    path.write_text(text)
    with pytest.raises(SettingError) as error:
        sweep_grid.read(path)
    for part in ("bad.yml" if "speed" not in text else "count_cells", *said):
        assert part in str(error.value)


def test_a_record_for_each_cell_like_any_other(home: Path):
    grid = sweep_grid.read(written(home, {"number": [1, 2], "scale": [1.0, 3.0]}))
    told = []
    outcomes = swept(grid, told=told.append)
    assert [each.cell for each in outcomes] == [cell.name for cell in grid.cells]
    assert told == outcomes
    for cell in grid.cells:
        record = load(sweep.folder(grid) / f"{cell.name}.json")
        assert (record.experiment, record.params, record.status) == (COUNT.name, cell.params, "OK")
        assert [row["scaled"] for row in record.samples] == [cell.params["number"] * cell.params["scale"]] * 2
        assert record.provenance["source"] == sweep_cell.SOURCE
        assert {"device", "commit", "kernels", "command", "utc", "seconds"} <= record.provenance.keys()
    assert len(list(sweep.folder(grid).iterdir())) == 4


def test_what_stands_is_kept_until_asked_or_until_it_stands_no_more(home: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(home, {"number": [1, 2, 3]})
    grid = sweep_grid.read(path)
    swept(grid)
    assert [each.status for each in swept(grid)] == ["kept"] * 3
    assert len(begun(home)) == 3
    longer = sweep_grid.read(written(home, {"number": [1, 2, 3, 4]}))
    assert [each.status for each in swept(longer)] == ["kept"] * 3 + ["OK"]
    assert [number for number, _ in begun(home)] == [1, 2, 3, 4]
    assert [each.status for each in swept(grid, again=True)] == ["OK"] * 3
    (sweep.folder(grid) / f"{grid.cells[1].name}.json").write_text("{}")
    machines = [sweep_cell.machine()]
    assert [sweep.state(grid, cell, machines)[0] for cell in grid.cells] == ["done", "malformed", "done"]
    machines[0].environment["torch"] = "another"
    assert sweep.state(grid, grid.cells[0], machines)[0] == "other machine"
    monkeypatch.setattr(sweep, "SOURCE", "another")
    assert sweep.state(grid, grid.cells[0], machines)[0] == "other sources"


def test_a_cell_that_fails_is_tried_again_written_down_and_comes_last_next_time(home: Path):
    grid = sweep_grid.read(written(home, {"failing": [[1]], "number": [1, 2]}))
    outcomes = swept(grid, retries=1)
    assert [(each.status, each.whole) for each in outcomes] == [("failed", False), ("OK", True)]
    assert [number for number, _ in begun(home)] == [1, 2, 1]
    failed = json.loads((sweep.folder(grid) / f"{grid.cells[0].name}.failed.json").read_text())
    assert failed["error"] == "ValueError: number 1 fails"
    assert (failed["attempts"], failed["params"]) == (2, grid.cells[0].params)
    assert any("raise ValueError" in line for line in failed["details"])
    swept(sweep_grid.read(written(home, {"failing": [[1]], "number": [1, 2, 3]})), retries=0)
    assert [number for number, _ in begun(home)] == [1, 2, 1, 3, 1]


def test_an_interrupted_sweep_goes_on_with_the_rest(home: Path):
    grid = sweep_grid.read(written(home, {"number": [1, 2, 3, 4]}))

    def stop_after_two(outcome: sweep.Outcome) -> None:
        if outcome.cell == grid.cells[1].name:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"2 of 4 cells are in .*small; the same command goes on"):
        swept(grid, told=stop_after_two)
    assert [each.status for each in swept(grid)] == ["kept", "kept", "OK", "OK"]
    assert Counter(number for number, _ in begun(home)) == {1: 1, 2: 1, 3: 1, 4: 1}


def test_a_cell_cut_short_is_no_failure_and_is_measured_by_the_next_run(home: Path):
    grid = sweep_grid.read(written(home, {"number": [1]}))
    (outcome,) = sweep.run(grid, Here(sweep.folder(grid)), limit_s=1e-9)
    assert (outcome.status, outcome.whole) == ("TIMEOUT", False)
    assert [each.status for each in swept(grid)] == ["OK"]


def test_a_process_that_lost_its_gpu_measures_no_more(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", torch.cuda.is_initialized)  # so that they are put back
    monkeypatch.setattr(torch.cuda, "synchronize", torch.cuda.synchronize)
    grid = sweep_grid.read(written(home, {"gpu_lost_once": [[1]], "number": [1, 2]}))
    with pytest.raises(ClusterError, match="lost this process its GPU"):
        swept(grid)
    assert [sweep.state(grid, cell, [])[0] for cell in grid.cells] == ["failed", "to run"]


def test_a_machine_must_have_the_same_package_and_a_gpu_where_one_is_needed(home: Path, monkeypatch):
    grid = sweep_grid.read(written(home, {"number": [1]}))
    job = sweep_cell.Job(COUNT, "cell", grid.cells[0].params, "another", "", 60)
    with pytest.raises(ClusterError, match="worker here runs other sources"):
        sweep_cell.attempt(job)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_gpu = sweep_grid.read(written(home, {"number": [1]}, experiment=ON_GPU.name))
    with pytest.raises(SettingError, match="'count_on_gpu' needs a CUDA GPU"):
        swept(on_gpu)
    assert begun(home) == []


def test_the_command_lists_measures_sums_up_and_says_by_its_status_that_a_cell_failed(home: Path):
    path = written(home, {"failing": [[2]], "number": [1, 2]})
    listed = command("--sweep", path, "--list")
    assert listed.exit_code == 0
    assert "0 of 2 cells are done" in listed.output
    assert begun(home) == []
    done = command("--sweep", path, "--retries", "0")
    assert done.exit_code == 1
    names = [cell.name for cell in sweep_grid.read(path).cells]
    summary = done.output[done.output.index("cell ") :]
    assert [line.split()[:2] for line in summary.splitlines()[1:3]] == [[names[0], "OK"], [names[1], "failed"]]
    assert "ValueError: number 2 fails" in done.output
    assert "1 of 2 cells are done" in command("--sweep", path, "--list").output


def test_compare_reads_cells(home: Path):
    grid = sweep_grid.read(written(home, {"scale": [1.0, 2.0], "number": [1]}))
    swept(grid)
    files = [str(sweep.folder(grid) / f"{cell.name}.json") for cell in grid.cells]
    found = CliRunner().invoke(main, ["compare", *files])
    assert found.exit_code == 0
    assert "scale" in found.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dask", "local"], ["--dask", "--sweep"]),
        (["--retries", "0"], ["--retries", "--sweep"]),
        (["--list"], ["--list", "--sweep"]),
        (["--sweep", SAMPLES / "policies.yml", "--only", "00"], ["--only", "notebooks"]),
        (["--sweep", SAMPLES / "policies.yml", "--workers", "2"], ["--workers 2", "--dask local"]),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list, said: list[str]):
    result = command(*arguments)
    assert result.exit_code == 1
    for part in said:
        assert part in result.output
