"""The scheduler's own cost is measured on cycles that do what they should."""

import pytest

from deepinfer_lab.lab import scheduler_bench


def test_every_cycle_gives_every_request_a_token(monkeypatch):
    made = []

    class Watched(scheduler_bench.Scheduler):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            made.append(self)

    monkeypatch.setattr(scheduler_bench, "Scheduler", Watched)
    found = list(scheduler_bench.measure([1, 5, 20], cycles=20))
    assert [each.running for each in found] == [1, 5, 20]
    for each, scheduler in zip(found, made, strict=True):
        assert len(each.cycles_us) == len(each.prepare_us) == 20
        assert len(scheduler.live()) == each.running  # nobody ended while it was timed
        assert all(len(sequence.output) > 20 for sequence in scheduler.live())
        assert scheduler.queues.preemptions == 0


def test_the_parts_add_up():
    found = scheduler_bench.Overhead(2, (30.0, 10.0, 20.0), (5.0, 7.0, 6.0))
    assert (found.cycle, found.plan_and_finish) == (20.0, pytest.approx(14.0))
