"""Workers for a sweep's cells, on GPUs and hosts: Dask (`dask.distributed`) starts them, finds the dead, and runs their cells
elsewhere.

Each worker measures one cell at a time, and no more cells are with the cluster than it has workers. So a cell that kills its
worker takes no other with it, and those that wait are still here when somebody presses Ctrl-C.
"""

import logging
import os
import signal
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from deepinfer_lab.errors import ClusterError, MissingDependency, SettingError
from deepinfer_lab.lab import provenance
from deepinfer_lab.lab.sweep_cell import Attempt, Job, Machine, attempt, machine

try:
    import dask
    import distributed
except ImportError as error:
    raise MissingDependency(f"--dask needs dask.distributed ({error}): pip install 'deepinfer-lab[cluster]'") from error

LOCAL = "local"
HERE = "127.0.0.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
LOGGED = logging.WARNING
JOIN_S = 30  # until a scheduler answers, and its first worker
JOINS = 5  # times that a client is made, where the scheduler's answer comes mixed with its news for all
LOOK_S = 5  # between two looks at the workers while cells are measured
DEATHS = 2  # of workers that a cell may cause before it counts as failed, where the scheduler is ours


@contextmanager
def workers(address: str, count: int | None, cells: int) -> Iterator["Workers"]:
    """Workers while the block lasts.

    Args:
        address: of a scheduler, such as tcp://10.0.0.1:8786; or "local": processes on this machine, one for each GPU, or
            without a GPU one for each core.
        count: of local processes; on a machine with GPUs at most as many as there are.
        cells: more processes than that are not started.

    Raises:
        ClusterError: no scheduler answers, or none of its workers.
        SettingError: more processes than GPUs, or a `count` for a scheduler's workers.
    """
    if address != LOCAL:
        if count is not None:
            raise SettingError(
                f"--workers {count}: allowed with --dask local only; {address} has the workers that joined it"
            )
        with _client(address) as client:
            yield Workers(client)
        return
    variables = _variables(count)[:cells]
    options = {
        "nthreads": 1, "memory_limit": 0, "host": HERE, "dashboard": False, "silence_logs": LOGGED, "preload": [__name__],
    }  # fmt: skip
    spec = {
        number: {"cls": distributed.Nanny, "options": {**options, "env": environment}}
        for number, environment in enumerate(variables)
    }
    scheduler = {
        "cls": distributed.Scheduler,
        "options": {"host": HERE, "dashboard": False, "dashboard_address": f"{HERE}:0", "allowed_failures": DEATHS},
    }
    # Each nanny starts its worker anew, however long that takes; by default the cluster drops one that is away for 15 s.
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1 day"}),
        distributed.SpecCluster(workers=spec, scheduler=scheduler, silence_logs=LOGGED) as cluster,
        _client(cluster) as client,
    ):
        yield Workers(client)


class Workers:
    """The workers of one cluster."""

    def __init__(self, client: distributed.Client) -> None:
        self._client = client

    def machines(self) -> list[Machine]:
        """Every worker.

        Raises:
            ClusterError: one that cannot import this package, or that takes several cells at once.
        """
        found = self._client.run(_machine, on_error="return")
        for address, answer in found.items():
            if isinstance(answer, ClusterError):
                raise answer
            if not isinstance(answer, Machine):
                raise ClusterError(f"worker {address} cannot run deepinfer-lab: {type(answer).__name__}: {answer}")
        return list(found.values())

    def attempts(self, jobs: deque[Job]) -> Iterator[tuple[Job, Attempt]]:
        """An answer for each job, in the order in which they come. Those that are added meanwhile are run, too.

        Raises:
            ClusterError: a worker that joined cannot run cells, or one has lost its GPU and nobody restarts it.
        """
        running: dict[distributed.Future, Job] = {}
        try:
            while jobs or running:
                while jobs and len(running) < max(1, len(self._client.nthreads())):
                    job = jobs.popleft()
                    # pure=False: a key of its own, so that an earlier attempt's answer is not taken for this one's
                    running[self._client.submit(_attempt, job, pure=False)] = job
                for future in self._answered(list(running)):
                    answer = _answer(future)
                    future.cancel(force=True)  # else Dask measures it again where the worker that keeps the answer ends
                    if answer.gpu_lost:
                        self._restart(answer.worker)
                    yield running.pop(future), answer
        finally:
            self._client.cancel(list(running), force=True)

    def _answered(self, futures: list[distributed.Future]) -> list[distributed.Future]:
        """Those that have an answer; none after a while, so that workers that joined get cells."""
        try:
            return list(distributed.wait(futures, timeout=LOOK_S, return_when="FIRST_COMPLETED").done)
        except TimeoutError:
            if not self._client.nthreads():
                warnings.warn("no worker is left; the sweep goes on when one joins", stacklevel=2)
            return []

    def _restart(self, worker: str) -> None:
        """A new process in the place of one that has lost its GPU."""
        try:
            self._client.restart_workers([worker])
        except (ValueError, TimeoutError) as error:
            raise ClusterError(f"worker {worker} has lost its GPU and does not restart: {error}") from None


