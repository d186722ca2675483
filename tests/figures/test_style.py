import re
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from deepinfer_lab.errors import SettingError
from deepinfer_lab.figures import style

DRAW = """
import sys
from pathlib import Path
import matplotlib
import pandas as pd
matplotlib.use("Agg")
from deepinfer_lab.figures import style
fig, axes = style.figure()
axes[0, 0].plot([1, 2, 3], [1, 4, 9], marker="o", label="n²")
axes[0, 0].legend()
style.label(axes[0, 0], "Squares", "n", "square")
style.save(fig, Path(sys.argv[1]), "squares", pd.DataFrame({"n": [1, 2, 3]}))
"""


def test_two_processes_write_the_same_bytes(tmp_path: Path):
    for folder in ("a", "b"):
        subprocess.run([sys.executable, "-c", DRAW, str(tmp_path / folder)], check=True)
    first = (tmp_path / "a" / "squares.svg").read_bytes()
    assert first == (tmp_path / "b" / "squares.svg").read_bytes()
    text = first.decode()
    assert "<dc:date>" not in text
    assert "matplotlib.org" not in text.replace("Created with matplotlib (https://matplotlib.org/)", "")
    assert not re.search(r"Matplotlib v\d", text)


def test_save_follows_the_drawing(tmp_path: Path):
    fig, axes = style.figure(1, 2)
    assert axes.shape == (1, 2)
    assert fig.get_size_inches()[0] * fig.dpi == 900
    table, path = pd.DataFrame({"a": [1]}), tmp_path / "a.svg"
    style.save(fig, tmp_path, "a", table)
    empty = path.read_bytes()
    axes[0, 0].plot([1, 2])
    style.save(fig, tmp_path, "a", table)
    assert path.read_bytes() != empty


def test_a_picture_holds_the_fingerprint_of_its_table(tmp_path: Path):
    fig, _ = style.figure()
    for table in (pd.DataFrame({"a": [1]}), pd.DataFrame({"a": [2]})):
        line = style.save(fig, tmp_path, "a", table)
        assert line == style.fingerprint(table, "a")
        assert style.described(tmp_path / "a.svg") == line
    (tmp_path / "b.svg").write_text("<svg/>")
    assert style.described(tmp_path / "b.svg") is None


def test_style_is_put_back():
    before = mpl.rcParams.copy()
    with style.style():
        colours = [mpl.colors.to_hex(colour) for colour in mpl.rcParams["axes.prop_cycle"].by_key()["color"]]
        assert colours == [colour.lower() for colour in style.PALETTE]
        assert mpl.rcParams != before
    assert mpl.rcParams == before


def luminance_gap(first: str, second: str, matrix: np.ndarray) -> float:
    """Distance of two colours as seen through a matrix on linear RGB (0..1)."""
    pair = np.array([mpl.colors.to_rgb(first), mpl.colors.to_rgb(second)])
    linear = np.where(pair <= 0.04045, pair / 12.92, ((pair + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ matrix.T, 0, 1)
    return float(np.abs(np.sqrt(seen[0]) - np.sqrt(seen[1])).sum())


# Full dichromacy on linear RGB: Machado, Oliveira and Fernandes 2009, table 1, severity 1.0.
PROTANOPIA = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]


@pytest.mark.parametrize("matrix", [np.eye(3), np.array(PROTANOPIA), np.array(DEUTERANOPIA)])
def test_every_two_colours_stay_apart_without_red_or_green_cones(matrix: np.ndarray):
    gaps = [luminance_gap(a, b, matrix) for i, a in enumerate(style.PALETTE) for b in style.PALETTE[:i]]
    assert min(gaps) > 0.2
    assert luminance_gap("#e00000", "#8a6000", np.array(DEUTERANOPIA)) < 0.2  # the measure does see a bad pair


def test_fingerprint_is_known_and_matches_its_pattern():
    table = pd.DataFrame({"time_ms": [1.0, 2.5], "lane": ["a", "b"]})
    line = style.fingerprint(table, "00_timeline")
    assert line == "table 00_timeline: 2 rows x 2 columns, sha256 " + EXPECTED
    assert style.FINGERPRINT.fullmatch(line)


EXPECTED = "81de42dc94ab"


def test_fingerprint_ignores_noise_and_index_but_not_values():
    table = pd.DataFrame({"time_ms": [1.0, 2.5]})
    line = style.fingerprint(table, "a")
    assert style.fingerprint(table * (1 + 1e-12), "a") == line
    assert style.fingerprint(table.set_index(pd.Index([7, 8])), "a") == line
    assert style.fingerprint(table + 0.001, "a") != line
    assert style.fingerprint(table.rename(columns={"time_ms": "time_s"}), "a") != line
    assert style.fingerprint(table.iloc[::-1], "a") != line


@pytest.mark.parametrize("name", ["", "../a", "a b", "a.svg"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str):
    fig, _ = style.figure()
    with pytest.raises(SettingError, match="picture name"):
        style.save(fig, tmp_path, name, pd.DataFrame({"a": [1]}))
    with pytest.raises(SettingError, match="picture name"):
        style.fingerprint(pd.DataFrame({"a": [1]}), name)
