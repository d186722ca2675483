"""What the inputs of a model's linear layers look like, one block at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from deepinfer_lab.errors import SettingError
from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.model.decoder import Block, Decoder, Linear
from deepinfer_lab.model.reference_text import reference_text
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.tokenizer import Tokenizer

BLOCK_SIZE = 16
SKIPPED = 8192  # tokens at the text's beginning, which evaluations read


@dataclass(frozen=True)
class Calibration:
    """Texts that a model reads while it is quantised: `windows` of equal length, as token ids."""

    windows: tuple[tuple[int, ...], ...]


def default_calibration(tokenizer: Tokenizer, windows: int = 32, length: int = 512) -> Calibration:
    """Windows cut from the reference behind Python's `help()`, one after the other, from token 8,192 on.

    Raises:
        SettingError: the text is too short.
    """
    return calibration_from(tokenizer, reference_text(), windows, length, SKIPPED)


def calibration_from(tokenizer: Tokenizer, text: str, windows: int, length: int, skip: int = 0) -> Calibration:
    """`windows` windows of `length` tokens from a text, after its first `skip` tokens.

    Raises:
        SettingError: the text is too short.
    """
    tokens = tokenizer.encode(text)[skip:]
    if len(tokens) < windows * length:
        raise SettingError(
            f"calibration text of {len(tokens):,} tokens: {windows} windows of {length} need {windows * length:,}"
        )
    return Calibration(tuple(tuple(tokens[i * length : (i + 1) * length]) for i in range(windows)))


class _Tap:
    """Stands before a linear layer and adds up x x^T of all that goes in."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self._sum: torch.Tensor | None = None
        self._rows = 0
        self.fused_rows = linear.fused_rows  # says in which order gate_up's outputs are

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.float()
        if self._sum is None:
            self._sum = torch.zeros(x.shape[1], x.shape[1], device=x.device)
        self._sum.addmm_(rows.T, rows)
        self._rows += len(rows)
        return self._linear(x)

    @property
    def gram(self) -> torch.Tensor:
        """The mean."""
        return self._sum / self._rows


LINEARS = tuple(field.name for field in fields(Block) if field.name in ("qkv", "o", "gate_up", "down"))


class Passage:
    """The calibration texts on their way through a model. Memory: their hidden states, and one block's."""

    def __init__(self, model: Decoder, calibration: Calibration) -> None:
        """`model` needs no blocks: those come one by one."""
        self._model = model
        length, device = len(calibration.windows[0]), model.device
        blocks = range(-(-length // BLOCK_SIZE))
        self._step = StepInput.build([Span((0,) * length, 0, blocks)], BLOCK_SIZE, device)
        shape = KVShape(1, model.config.num_kv_heads, model.config.head_dim, model.dtype)
        self._kv = KVPool(shape, len(blocks), BLOCK_SIZE, device)
        tokens = torch.tensor(calibration.windows, device=device)
        self._states = [model.embed(window) for window in tokens]

    def observe(self, block: Block, *, move: bool) -> dict[str, torch.Tensor]:
        """Let the texts pass a block: the mean of x x^T, float32 [K, K], of the inputs of each of `LINEARS`.

        Args:
            move: go on from where the block leaves them; otherwise they stay before it.
        """
        taps = {name: _Tap(getattr(block, name)) for name in LINEARS}
        after = self._through(replace(block, **taps), self._states)
        if move:
            self._states = after
        return {name: tap.gram for name, tap in taps.items()}

    def move(self, block: Block) -> None:
        """Let the texts pass a block."""
        self._states = self._through(block, self._states)

    def _through(self, block: Block, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._model.pass_block(block, state, self._step, self._kv) for state in states]
