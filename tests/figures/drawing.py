"""What the tests of pictures draw on, and what they read off it."""

from matplotlib.axes import Axes

from deepinfer_lab.figures import style


def axes() -> Axes:
    return style.figure()[1][0, 0]


def texts(drawn: Axes) -> list[str]:
    return [text.get_text() for text in drawn.texts]
