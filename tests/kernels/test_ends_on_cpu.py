"""The kernels before a step's first layer and after its last, run on the CPU as C++ under the address sanitizer."""

from functools import partial

import pytest
import torch
from arrivals import Arrivals

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import ends
from deepinfer_lab.kernels.ops_catalogue import OPS


@pytest.fixture
def on_host(host_ops, monkeypatch: pytest.MonkeyPatch):
    """The launchers, sending their work to the CPU program: to a card of five multiprocessors, blocks in a random order."""
    arrivals = Arrivals()
    monkeypatch.setattr(ends, "launch_op", partial(host_ops.launch, shuffle=3))
    monkeypatch.setattr(ends, "expect", lambda *_, **__: None)  # it asks for a CUDA device
    monkeypatch.setattr(ends, "counters", lambda _: arrivals)
    monkeypatch.setattr(ends, "multiprocessors", lambda _: 5)
    yield
    assert not any(taken.any() for taken in arrivals.taken)


def check(logits: torch.Tensor) -> None:
    rows = len(logits)
    last = torch.full((rows + 2,), -5)
    out, nowhere = torch.full((2, rows), -7.0, dtype=torch.float64), torch.tensor([0])
    ends.likeliest(logits, last, out, nowhere)
    values, places = logits.max(dim=-1)
    assert torch.equal(out[1].long(), places)
    assert torch.equal(out[0].nan_to_num(9e9), values.double().nan_to_num(9e9))
    assert last.tolist() == [*places.tolist(), -5, -5]


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 2048, 2049, 2056, 20_000])
@pytest.mark.parametrize("rows", [1, 3, 21])  # twenty blocks run at once: several to a row, or one
def test_the_largest_of_random_logits(on_host, rows, columns):
    check(torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)).half())


@pytest.mark.parametrize("columns", [15, 4104])
@pytest.mark.parametrize("pair", [
    (torch.nan, torch.nan), (torch.nan, torch.inf), (torch.inf, torch.nan), (torch.inf, torch.inf), (5.0, 5.0), (5.0, 4.0),
    (-0.0, 0.0), (0.0, -0.0), (6e-8, 0.0), (-6e-8, -0.0),
])  # fmt: skip
def test_ties_nan_and_infinities_at_every_distance(on_host, pair, columns):
    """Within eight values, within a thread, a warp, a block, a row, and in the row's last places."""
    places = [(0, 1), (2, 9), (7, 14), (columns - 2, columns - 1), (0, columns - 1), (1, 300), (9, 2060), (2050, 4103)]
    logits = torch.full((2 * len(places), columns), -torch.inf).half()
    for row, (a, b) in enumerate(places):
        logits[row, min(a, columns - 1)], logits[row, min(b, columns - 1)] = pair
        logits[len(places) + row] = logits[row].where(logits[row] != -torch.inf, torch.tensor(-9.0).half())
    for part in (logits, logits[2:5], logits[-1:]):
        check(part.contiguous())


def test_no_two_threads_race(on_host, racing_host_ops, monkeypatch):
    monkeypatch.setattr(ends, "launch_op", racing_host_ops.launch)
    check(torch.randn(2, 4104).half())


def test_a_row_of_the_lowest(on_host):
    check(torch.full((2, 2500), -torch.inf).half())
    check(torch.full((1, 7), -65504.0).half())


@pytest.mark.parametrize(("rows", "columns"), [(1, 7), (1, 151_936), (64, 151_936), (64, 49_152), (65, 8), (2000, 500)])
@pytest.mark.parametrize("slots", [1, 64, 528])
def test_parts_cover_a_row(rows, columns, slots):
    part, parts = ends.cut(rows, columns, slots)
    units = -(-columns // 8)
    assert part * (parts - 1) < units <= part * parts
    assert parts == 1 or rows * parts <= slots


@pytest.mark.parametrize("columns", [8, 576, 2056])
def test_embedding_rows(on_host, columns):
    table = torch.randn(11, columns).half()
    tokens = torch.tensor([10, 0, 3, 3])
    out = ends.embed(tokens, table, out=torch.full((4, columns), torch.nan).half())
    assert torch.equal(out, table[tokens])


@pytest.mark.parametrize("sources", [[], [-1], [0], [5, -1], [2, 2, 0], [-1, 5, -1, 0]])
def test_tokens_that_only_the_device_knows(on_host, sources):
    table, last = torch.randn(11, 2056).half(), torch.tensor([4, 8, 10, 0, 1, 9])
    tokens = torch.tensor([7, 2, 6, 5])
    known, unseen = tokens[: 4 - len(sources)].tolist(), tokens[4 - len(sources) :].tolist()
    expected = [*known, *(last[s].item() if s >= 0 else t for s, t in zip(sources, unseen, strict=True))]
    out = ends.embed(
        tokens, table, torch.tensor(sources, dtype=torch.int64), last, torch.full((4, 2056), torch.nan).half()
    )
    assert tokens.tolist() == expected
    assert torch.equal(out, table[expected])


def test_fetching_words(host_ops):
    host, out = torch.randint(-(2**62), 2**62, (300,)), torch.full((301,), -7)
    host_ops.launch(OPS["fetch"], (2,), (out, host), 300)
    assert out.tolist() == [*host.tolist(), -7]


def test_refusals():
    table, logits = torch.zeros(3, 12).half(), torch.zeros(4, 9).half()
    with pytest.raises(KernelError, match=r"embed: N = 12, must be a positive multiple of 8"):
        ends.embed(torch.tensor([0]), table)
    with pytest.raises(KernelError, match=r"embed: 2 sources, must be at most 1"):
        ends.embed(torch.tensor([0]), torch.zeros(3, 8).half(), torch.tensor([0, 0]), torch.tensor([0, 0]))
    with pytest.raises(KernelError, match=r"embed: sources and last, must be both or neither"):
        ends.embed(torch.tensor([0]), torch.zeros(3, 8).half(), torch.tensor([0]))
    with pytest.raises(KernelError, match=r"fetch: host is on cpu, must be in pinned host memory"):
        ends.fetch(torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(KernelError, match=r"likeliest: V = 0"):
        ends.likeliest(logits[:, :0])
    with pytest.raises(KernelError, match=r"likeliest: logits has dtype torch.float32, must be torch.float16"):
        ends.likeliest(logits.float())
    with pytest.raises(KernelError, match=r"likeliest: logits is on cpu"):
        ends.likeliest(logits)