@contextmanager
def _client(cluster: str | distributed.SpecCluster) -> Iterator[distributed.Client]:
    """A client with at least one worker."""
    try:
        client = _joined(cluster)
    except (OSError, ValueError, MemoryError) as error:  # where a web server answers, its words are taken for sizes
        raise ClusterError(
            f"--dask {cluster}: no scheduler answers ({error}); allowed are local and the address that `dask scheduler` prints"
        ) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=JOIN_S)
        except TimeoutError:
            raise ClusterError(
                f"--dask {cluster}: the scheduler has no worker; start one on each host, or for each GPU: "
                f"`dask worker {cluster} --nthreads 1 --memory-limit 0`"
            ) from None
        yield client


def _joined(cluster: str | distributed.SpecCluster) -> distributed.Client:
    """A client of a scheduler that may have others.

    What the scheduler says to all its clients at once can come together with its first words to this one, which Dask 2026.8
    fails an assertion over; the next client has no part in that.
    """
    for _ in range(JOINS - 1):
        with suppress(AssertionError):
            return distributed.Client(cluster, timeout=JOIN_S)
    return distributed.Client(cluster, timeout=JOIN_S)


def _variables(count: int | None) -> list[dict[str, str]]:
    """For each local process, the variables that give it a GPU of its own, where there are any."""
    visible = os.environ.get(VISIBLE)
    gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    if not torch.cuda.is_available():
        return [{} for _ in range(count or provenance.cores())]
    if count is not None and count > len(gpus):
        raise SettingError(f"--workers {count}: allowed are 1 to {len(gpus)}, one for each GPU here")
    return [{VISIBLE: gpu} for gpu in gpus[:count]]


def dask_setup(_worker: distributed.Worker) -> None:
    """Dask calls this as a local worker starts. Ctrl-C is for the process that has the sweep, and ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _machine(dask_worker: distributed.Worker) -> Machine:
    """On a worker: `Client.run` fills in the argument by its name."""
    return machine(_address(dask_worker))


def _attempt(job: Job) -> Attempt:
    return attempt(job, _address(distributed.get_worker()))


def _address(worker: distributed.Worker) -> str:
    """Of a worker, if it measures one cell at a time."""
    if worker.state.nthreads != 1:
        raise ClusterError(
            f"worker {worker.address} has {worker.state.nthreads} threads, and cells that one process measures at once disturb "
            "each other: start it with --nthreads 1"
        )
    return worker.address


def _answer(future: distributed.Future) -> Attempt:
    """What a worker said, or that none lived to say anything."""
    try:
        return future.result()
    except ClusterError:
        raise
    except distributed.KilledWorker as error:
        line = f"ended {error.allowed_failures + 1} workers"
        return Attempt(error.last_worker.address, 0.0, None, line, str(error), again=False)
    except Exception as error:
        return Attempt("-", 0.0, None, f"{type(error).__name__}: {error}")
