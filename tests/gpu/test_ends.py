"""The kernels before a step's first layer and after its last, against torch, on a GPU. Outputs are poisoned first."""

import pytest
import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import ends
from deepinfer_lab.kernels.counters import counters


def check(logits: torch.Tensor) -> None:
    rows = len(logits)
    last = torch.full((rows + 2,), -5, device="cuda")
    out = ends.likeliest(logits, last, torch.full((2, rows), -7.0, dtype=torch.float64, device="cuda"))
    values, places = logits.max(dim=-1)
    assert torch.equal(out[1].long(), places)
    assert torch.equal(out[0].nan_to_num(9e9), values.double().nan_to_num(9e9))
    assert last.tolist() == [*places.tolist(), -5, -5]
    assert not counters(torch.cuda.current_device()).take(rows).any()


@pytest.mark.parametrize("columns", [1, 7, 8, 2049, 2056, 49_152, 50_257, 151_936])
@pytest.mark.parametrize("rows", [*range(1, 10), 16, 33, 64, 65])
def test_the_largest_of_random_logits(rows, columns):
    check(torch.randn(rows, columns, device="cuda").half())


@pytest.mark.parametrize("columns", [15, 4104, 151_936])
@pytest.mark.parametrize("pair", [
    (torch.nan, torch.nan), (torch.nan, torch.inf), (torch.inf, torch.nan), (torch.inf, torch.inf), (5.0, 5.0), (5.0, 4.0),
    (-0.0, 0.0), (0.0, -0.0), (6e-8, 0.0), (-6e-8, -0.0),
])  # fmt: skip
def test_ties_infinities_and_nan_at_every_distance(pair, columns):
    """Within eight values, within a thread, a warp, a block, a row, and in the row's last places."""
    places = [(0, 1), (2, 9), (7, 14), (columns - 2, columns - 1), (0, columns - 1), (1, 300), (9, 2060), (2050, 4103)]
    logits = torch.full((2 * len(places), columns), -torch.inf).half()
    for row, (a, b) in enumerate(places):
        logits[row, min(a, columns - 1)], logits[row, min(b, columns - 1)] = pair
        logits[len(places) + row] = logits[row].where(logits[row] != -torch.inf, torch.tensor(-9.0).half())
    for part in (logits, logits[2:5], logits[-1:]):
        check(part.contiguous().cuda())


@pytest.mark.parametrize("count", [1, 255, 256, 257, 20_000])
def test_numbers_come_from_pinned_memory(count):
    host = torch.randint(-(2**62), 2**62, (count,)).pin_memory()
    memory = torch.full((count + 1,), -7, device="cuda")
    for _ in range(3):
        host += 1  # the same addresses: nothing stale may be read
        assert torch.equal(ends.fetch(host, memory[:count]).cpu(), host)
    assert memory[-1] == -7


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_answers_go_to_the_host_by_themselves(rows):
    """A graph's replays, each to an address of its own that it is told, all before anybody looks."""
    logits = torch.empty(rows, 151_936, device="cuda").half()
    answers = [torch.full((2, rows), -7.0, dtype=torch.float64).pin_memory() for _ in range(4)]
    address, graph = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ends.likeliest(logits, host=address)
    expected = []
    for answer in answers:
        logits.copy_(torch.randn(logits.shape, device="cuda"))
        address.fill_(answer.data_ptr())
        graph.replay()
        expected.append(logits.max(dim=-1))
    address.zero_()
    graph.replay()
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    for answer, (values, places) in zip(answers, expected, strict=True):
        assert torch.equal(answer, torch.stack([values.double(), places.double()]).cpu())
    assert torch.equal(out.cpu(), answers[-1])


