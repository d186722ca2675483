"""Sweeps on workers of Dask: processes of this machine, which die and lose their GPU in the middle of a cell."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from sweep_experiments import COUNT, begun
from test_sweep import written

from deepinfer_lab.cli import main
from deepinfer_lab.errors import ClusterError, SettingError
from deepinfer_lab.lab import sweep, sweep_grid
from deepinfer_lab.lab.experiments import EXPERIMENTS
from deepinfer_lab.lab.record import Record, load
from deepinfer_lab.lab.sweep_cell import Here
from deepinfer_lab.lab.sweep_grid import Grid

distributed = pytest.importorskip("distributed", reason="needs the extra `cluster`")

from deepinfer_lab.lab import sweep_dask  # noqa: E402
from deepinfer_lab.lab.sweep_dask import Workers  # noqa: E402


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_dask, "DEATHS", 1)  # a new worker takes seconds
        patch.setattr(sweep_dask, "LOOK_S", 0.2)
        with sweep_dask.workers("local", 2, cells=8) as workers:
            yield workers


@pytest.fixture(autouse=True)
def _known(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(EXPERIMENTS, COUNT.name, COUNT)


def records(grid: Grid) -> list[Record]:
    """Of each cell; there is no other file."""
    paths = [sweep.folder(grid) / f"{cell.name}.json" for cell in grid.cells]
    assert sorted(sweep.folder(grid).iterdir()) == sorted(paths)
    return [load(path) for path in paths]


def test_workers_make_the_records_that_one_process_makes(home: Path, two: Workers):
    beside = sweep_grid.read(written(home, {"number": [1, 2, 3, 4, 5]}, name="beside"))
    alone = sweep_grid.read(written(home, {"number": [1, 2, 3, 4, 5]}, name="alone"))
    outcomes = sweep.run(beside, two, limit_s=60)
    sweep.run(alone, Here(sweep.folder(alone)), limit_s=60)
    assert [each.status for each in outcomes] == ["OK"] * 5
    assert {each.worker for each in outcomes} <= {each.name for each in two.machines()}
    for one, other in zip(records(beside), records(alone), strict=True):
        assert (one.experiment, one.params, one.samples) == (other.experiment, other.params, other.samples)
        assert one.provenance.keys() == other.provenance.keys()
        assert one.provenance["command"] == other.provenance["command"]
    assert [each.status for each in sweep.run(beside, two, limit_s=60)] == ["kept"] * 5
    assert len({process for _, process in begun(home)} - {os.getpid()}) == 2


def test_no_cell_is_lost_or_there_twice_when_a_worker_is_killed(home: Path, two: Workers):
    grid = sweep_grid.read(written(home, {"hanging_once": [[1]], "number": [1, 2, 3, 4, 5]}))
    pipe = home / "pipe"
    os.mkfifo(pipe)
    killed: list[int] = []

    def kill() -> None:
        killed.append(int(pipe.read_text()))  # waits for the cell
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    told: list[str] = []
    outcomes = sweep.run(grid, two, limit_s=60, told=lambda outcome: told.append(outcome.cell))
    killer.join()
    assert [each.status for each in outcomes] == ["OK"] * 5
    assert sorted(told) == sorted(cell.name for cell in grid.cells)  # one answer each
    assert [len(record.samples) for record in records(grid)] == [2] * 5
    assert Counter(number for number, _ in begun(home)) == {1: 2, 2: 1, 3: 1, 4: 1, 5: 1}
    assert next(process for number, process in begun(home) if number == 1) == killed[0]


@pytest.mark.filterwarnings("ignore:no worker is left")
def test_a_cell_that_kills_every_worker_is_given_up_and_takes_no_other_with_it(home: Path, two: Workers):
    grid = sweep_grid.read(written(home, {"deadly": [[1]], "number": [1, 2, 3, 4]}))
    outcomes = sweep.run(grid, two, limit_s=60)
    assert [each.status for each in outcomes] == ["failed", "OK", "OK", "OK"]
    assert outcomes[0].error == "ended 2 workers"
    assert Counter(number for number, _ in begun(home)) == {1: 2, 2: 1, 3: 1, 4: 1}


def test_a_worker_that_lost_its_gpu_is_replaced(home: Path, two: Workers):
    grid = sweep_grid.read(written(home, {"gpu_lost_once": [[1]], "number": [1, 2, 3]}))
    assert [each.status for each in sweep.run(grid, two, limit_s=60)] == ["OK"] * 3
    lost, then = (process for number, process in begun(home) if number == 1)
    assert then != lost
    assert [process for _, process in begun(home)].count(lost) == 1


def test_the_command_joins_a_scheduler_and_goes_on_after_a_failure(home: Path, two: Workers):
    address = two._client.scheduler.address
    path = written(home, {"failing": [[2]], "number": [1, 2]})
    found = CliRunner().invoke(main, ["run", "--sweep", str(path), "--dask", address, "--retries", "1"])
    assert found.exit_code == 1
    assert "ValueError: number 2 fails" in found.output
    assert Counter(number for number, _ in begun(home)) == {1: 1, 2: 2}
    listed = CliRunner().invoke(main, ["run", "--sweep", str(path), "--dask", address, "--list"])
    assert "1 of 2 cells are done" in listed.output


def test_an_interruption_leaves_records_and_nothing_running(home: Path, two: Workers):
    grid = sweep_grid.read(written(home, {"number": [1, 2, 3, 4, 5, 6]}))

    def stop(_outcome: sweep.Outcome) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="1 of 6 cells are in"):
        sweep.run(grid, two, limit_s=60, told=stop)
    statuses = [each.status for each in sweep.run(grid, two, limit_s=60)]
    assert Counter(statuses) == {"kept": 1, "OK": 5}
    assert [record.whole for record in records(grid)] == [True] * 6


def test_workers_with_other_sources_get_no_cell(home: Path, two: Workers, monkeypatch: pytest.MonkeyPatch):
    grid = sweep_grid.read(written(home, {"number": [1]}))
    source = sweep.SOURCE
    monkeypatch.setattr(sweep, "SOURCE", "another")
    with pytest.raises(
        ClusterError, match=rf"worker tcp://\S+ has deepinfer-lab \S+, sources {source[:12]}; .*restart"
    ):
        sweep.run(grid, two, limit_s=60)
    monkeypatch.setattr(sweep, "check", lambda *_: None)  # as if the worker had joined after the check
    with pytest.raises(ClusterError, match="runs other sources"):
        sweep.run(grid, two, limit_s=60)
    assert begun(home) == []


def test_no_scheduler_and_no_worker_are_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sweep_dask, "JOIN_S", 0.2)
    with pytest.raises(ClusterError, match=r"tcp://127\.0\.0\.1:9: no scheduler answers"):  # noqa: SIM117
        with sweep_dask.workers("tcp://127.0.0.1:9", None, cells=1):
            pass
    with distributed.LocalCluster(n_workers=0, dashboard_address=":0", processes=False) as empty:
        with pytest.raises(ClusterError, match=r"no worker.*dask worker"):  # noqa: SIM117
            with sweep_dask.workers(empty.scheduler_address, None, cells=1):
                pass
        with pytest.raises(SettingError, match="--workers 2: allowed with --dask local only"):  # noqa: SIM117
            with sweep_dask.workers(empty.scheduler_address, 2, cells=1):
                pass


def test_news_for_every_client_does_not_keep_a_new_one_out():
    class News(distributed.SchedulerPlugin):
        """Says something to all clients right after the first one came, so that both are one message to it."""

        came = 0

        def add_client(self, scheduler: distributed.Scheduler, client: str) -> None:
            self.came += 1
            if self.came == 1:
                scheduler.loop.asyncio_loop.call_soon(scheduler.report, {"op": "cancelled-keys", "keys": []})

    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, dashboard_address=":0", processes=False
    ) as cluster:
        news = News()
        cluster.scheduler.add_plugin(news)
        with sweep_dask.workers(cluster.scheduler_address, None, cells=1) as workers:
            assert len(workers.machines()) == 1
        assert news.came == 2


def test_a_worker_with_several_threads_is_refused():
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=":0", processes=False) as cluster,
        sweep_dask.workers(cluster.scheduler_address, None, cells=1) as workers,
        pytest.raises(ClusterError, match=r"has 2 threads.*--nthreads 1"),
    ):
        workers.machines()


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [(None, None, ["0", "1"]), (None, 1, ["0"]), ("5,GPU-ab", None, ["5", "GPU-ab"])],
)
def test_each_local_process_gets_a_gpu_of_its_own(visible, count, expected, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv(sweep_dask.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(sweep_dask.VISIBLE, visible)
    assert [each[sweep_dask.VISIBLE] for each in sweep_dask._variables(count)] == expected
    with pytest.raises(SettingError, match="--workers 3: allowed are 1 to 2"):
        sweep_dask._variables(3)
