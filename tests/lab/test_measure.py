import json

import pytest
from sweep_experiments import COUNT

from deepinfer_lab.errors import SettingError
from deepinfer_lab.lab import experiment, measure
from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.record import load


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A project of its own, with an experiment that works and one that fails after its first row."""
    monkeypatch.setenv("DEEPINFER_HOME", str(tmp_path))
    monkeypatch.setenv(experiment.AGAIN, "")  # so that it is as before when the test is over
    monkeypatch.delenv(experiment.AGAIN)
    (tmp_path / "data").mkdir(), (tmp_path / "notebooks").mkdir()
    works = {**COUNT.defaults, "folder": str(tmp_path)}
    fails = {**works, "number": 1, "failing": [1]}
    known = {
        "works": Experiment("works", COUNT.measure, works, True, "Counts."),
        "fails": Experiment("fails", COUNT.measure, fails, True, "Counts, and fails."),
    }
    monkeypatch.setattr(measure, "EXPERIMENTS", known)
    return tmp_path


def begun(home) -> list[str]:
    return [line.split()[0] for line in (home / "begun").read_text().splitlines()]


def test_a_failure_is_recorded_and_the_next_is_measured(home, capsys):
    assert measure.main(["fails", "works"]) == 1
    records = {path.stem: load(path) for path in home.glob("build/data/*/*.json")}
    assert records["works"].whole
    assert len(records["works"].samples) == 2
    assert "fails" not in records or not records["fails"].whole
    said = capsys.readouterr().out
    assert "works" in said
    assert "incomplete" in said
    outcomes = (home / "build" / "measure.outcomes.jsonl").read_text().splitlines()
    assert list(dict.fromkeys(json.loads(line)["experiment"] for line in outcomes)) == ["fails", "works"]


def test_what_is_finished_is_measured_anew_where_asked_for(home):
    assert measure.main(["works"]) == 0
    assert measure.main(["works", "--again"]) == 0
    assert begun(home) == ["0", "0"]


def test_a_name_that_no_experiment_has(home):
    with pytest.raises(SettingError, match="experiment 'worse': allowed are works, fails"):
        measure.main(["works", "worse"])
    with pytest.raises(SettingError, match="experiment 'missing': allowed are"):
        measure.main([])
    assert not (home / "begun").exists()
