"""Measure experiments without their notebooks:  python -m deepinfer_lab.lab.measure NAME ...

Records go to build/data/, as those of notebooks do, and are published with them. One process measures all of them, so that a
model which neighbours share is loaded once.
"""

import sys

from deepinfer_lab.errors import SettingError
from deepinfer_lab.lab import experiment
from deepinfer_lab.lab.experiments import EXPERIMENTS


def main(names: list[str]) -> None:
    """Measure and say what came of it.

    Raises:
        SettingError: no name, or one that no experiment has.
    """
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown or not names:
        raise SettingError(f"experiment {unknown[0] if unknown else 'missing'!r}: allowed are {', '.join(EXPERIMENTS)}")
    for name in names:
        asked = experiment.complete(EXPERIMENTS[name], {})
        print(experiment.banner(experiment.measure(EXPERIMENTS[name], asked)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
