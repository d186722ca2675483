"""A decode step in one launch, against float32: fresh random decoders, at lengths around each edge of attention's."""

from collections.abc import Sequence

import pytest
import torch
from chain_models import BLOCK, SLOTS, make, normed, reference

from deepinfer_lab.kernels.chain_plan import CAPABILITY, ChainShape
from deepinfer_lab.kernels.decode_chain import DecodeChain, LayerTensors
from deepinfer_lab.kernels.tiles_check import UNIT_K, UNIT_N, unit_bytes

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != CAPABILITY,
    reason="needs compute capability 9.0",
)
SHAPE, NUDGES = ChainShape(3, 1024, 1536, 16, 2, 4, 4), 8


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double().cpu() - expected.double()).norm() / expected.double().norm()).item()


def close(found: torch.Tensor, expected: torch.Tensor, nudged: Sequence[torch.Tensor]) -> bool:
    """nudged: what is expected of activations that are a thousandth off, which softmax can make much of, and of some far more
    than of others: four times one nudge's error is too little in one case of a thousand, the most of eight never half of it."""
    return error(found, expected) < 4 * max(1e-3, *(error(each, expected) for each in nudged))


def step(hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, hidden).half(), torch.randperm(SLOTS // BLOCK).unsqueeze(0)


@pytest.mark.parametrize("length", [1, 5, 128, 129, 256, 257, 500, 1000])
@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        (SHAPE, None),  # a block to each tile of o and down
        (SHAPE, 48),  # parts of tiles
        (ChainShape(2, 896, 1280, 7, 1, 4, 3), 37),  # 3 bits, a head too few, shares of nothing even
        (ChainShape(2, 512, 512, 4, 4, 3, 3), 16),  # at most four splits
        (ChainShape(2, 2048, 1024, 4, 2, 4, 4), 90),  # as many units of K as there are warps
    ],
)
def test_matches_float32(shape, blocks, length):
    model = make(shape, bias=blocks is None, seed=torch.initial_seed() % 1000)
    x, table = step(shape.hidden)
    expected = reference(model, x, table, length)
    others = [(x * (1 + torch.randn(x.shape) / 1000)).half() for _ in range(NUDGES)]
    nudged = [reference(model, other, table, length) for other in others]
    new = table[:, (length - 1) // BLOCK] * BLOCK + (length - 1) % BLOCK
    for layer in model.layers:  # nothing of what is there yet may matter
        layer.k[new] = layer.v[new] = torch.nan
    there = model.on("cuda")
    chain = there.chain(blocks)
    given = x.cuda(), table.cuda(), torch.tensor([length]).cuda()
    first = [each.clone() for each in chain(*given)]
    assert close(first[0], expected[-1].out, [layers[-1].out for layers in nudged])
    assert error(first[1], normed(first[0].float().cpu(), model.norm)) < 5e-4
    for layer, off, tensors in zip(expected, zip(*nudged, strict=True), there.layers, strict=True):
        assert close(tensors.k[new], layer.k, [each.k for each in off])
        assert close(tensors.v[new], layer.v, [each.v for each in off])
    for _ in range(20):  # what a launch leaves is what the next one needs
        assert all(map(torch.equal, chain(*given), first))


def test_in_a_graph_and_after_a_launch_that_stopped_early():
    model = make(SHAPE, seed=1).on("cuda")
    chain = model.chain()
    given = [each.cuda() for each in (*step(SHAPE.hidden), torch.tensor([300]))]
    expected = [each.clone() for each in chain(*given)]
    for phases in range(1, 11):
        chain(*given, phases=phases)
        chain.reset()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = chain(*given)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))


def large_layer(shape: ChainShape, positions: int) -> LayerTensors:
    """Random bytes for weights, whose scales are small enough for what comes of them."""
    cuda = {"device": "cuda"}
    products = []
    for (n, k), bits in zip(shape.products, (shape.attention_bits,) * 2 + (shape.mlp_bits,) * 2, strict=True):
        tiles = torch.randint(0, 256, (n // UNIT_N, k // UNIT_K, unit_bytes(bits)), dtype=torch.uint8, **cuda)
        products.append((tiles, (torch.rand(*tiles.shape[:2], 8, 2, **cuda) / (8 * k**0.5)).half()))
    norm = torch.ones(shape.hidden, dtype=torch.float16, **cuda)
    k, v = torch.randn(2, positions, shape.kv_heads, 128, dtype=torch.float16, **cuda)
    return LayerTensors(tuple(products), None, norm, norm, k, v)


def test_the_same_bits_every_time():
    """Where the memory is busiest: a 7B model, and two rounds of positions. A weight that is overwritten before all have
    read it shows, if rarely: without `finish_reads`, and with slots left as soon as loads were issued, in one such step of a
    thousand."""
    shape, positions, launches = ChainShape(28, 3584, 18944, 28, 4, 4, 4), 2048, 5_000
    layers = [large_layer(shape, positions) for _ in range(shape.layers)]
    angles = torch.randn(positions, 64).cuda()
    cos, sin = angles.cos().half(), angles.sin().half()
    chain = DecodeChain(shape, layers, layers[0].input_norm, cos, sin, eps=1e-6, block_size=16)
    table = torch.randperm(positions // 16).cuda().unsqueeze(0)
    given = torch.randn(1, shape.hidden).half().cuda(), table, torch.tensor([2000]).cuda()
    expected = [each.clone() for each in chain(*given)]
    assert all(each.isfinite().all() for each in expected)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = chain(*given)
        differing += torch.stack([(a != b).any() for a, b in zip(found, expected, strict=True)]).any()
    for _ in range(launches):
        graph.replay()
    assert differing.item() == 0
