"""How long a forward pass will take, judged by those that ran."""

from math import sqrt

import numpy as np

SHORTEST_MS, LONGEST_MS = 1e-6, 1e9  # a clock that shows less or more shows nothing
GRANULE = 64  # chunk sizes are multiples of this many tokens
HANDFUL = 5  # observations before anything is predicted
MEMORY = 0.9  # of what is known about an observed size, the part that outlives the next observation of it
NOISE = 0.1  # relative error of a timing, as far as it weighs against what is supposed before any
FAR = 5.0  # a timing that many times above or below its prediction is an accident, such as a launch that compiles,
BELIEVED = 3  # unless there are so many of them, without a handful of others between two


class CostModel:
    """Predicts the milliseconds of a forward pass, learnt from the engine's own timings.

    Prefill of a chunk: a + b·tokens + c·tokens·context, with the mean context start + tokens/2.
    Decode: d + e·rows + f·context, with the context of all rows together.
    Weights are read once a pass (a, d), layers work for each token (b, e), attention for each pair of tokens (c, f).

    It knows what it is fed: timings of a phase that shared the device predict how it does when it shares the device.
    """

    def __init__(self) -> None:
        self._prefill, self._decode = _Fit(), _Fit()

    def observe_prefill(self, tokens: int, start: int, ms: float) -> None:
        """A chunk of `tokens` tokens behind `start` others took `ms`. A time that no pass can take is ignored."""
        self._prefill.observe(tokens, _prefill_terms(tokens, start), ms)

    def observe_decode(self, rows: int, total_context: int, ms: float) -> None:
        """A step of `rows` requests with `total_context` tokens in their caches took `ms`."""
        self._decode.observe((rows, total_context), (1, rows, total_context), ms)

    def prefill_ms(self, tokens: int, start: int) -> float | None:
        """None before a handful of chunks, of two sizes at least, has been seen."""
        return self._prefill.ms(_prefill_terms(tokens, start)) if self._prefill.known else None

    def decode_ms(self, rows: int, total_context: int) -> float | None:
        """None before a handful of steps, with two different contexts or row counts at least, has been seen."""
        return self._decode.ms((1, rows, total_context)) if self._decode.known else None

    @property
    def wants_another_chunk_size(self) -> bool:
        """Whether a handful of chunks has been seen, but all of one size: a line needs two points."""
        return self._prefill.count >= HANDFUL and not self._prefill.known

    def prefill_tokens_within(self, ms: float, start: int, most: int, granule: int = GRANULE) -> int | None:
        """The largest chunk that is predicted to take no longer than `ms`.

        Solves c/2·t² + (b + c·start)·t + a = ms for its positive root.

        Returns:
            A multiple of `granule`, at least one granule however little time there is, or `most` where that is less.
            None where `prefill_ms` is None.
        """
        assert most >= 1
        assert granule >= 1
        if self.prefill_ms(most, start) is None:
            return None
        a, b, c = self._prefill.costs
        room, slope = ms - a, b + c * start
        if room <= 0:
            return min(granule, most)
        steepness = slope + sqrt(slope * slope + 2 * c * room)  # t = 2·room/steepness, which holds for c = 0 too
        if 2 * room >= steepness * most:
            return most
        return min(most, max(granule, int(2 * room / steepness) // granule * granule))


def _prefill_terms(tokens: int, start: int) -> tuple[float, float, float]:
    return 1, tokens, tokens * (start + tokens / 2)


class _Fit:
    """ms = costs · terms, with three costs that are not negative, from observations that come one at a time.

    Recursive least squares on relative errors, so that 1% weighs the same for a small chunk as for a large one: terms and ms
    are divided by the ms that are predicted. While little is known they are divided by ms itself, so that a launch that
    compiled weighs next to nothing. With the costs θ, their covariance P, terms φ and ms y after the division, s = φᵀPφ, and
    the memory λ:

        θ ← θ + Pφ·(y - φᵀθ) / (λ + s)
        P ← P + Pφφᵀ P·((1 - λ)/s - 1/(λ + s)) / λ

    That is directional forgetting (Kulhavý, "Restricted exponential forgetting in real-time identification", Automatica 23,
    1987), with the forgetting before the update: s becomes s/λ, then the observation comes in. Exponential forgetting has the
    same gain, but divides all of P by λ. A scheduler runs the same size for minutes, and by then everything about other sizes
    would be forgotten. Here an observation ages only what is known about its own direction.

    P is kept as LLᵀ, so that rounding cannot make it indefinite (Potter's square root; Bierman, "Factorization Methods for
    Discrete Sequential Estimation", 1977). With g = Lᵀφ the second line becomes L ← L + Lggᵀ·(1/√(λ + s) - 1) / s.

    At first each cost is taken for a third of the first observation, give or take all of that, so that units do not matter.
    P is in units of a timing's own variance.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.count = 0  # of the observations that made the fit
        self.costs = [0.0, 0.0, 0.0]
        self._unbound = np.zeros(3)  # the same before negative ones were ruled out
        self._root = np.zeros((3, 3))  # L
        self._first_size: object = None
        self._sizes_differ = False
        self._far: list[tuple[object, tuple[float, ...], float]] = []  # left out, until there are enough of them
        self._since_far = 0

    @property
    def known(self) -> bool:
        return self.count >= HANDFUL and self._sizes_differ

    def ms(self, terms: tuple[float, ...]) -> float | None:
        """What the fit says, however little it knows. None for nothing or less."""
        (a, b, c), (x, y, z) = self.costs, terms
        return a * x + b * y + c * z or None

    def observe(self, size: object, terms: tuple[float, ...], ms: float) -> None:
        """Take a timing. `size` tells which ones are of the same size."""
        assert min(terms) > 0
        if not SHORTEST_MS <= ms <= LONGEST_MS:
            return
        predicted = self.ms(terms) or ms
        # A fit that knows little may predict far too much, for one size from another, or after launches that compiled.
        if ms <= FAR * predicted and (predicted <= FAR * ms or not self.known):
            self._take(size, terms, ms)
            self._since_far += 1
            if self._since_far == HANDFUL:
                self._far.clear()
            return
        self._since_far = 0
        self._far.append((size, terms, ms))
        if len(self._far) == BELIEVED:  # no accident: the machine is another one, or this work is unlike all before
            far = self._far
            self._forget()
            for observation in far:
                self._take(*observation)

    def _take(self, size: object, terms: tuple[float, ...], ms: float) -> None:
        x = np.array(terms, dtype=float)
        if self.count == 0:
            self._first_size = size
            self._unbound = ms / 3 / x
            self._root = np.diag(ms / x / NOISE)
        else:
            self._sizes_differ |= size != self._first_size
            scale = (self.ms(terms) if self.known else None) or ms
            row = x / scale
            error = ms / scale - row @ self._unbound
            g = row @ self._root
            s = g @ g
            toward = self._root @ g
            self._unbound = self._unbound + toward * (error / (MEMORY + s))
            self._root = self._root + np.outer(toward, g) * ((1 / sqrt(MEMORY + s) - 1) / s)
        self.count += 1
        self.costs = _without_negatives(self._unbound, self._root)


def _without_negatives(costs: np.ndarray, root: np.ndarray) -> list[float]:
    """Negative costs become 0, one after the other, and the rest moves as it co-varies: to its mean, given those zeros.

    Without that the fit would no longer go through what was observed.
    """
    while (costs < 0).any():
        i = np.flatnonzero(costs < 0)[-1]
        column = root @ root[i] / (root[i] @ root[i])
        costs = costs - column * costs[i]
        root = root - np.outer(column, root[i])
        costs[i] = root[i] = 0.0  # exactly
    return costs.tolist()
