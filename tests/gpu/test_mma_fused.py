"""What a product of a few rows does before and after, on a GPU: bit for bit what a launch for each does."""

import pytest
import torch

from deepinfer_lab import kernels
from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import elementwise, mma_small
from deepinfer_lab.kernels.loader import max_shared, multiprocessors
from deepinfer_lab.kernels.mma_small import FUSED_ROWS, Card, Norm, Plan, fuses, norm_plan
from deepinfer_lab.quant.interleave import interleave, interleaved_rows
from deepinfer_lab.quant.layout import PackedWeight
from deepinfer_lab.quant.tiles import TiledWeight, to_tiles

NAMES = ("w4_mma_small", "w3_mma_small")
EPS = 1e-5
EVERY_M = range(1, FUSED_ROWS + 1)


@pytest.fixture(params=["8", "8_pair", "8_many"])
def form(request, monkeypatch) -> str:
    """This kernel, whatever the launcher would choose."""
    columns = 32 if "pair" in request.param else 16
    monkeypatch.setattr(
        mma_small, "plan", lambda bits, m, n, card: Plan(f"w{bits}_mma_{request.param}", (-(-m // 8), -(-n // columns)))
    )
    return request.param


def product(x: torch.Tensor, weight: PackedWeight | TiledWeight, bias: torch.Tensor | None = None, **more: object):
    """Into memory that held NaN, unless `out` is given."""
    tiled = weight if isinstance(weight, TiledWeight) else to_tiles(weight)
    columns = weight.n // 2 if more.get("gated") else weight.n
    out = more.pop("out", torch.full((x.shape[0], columns), torch.nan, dtype=torch.float16, device="cuda"))
    launcher = kernels.TILED_LAUNCHERS[f"w{weight.bits}_mma_small"]
    return launcher(x, tiled.tiles, tiled.scales, weight.n, weight.group, bias, out, **more)


def norm_of(k: int) -> Norm:
    return Norm((1 + torch.randn(k, device="cuda") / 4).half(), EPS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_norm_gate_and_addition_over_odd_sizes(problem, form, name, group):
    for m in EVERY_M:
        for n, k in ((16, group), (48, 9 * group), (4240, 2048), (336, 2048 + group)):
            p, norm = problem(name, m, n, k, group, bias=True), norm_of(k)
            x, bias = p.x * 3, p.bias
            normed, residual = elementwise.rms_norm(x, norm.weight, EPS), torch.randn(m, n, device="cuda").half()
            plain = product(normed, p.weight, bias)
            assert torch.equal(product(x, p.weight, bias, norm=norm), plain), (m, n, k)
            total, _ = elementwise.add_rms_norm(residual, plain, torch.ones(n, device="cuda").half(), EPS)
            assert torch.equal(product(normed, p.weight, bias, residual=residual), total)
            assert torch.equal(product(x, p.weight, bias, norm=norm, residual=residual), total)
            assert product(normed, p.weight, bias, residual=residual, out=residual) is residual
            assert torch.equal(residual, total)
            in_turn, its_bias = interleave(p.weight), bias[interleaved_rows(n).cuda()]
            gated = elementwise.silu_mul(plain)
            assert torch.equal(elementwise.silu_mul(product(normed, in_turn, its_bias), interleaved=True), gated)
            assert torch.equal(product(normed, in_turn, its_bias, gated=True), gated)
            assert torch.equal(product(x, in_turn, its_bias, norm=norm, gated=True), gated)


@pytest.mark.parametrize("name", NAMES)
def test_the_layers_of_a_decoder_against_float32(problem, name):
    """Each as the plan has it: qkv, gate and up, and both that add to the residual stream."""
    for m in (1, 3, 8):
        for n, k in ((2560, 2048), (22016, 2048), (5632, 2048), (1536, 576)):
            p, norm = problem(name, m, n, k, 64, bias=True), norm_of(k)
            assert fuses(p.weight.bits, m, n, k, 64, "cuda")
            normed = torch.nn.functional.rms_norm(p.x.float(), (k,), norm.weight.float(), EPS)
            expected = normed @ p.weight.dequantise(torch.float32).T + p.bias.float()
            out = product(p.x, p.weight, p.bias, norm=norm).float()
            assert (out - expected).norm() / expected.norm() < 2e-3
            gate, up = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * up
            in_turn, its_bias = interleave(p.weight), p.bias[interleaved_rows(n).cuda()]
            out = product(p.x, in_turn, its_bias, norm=norm, gated=True).float()
            assert (out - expected).norm() / expected.norm() < 4e-3
        for n, k in ((2048, 2048), (2048, 11008), (3584, 18944)):
            p, residual = problem(name, m, n, k, 64), torch.randn(m, n, device="cuda").half()
            expected = residual.float() + p.reference()
            out = product(p.x, p.weight, residual=residual).float()
            assert (out - expected).norm() / expected.norm() < 2e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_its_batch(problem, form, name):
    p, norm = problem(name, 8, 4240, 2240, 64), norm_of(2240)
    tiled = to_tiles(p.weight)
    together = product(p.x, tiled, norm=norm, gated=True)
    for size in range(1, 8):
        parts = [product(rows, tiled, norm=norm, gated=True) for rows in p.x.split(size)]
        assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_stay_in_their_rows(problem, form, name):
    p, norm = problem(name, 6, 80, 192, 64), norm_of(192)
    right = product(p.x, p.weight, norm=norm)
    x = p.x.clone()
    x[1, 191], x[4, 0] = torch.nan, torch.inf
    out = product(x, p.weight, norm=norm)
    good = [0, 2, 3, 5]
    assert torch.equal(out[good], right[good])
    assert out[[1, 4]].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_more_rows_are_gated_and_added_to_as_well(problem, name):
    for m in (9, 16, 33):
        p, residual = problem(name, m, 176, 640, 128, bias=True), torch.randn(m, 176, device="cuda").half()
        plain = product(p.x, p.weight, p.bias)
        assert torch.equal(product(p.x, p.weight, p.bias, residual=residual), residual + plain)
        assert torch.equal(product(p.x, p.weight, p.bias, gated=True), elementwise.silu_mul(plain, interleaved=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_in_a_cuda_graph(problem, name):
    """Each launch may begin while the one before it runs, and reads what that one writes: gate and up, then down, in place."""
    for m in (1, 8):
        p, q = problem(name, m, 2 * 2816, 2048, 128), problem(name, m, 2048, 2816, 128)
        gate_up, down, norm, start = to_tiles(interleave(p.weight)), to_tiles(q.weight), norm_of(2048), p.x.clone()
        hidden = start.clone()

        def layer(x: torch.Tensor, gate_up=gate_up, down=down, norm=norm) -> None:
            product(product(x, gate_up, norm=norm, gated=True), down, residual=x, out=x)

        expected = start.clone()
        for _ in range(6):
            gated = elementwise.silu_mul(
                product(elementwise.rms_norm(expected, norm.weight, EPS), gate_up), interleaved=True
            )
            expected = expected + product(gated, down)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(6):
                layer(hidden)
        for _ in range(20):
            hidden.copy_(start)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(hidden, expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_longest_rows_that_fit(problem, name):
    """Hardly a byte of shared memory is left."""
    card, bits = Card(multiprocessors(0), max_shared(0)), int(name[1])
    k = max(k for k in range(128, 2**15, 128) if norm_plan(bits, 8, 48, k, card))
    p, norm = problem(name, 8, 48, k, 128), norm_of(k)
    assert card.shared - norm_plan(bits, 8, 48, k, card).shared < 2**15
    assert torch.equal(
        product(p.x, p.weight, norm=norm), product(elementwise.rms_norm(p.x, norm.weight, EPS), p.weight)
    )
    assert not fuses(bits, 8, 48, k + 128, 128, "cuda")
    longer, its_norm = problem(name, 8, 48, k + 128, 128), norm_of(k + 128)
    with pytest.raises(KernelError, match="the norm of so many does not fit"):
        product(longer.x, longer.weight, norm=its_norm)


def test_refusals(problem):
    p = problem("w4_mma_small", 1, 32, 64, 32)
    for more, complaint in (
        ({"residual": torch.zeros(1, 31).half().cuda()}, r"residual has shape \(1, 31\), must be \(1, 32\)"),
        ({"norm": Norm(torch.ones(64).half(), EPS)}, r"norm.weight is on cpu, must be on a CUDA device"),
        ({"norm": norm_of(32)}, r"norm.weight has shape \(32,\), must be \(64,\)"),
        ({"gated": True, "out": torch.zeros(1, 32).half().cuda()}, r"out has shape \(1, 32\), must be \(1, 16\)"),
    ):
        with pytest.raises(KernelError, match=complaint):
            product(p.x, p.weight, **more)
