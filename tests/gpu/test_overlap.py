"""Prefill and decode side by side on a GPU: that they do run so, and that nobody's tokens change for it."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.profiler import record_function

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.policy import PRESETS
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.sm_partition import partition_streams
from deepinfer_lab.kernels.spin import spin
from deepinfer_lab.metrics.kernel_trace import profiled, read
from deepinfer_lab.metrics.overlap import Overlap
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.synthetic import SyntheticSource
from deepinfer_lab.quant.plan import plan_named

CONFIG = ModelConfig(
    architecture="qwen2", vocab_size=2000, hidden_size=512, intermediate_size=1024, num_layers=4, num_heads=8,
    num_kv_heads=2, head_dim=64, max_context=4096, rms_norm_eps=1e-5, rope_theta=1e4, qkv_bias=True,
)  # fmt: skip
TWO_LANES = [name for name, preset in PRESETS.items() if len(preset.placement.lanes) == 2]


def built(*, layers: int = CONFIG.num_layers, batch_invariant: bool) -> Decoder:
    device = torch.device("cuda", torch.cuda.current_device())
    config = dataclasses.replace(CONFIG, num_layers=layers)
    return build_decoder(
        SyntheticSource(config, "random"), plan_named("w4"), group=64, device=device, dtype=torch.float16,
        batch_invariant=batch_invariant,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Decoder:
    return built(layers=8, batch_invariant=False)


@pytest.fixture(scope="module")
def invariant() -> Decoder:
    return built(batch_invariant=True)


def prompt(name: int, length: int) -> list[int]:
    return np.random.default_rng(name).integers(0, CONFIG.vocab_size, length).tolist()


def load(engine: Engine) -> dict[str, object]:
    """Two readers decode while documents come in. The engine's status afterwards."""
    readers = [engine.submit(prompt(i, 30), SamplingParams(max_tokens=150)) for i in range(2)]
    for reader in readers:
        next(iter(reader))
    documents = [engine.submit(prompt(10 + i, 3000), SamplingParams(max_tokens=2)) for i in range(3)]
    for handle in (*documents, *readers):
        engine.collect(handle)
    return engine.status()


def config(policy: str, *, chunk_tokens: int = 512, **more: object) -> EngineConfig:
    return EngineConfig(policy=policy, chunk_tokens=chunk_tokens, max_batch=8, kv_cache_mib=256, **more)


@pytest.mark.parametrize("name", PRESETS)
def test_prefill_decode_stream_overlap_runs_both_forwards(model, name, tmp_path):
    # Documents come twice, and a chunk must take longer than the profiled host takes to launch the next decode step.
    with Engine(model, config=config(name, chunk_tokens=2048, prefix_cache=False)) as engine:
        load(engine)
        with profiled(tmp_path / "trace.json"):
            status = load(engine)
            torch.cuda.synchronize()
    overlap = Overlap.of(read(tmp_path / "trace.json"))
    assert status["policy"] == name
    assert status["prefill_steps"] > 0
    assert status["decode_steps"] > 0
    assert status["prefill_decode_overlap_steps"] > 0
    if name in TWO_LANES:
        assert status["prefill_decode_stream_overlap_steps"] > 0
        if name != "dual-stream":  # there, decode may be over before the chunk behind it is even launched
            assert overlap.physical_overlap_ms > 0
    else:
        assert status["prefill_decode_stream_overlap_steps"] == 0
        assert overlap.physical_overlap_ms == 0


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "serial"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_every_preset_gives_the_tokens_of_serial(invariant, name, kv_dtype):
    """With a request cancelled on the way, and a pool that cannot hold all that the others come to."""
    lengths = [(200 + 5 * i, 60) for i in range(8)]
    token_bytes = dataclasses.replace(invariant.kv_shape, quantised=kv_dtype == "int8").bytes_per_token

    def outputs(policy: str, pool_tokens: int) -> tuple[list[tuple[int, ...]], int]:
        settings = EngineConfig(
            policy=policy, chunk_tokens=128, max_batch=9, kv_cache_mib=pool_tokens * token_bytes // 2**20, kv_dtype=kv_dtype,
            prefix_cache=False,
        )  # fmt: skip
        with Engine(invariant, config=settings) as engine:
            gone = engine.submit(prompt(99, 100), SamplingParams(max_tokens=500))
            handles = [
                engine.submit(prompt(i, length), SamplingParams(max_tokens=new))
                for i, (length, new) in enumerate(lengths)
            ]
            for _ in range(20):
                next(iter(gone))
            engine.cancel(gone.request.id)
            found = [engine.collect(handle).tokens for handle in handles]
            return found, engine.status()["preemptions"]

    expected, _ = outputs("serial", 32 * 1024)
    found, preemptions = outputs(name, 1024)
    assert found == expected
    assert preemptions > 0


def test_kernels_launched_one_by_one_give_the_tokens_of_graphs(invariant):
    def outputs(graphs: bool) -> list[tuple[int, ...]]:
        with Engine(invariant, config=config("priority", cuda_graphs=graphs)) as engine:
            prompts = [prompt(i, 50 + 100 * i) for i in range(4)]
            return [completion.tokens for completion in engine.generate(prompts, SamplingParams(max_tokens=30))]

    assert outputs(True) == outputs(False)


def test_a_partition_has_no_multiprocessor_twice():
    device = torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.get_device_properties(device).multi_processor_count
    small, rest = partition_streams(device, 0.25)
    seen = []
    for stream in (small, rest):
        with torch.cuda.stream(stream):
            blocks_on = spin(4 * count, 1.0)
        stream.synchronize()
        seen.append(set(blocks_on.nonzero().flatten().tolist()))
    assert not seen[0] & seen[1]
    assert len(seen[0]) + len(seen[1]) <= count
    assert 0.2 * count <= len(seen[0]) <= 0.35 * count


def controlled(path, first: torch.cuda.Stream, second: torch.cuda.Stream) -> Overlap:
    """Two kernels that fill half of the GPU each, one called prefill and one decode."""
    half = torch.cuda.get_device_properties(first.device).multi_processor_count // 2
    spin(1, 1.0)
    outs = [torch.zeros(1024, dtype=torch.int32, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    with profiled(path):
        for phase, stream, out in zip(("prefill", "decode"), (first, second), outs, strict=True):
            with torch.cuda.stream(stream), record_function(phase):
                spin(half, 20.0, out)
        torch.cuda.synchronize()
    return Overlap.of(read(path))


def test_controls_of_physical_overlap(tmp_path):
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    assert controlled(tmp_path / "same.json", one, one).physical_overlap_ms == 0
    both = controlled(tmp_path / "two.json", one, other)
    assert both.share > 0.9
