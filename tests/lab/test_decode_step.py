"""The experiment on whole decode steps, small and on a CPU: graphs are forward passes, and a chain only bears the name."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch_gpu import BANDWIDTH, TorchGpu

from deepinfer_lab.engine import step_graph
from deepinfer_lab.engine.padded_step import PaddedShape
from deepinfer_lab.errors import SettingError
from deepinfer_lab.lab import decode_step
from deepinfer_lab.lab.decode_step import COLUMNS, DECODE_STEP, Steps, decode_step_rows
from deepinfer_lab.lab.experiment import complete, obtain
from deepinfer_lab.lab.experiments import EXPERIMENTS
from deepinfer_lab.lab.kernel_timing import WARM_UP
from deepinfer_lab.lab.overlap_cells import load_for
from deepinfer_lab.lab.record import check_row
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.load import load_model

TINY = {"model": "synthetic:tiny", "bits": "w4", "group": 32}
SMALL = {"models": [TINY, {**TINY, "bits": "w4-all"}], "rows": [1, 3], "contexts": [1, 17, 40], "replays": 4}
LONGEST = 32  # positions of the chain


class Graph:
    """Stands in for `StepGraph`: a launch computes at once, and is noted with what it was launched for."""

    launched: list[tuple[PaddedShape, tuple[int, ...], float]]
    off = 0.0  # by how much a chain's logits are wrong

    def __init__(self, shape, model, kv, last, pool, chain, warm_up) -> None:
        self.shape, self.pool, self._model, self._kv = shape, (0, 1), model, kv
        assert shape.chained == (chain is not None)

    def prepare(self, work):
        return work

    def launch(self, work) -> None:
        self.logits = self._model.forward(work.step(self._kv.block_size, self._model.device), self._kv)
        if self.shape.chained:
            self.logits *= 1 + self.off
        past = sum(float(self._kv.read(0, self._kv.rows(torch.as_tensor(span.blocks), torch.arange(span.start)))[0].sum())
                   for span in work.spans)  # fmt: skip
        Graph.launched.append((self.shape, tuple(span.start for span in work.spans), past))


@pytest.fixture(autouse=True)
def _graphs_on_a_cpu(monkeypatch):
    load_for.cache_clear()
    chain = SimpleNamespace(plan=SimpleNamespace(longest=LONGEST))
    monkeypatch.setattr(step_graph, "StepGraph", Graph)
    monkeypatch.setattr(step_graph, "FEWEST_POSITIONS", 16)
    monkeypatch.setattr(Decoder, "chain", lambda self, kv: chain)
    monkeypatch.setattr(Graph, "launched", [], raising=False)


def test_rows_say_what_was_measured():
    rows = list(decode_step_rows(complete(DECODE_STEP, SMALL), TorchGpu()))
    for row in rows:
        assert set(row) == set(COLUMNS)
        check_row(row, "row")
        assert (row["model"], row["group"], row["reason"]) == ("synthetic:tiny", 32, None)
        assert len(row["time_us"]) == 4
        decoder = load_model("synthetic:tiny", bits=row["bits"], group=32, device="cpu").decoder
        read = decoder.step_bytes + row["rows"] * row["context"] * decoder.kv_shape.bytes_per_token
        assert row["step_bytes"] == read
        assert row["floor_us"] == pytest.approx(read / BANDWIDTH * 1e6)
        judged = row["way"] == "chain"
        assert (row["correct"], row["rel_err"]) == ((True, 0) if judged else (None, None))
    expected = []
    for bits in ("w4", "w4-all"):  # a context of 40 is longer than a chain's can be
        for count in (1, 3):
            for context in (1, 17, 40):
                expected.append((bits, count, context, "launches"))
                if count == 1 and context <= LONGEST:
                    expected.append((bits, count, context, "chain"))
    assert [(row["bits"], row["rows"], row["context"], row["way"]) for row in rows] == expected


def test_both_ways_do_the_same_over_the_same_k_and_v():
    params = {**SMALL, "models": [TINY], "rows": [1], "contexts": [9]}
    list(decode_step_rows(complete(DECODE_STEP, params), TorchGpu()))
    each = WARM_UP + 4
    assert [shape.chained for shape, *_ in Graph.launched] == [False] * each + [True] * each
    assert {starts for _, starts, _ in Graph.launched} == {(8,)}
    (past,) = {past for *_, past in Graph.launched}
    assert past != 0  # something is there to be read


@pytest.mark.parametrize(
    ("off", "correct", "rel_err"), [(0.01, True, 0.01), (0.5, False, 0.5), (math.nan, False, None)]
)
def test_a_chain_whose_logits_are_others(monkeypatch, off, correct, rel_err):
    monkeypatch.setattr(Graph, "off", off)
    params = {**SMALL, "models": [TINY], "rows": [1], "contexts": [9]}
    launches, chain = decode_step_rows(complete(DECODE_STEP, params), TorchGpu())
    assert launches["correct"] is None
    assert chain["correct"] is correct
    assert chain["rel_err"] == (rel_err if rel_err is None else pytest.approx(rel_err, rel=1e-3))
    check_row(chain, "row")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room\nfor it"), MemoryError("no room")])
def test_a_model_that_does_not_fit_is_named_and_the_others_are_measured(monkeypatch, error):
    def made(model, *sizes):
        if model.step_bytes == whole:
            raise error
        return Steps(model, *sizes)

    whole = load_model("synthetic:tiny", bits="w4", group=32, device="cpu").decoder.step_bytes
    monkeypatch.setattr(decode_step, "Steps", made)
    first, *others = decode_step_rows(complete(DECODE_STEP, SMALL), TorchGpu())
    assert set(first) == set(COLUMNS)
    check_row(first, "row")
    assert {name: value for name, value in first.items() if value is not None} == {
        **TINY, "reason": f"{type(error).__name__}: no room",
    }  # fmt: skip
    assert {row["bits"] for row in others} == {"w4-all"}


def test_it_asks_for_a_gpu(monkeypatch):
    assert EXPERIMENTS["decode_step"] is DECODE_STEP
    monkeypatch.delenv("DEEPINFER_MODE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match="GPU"):
        obtain(DECODE_STEP, mode="measure", device="unused")
