"""Products of a few rows with a dense weight, on a GPU, against float64. Outputs are poisoned with NaN first."""

import pytest
import torch
from torch.nn.functional import linear

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import elementwise
from deepinfer_lab.kernels.dense_rows import MAX_ROWS, dense_rows, most_rows
from deepinfer_lab.quant.linear import DenseLinear


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").half()


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    memory = torch.full((len(x) + 1, len(weight)), torch.nan, device="cuda").half()
    dense_rows(x, weight, bias, memory[:-1])
    assert memory[-1].isnan().all()
    return memory[:-1]


def near(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    return torch.allclose(out.double(), exact, rtol=2**-10, atol=2e-4)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "k"), [
    (1, 8), (2, 248), (3, 256), (33, 264), (2111, 1280), (6335, 1536), (6337, 1544), (12_673, 576), (20_001, 24),
    (2560, 2048), (2048, 11_008), (4096, 14_336), (49_152, 576), (151_936, 2048),
])  # fmt: skip
def test_outputs_of_few_rows(n, k, biased):
    x, weight, bias = random(4, k), random(n, k), random(n) if biased else None
    weight *= k**-0.5
    most = most_rows(weight)
    whole = run(x[:most], weight, bias)
    assert near(whole, x[:most], weight, bias)
    for rows in range(1, most):
        assert torch.equal(run(x[:rows], weight, bias), whole[:rows])
    assert torch.equal(run(x[most - 1 : most], weight, bias), whole[most - 1 :])


@pytest.mark.parametrize("rows", [1, 3])
def test_one_hot_reads_out_the_weight(rows):
    """Each value of the weight by itself."""
    weight = random(517, 520)
    for k in (*range(0, 520, 37), 255, 256, 511, 512, 519):
        x = torch.zeros(rows, 520, device="cuda").half()
        x[-1, k] = 1.0
        out = run(x, weight)
        assert torch.equal(out[-1], weight[:, k])
        assert not out[:-1].any()


def test_nan_and_infinities_stay_in_their_rows_and_columns():
    x, weight = random(3, 520), random(5000, 520)
    right = run(x, weight)
    x[1, 300], weight[20, 511], weight[4999, 3] = torch.inf, torch.nan, torch.inf
    out = run(x, weight)
    others = torch.ones(5000, dtype=torch.bool, device="cuda")
    others[[20, 4999]] = False
    assert torch.equal(out[::2, others], right[::2, others])
    assert out[:, 20].isnan().all()
    assert not out[:, 4999].isfinite().any()
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_a_chain_in_a_graph(rows):
    """Each product reads what the kernel before it wrote, and writes where the one before that has read, while its first
    weights are on their way before that is done."""
    first, weight, scale = random(rows, 2048), random(2048, 2048), random(2048)
    weight *= 2048**-0.5

    def chain(x: torch.Tensor) -> torch.Tensor:
        other = torch.empty_like(x)
        for _ in range(20):
            dense_rows(x, weight, None, other)
            dense_rows(other, weight, None, x)
            elementwise.rms_norm(x, scale, 1e-5, out=other)
            dense_rows(other, weight, None, x)
        return x.clone()

    expected = chain(first.clone())
    x, graph = first.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x)
    for _ in range(5):
        x.copy_(first)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def test_a_dense_layer_has_few_rows_from_it_and_others_from_torch():
    weight, bias = random(3000, 576), random(3000)
    weight /= 24
    layer, x = DenseLinear(weight, bias), random(9, 576)
    assert layer.few == MAX_ROWS
    for rows in range(10):
        expected = dense_rows(x[:rows], weight, bias) if 0 < rows <= MAX_ROWS else linear(x[:rows], weight, bias)
        assert torch.equal(layer(x[:rows]), expected)
    assert near(layer(x[::4]), x[::4], weight, bias)
    assert near(layer(x[:1]), x[:1], weight, bias)


def test_what_other_weights_and_layers_leave_to_torch():
    weight = random(40, 96)
    assert DenseLinear(weight, fixed_rows=64).few == 0
    assert DenseLinear(weight.bfloat16()).few == 0
    assert DenseLinear(weight[:, ::2]).few == 0
    assert DenseLinear(weight[:, :92].contiguous()).few == 0
    assert DenseLinear(weight.flatten()[4:-92].view(39, 96)).few == 0
    assert DenseLinear(random(2, 2**18)).few == 0
    assert DenseLinear(weight.float()).few == 0


def test_refusals():
    x, weight = random(2, 96), random(40, 96)
    with pytest.raises(KernelError, match=r"dense_rows: weight has strides"):
        dense_rows(x[:, :48], weight[:, ::2])
    with pytest.raises(KernelError, match=r"dense_rows: weight has dtype torch.float32, must be torch.float16"):
        dense_rows(x, weight.float())
    with pytest.raises(KernelError, match=r"dense_rows: bias has shape \(39,\), must be \(40,\)"):
        dense_rows(x, weight, random(39))
    with pytest.raises(
        KernelError, match=r"dense_rows: M = 2, K = 262144: \d+ bytes of shared memory, must be at most"
    ):
        dense_rows(random(2, 2**18), random(1, 2**18))
