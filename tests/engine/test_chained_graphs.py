"""Which steps of a GPU's lanes are chained: who takes a chain, and who does not, at every edge. Nothing is launched."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer_lab.engine import cuda_lanes as lanes_module
from deepinfer_lab.engine import step_graph
from deepinfer_lab.engine.cuda_lane import CudaLane, Track
from deepinfer_lab.engine.cuda_lanes import cuda_lanes
from deepinfer_lab.engine.padded_step import PaddedShape
from deepinfer_lab.engine.placement import ELASTIC, FUSED, ONE_LANE, PARTITION, PRIORITY_LANES, TWO_LANES
from deepinfer_lab.engine.step_graph import StepGraphs
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.step_input import Span

BLOCK = 4
LONGEST = 2048


def chain_of(longest: int) -> SimpleNamespace:
    return SimpleNamespace(plan=SimpleNamespace(longest=longest))


CHAIN = chain_of(LONGEST)


class Graph:
    """Stands in for `StepGraph`: what it was made of."""

    def __init__(self, shape, model, kv, last, pool, chain, warm_up) -> None:
        self.shape, self.chain, self.warm_up, self.pool = shape, chain, warm_up, (0, 1)


def work(rows: int, context: int, chunk: int = 0) -> SimpleNamespace:
    """Decode rows whose new token is each one's number `context`, and a chunk that ends there."""
    blocks = np.arange(1 + context // BLOCK)
    decodes = [Span([1], context - 1, blocks)] * rows
    first = Span([1] * chunk, context - chunk, blocks) if chunk else None
    return SimpleNamespace(chunk=first, decodes=decodes, spans=[*([first] if first else []), *decodes])


def graphs(tiny, monkeypatch, chain=CHAIN, phases=("decode", "prefill"), **more: int) -> StepGraphs:
    monkeypatch.setattr(step_graph, "StepGraph", Graph)
    kv = KVPool(tiny.kv_shape, 2048, BLOCK, tiny.device, scratch=True)
    sizes = {"chunk_tokens": 32, "max_batch": 8, "max_tokens": 8000, **more}
    return StepGraphs(tiny, kv, phases=phases, last=torch.zeros(9, dtype=torch.int64), chain=chain, **sizes)


def chained_columns(graphs: StepGraphs) -> list[int]:
    return [shape.columns for shape in graphs.shapes() if shape.chained]


@pytest.mark.parametrize("phases", [("decode", "prefill"), ("mixed", "decode", "prefill")])
def test_one_row_alone_in_a_short_context(tiny, monkeypatch, phases):
    ours = graphs(tiny, monkeypatch, phases=phases)
    captured = {shape for shape in ours.shapes() if shape.chained}
    assert captured == {PaddedShape(0, 1, positions // BLOCK, True) for positions in (1024, LONGEST)}
    for context in (1, 1024, 1025, LONGEST, LONGEST + 1, 8000):
        for rows in (1, 2, 8):
            graph = ours.for_work(work(rows, context), alone=True)
            assert graph.shape.chained == (rows == 1 and context <= LONGEST), (rows, context)
            assert graph.chain == (CHAIN if graph.shape.chained else None)
            assert graph.shape.chained == (graph.shape in captured)
            if graph.shape.chained:
                assert graph.shape.columns * BLOCK == (1024 if context <= 1024 else LONGEST)
            assert not ours.for_work(work(rows, context)).shape.chained
    for rows in (0, 1, 2):
        assert not ours.for_work(work(rows, 40, chunk=5), alone=True).shape.chained


@pytest.mark.parametrize("limit", [9, 1000, 1024, 1501, LONGEST - 32, LONGEST - 31, LONGEST])
def test_a_limit_within_the_longest_is_chained_to_its_end(tiny, monkeypatch, limit):
    ours = graphs(tiny, monkeypatch, max_tokens=limit)
    captured = chained_columns(ours)
    for context in (1, limit // 2, limit):
        shape = ours.for_work(work(1, context), alone=True).shape
        assert shape.chained
        assert shape.columns in captured
    assert max(captured) == min(-(-(limit + 32) // BLOCK), LONGEST // BLOCK)  # a chunk of 32 may pass the limit


@pytest.mark.parametrize(("longest", "columns"), [(2050, [256, 512]), (1024, [256]), (515, [128]), (3, [])])
def test_whole_blocks_of_the_longest(tiny, monkeypatch, longest, columns):
    ours = graphs(tiny, monkeypatch, chain=chain_of(longest))
    assert chained_columns(ours) == columns
    whole = longest // BLOCK * BLOCK
    for context in range(max(whole, 1), longest + 2):
        assert ours.for_work(work(1, context), alone=True).shape.chained == (context <= whole)


def test_without_a_chain(tiny, monkeypatch):
    ours = graphs(tiny, monkeypatch, chain=None)
    assert not any(shape.chained for shape in ours.shapes())
    assert ours.for_work(work(1, 9), alone=True).chain is None


def test_the_first_of_a_kind_is_warmed_up(tiny, monkeypatch):
    ours = graphs(tiny, monkeypatch, phases=("decode",))
    warmed = [shape.chained for shape in ours.shapes() if ours.capture(shape).warm_up]
    assert warmed == [False, True]


@pytest.fixture
def made(tiny, monkeypatch):
    """Lanes of a placement, without a GPU."""
    divided = True

    def streams(placement, device, share):
        whole = {name: f"whole {name}" for name in placement.lanes}
        if placement.decode_share is None or not divided:
            return whole, whole
        parts = {name: f"part {name}" for name in placement.lanes}
        return (whole if placement.elastic else parts), parts

    monkeypatch.setattr(lanes_module, "DeviceClock", lambda _: None)
    monkeypatch.setattr(lanes_module, "preload", lambda _: None)
    monkeypatch.setattr(lanes_module, "_streams", streams)
    monkeypatch.setattr(lanes_module, "_capture", lambda *_: None)
    monkeypatch.setattr(type(tiny), "chain", lambda self, kv: CHAIN)
    kv = KVPool(tiny.kv_shape, 8, BLOCK, tiny.device, scratch=True)

    def lanes(placement, *, divides: bool = True, graphs: bool = True, **more: bool):
        nonlocal divided
        divided = divides
        return cuda_lanes(
            placement, tiny, kv, graphs=graphs, chunk_tokens=8, max_batch=4, max_context=32, decode_share=None, **more
        )

    return lanes


def chained(lanes) -> dict[str, tuple[bool, bool]]:
    """Of each lane, whether it has the chain alone and shared."""
    return {
        name: tuple(bool(track.graphs and track.graphs._chain) for track in (lane._alone, lane._shared))
        for name, lane in lanes.items()
    }


def test_the_track_of_decode_on_the_whole_device_has_the_chain(made):
    for placement in (ONE_LANE, FUSED):
        assert chained(made(placement)) == {"main": (True, True)}  # one track, and no lane beside
        assert made(placement)["main"]._beside is None
    for placement in (TWO_LANES, PRIORITY_LANES):
        lanes = made(placement)
        assert chained(lanes) == {"prefill": (False, False), "decode": (True, True)}
        assert lanes["decode"]._beside is lanes["prefill"]
    assert chained(made(ELASTIC)) == {"prefill": (False, False), "decode": (True, False)}
    assert chained(made(PARTITION)) == {"prefill": (False, False), "decode": (False, False)}


def test_never_more_than_one_track_has_it(made):
    for placement in (ONE_LANE, FUSED, TWO_LANES, PRIORITY_LANES, ELASTIC, PARTITION):
        for divides in (True, False):
            tracks = {
                id(t): t for lane in made(placement, divides=divides).values() for t in (lane._alone, lane._shared)
            }
            assert sum(bool(track.graphs._chain) for track in tracks.values()) <= 1


def test_what_turns_it_off(made):
    for off in ({"decode_chain": False}, {"graphs": False}):
        assert chained(made(ONE_LANE, **off)) == {"main": (False, False)}


def test_not_while_the_lane_beside_has_anything_to_run(tiny):
    def lane(beside=None) -> CudaLane:
        return CudaLane("x", tiny, None, Track(None, None), Track(None, None), None, None, beside)

    prefill = lane()
    decode = lane(prefill)
    assert prefill._has_device(False)
    assert [decode._has_device(shared) for shared in (False, True)] == [True, False]
    passed = False
    prefill._end = SimpleNamespace(query=lambda: passed)
    assert not decode._has_device(False)
    passed = True
    assert decode._has_device(False)
    assert not decode._has_device(True)
