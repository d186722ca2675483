"""TeX formulas as pictures, for pages that load no script to draw them."""

import io
import re
from functools import reduce

import matplotlib
from matplotlib.mathtext import math_to_image

# TeX that matplotlib spells otherwise, or does without.
SPELLINGS = (
    (r"\\ge(?![a-zA-Z])", r"\\geq"),
    (r"\\le(?![a-zA-Z])", r"\\leq"),
    (r"\\nolimits", ""),
    (r"\\bigl", r"\\left"),
    (r"\\bigr", r"\\right"),
    (r"\\sqrt (\w)", r"\\sqrt{\1}"),
)


def draw_formula(tex: str) -> tuple[str, float]:
    """A formula in black on nothing, in 12 points; the same formula gives the same bytes.

    Args:
        tex: without dollars, in the part of TeX that matplotlib's mathtext reads, and `SPELLINGS`.

    Returns:
        The SVG, and how many points of it lie under the line of text that it stands in.

    Raises:
        ValueError: mathtext cannot read it.
    """
    known = reduce(lambda text, pair: re.sub(*pair, text), SPELLINGS, " ".join(tex.split()))
    picture = io.BytesIO()
    with matplotlib.rc_context({"savefig.transparent": True, "svg.hashsalt": "deepinfer-lab", "svg.fonttype": "path"}):
        depth = math_to_image(f"${known}$", picture, format="svg")
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", picture.getvalue().decode(), flags=re.DOTALL)  # it holds the date
    return text[text.index("<svg") :], float(depth)
