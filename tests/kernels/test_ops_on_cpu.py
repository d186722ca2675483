"""The element-wise CUDA sources, run on the CPU as C++ under the address sanitizer, against torch."""

import pytest
import torch
from torch.nn.functional import silu

from deepinfer_lab.errors import MissingDependency
from deepinfer_lab.kernels import elementwise, merge_attention, paged_attention, resources
from deepinfer_lab.kernels.compiler import ARCHS
from deepinfer_lab.kernels.ops_catalogue import OPS, runs_on
from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.model.rope import rotate

CPU = torch.device("cpu")


@pytest.fixture
def on_host(host_ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers, sending their work to the CPU program."""
    for module in (elementwise, merge_attention):
        monkeypatch.setattr(module, "launch_op", host_ops.launch)
        monkeypatch.setattr(module, "expect", lambda *_, **__: None)  # it asks for a CUDA device


@pytest.mark.parametrize("columns", [8, 576, 2056])
def test_rms_norm(on_host, columns):
    random = torch.Generator().manual_seed(columns)
    x, delta, weight = (torch.randn(*s, columns, generator=random).half() for s in ((3,), (3,), ()))
    norm = torch.nn.functional.rms_norm
    out = elementwise.rms_norm(x, weight, 1e-5, torch.full_like(x, torch.nan))
    assert torch.allclose(out.float(), norm(x.float(), (columns,), weight.float(), 1e-5), rtol=1e-3, atol=1e-6)
    total, out = elementwise.add_rms_norm(
        x, delta, weight, 1e-5, torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    )
    assert torch.equal(total, x + delta)
    assert torch.allclose(out.float(), norm(total.float(), (columns,), weight.float(), 1e-5), rtol=1e-3, atol=1e-6)


def test_silu_mul(on_host):
    x = torch.randn(3, 2 * 1032).half() * 4
    out = elementwise.silu_mul(x, torch.full((3, 1032), torch.nan).half())
    gate, up = x.float().chunk(2, dim=1)
    assert torch.allclose(out.float(), silu(gate) * up, rtol=1e-3, atol=1e-6)
    in_turn = x.view(3, 2, -1, 8).transpose(1, 2).flatten(1).contiguous()
    assert torch.equal(elementwise.silu_mul(in_turn, torch.full((3, 1032), torch.nan).half(), interleaved=True), out)


@pytest.mark.parametrize(("splits", "empty"), [(1, ()), (4, (1,)), (3, (0, 1, 2))])
def test_merge_attention(on_host, splits, empty):
    """Of keys that are cut into parts: what attention over each gives, and the log of what it divided by, give it over all."""
    tokens, heads, dim, keys = 5, 3, 40, 7
    scores = torch.randn(splits + 1, heads, tokens, keys, dtype=torch.float64) * 3
    values = torch.randn(splits + 1, heads, keys, dim, dtype=torch.float64)
    used = [part for part in range(splits + 1) if part not in empty]
    results = (scores.softmax(-1) @ values).transpose(1, 2).half().contiguous()
    results[list(empty)] = torch.nan  # not written
    sums = scores.logsumexp(-1).float()
    sums[list(empty)] = torch.inf
    out = merge_attention.merge_attention(
        results[:-1].reshape(splits * tokens, heads, dim), sums[:-1].transpose(0, 1).reshape(heads, -1).contiguous(),
        results[-1], sums[-1].contiguous(), torch.full((tokens, heads, dim), torch.nan).half(),
    )  # fmt: skip
    together = torch.cat([scores[part] for part in used], dim=-1).softmax(-1)
    expected = together @ torch.cat([values[part] for part in used], dim=1)
    assert (out.double() - expected.transpose(0, 1)).abs().max() < 3e-3


def test_merging_lets_nan_through(on_host):
    parts, last = torch.ones(2, 1, 8).half(), torch.ones(2, 1, 8).half()
    sums = torch.tensor([[0.0, torch.nan]])
    assert merge_attention.merge_attention(parts, sums, last, torch.zeros(1, 2)).isnan().any(-1).flatten().tolist() == [
        False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("quantised", [False, True], ids=["f16", "i8"])
@pytest.mark.parametrize("dim", [16, 80, 128, 256])
def test_rope_write(on_host, quantised, dim):
    heads, kv_heads, slots = 3, 2, torch.tensor([9, 0, 14, 7])
    qkv = torch.randn(4, heads + 2 * kv_heads, dim).half()
    qkv[1, heads + kv_heads] = 0  # a V of zeros
    qkv[2, heads + kv_heads, 1] = torch.inf
    qkv[3, heads, 0] = torch.nan
    angle = torch.rand(20, dim // 2) * 6
    cos, sin, positions = angle.cos().half(), angle.sin().half(), torch.tensor([3, 19, 0, 11])
    pools = [KVPool(KVShape(1, kv_heads, dim, torch.float16, quantised), 4, 4, CPU) for _ in range(2)]
    memory = pools[0].layer(0)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    caches = (memory.k, memory.v, memory.k_scale, memory.v_scale)
    out = elementwise.rope_write(
        q, k, v, cos, sin, positions, slots, *caches, torch.full((4, heads, dim), torch.nan).half()
    )
    qk = rotate(qkv[:, : heads + kv_heads].float(), *(x[positions].float().unsqueeze(1) for x in (cos, sin))).half()
    assert torch.equal(out, qk[:, :heads])
    pools[1].write(0, slots, qk[:, heads:], v)
    expected = pools[1].layer(0)
    for name in ("k", "v", "k_scale", "v_scale"):
        ours, theirs = getattr(memory, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours.nan_to_num(5.0), theirs.nan_to_num(5.0)), name


def test_no_op_spills_on_any_architecture():
    try:
        rows = resources.report(kernels=OPS)
    except MissingDependency as error:
        pytest.skip(str(error))
    pairs = {(name, arch) for name, op in OPS.items() for arch in ARCHS if runs_on(op, arch)}
    assert {(row.kernel, row.arch) for row in rows} == pairs
    assert [r for r in rows if r.usage.spill_stores or r.usage.spill_loads or r.usage.stack] == []
    for row in rows:  # what the splitting of sequences counts on
        if row.kernel.startswith("paged_decode"):
            resident = paged_attention.RESIDENT[torch.int8 if "i8" in row.kernel else torch.float16]
            assert row.occupancy.blocks >= resident or row.arch == "sm_120", row
