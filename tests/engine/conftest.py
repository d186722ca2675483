"""A tiny model whose outputs vary, a byte tokenizer, and ways to hold an engine still."""

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
import torch

from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.model.tokenizer import Tokenizer
from deepinfer_lab.quant.plan import plan_named

PATIENCE_S = 60.0  # after which a test fails instead of hanging; nothing is timed


def tiny_decoder(**changes: object) -> Decoder:
    """Untied, so that the model does not merely repeat its last token."""
    config = dataclasses.replace(SHAPES["tiny"], tied_embeddings=False, **changes)
    return build_decoder(
        SyntheticSource(config, "tiny"), plan_named("none"), group=64, device=torch.device("cpu"), dtype=torch.float32
    )


@pytest.fixture(scope="session")
def tiny() -> Decoder:
    """For tests that leave the model as it is."""
    return tiny_decoder()


@pytest.fixture
def own_tiny() -> Decoder:
    """The same model, for tests that tamper with it."""
    return tiny_decoder()


@pytest.fixture
def own_model() -> Decoder:
    """For tests that tamper with it. One block of 16 tokens takes 128 KiB, so that 1 MiB of cache holds 8 of them."""
    return tiny_decoder(num_layers=4, num_heads=4, num_kv_heads=4, head_dim=64)


@pytest.fixture(scope="session")
def greedy(tiny: Decoder) -> Callable[[Sequence[int], int], list[int]]:
    """Greedy continuation by one whole prefill for each token: no chunks, no decode steps, no scheduler."""

    @torch.inference_mode()
    def continuation(prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            pool = KVPool(tiny.kv_shape, 1, len(tokens), tiny.device)
            step = StepInput.build([Span(tokens, 0, [0])], len(tokens), tiny.device)
            tokens.append(int(tiny.forward(step, pool)[0].argmax()))
        return tokens[len(prompt) :]

    return continuation


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., Tokenizer]:
    """Makes tokenizers with one token for each byte, and the given end-of-sequence ids."""

    def make(eos_ids: Sequence[int] = ()) -> Tokenizer:
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        return Tokenizer(backend, eos_ids=eos_ids)

    return make


@pytest.fixture
def wait_for() -> Callable[[Callable[[], Any]], Any]:
    """Runs something that might hang; its result or error, or a failed test."""

    def run(action: Callable[[], Any]) -> Any:
        outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                outcome.put((action(), None))
            except BaseException as error:
                outcome.put((None, error))

        threading.Thread(target=work, daemon=True).start()
        try:
            result, error = outcome.get(timeout=PATIENCE_S)
        except queue.Empty:
            pytest.fail(f"still waiting after {PATIENCE_S:.0f} s")
        if error is not None:
            raise error
        return result

    return run


class Gate:
    """Stands before every forward pass of a model and lets them through one by one."""

    def __init__(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self._arrivals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._open = False
        forward = model.forward

        def gated(step: StepInput, kv: KVPool) -> torch.Tensor:
            if not self._open:
                self._arrivals.put(None)
                error = self._permits.get(timeout=PATIENCE_S)
                if error is not None:
                    raise error
            return forward(step, kv)

        monkeypatch.setattr(model, "forward", gated)

    def arrived(self) -> None:
        """Wait until the engine stands before the next forward pass."""
        self._arrivals.get(timeout=PATIENCE_S)

    def step(self) -> None:
        """Let one pass through and wait for the next one."""
        self._permits.put(None)
        self.arrived()

    def release(self) -> None:
        """Let everything through from now on."""
        self._open = True
        self._permits.put(None)

    def break_down(self, error: Exception) -> None:
        self._permits.put(error)


@pytest.fixture
def gate(own_model: Decoder, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(own_model, monkeypatch)
