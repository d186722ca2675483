"""The layouts that the driver expects (cuda.h), and that kernels which are launched so do await."""

import ctypes
import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import dependent_launch, loader
from deepinfer_lab.kernels.catalogue import SOURCES
from deepinfer_lab.kernels.ops_catalogue import OPS


def test_layouts():
    attribute, config = dependent_launch._Attribute, dependent_launch._Config
    assert (ctypes.sizeof(attribute), attribute.value.offset) == (72, 8)
    assert (ctypes.sizeof(config), config.stream.offset, config.attributes.offset) == (56, 32, 40)


def test_a_kernel_is_launched_so_exactly_where_it_awaits_the_one_before():
    def text(name: str) -> str:
        own = (SOURCES / name).read_text(encoding="utf-8")
        return own + "".join(
            text(included) for included in re.findall('#include "(.*)"', own) if included != "dependent.cuh"
        )

    for op in OPS.values():
        awaits = bool(re.search(r"(take_turn|await_previous)\(\);", text(op.source.name)))
        assert awaits == op.dependent, op.name


class Driver:
    """Stands in for libcuda: says what it was asked for, and answers with `status`."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.grid, self.attributes, self.arguments = status, None, None, None

    def cuLaunchKernelEx(self, config, function, arguments, _) -> int:
        assert function.value == 7
        self._read(config._obj)
        sizes = (ctypes.c_uint64, ctypes.c_int32)
        self.arguments = [ctypes.cast(at, ctypes.POINTER(its))[0] for at, its in zip(arguments, sizes, strict=True)]
        return self.status

    def cuOccupancyMaxActiveClusters(self, count, function, config) -> int:
        assert function.value == 7
        self._read(config._obj)
        count._obj.value = 66
        return self.status

    def _read(self, config) -> None:
        self.grid = tuple(config.grid)
        found = (config.attributes[i] for i in range(config.attribute_count))
        self.attributes = {each.id: tuple(each.value) for each in found}


@pytest.mark.parametrize(
    ("dependent", "cluster", "attributes"),
    [(False, 1, {}), (True, 1, {6: (1, 0, 0)}), (False, 3, {4: (3, 1, 1)}), (True, 8, {4: (8, 1, 1), 6: (1, 0, 0)})],
)
def test_the_driver_is_asked_for_both(monkeypatch, dependent, cluster, attributes):
    driver = Driver()
    monkeypatch.setattr(dependent_launch, "_driver", lambda: driver)
    arguments = np.uint64(2**40 + 1), np.int32(-5)
    dependent_launch.launch(7, (cluster * 5,), 128, 1024, 0, arguments, dependent=dependent, cluster=cluster)
    assert (driver.grid, driver.attributes) == ((cluster * 5, 1, 1), attributes)
    assert driver.arguments == [2**40 + 1, -5]


def test_refusals_of_the_driver(monkeypatch):
    monkeypatch.setattr(dependent_launch, "_driver", lambda: Driver(912))
    with pytest.raises(KernelError, match=r"CUDA error 912, grid \(8,\), clusters of 4"):
        dependent_launch.launch(7, (8,), 128, 0, 0, (np.uint64(0), np.int32(0)), dependent=False, cluster=4)
    assert dependent_launch.active_clusters(7, 128, 0, 4) == 0, "it cannot tell: such clusters are not to be used"


def test_clusters_that_a_device_holds(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(dependent_launch, "_driver", lambda: driver)
    assert dependent_launch.active_clusters(7, 640, 2**17, 6) == 66
    assert driver.grid[0] % 6 == 0
    assert driver.attributes == {4: (6, 1, 1)}


def test_sizes_of_clusters_that_a_device_lacks_are_left_out(monkeypatch):
    op, function = next(iter(OPS.values())), SimpleNamespace(ptr=7)
    counts = {2: 66, 3: 42, 4: 30, 5: 24, 6: 20, 7: 0, 8: 14}
    monkeypatch.setattr(loader, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(loader, "loader", lambda _: SimpleNamespace(function=lambda _: function))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(dependent_launch, "active_clusters", lambda *arguments: counts[arguments[-1]])
    monkeypatch.setattr(loader, "_can_depend", lambda _: True)
    assert loader.held_clusters(op, 1024, 0) == {1: 132, 2: 66, 3: 42, 4: 30, 5: 24, 6: 20, 8: 14}
    monkeypatch.setattr(loader, "_can_depend", lambda _: False)
    assert loader.held_clusters(op, 1024, 0) == {1: 132}
