"""What a load is, before anybody sends it: how many requests of which sizes, and when."""

from dataclasses import dataclass
from pathlib import Path

from deepinfer_lab.errors import SettingError
from deepinfer_lab.workload.arrivals import gamma
from deepinfer_lab.workload.trace_file import read_trace

SEED = 0  # every run and every round draws the same arrivals


@dataclass(frozen=True)
class Load:
    """A closed-loop load: `concurrency` clients, each sending `requests_per_client` requests one after the other.

    Raises:
        SettingError: a size below 1.
    """

    concurrency: int
    prompt_tokens: int = 128
    output_tokens: int = 64
    requests_per_client: int = 2

    def __post_init__(self) -> None:
        _check_sizes(**vars(self))


@dataclass(frozen=True)
class OpenLoad:
    """An open-loop load: requests that are sent when they are due, whatever is still running.

    Attributes:
        name: "poisson", "gamma" or "trace".
        due: when to send each, in seconds from the start, nondecreasing.
        sizes: prompt and output tokens of each.
        max_concurrency: the most at a time; requests beyond it are sent late. None sets no limit.
        skipped: rows of a trace that were left out because they have no tokens.
    """

    name: str
    due: tuple[float, ...]
    sizes: tuple[tuple[int, int], ...]
    max_concurrency: int | None = None
    skipped: int = 0

    @classmethod
    def drawn(
        cls, name: str, rate: float, cv: float, requests: int, prompt_tokens: int, output_tokens: int,
        max_concurrency: int | None = None,
    ) -> "OpenLoad":  # fmt: skip
        """Requests of one size with gamma-distributed gaps. For `rate` and `cv`, and errors, see `arrivals.gamma`."""
        _check_sizes(requests=requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        due = gamma(rate, requests, cv, SEED)
        return cls(name, due, ((prompt_tokens, output_tokens),) * requests, max_concurrency)

    @classmethod
    def replayed(
        cls, path: Path, *, limit: int | None = None, speed_up: float = 1.0, max_concurrency: int | None = None
    ) -> "OpenLoad":
        """The requests of a CSV trace. For arguments and errors see `trace_file.read_trace`."""
        trace = read_trace(path, limit=limit, speed_up=speed_up)
        return cls(
            "trace",
            tuple(each.at_s for each in trace.arrivals),
            tuple((each.input_tokens, each.output_tokens) for each in trace.arrivals),
            max_concurrency,
            trace.skipped,
        )


@dataclass(frozen=True)
class InsertionLoad:
    """`readers` requests decode, and then a prompt of `document_tokens` comes in.

    Raises:
        SettingError: a size below 1.
    """

    readers: int = 8
    prompt_tokens: int = 128
    document_tokens: int = 2048

    def __post_init__(self) -> None:
        _check_sizes(**vars(self))


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise SettingError(f"{name.replace('_', '-')} {value}: allowed is 1 or more")
