"""The layouts that the driver expects (cuda.h), and that kernels which are launched so do await."""

import ctypes
import re

from deepinfer_lab.kernels import dependent_launch
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
