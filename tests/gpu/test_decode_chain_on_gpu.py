"""A decode step in one launch, against float32: fresh random decoders, at lengths around each edge of attention's."""

from collections.abc import Sequence

import pytest
import torch
from chain_models import BLOCK, SLOTS, make, normed, reference

from deepinfer_lab.kernels.chain_plan import CAPABILITY, ChainShape

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
