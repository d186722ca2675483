"""K and V in one byte a value, through the whole engine."""

import dataclasses

import pytest
import torch

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.errors import SettingError
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.step_input import Span, StepInput

MIB = 1 << 20


@torch.inference_mode()
def test_logits_move_little(own_model):
    window = torch.randint(0, 256, (120,), generator=torch.Generator().manual_seed(3)).tolist()
    found = []
    for quantised in (False, True):
        pool = KVPool(dataclasses.replace(own_model.kv_shape, quantised=quantised), 8, 16, own_model.device)
        chunks = [Span(window[i : i + 40], i, range(8), all_logits=True) for i in range(0, 120, 40)]
        found.append(torch.cat([own_model.forward(StepInput.build([c], 16, own_model.device), pool) for c in chunks]))
    exact, rounded = found
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).norm() / exact.norm() < 0.02
    assert (exact.argmax(-1) == rounded.argmax(-1)).double().mean() > 0.9


def test_the_same_memory_holds_almost_four_times_as_much(own_model, wait_for):
    params = SamplingParams(max_tokens=20)
    held, texts = {}, {}
    for kv_dtype in ("auto", "int8"):
        with Engine(own_model, config=EngineConfig(kv_cache_mib=1, kv_dtype=kv_dtype)) as engine:
            assert engine.kv.nbytes <= MIB
            held[kv_dtype] = engine.kv.num_blocks
            done = wait_for(lambda engine=engine: engine.generate([[1, 2, 3], [7] * 30], params))
            texts[kv_dtype] = [completion.tokens for completion in done]
            assert wait_for(engine.status)["kv_bytes"] == engine.kv.nbytes
    assert held["int8"] == int(held["auto"] * 4 * 64 / (64 + 2))  # of 64 values of 4 bytes: 64 bytes and a scale of two
    assert all(len(tokens) == 20 for tokens in texts["int8"])


def test_unknown_types():
    with pytest.raises(SettingError, match="kv_dtype = 'fp8': allowed are auto, int8"):
        EngineConfig(kv_dtype="fp8")