def test_a_row_of_the_lowest():
    check(torch.full((2, 151_936), -torch.inf, device="cuda").half())
    check(torch.full((1, 7), -65504.0, device="cuda").half())


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_step_in_a_graph_feeds_the_next(rows):
    """Each replay takes the tokens that the one before has found: a row of the table is its logits, and the largest of row i
    is at a place that only it names, so that one stale token shows."""
    vocabulary, steps = 4096, 6
    after = torch.randperm(vocabulary, device="cuda")
    table = torch.randn(vocabulary, vocabulary, device="cuda").clamp(-3, 3).half()
    table[torch.arange(vocabulary, device="cuda"), after] = 4.0
    tokens = torch.randperm(vocabulary, device="cuda")[: rows + 1]
    last, sources = torch.zeros(rows + 3, dtype=torch.int64, device="cuda"), torch.full((rows,), -1, device="cuda")
    given = tokens.clone()

    def step() -> torch.Tensor:
        return ends.likeliest(ends.embed(given, table, sources, last)[1:].contiguous(), last)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        best = step()
    expected = tokens[1:]
    for _ in range(steps):
        graph.replay()
        expected = after[expected]
        assert torch.equal(best[1].long(), expected)
        assert (best[0] == 4).all()
        assert torch.equal(last[:rows], expected)
        assert given[0] == tokens[0]
        given[1:] = 0  # not known
        sources.copy_(torch.arange(rows, device="cuda").flip(0))
        expected = expected.flip(0)


def test_graphs_on_two_streams_keep_their_counters_apart():
    logits = [torch.randn(3, 151_936, device="cuda").half() for _ in range(2)]
    streams, graphs, found = [torch.cuda.Stream() for _ in logits], [], []
    for each, stream in zip(logits, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            found.append([ends.likeliest(each) for _ in range(20)])
    for _ in range(5):
        for results in found:
            for best in results:
                best.fill_(-1)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for each, results in zip(logits, found, strict=True):
            assert all(torch.equal(best[1].long(), each.argmax(dim=-1)) for best in results)


@pytest.mark.parametrize("columns", [8, 576, 2048, 2056, 3584])
@pytest.mark.parametrize("rows", [1, 7, 64, 2113])
def test_embedding_rows(rows, columns):
    table = torch.randn(500, columns, device="cuda").half()
    tokens = torch.randint(0, 500, (rows,), device="cuda")
    tokens[0], tokens[-1] = 499, 0
    out = ends.embed(tokens, table, out=torch.full((rows, columns), torch.nan, device="cuda").half())
    assert torch.equal(out, table[tokens])


@pytest.mark.parametrize("columns", [2056, 8])
@pytest.mark.parametrize("sources", [[], [-1], [0], [64, -1], [2, 2, 0], [-1, 64, -1, 0], [63] * 60])
def test_tokens_that_only_the_device_knows(sources, columns):
    table, last = torch.randn(500, columns, device="cuda").half(), torch.randint(0, 500, (65,), device="cuda")
    tokens = torch.randint(0, 500, (60,), device="cuda")
    expected, first = tokens.clone(), 60 - len(sources)
    for row, source in enumerate(sources):
        expected[first + row] = last[source] if source >= 0 else tokens[first + row]
    out = torch.full((60, columns), torch.nan, device="cuda").half()
    ends.embed(tokens, table, torch.tensor(sources, dtype=torch.int64, device="cuda"), last, out)
    assert torch.equal(tokens, expected)
    assert torch.equal(out, table[expected])


def test_refusals():
    logits = torch.zeros(4, 16, device="cuda").half()
    with pytest.raises(KernelError, match=r"likeliest: logits has strides"):
        ends.likeliest(logits[:, ::2])
    with pytest.raises(KernelError, match=r"likeliest: last has 3 places, must be at least 4"):
        ends.likeliest(logits, torch.zeros(3, dtype=torch.int64, device="cuda"))
    with pytest.raises(KernelError, match=r"fetch: host is on cpu, must be in pinned host memory"):
        ends.fetch(torch.tensor([1]), torch.tensor([1], device="cuda"))
    with pytest.raises(KernelError, match=r"embed: tokens is on cpu"):
        ends.embed(torch.tensor([1]), logits)
