"""What came of each experiment of a run. The kernels that measure write it, and the process that started them reads it."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

BEGUN = "broken off"  # what stays of an experiment whose process dies
VARIABLE = "DEEPINFER_JOURNAL"  # names the file; where it is not set, nobody keeps one


@dataclass(frozen=True)
class Outcome:
    """One experiment. `status` is its record's, or "replayed", "kept" (an earlier run's), "failed: <error>", or `BEGUN`."""

    experiment: str
    status: str
    seconds: float


@contextmanager
def kept_in(path: Path) -> Iterator[None]:
    """Keep a journal in a new file at `path`, in this process and in those that it starts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("", encoding="utf-8")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(path)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def note(experiment: str, status: str, seconds: float = 0.0) -> None:
    """Write down an outcome, where a journal is kept."""
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(Outcome(experiment, status, seconds))) + "\n")


def read(path: Path) -> list[Outcome]:
    """The outcomes in a journal, in their order."""
    found: list[Outcome] = []
    for outcome in (Outcome(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()):
        if found and (found[-1].experiment, found[-1].status) == (outcome.experiment, BEGUN):
            found.pop()
        found.append(outcome)
    return found


def table(runs: Sequence[tuple[str, str, float, Sequence[Outcome]]]) -> str:
    """A summary: for each (name, status, seconds, outcomes) a line for the whole and one for each experiment."""
    lines = [f"{'notebook':<28} {'experiment':<22} {'status':<22} {'seconds':>7}"]
    for name, status, seconds, outcomes in runs:
        lines.append(f"{name:<28} {'':<22} {status:<22} {seconds:>7.0f}")
        lines += [f"{'':<28} {each.experiment:<22} {each.status:<22} {each.seconds:>7.0f}" for each in outcomes]
    return "\n".join(lines)
