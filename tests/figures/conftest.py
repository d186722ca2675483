"""Pictures are drawn without a window, and closed after each test."""

import matplotlib as mpl
import pytest


@pytest.fixture(autouse=True)
def _agg():
    mpl.use("Agg")
    yield
    mpl.pyplot.close("all")
