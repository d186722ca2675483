"""The bandwidth figure from times that are made up."""

import pytest
import torch

from deepinfer_lab.metrics import bandwidth


def test_the_best_of_several_reads(monkeypatch):
    seconds = iter([4.0, 0.5, 0.25, 2.0])
    sizes = []

    def read(work, device: torch.device) -> float:
        sizes.append(work.__self__.nbytes)
        return next(seconds)

    monkeypatch.setattr(bandwidth, "_seconds", read)
    assert bandwidth.read_bandwidth(torch.device("cpu"), nbytes=4000, repeats=3) == pytest.approx(4000 / 0.25)
    assert sizes == [4000] * 4


def test_a_real_read_takes_some_time():
    assert 0 < bandwidth.read_bandwidth(torch.device("cpu"), nbytes=1 << 20, repeats=2) < float("inf")


def test_the_best_of_several_products(monkeypatch):
    seconds = iter([1.0, 0.5, 2.0])
    shapes = []

    def multiply(work, device: torch.device) -> float:
        shapes.append(work().shape)
        return next(seconds)

    monkeypatch.setattr(bandwidth, "_seconds", multiply)
    assert bandwidth.matrix_rate(torch.device("cpu"), torch.float32, size=10, repeats=2) == 2 * 1000 / 0.5
    assert shapes == [(10, 10)] * 3
