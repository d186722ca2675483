"""CUDA lanes: captured steps compute what steps launched one kernel at a time compute, and their padding touches nobody."""

import dataclasses
import time

import numpy as np
import pytest
import torch

from deepinfer_lab.engine.cuda_lane import CudaLane, DeviceClock
from deepinfer_lab.engine.cuda_lanes import cuda_lanes
from deepinfer_lab.engine.placement import ELASTIC, FUSED, ONE_LANE, Placement
from deepinfer_lab.engine.request import Request, Sequence
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stopping import Stopper
from deepinfer_lab.engine.work import Work, fuse, prepare_decode, prepare_prefill
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.ops import CudaOps, TorchOps
from deepinfer_lab.model.synthetic import SyntheticSource
from deepinfer_lab.quant.plan import plan_named

CONFIG = ModelConfig(
    architecture="qwen2", vocab_size=500, hidden_size=256, intermediate_size=512, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=64, max_context=512, rms_norm_eps=1e-5, rope_theta=1e4, qkv_bias=True,
)  # fmt: skip
BLOCK, BLOCKS, CHUNK, BATCH = 16, 96, 48, 10


@pytest.fixture(scope="module")
def model() -> Decoder:
    device = torch.device("cuda", torch.cuda.current_device())
    return build_decoder(
        SyntheticSource(CONFIG, "random"), plan_named("w4"), group=32, device=device, dtype=torch.float16,
        batch_invariant=True,
    )  # fmt: skip


def pool(model: Decoder, *, quantised: bool = False) -> KVPool:
    shape = dataclasses.replace(model.kv_shape, quantised=quantised)
    kv = KVPool(shape, BLOCKS, BLOCK, model.device, scratch=True)
    for tensor in kv._tensors():  # numbers that a reply would show
        filler = torch.randn(tensor.shape, generator=torch.Generator(model.device).manual_seed(5), device=model.device)
        tensor.copy_(filler.mul(4).to(tensor.dtype))
    return kv


def lane(model: Decoder, kv: KVPool, placement: Placement = FUSED, *, graphs: bool = True) -> CudaLane:
    lanes = cuda_lanes(
        placement, model, kv, graphs=graphs, chunk_tokens=CHUNK, max_batch=BATCH, max_context=512, decode_share=0.25
    )
    return lanes[placement.decode]


