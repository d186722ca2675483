"""Measure experiments without their notebooks:  python -m deepinfer_lab.lab.measure [--again] NAME ...

Records go to build/data/, as those of notebooks do, and are published with them. One process measures all of them, so that a
model which neighbours share is loaded once. What an earlier run has finished is kept, unless `--again` is given.
"""

import os
import sys
import time
import traceback

from deepinfer_lab.errors import SettingError
from deepinfer_lab.lab import experiment, journal, project
from deepinfer_lab.lab.experiments import EXPERIMENTS


def main(arguments: list[str]) -> int:
    """Measure, and say what came of it.

    Returns:
        The exit status: 1 if an experiment failed or was cut short. The others are measured all the same.

    Raises:
        SettingError: no name, or one that no experiment has.
    """
    names = [name for name in arguments if name != "--again"]
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown or not names:
        raise SettingError(f"experiment {unknown[0] if unknown else 'missing'!r}: allowed are {', '.join(EXPERIMENTS)}")
    if len(names) < len(arguments):
        os.environ[experiment.AGAIN] = "1"
    outcomes = project.build() / "measure.outcomes.jsonl"
    started, bad = time.monotonic(), 0
    with journal.kept_in(outcomes):
        for name in names:
            try:
                record = experiment.measure(EXPERIMENTS[name], experiment.complete(EXPERIMENTS[name], {}))
            except Exception:
                traceback.print_exc()
                bad = 1
            else:
                print(experiment.banner(record), flush=True)
                bad |= not record.whole
    status = "incomplete" if bad else "done"
    print(journal.table([("(none)", status, time.monotonic() - started, journal.read(outcomes))]))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
