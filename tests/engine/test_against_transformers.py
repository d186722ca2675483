"""The default model, in unquantised float32, against Hugging Face transformers reading the same file."""

import dataclasses
import platform
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transformers

from deepinfer_lab.engine.engine import Engine, EngineConfig
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.metrics.quality import teacher_forced
from deepinfer_lab.model.load import LoadedModel, load_model
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.workload.text import reference_text

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
    """What transformers computes: greedy tokens and last-token logits for each prompt, and the text's likelihoods."""

    greedy: list[list[int]]
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


@pytest.fixture(scope="module")
def reference(smollm2_path, prompts, text_tokens) -> Iterator[Reference]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    greedy, logits, nll, top1 = [], [], [], []
    with torch.inference_mode():
        for prompt in prompts:
            out = model(torch.tensor([prompt]), use_cache=True)
            logits.append(out.logits[0, -1])
            tokens = [int(out.logits[0, -1].argmax())]
            while len(tokens) < NEW_TOKENS:
                out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
                tokens.append(int(out.logits[0, -1].argmax()))
            greedy.append(tokens)
        for start in range(0, TEXT_TOKENS, WINDOW):
            window = torch.tensor(text_tokens[start : start + WINDOW])
            logs = model(window[None]).logits[0, :-1].log_softmax(dim=-1)
            nll.append(-logs.gather(1, window[1:, None])[:, 0].double().numpy())
            top1.append(logs.argmax(dim=-1).numpy())
    return Reference(greedy, logits, np.concatenate(nll), np.concatenate(top1))


@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
@pytest.mark.parametrize("company", ["alone", "together"])
def test_greedy_tokens(loaded, prompts, reference, chunk, company):
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    config = EngineConfig(chunk_tokens=chunk, max_batch=1 if company == "alone" else 8, kv_cache_mib=64)
    with Engine(loaded.decoder, loaded.tokenizer, config) as engine:
        done = engine.generate(prompts, params)
    assert [list(completion.tokens) for completion in done] == reference.greedy


def test_outputs_are_worth_comparing(loaded, reference):
    assert all(len(set(tokens)) >= 8 for tokens in reference.greedy)
    assert any(loaded.tokenizer.eos_ids & set(tokens) for tokens in reference.greedy)


def test_stopping_where_transformers_generates_its_end_token(loaded, prompts, reference):
    eos_ids = loaded.tokenizer.eos_ids
    with Engine(loaded.decoder, loaded.tokenizer, EngineConfig(kv_cache_mib=64)) as engine:
        done = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))
    for completion, tokens in zip(done, reference.greedy, strict=True):
        ends = [place for place, token in enumerate(tokens) if token in eos_ids]
        assert list(completion.tokens) == tokens[: ends[0] + 1 if ends else None]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_logits(loaded, prompts, reference):
    decoder = loaded.decoder
    pool = KVPool(decoder.kv_shape, 24, 16, decoder.device)
    spans = [Span(prompt, 0, [i, 23 - i, 8 + i][: -(-len(prompt) // 16)]) for i, prompt in enumerate(prompts)]
    with torch.inference_mode():
        together = decoder.forward(StepInput.build(spans, 16, decoder.device), pool)
        for span, row, theirs in zip(spans, together, reference.logits, strict=True):
            alone = decoder.forward(StepInput.build([span], 16, decoder.device), pool)[0]
            assert relative(row, theirs) < 1e-4
            assert relative(alone, theirs) < 1e-4


def test_perplexity(loaded, text_tokens, reference):
    found = teacher_forced(loaded.decoder, text_tokens, WINDOW)
    theirs = float(np.exp(reference.nll.mean()))
    assert found.perplexity == pytest.approx(theirs, rel=1e-3)
    assert found.nll == pytest.approx(reference.nll, rel=1e-3, abs=2e-3)
    assert (found.top1 == reference.top1).mean() > 0.999
    if platform.python_version_tuple()[:2] == ("3", "11"):  # the text differs a little between versions
        assert found.perplexity == pytest.approx(13.1, abs=0.05)
