"""The default model, in unquantised float32, against Hugging Face transformers reading the same file."""

import dataclasses
import platform

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.metrics.quality import teacher_forced
from deepinfer_lab.model.load import LoadedModel, load_model
from deepinfer_lab.model.reference_text import reference_text
from deepinfer_lab.model.step_input import Span, StepInput

NEW_TOKENS = 64
WINDOW, TEXT_TOKENS = 1024, 4096
TEXTS = [
    "The capital of France is the city of",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "Q: Name three primary colours.\nA:",
    "Water boils at 100 degrees Celsius at sea level, but on a mountain it boils",
    "In 1969, Neil Armstrong and Buzz Aldrin",
    "<|im_start|>user\nWrite a haiku about rain on a tin roof.<|im_end|>\n<|im_start|>assistant\n",
]


@dataclasses.dataclass(frozen=True)
class Reference:
    """What transformers computes.

    Attributes:
        greedy: for each prompt, its likeliest next token after the prompt and after each token of our answer. Where that is
            our answer again then, by induction, our answer is its greedy one, at a tenth of the time of generating it.
        generated: what its own `generate` says to the first prompt.
        logits: after each prompt. nll, top1: of the text, as in `TeacherForced`.
    """

    greedy: list[list[int]]
    generated: list[int]
    logits: list[torch.Tensor]
    nll: np.ndarray
    top1: np.ndarray


@pytest.fixture(scope="module")
def loaded(smollm2_path) -> LoadedModel:
    return load_model(str(smollm2_path), bits="none", device="cpu")


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    encoded = [loaded.tokenizer.encode(text) for text in TEXTS]
    assert all(8 <= len(prompt) <= 40 for prompt in encoded)
    return encoded


@pytest.fixture(scope="module")
def text_tokens(loaded: LoadedModel) -> list[int]:
    return loaded.tokenizer.encode(reference_text()[: 8 * TEXT_TOKENS])[:TEXT_TOKENS]


def answers(loaded: LoadedModel, prompts: list[list[int]], chunk: int, batch: int, new: int) -> list[list[int]]:
    config = EngineConfig(chunk_tokens=chunk, max_batch=batch, kv_cache_mib=64)
    with Engine(loaded.decoder, loaded.tokenizer, config) as engine:
        done = engine.generate(prompts, SamplingParams(max_tokens=new, ignore_eos=True))
    return [list(completion.tokens) for completion in done]


@pytest.fixture(scope="module")
def ours(loaded, prompts) -> list[list[int]]:
    return answers(loaded, prompts, chunk=256, batch=8, new=NEW_TOKENS)


@pytest.fixture(scope="module")
def reference(smollm2_path, prompts, text_tokens, ours) -> Reference:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    greedy, logits, nll, top1 = [], [], [], []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, ours, strict=True):
            rows = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
            logits.append(rows[0])
            greedy.append(rows.argmax(dim=-1).tolist())
        first = torch.tensor(prompts[:1])
        generated = model.generate(first, attention_mask=torch.ones_like(first), max_new_tokens=24, do_sample=False)
        for start in range(0, TEXT_TOKENS, WINDOW):
            window = torch.tensor(text_tokens[start : start + WINDOW])
            rows = model(window[None]).logits[0, :-1]
            nll.append(cross_entropy(rows, window[1:], reduction="none").double().numpy())
            top1.append(rows.argmax(dim=-1).numpy())
    return Reference(greedy, generated[0, first.shape[1] :].tolist(), logits, np.concatenate(nll), np.concatenate(top1))


def test_greedy_tokens_are_those_of_transformers(ours, reference):
    assert ours == reference.greedy


def test_greedy_tokens_are_those_that_transformers_generates(ours, reference):
    assert reference.generated
    assert ours[0][: len(reference.generated)] == reference.generated


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_together_in_chunks(loaded, prompts, reference, chunk):
    assert answers(loaded, prompts, chunk, batch=8, new=NEW_TOKENS) == reference.greedy


@pytest.mark.parametrize(("chunk", "new"), [(256, NEW_TOKENS), (64, 16), (7, 16), (1, 16)])
def test_alone_in_chunks(loaded, prompts, reference, chunk, new):
    """Chunks only shape what the prompt leaves in the cache: after 16 tokens a difference there would have shown."""
    assert answers(loaded, prompts, chunk, batch=1, new=new) == [tokens[:new] for tokens in reference.greedy]


def test_answers_are_worth_comparing(loaded, reference):
    assert all(len(set(tokens)) >= 8 for tokens in reference.greedy)
    assert any(loaded.tokenizer.eos_ids & set(tokens) for tokens in reference.greedy)


def test_an_answer_stops_with_its_end_token(loaded, prompts, reference):
    eos_ids = loaded.tokenizer.eos_ids
    ending = [(p, tokens) for p, tokens in zip(prompts, reference.greedy, strict=True) if eos_ids & set(tokens)]
    with Engine(loaded.decoder, loaded.tokenizer, EngineConfig(kv_cache_mib=64)) as engine:
        done = engine.generate([prompt for prompt, _ in ending], SamplingParams(max_tokens=NEW_TOKENS))
    for completion, (_, tokens) in zip(done, ending, strict=True):
        place = next(i for i, token in enumerate(tokens) if token in eos_ids)
        assert list(completion.tokens) == tokens[: place + 1]
        assert completion.reason is FinishReason.STOP


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_logits(loaded, prompts, reference):
    decoder = loaded.decoder
    pool = KVPool(decoder.kv_shape, 24, 16, decoder.device)
    spans = [Span(prompt, 0, [i, 23 - i, 8 + i][: -(-len(prompt) // 16)]) for i, prompt in enumerate(prompts)]
    with torch.inference_mode():
        together = decoder.forward(StepInput.build(spans, 16, decoder.device), pool)
        alone = decoder.forward(StepInput.build(spans[:1], 16, decoder.device), pool)
    assert relative(alone[0], reference.logits[0]) < 1e-4
    for row, theirs in zip(together, reference.logits, strict=True):
        assert relative(row, theirs) < 1e-4


def test_perplexity(loaded, text_tokens, reference):
    found = teacher_forced(loaded.decoder, text_tokens, WINDOW)
    theirs = float(np.exp(reference.nll.mean()))
    assert found.perplexity == pytest.approx(theirs, rel=1e-3)
    assert found.nll == pytest.approx(reference.nll, rel=1e-3, abs=2e-3)
    assert (found.top1 == reference.top1).mean() > 0.999
    if platform.python_version_tuple()[:2] == ("3", "11"):  # the text differs a little between versions
        assert found.perplexity == pytest.approx(13.1, abs=0.05)
