"""Decode steps whose layers are one launch, through lanes and engines: what several launches a layer compute, and say."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.cuda_lane import CudaLane
from deepinfer_lab.engine.cuda_lanes import cuda_lanes
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.padded_step import PaddedShape
from deepinfer_lab.engine.placement import ELASTIC, FUSED, ONE_LANE, Placement
from deepinfer_lab.engine.request import Request, Sequence
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.step_graph import StepGraph
from deepinfer_lab.engine.stopping import Stopper
from deepinfer_lab.engine.work import prepare_decode
from deepinfer_lab.kernels.chain_plan import CAPABILITY
from deepinfer_lab.kernels.dispatch import Row
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.lab.decode_step import CHAIN, LAUNCHES, Steps
from deepinfer_lab.lab.kernel_timing import CudaGpu
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SyntheticSource
from deepinfer_lab.quant.plan import plan_named

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != CAPABILITY,
    reason="needs compute capability 9.0",
)
CONFIG = ModelConfig(
    architecture="qwen2", vocab_size=500, hidden_size=1024, intermediate_size=1536, num_layers=3, num_heads=8, num_kv_heads=2,
    head_dim=128, max_context=4096, rms_norm_eps=1e-5, rope_theta=1e4, qkv_bias=True,
)  # fmt: skip
TABLE = tuple(
    row
    for bits in (4, 3)
    for row in (Row(bits, 1, 32, f"w{bits}_mma_small"), Row(bits, 33, None, f"w{bits}_dequantise_cublas"))
)
BLOCK, EACH = 16, 64  # blocks of a sequence in lanes' tests


class Uneven(SyntheticSource):
    """Norms that are not all ones, and biases."""

    def tensor(self, name: str) -> torch.Tensor:
        tensor = super().tensor(name)
        return tensor + 0.5 * torch.rand(tensor.shape) if tensor.dim() == 1 else tensor


@pytest.fixture(scope="module", params=["w4", "w3", "mixed", "w4-all"])  # the last one's head is packed
def model(request) -> Decoder:
    device = torch.device("cuda", torch.cuda.current_device())
    return build_decoder(
        Uneven(CONFIG, "random"), plan_named(request.param), group=128, device=device, dtype=torch.float16, table=TABLE
    )


@pytest.fixture
def launched(monkeypatch) -> list[PaddedShape]:
    """Shapes of all graphs that are launched."""
    shapes, launch = [], StepGraph.launch

    def noted(graph: StepGraph, *given: object) -> None:
        shapes.append(graph.shape)
        launch(graph, *given)

    monkeypatch.setattr(StepGraph, "launch", noted)
    return shapes


def pool(model: Decoder) -> KVPool:
    kv = KVPool(model.kv_shape, 2 * EACH, BLOCK, model.device, scratch=True)
    random = torch.Generator(model.device).manual_seed(3)
    for tensor in kv._tensors():
        tensor.normal_(generator=random)
    return kv


def lane(model: Decoder, kv: KVPool, placement: Placement, *, chained: bool) -> CudaLane:
    lanes = cuda_lanes(
        placement, model, kv, graphs=True, chunk_tokens=64, max_batch=3, max_context=EACH * BLOCK, decode_share=None,
        decode_chain=chained,
    )  # fmt: skip
    return lanes[placement.decode]


def sequence(context: int, row: int) -> Sequence:
    """Whose next step is at its position context - 1."""
    tokens = tuple(np.random.default_rng(context).integers(0, CONFIG.vocab_size, context).tolist())
    params = SamplingParams(max_tokens=9)
    made = Sequence(Request(f"{row}", tokens, params), 0, Stopper(params, (), None))
    made.launched = made.computed = context - 1
    made.blocks = np.random.default_rng(7).permutation(2 * EACH)[row * EACH :][: -(-(context + 9) // BLOCK)].tolist()
    made.block_table = np.array(made.blocks)
    return made


CONTEXTS = (1, 2, 16, 17, 128, 129, 256, 257, 512, 513, 1000)


@pytest.mark.parametrize("placement", [ONE_LANE, FUSED, ELASTIC], ids=lambda placement: placement.name)
def test_the_logits_of_several_launches_and_the_same_k_and_v(model, launched, placement):
    kv, plain_kv = pool(model), pool(model)
    ours, plain = lane(model, kv, placement, chained=True), lane(model, plain_kv, placement, chained=False)
    for context in CONTEXTS:
        found = []
        for each in (ours, plain, ours):
            with torch.inference_mode():
                ticket = each.launch(prepare_decode([sequence(context, 0)], 1))
            ticket.finished.wait()
            found.append(ticket.logits.clone())
            assert torch.equal(ticket.likeliest[1].long(), ticket.logits.argmax(-1).cpu())
        assert [shape.chained for shape in launched[-3:]] == [True, False, True]
        assert torch.equal(found[0], found[2]), context  # over what the same step has written before
        error = (found[0] - found[1]).norm() / found[1].norm()
        assert error < 2e-2, context
        for mine, theirs in zip(kv._tensors(), plain_kv._tensors(), strict=True):
            mine, theirs = (x[:, : 2 * EACH * BLOCK].float() for x in (mine, theirs))
            changed = (mine != theirs).flatten(2).any(-1).any(0).nonzero().flatten()
            assert len(changed) <= 1
            assert (mine - theirs)[:, changed].norm() <= 2e-2 * theirs[:, changed].norm()
        for mine, theirs in zip(kv._tensors(), plain_kv._tensors(), strict=True):
            theirs.copy_(mine)


def test_graphs_of_a_thread_that_has_not_used_cublas(model):
    """Steps of few tokens do without; the first graph of a longer chunk does not, and cannot set it up while it is captured."""
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(lane, model, pool(model), FUSED, chained=False).result()
    assert any(shape.chunk == 64 for shape in made._alone.graphs._graphs)


def check(logits: torch.Tensor, tokens: list[int]) -> None:
    """They are the likeliest by several launches a layer, or all but as likely. logits: [T, vocab]."""
    chosen = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    behind = logits.amax(-1) - logits.gather(1, chosen).squeeze(1)
    assert behind.max() < 0.1 * logits.std()
    assert (behind > 0).sum() <= 1 + len(tokens) // 8


def test_steps_with_and_without_keep_their_order(model, launched):
    """Each step reads K, V and the token of the one before, which only the lane knows."""
    ours, plain_kv = lane(model, pool(model), ELASTIC, chained=True), pool(model)
    reader, rows, tickets = sequence(127, 0), {}, []
    shared = [False, True, True, False, False, True]
    with torch.inference_mode():
        for cycle, beside in enumerate(shared):
            tickets.append(ours.launch(prepare_decode([reader], cycle, rows), shared=beside))
            rows = {reader: 0}
            reader.launched += 1
        tickets[-1].finished.wait()
        assert [shape.chained for shape in launched] == [not each for each in shared]
        tokens = [reader.tokens[-1]]
        for at, ticket in enumerate(tickets):
            spans = [Span(tokens, reader.launched - len(shared) + at, reader.blocks)]
            tokens = ticket.likeliest[1].long().tolist()
            check(model.forward(StepInput.build(spans, BLOCK, model.device), plain_kv), tokens)


def prompt(name: int, length: int) -> list[int]:
    return np.random.default_rng(name).integers(0, CONFIG.vocab_size, length).tolist()


@torch.inference_mode()
def check_request(model: Decoder, prompt: list[int], tokens: list[int]) -> None:
    """`check` of each token after those before it."""
    ids = [*prompt, *tokens]
    blocks = list(range(-(-len(ids) // BLOCK)))
    step = StepInput.build([Span(ids[:-1], 0, blocks, all_logits=True)], BLOCK, model.device)
    check(model.forward(step, KVPool(model.kv_shape, len(blocks), BLOCK, model.device))[len(prompt) - 1 :], tokens)


SETTINGS = {
    **{policy: (True, {"policy": policy}) for policy in ("serial", "time-sliced", "mixed", "priority", "adaptive")},
    "partition": (False, {"policy": "partition"}),
    "turned off": (False, {"decode_chain": False}),
    "an int8 cache": (False, {"kv_dtype": "int8"}),
    "without graphs": (False, {"cuda_graphs": False}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_through_an_engine(model, launched, name):
    """One reader after a request that was cancelled; then two, and a document beside them. Contexts of one alone go across the
    edges of blocks, of a split of attention, and of its rounds."""
    chained, settings = SETTINGS[name]
    config = EngineConfig(chunk_tokens=256, max_batch=4, max_context=2048, kv_cache_mib=64, **settings)
    requests = [(prompt(1, 5), 140), (prompt(2, 120), 300), (prompt(3, 250), 400), (prompt(4, 1500), 3)]
    with Engine(model, config=config) as engine:
        launched.clear()
        gone = engine.submit(prompt(9, 40), SamplingParams(max_tokens=1900))
        for _ in range(20):
            next(iter(gone))
        engine.cancel(gone.request.id)
        first, *others = requests
        found = [engine.generate([first[0]], SamplingParams(max_tokens=first[1]))[0].tokens]
        handles = []
        for ids, new in others:
            handles.append(engine.submit(ids, SamplingParams(max_tokens=new)))
            found.append((next(iter(handles[-1])).token,))
        found[1:] = [(*begun, *engine.collect(each).tokens) for begun, each in zip(found[1:], handles, strict=True)]
    assert {shape.rows for shape in launched if shape.chained} == ({1} if chained else set())
    for (ids, new), tokens in zip(requests, found, strict=True):
        assert len(tokens) == new
        if chained:
            check_request(model, ids, tokens)


def test_it_goes_with_its_engine(model):
    config = EngineConfig(max_batch=2, max_context=512, kv_cache_mib=64)
    with Engine(model, config=config) as engine:
        engine.generate([prompt(1, 5)], SamplingParams(max_tokens=9))
        chain = weakref.ref(engine._scheduler.lanes["main"]._alone.graphs._chain)
        assert chain() is not None
    del engine
    gc.collect()
    assert chain() is None


def test_a_device_and_a_cache_without_a_chain(model):
    kv = KVPool(replace(model.kv_shape, quantised=True), 4, BLOCK, model.device)
    assert model.chain(kv) is None
    assert model.chain(KVPool(model.kv_shape, 8, 2, model.device)) is None
    assert model.chain(KVPool(model.kv_shape, 4, BLOCK, model.device)) is not None


def test_whole_steps_are_timed_both_ways(model):
    gpu, steps = CudaGpu(), Steps(model, 3, 3000, 5)
    for context in (1, 128, 1024, 1025, 2048, 128):
        found = [steps.timed(gpu, 1, context, way, 5) for way in (LAUNCHES, CHAIN)]
        (plain_us, plain), (chained_us, chained) = found
        assert len(plain_us) == len(chained_us) == 5
        assert min(plain_us + chained_us) > 0
        assert plain.shape == chained.shape == (1, CONFIG.vocab_size)
        assert (chained - plain).norm() < 2e-2 * plain.norm()
    for rows, context in ((2, 128), (3, 128), (1, 2049)):
        assert steps.timed(gpu, rows, context, CHAIN, 5) is None
    assert steps.timed(gpu, 3, 128, LAUNCHES, 5)[1].shape == (3, CONFIG.vocab_size)
