"""The fused element-wise kernels against torch, on a GPU. Outputs are poisoned with NaN first."""

import pytest
import torch
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import silu

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import elementwise
from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.model.rope import rotate


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").half()


def poison(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=torch.float16, device="cuda")


def within_an_ulp(ours: torch.Tensor, exact: torch.Tensor) -> bool:
    """fp16 has 11 bits: a correctly rounded value is within 2^-11 of the exact one; twice that leaves room for float32."""
    return torch.allclose(ours.double(), exact.double(), rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("columns", [8, 64, 576, 2048, 2056, 11008])
def test_rms_norm(rows, columns):
    x, delta, weight = random(rows, columns) * 3, random(rows, columns), random(columns)
    out = elementwise.rms_norm(x, weight, 1e-5, poison(rows, columns))
    assert within_an_ulp(out, torch_rms_norm(x.double(), (columns,), weight.double(), 1e-5))
    total, out = elementwise.add_rms_norm(x, delta, weight, 1e-5, poison(rows, columns), poison(rows, columns))
    assert torch.equal(total, x + delta)
    assert within_an_ulp(out, torch_rms_norm(total.double(), (columns,), weight.double(), 1e-5))


def test_rms_norm_keeps_rows_apart():
    x, weight = random(4, 128), random(128)
    right = elementwise.rms_norm(x, weight, 1e-5)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    out = elementwise.rms_norm(x, weight, 1e-5)
    assert torch.equal(out[[0, 3]], right[[0, 3]])
    assert out[1].isnan().all()
    assert out[2, 5].isnan()


# 70,000 rows are more than a grid's y dimension holds.
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (5, 1536), (3, 2056), (2, 11008), (70_000, 8)])
def test_silu_mul(rows, columns):
    x = random(rows, 2 * columns) * 4
    gate, up = x.float().chunk(2, dim=1)
    assert within_an_ulp(elementwise.silu_mul(x, poison(rows, columns)), silu(gate) * up)


def test_silu_mul_of_eight_in_turn():
    x = random(3, 2 * 1032) * 4
    in_turn = x.view(3, 2, -1, 8).transpose(1, 2).flatten(1).contiguous()
    assert torch.equal(elementwise.silu_mul(in_turn, poison(3, 1032), interleaved=True), elementwise.silu_mul(x))


def test_silu_mul_of_extremes():
    x = torch.tensor([[65504, -65504, 0, -0.0, torch.nan, 1, torch.inf, -20] + [1] * 8], device="cuda").half()
    expected = silu(x[:, :8].float())
    assert torch.allclose(elementwise.silu_mul(x).float(), expected, rtol=1e-3, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("quantised", [False, True], ids=["f16", "i8"])
@pytest.mark.parametrize("dim", [2, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (16, 2)])
def test_rope_write(quantised, dim, heads, kv_heads):
    tokens, device = 37, torch.device("cuda", torch.cuda.current_device())
    qkv = random(tokens, heads + 2 * kv_heads, dim)
    qkv[3, heads] = 0
    qkv[4, heads + kv_heads, 1], qkv[5, heads, 0] = torch.inf, torch.nan
    angle = torch.rand(500, dim // 2, device=device) * 6
    cos, sin = angle.cos().half(), angle.sin().half()
    positions, slots = (torch.randperm(500, device=device)[:tokens] for _ in range(2))
    pools = [KVPool(KVShape(2, kv_heads, dim, torch.float16, quantised), 32, 16, device) for _ in range(2)]
    memory = pools[0].layer(1)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    caches = (memory.k, memory.v, memory.k_scale, memory.v_scale)
    out = elementwise.rope_write(q, k, v, cos, sin, positions, slots, *caches, poison(tokens, heads, dim))
    angles = (x[positions].float().unsqueeze(1) for x in (cos, sin))
    qk = rotate(qkv[:, : heads + kv_heads].float(), *angles)
    assert torch.allclose(out.float(), qk[:, :heads], rtol=2**-10, atol=1e-6)
    pools[1].write(1, slots, qk[:, heads:].half(), v)
    everything = torch.arange(32, device=device)[None]
    for ours, theirs in zip(pools[0].gather(1, everything), pools[1].gather(1, everything), strict=True):
        # A fused multiply-add may round the last bit differently, and then a neighbouring int8.
        step = 0.05 if quantised else 0.005
        assert torch.allclose(ours, theirs, rtol=2**-9, atol=step, equal_nan=True)
    zeros = pools[0].gather(0, everything)
    assert all((x == 0).all() for x in zeros)  # the other layer is untouched


@pytest.mark.parametrize("quantised", [False, True], ids=["f16", "i8"])
def test_v_in_the_cache_is_bit_for_bit_what_the_pool_writes(quantised):
    device = torch.device("cuda", torch.cuda.current_device())
    qkv, slots = random(50, 5, 128), torch.randperm(64, device=device)[:50]
    cos, sin = torch.ones(1, 64, device=device).half(), torch.zeros(1, 64, device=device).half()  # no rotation
    pools = [KVPool(KVShape(1, 2, 128, torch.float16, quantised), 4, 16, device) for _ in range(2)]
    memory, expected = (pool.layer(0) for pool in pools)
    q, k, v = qkv.split((1, 2, 2), dim=1)
    caches = (memory.k, memory.v, memory.k_scale, memory.v_scale)
    out = elementwise.rope_write(q, k, v, cos, sin, torch.zeros_like(slots), slots, *caches)
    pools[1].write(0, slots, k, v)
    assert torch.equal(out, q)
    for name in ("k", "v", "k_scale", "v_scale"):
        ours, theirs = getattr(memory, name), getattr(expected, name)
        assert ours is theirs is None or torch.equal(ours, theirs), name


def test_graph_capture():
    x, delta, weight = random(5, 256), random(5, 256), random(256)
    elementwise.silu_mul(elementwise.add_rms_norm(x, delta, weight, 1e-5)[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, normed = elementwise.add_rms_norm(x, delta, weight, 1e-5)
        gated = elementwise.silu_mul(normed)
    for _ in range(3):
        x.copy_(random(5, 256))
        graph.replay()
        torch.cuda.synchronize()
        again = elementwise.add_rms_norm(x, delta, weight, 1e-5)[1]
        assert torch.equal(normed, again)
        assert torch.equal(gated, elementwise.silu_mul(again))


def test_refusals():
    x, weight = random(2, 64), random(64)
    with pytest.raises(KernelError, match=r"N = 60, must be a positive multiple of 8"):
        elementwise.rms_norm(x[:, :60].contiguous(), weight[:60], 1e-5)
    with pytest.raises(KernelError, match=r"x has dtype torch.float32, must be torch.float16"):
        elementwise.rms_norm(x.float(), weight, 1e-5)
    with pytest.raises(KernelError, match=r"weight is on cpu"):
        elementwise.rms_norm(x, weight.cpu(), 1e-5)
    with pytest.raises(KernelError, match=r"I = 12, must be a multiple of 8"):
        elementwise.silu_mul(x[:, :24].contiguous())
    with pytest.raises(KernelError, match=r"x has strides"):
        elementwise.silu_mul(x[:, ::2])