def sequence(length: int, launched: int, first_block: int, *, temperature: float = 0.0) -> Sequence:
    prompt = tuple(np.random.default_rng(length * 1000 + first_block).integers(0, 500, length).tolist())
    params = SamplingParams(max_tokens=9, temperature=temperature)
    made = Sequence(Request(f"{first_block}", prompt, params), 0, Stopper(params, (), None))
    made.launched = made.computed = launched
    made.blocks = list(range(first_block, first_block + -(-(length + 2) // BLOCK)))
    made.block_table = np.array(made.blocks)
    return made


def batch(rows: int, chunk: int) -> Work:
    """Decode rows of various lengths, and a chunk in the middle of a prompt."""
    decodes = prepare_decode([sequence(5 + 7 * i, 4 + 7 * i, 8 * i) for i in range(rows)], 1) if rows else None
    prefill = prepare_prefill(sequence(20 + chunk, 20, 85), chunk, 1) if chunk else None
    return fuse(prefill, decodes) if rows and chunk else decodes or prefill


@torch.inference_mode()
def run(lane: CudaLane, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    ticket = lane.launch(work)
    ticket.finished.wait()
    return ticket.logits.clone(), ticket.likeliest.clone()


EDGES = [
    (rows, chunk) for rows in (0, 1, 2, 3, 4, 5, 7, 8, 9, 10) for chunk in (0, 2, 15, 16, 17, 47, 48) if rows or chunk
]


@pytest.mark.parametrize("quantised", [False, True], ids=["f16", "i8"])
def test_a_captured_step_at_every_edge_of_its_sizes(model, quantised):
    """The same bits as launched kernel by kernel, and no block changes but those that the step writes."""
    kv, plain_kv = pool(model, quantised=quantised), pool(model, quantised=quantised)
    captured, plain = lane(model, kv), lane(model, plain_kv, graphs=False)
    for rows, chunk in EDGES:
        work = batch(rows, chunk)
        before = [tensor.clone() for tensor in kv._tensors()]
        logits, best = run(captured, work)
        expected, _ = run(plain, work)
        assert torch.equal(logits, expected), (rows, chunk)
        assert best[0].tolist() == expected.max(dim=-1).values.double().tolist()
        assert best[1].long().tolist() == expected.argmax(dim=-1).tolist()
        written = {
            int(span.blocks[position // BLOCK]) * BLOCK + position % BLOCK
            for span in work.spans
            for position in range(span.start, span.start + len(span.tokens))
        }
        for old, new in zip(before, kv._tensors(), strict=True):
            changed = (old[:, : BLOCKS * BLOCK] != new[:, : BLOCKS * BLOCK]).flatten(2).any(-1).any(0)
            assert set(changed.nonzero().flatten().tolist()) <= written, (rows, chunk)
        for each, other in zip(kv._tensors(), plain_kv._tensors(), strict=True):
            assert torch.equal(each[:, : BLOCKS * BLOCK], other[:, : BLOCKS * BLOCK]), (rows, chunk)


def test_long_chunks_give_what_flash_attention_gives():
    """Captured, padded or not, at the beginning of a prompt, where no columns are before them, and further on."""
    config = dataclasses.replace(CONFIG, max_context=2048)
    device = torch.device("cuda", torch.cuda.current_device())
    made = build_decoder(
        SyntheticSource(config, "random"), plan_named("w4"), group=32, device=device, dtype=torch.float16
    )
    plain = Decoder(config, made._embed, made._blocks, made._norm, made._lm_head, CudaOps())
    captured, eager = (
        cuda_lanes(
            ONE_LANE,
            each,
            pool(each),
            graphs=graphs,
            chunk_tokens=1024,
            max_batch=1,
            max_context=1500,
            decode_share=None,
        )[ONE_LANE.prefill]
        for each, graphs in ((made, True), (plain, False))
    )
    for launched, chunk in ((0, 512), (0, 400), (512, 512), (300, 1000), (0, 1024), (476, 1024)):
        work = prepare_prefill(sequence(launched + chunk, launched, 0), chunk, 1)
        (logits, _), (expected, _) = run(captured, work), run(eager, work)
        assert ((logits - expected).norm() / expected.norm()).item() < 0.02, (launched, chunk)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_step_takes_tokens_that_the_host_has_not_seen(model, graphs):
    ours = lane(model, pool(model), ONE_LANE, graphs=graphs)
    known = lane(model, pool(model), ONE_LANE, graphs=False)
    first = [sequence(9 + i, 8 + i, 8 * i) for i in range(3)]
    with torch.inference_mode():
        ahead = ours.launch(prepare_decode(first, 1))
        for each in first:
            each.launched += 1
        newcomer = sequence(30, 29, 40)
        rows = {first[2]: 2, first[0]: 0}
        second = ours.launch(prepare_decode([first[2], newcomer, first[0]], 2, rows))
    second.finished.wait()
    run(known, ahead.work)
    tokens = ahead.likeliest[1].long().tolist()
    for each, token in zip(first, tokens, strict=True):
        each.tokens.append(token)
    expected, _ = run(known, prepare_decode([first[2], newcomer, first[0]], 2))
    assert torch.equal(second.logits, expected)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_steps_on_part_of_the_device_and_on_all_of_it_keep_their_order(model, graphs):
    """Each step reads the K and V of the one before, and its token, which only the lane knows."""
    ours = lane(model, pool(model), ELASTIC, graphs=graphs)
    plain = lane(model, pool(model), ONE_LANE, graphs=graphs)

    def outputs(lane: CudaLane, shared: list[bool]) -> list[torch.Tensor]:
        readers, rows, tickets = [sequence(9 + i, 8 + i, 8 * i) for i in range(3)], {}, []
        for cycle, beside in enumerate(shared):
            tickets.append(lane.launch(prepare_decode(readers, cycle, rows), shared=beside))
            rows = {each: row for row, each in enumerate(readers)}
            for each in readers:
                each.launched += 1
        tickets[-1].finished.wait()
        return [ticket.likeliest.clone() for ticket in tickets]

    with torch.inference_mode():
        expected = outputs(plain, [False] * 6)
        found = outputs(ours, [False, True, True, False, False, True])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("ops", [TorchOps(), CudaOps()], ids=["torch", "kernels"])
def test_answers_of_captured_steps_come_with_and_without_kernels(model, ops):
    """Of several in flight, each from the one before, whatever takes them to the host."""
    ours = lane(
        Decoder(model.config, model._embed, model._blocks, model._norm, model._lm_head, ops), pool(model), ONE_LANE
    )
    readers, rows, tickets = [sequence(9 + i, 8 + i, 8 * i, temperature=1.0) for i in range(3)], {}, []
    with torch.inference_mode():
        for cycle in range(4):
            tickets.append(ours.launch(prepare_decode(readers, cycle, rows)))
            rows = {each: row for row, each in enumerate(readers)}
            for each in readers:
                each.launched += 1
    tickets[-1].finished.wait()
    for ticket in tickets:
        values, places = ticket.logits.max(dim=-1)
        assert torch.equal(ticket.likeliest, torch.stack([values.double(), places.double()]).cpu())
    assert len({tuple(ticket.likeliest[0].tolist()) for ticket in tickets}) > 1


def test_logits_of_whoever_draws_outlive_the_next_launch(model):
    ours = lane(model, pool(model), ONE_LANE)
    with torch.inference_mode():
        drawn = ours.launch(prepare_decode([sequence(9, 8, 0, temperature=1.0)], 1))
        ours.launch(prepare_decode([sequence(20, 19, 8)], 1)).finished.wait()
    expected, _ = run(lane(model, pool(model), ONE_LANE), prepare_decode([sequence(9, 8, 0)], 1))
    assert torch.equal(drawn.logits, expected)


def test_events_tell_the_hosts_time(model):
    began = time.perf_counter()
    clock = DeviceClock(torch.device("cuda"))
    # The clock's zero lies in this span, however busy host and device are. CUDA counts milliseconds in 32-bit floats.
    slack = time.perf_counter() - began + 1e-5
    ours = lane(model, pool(model), ONE_LANE)
    before = time.perf_counter()
    with torch.inference_mode():
        ticket = ours.launch(batch(2, 0))
    ticket.finished.wait()
    after = time.perf_counter()
    started, finished = clock.time(ticket.started.event), clock.time(ticket.finished.event)
    assert before - slack < started < finished < after + slack
