"""Where each bit of a weight in tiles lies, found by re-packing: a picture of what `quant.tiles` does, not of what it says."""

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from deepinfer_lab.figures.style import PALETTE, label
from deepinfer_lab.quant.layout import PackedWeight, pack
from deepinfer_lab.quant.tiles import FIRST_WORDS, LANES, to_tiles

UNIT_N, UNIT_K, RUN = 16, 128, 8  # outputs and k of a unit; neighbours along k that one lane holds


def unit_table(bits: int) -> pd.DataFrame:
    """One row a bit of a unit of 16 outputs by 128 of k, sorted by its place.

    Weights whose bits spell their own number are re-packed, a bit of the number at a time, so that each place in the tile tells
    whose it is.

    Returns:
        Columns lane, word (of the lane's), bit (of the word, 0 the lowest), n, k, value_bit.
    """
    numbers = np.arange(UNIT_N * UNIT_K).reshape(UNIT_N, UNIT_K)
    parts = []
    for value_bit in range(bits):
        places = np.flatnonzero(_places(np.ones_like(numbers), value_bit, bits))
        number = np.zeros(len(places), dtype=int)
        for digit in range(int(numbers.max()).bit_length()):
            number |= _places(numbers >> digit & 1, value_bit, bits)[places].astype(int) << digit
        word, bit = places // 32, places % 32
        first = word < LANES * FIRST_WORDS  # the first words of all lanes come before the rest
        rest, more = word - LANES * FIRST_WORDS, 2 * bits - FIRST_WORDS
        parts.append(
            pd.DataFrame(
                {
                    "lane": np.where(first, word // FIRST_WORDS, rest // more),
                    "word": np.where(first, word % FIRST_WORDS, FIRST_WORDS + rest % more),
                    "bit": bit,
                    "n": number // UNIT_K,
                    "k": number % UNIT_K,
                    "value_bit": value_bit,
                }
            )
        )
    return pd.concat(parts).sort_values(["lane", "word", "bit"], ignore_index=True)


def draw_lanes(axes: Axes, table: pd.DataFrame, title: str) -> None:
    """The unit, outputs down and k across: a lane's number on each run of eight that it holds, a colour for each of four lanes.

    Args:
        table: as `unit_table` returns it.
    """
    cells = table.drop_duplicates(["n", "k"]).pivot(index="n", columns="k", values="lane").to_numpy()
    for n in range(UNIT_N):
        for k in range(0, UNIT_K, RUN):
            (lane,) = set(cells[n, k : k + RUN])
            colour = PALETTE[lane % 4]
            axes.add_patch(Rectangle((k, n), RUN, 1, facecolor=colour, alpha=0.75, edgecolor="white", linewidth=0.8))
            axes.text(k + RUN / 2, n + 0.5, str(lane), ha="center", va="center", fontsize=8)
    axes.set(xlim=(0, UNIT_K), ylim=(UNIT_N, 0))
    axes.set_xticks(range(0, UNIT_K + 1, 16))
    axes.set_yticks([0.5, 7.5, 8.5, 15.5], ["0", "7", "8", "15"])
    axes.grid(visible=False)
    label(axes, title, "k in the unit", "output")


def draw_words(axes: Axes, table: pd.DataFrame, lane: int, title: str) -> None:
    """A lane's words, highest bit first: on each field the k of its value, in the colour of its output.

    Args:
        table: as `unit_table` returns it.
    """
    mine = table[table["lane"] == lane]
    outputs = sorted(mine["n"].unique())
    for (word, n, k), bits in mine.groupby(["word", "n", "k"]):
        left, width = 31 - bits["bit"].max(), len(bits)
        colour = PALETTE[outputs.index(n)]
        axes.add_patch(Rectangle((left, word), width, 1, facecolor=colour, alpha=0.6, edgecolor="white", linewidth=1))
        size = 8 if width > 1 else 6
        axes.text(left + width / 2, word + 0.5, str(k), ha="center", va="center", fontsize=size)
    words = mine["word"].max() + 1
    axes.axvline(16, color="black", linewidth=1.2)
    axes.set(xlim=(0, 32), ylim=(words, 0))
    axes.set_xticks([0.5, 15.5, 16.5, 31.5], ["31", "16", "15", "0"])
    axes.set_yticks([word + 0.5 for word in range(words)], [str(word) for word in range(words)])
    axes.grid(visible=False)
    label(axes, title, "bit", "word")


def _places(values: np.ndarray, value_bit: int, bits: int) -> np.ndarray:
    """Which bits of the tile are set, lowest first, where each value has `value_bit` set or no bit at all."""
    stored = torch.from_numpy(values << value_bit) - (1 << bits - 1)
    packed = pack(stored.to(torch.int8), bits)
    weight = PackedWeight(bits, UNIT_K, UNIT_N, UNIT_K, packed, torch.ones(UNIT_N, 1, dtype=torch.float16))
    return np.unpackbits(to_tiles(weight).tiles.numpy().reshape(-1), bitorder="little").astype(bool)
