import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
from jupyter_client.manager import start_new_kernel

from deepinfer_lab.figures import explore
from deepinfer_lab.kernels import maps, resources

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SIZES = (16, 32, 64, 128)
MEASURED = pd.DataFrame(
    [
        {"bits": 4, "m": 1, "n": 64, "k": 128, "kernel": "w4_gemv", "us": 2.0},
        {"bits": 4, "m": 512, "n": 64, "k": 128, "kernel": "w4_tiled_gemm", "us": 4.0},
        {"bits": 4, "m": 1, "n": 64, "k": 128, "kernel": "dequant_cublas", "us": 1.0},
        {"bits": 4, "m": 1, "n": 64, "k": 128, "kernel": "w4_dequantise_cublas", "us": 1.0},
        *(
            {"bits": 4, "m": 512, "n": 64, "k": 128, "kernel": f"w4_{kind}", "us": 1.0}
            for kind in ("mma_small", "mma_block", "wide")
        ),
        {"bits": 4, "m": 1, "n": 64, "k": 256, "kernel": "w4_gemv", "us": 3.0},
        {"bits": 3, "m": 1, "n": 64, "k": 128, "kernel": "w3_gemv", "us": 5.0},
        {"bits": 16, "m": 1, "n": 64, "k": 128, "kernel": "cublas_fp16", "us": 1.0},
    ]
)
CHUNKS = pd.DataFrame(
    {
        "policy": ["serial", "serial", "priority"],
        "chunk": [128, 512, 128],
        "disturbed_itl_ms": [[1.0, 2.0, 9.0], [4.0], [1.0, 3.0]],
        "document_ttft_ms": [50.0, 30.0, 60.0],
    }
)


def test_the_kernel_s_own_tile():
    assert explore.tile_bytes(maps.BM, maps.BN, maps.BK) == sum(maps.shared_bytes().values())
    assert explore.accumulators(maps.BM, maps.BN) == maps.output_map().row.shape[1]


@pytest.mark.parametrize("card", resources.CARDS)
def test_limits_of_a_tile_are_those_of_the_occupancy_that_follows(card: str):
    arch = resources.CARDS[card]
    for bm, bn, bk in itertools.product(SIZES, SIZES, SIZES):
        table = explore.tile_limits(bm, bn, bk, card).set_index("limit")
        assert table["decides"].sum() == 1
        assert table.loc[table["decides"], "blocks"].item() == table["blocks"].min()
        shared = explore.tile_bytes(bm, bn, bk)
        found = resources.occupancy(arch, maps.THREADS, explore.accumulators(bm, bn), shared)
        decisive = table[table["decides"]]
        assert (decisive.index.item(), decisive["blocks"].item()) == (found.limiter, found.blocks)
        assert decisive["occupancy"].item() == found.fraction
        assert table.at["shared memory", "blocks"] * shared <= resources.LIMITS[arch].shared


def test_a_tile_that_fits_no_multiprocessor_gets_no_block():
    table = explore.tile_limits(1024, 1024, 128, "A10").set_index("limit")
    assert table.loc[table["decides"], "blocks"].item() == 0


def test_roofline_by_hand():
    table = explore.roofline(MEASURED, 4, 64, 128, group=64, bandwidth=1e9, peak=1e10)
    assert table["kernel"].tolist() == ["w4_gemv", "w4_tiled_gemm"]  # not what uses tensor cores, another k, other bits
    weights = 64 * 128 * (0.5 + 2 / 64)
    one, many = 2 * 64 * 128 / (weights + (64 + 128) * 2), 512 * 2 * 64 * 128 / (weights + 512 * (64 + 128) * 2)
    np.testing.assert_allclose(table["intensity"], [one, many])
    assert table["bound"].tolist() == ["memory", "arithmetic"]
    np.testing.assert_allclose(table["roof_tflops"], [one * 1e9 / 1e12, 0.01])
    np.testing.assert_allclose(table["tflops"], [2 * 64 * 128 / 2e-6 / 1e12, 512 * 2 * 64 * 128 / 4e-6 / 1e12])
    np.testing.assert_allclose(table["share"], table["tflops"] / table["roof_tflops"])


def test_gaps_are_pooled_by_policy_and_chunk():
    table = explore.gaps(CHUNKS)
    assert table["max"].tolist() == [3.0, 4.0, 9.0]
    assert table["p50"].tolist() == [2.0, 4.0, 2.0]
    assert table["policy"].tolist() == ["priority", "serial", "serial"]
    assert table["document_ttft_ms"].tolist() == [60.0, 30.0, 50.0]


class Widgets:
    """Stands for ipywidgets: `interact` draws once for each option of each control."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.drawn = 0
        self.Dropdown, self.SelectionSlider = (
            lambda kind=kind, **settings: SimpleNamespace(kind=kind, **settings) for kind in ("menu", "slider")
        )

    def interact(self, draw: Any, **controls: Any) -> None:
        self.kinds = {name: control.kind for name, control in controls.items()}
        first = {name: control.value for name, control in controls.items()}
        assert all(control.value in control.options for control in controls.values())
        for name, control in controls.items():
            for option in control.options:
                draw(**{**first, name: option})
                plt.close()
                self.drawn += 1


@pytest.fixture
def widgets(monkeypatch: pytest.MonkeyPatch) -> Widgets:
    found = Widgets()
    monkeypatch.setitem(sys.modules, "ipywidgets", found)
    monkeypatch.setattr(explore, "watched", lambda: True)
    monkeypatch.setattr(plt, "show", lambda: None)
    return found


def test_every_choice_draws(widgets: Widgets, capsys: pytest.CaptureFixture[str]):
    explore.explore_tiles()
    assert widgets.kinds == {"card": "menu", "bm": "slider", "bn": "slider", "bk": "slider"}
    explore.explore_roofline(MEASURED, group=64, bandwidth=1e9, peak=1e10)
    assert widgets.kinds == {"shape": "menu", "bits": "slider", "m": "slider"}
    explore.explore_chunks(CHUNKS)
    assert widgets.kinds == {"policy": "menu", "chunk": "slider"}
    assert widgets.drawn == len(resources.CARDS) + 4 + 5 + 4 + 2 + 2 + 2 + 2 + 2
    assert "6,208 bytes of shared memory, 8 accumulators" in capsys.readouterr().out


def test_without_ipywidgets_it_says_how_to_install(widgets: Widgets, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    explore.explore_tiles()
    assert "pip install -e '.[explore]'" in capsys.readouterr().out


def test_nobody_watches_plain_python(capsys: pytest.CaptureFixture[str]):
    explore.explore_tiles()
    assert capsys.readouterr().out == ""


def test_a_frontend_watches_and_papermill_does_not():
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        for watched in (True, False):
            printed: list[str] = []
            client.execute_interactive(
                "from deepinfer_lab.figures.explore import watched\nprint(watched())",
                allow_stdin=watched, stdin_hook=lambda _: None, timeout=60,
                output_hook=lambda message, out=printed: out.append(message["content"].get("text", "")),
            )  # fmt: skip
            assert "".join(printed).strip() == str(watched)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("name", ["01_tiled_gemm", "04_itl_analysis"])
def test_in_a_published_notebook_a_skipped_cell_has_no_output(name: str):
    cells = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
    skipped = [cell for cell in cells if "nbval-skip" in cell.metadata.get("tags", [])]
    assert skipped
    for cell in skipped:
        assert "explore." in cell.source
        assert cell.outputs == []
