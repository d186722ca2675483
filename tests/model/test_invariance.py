"""What a batch-invariant model is built of. That its logits are the same bits is for `tests/gpu/` to say."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from deepinfer_lab.cli import main
from deepinfer_lab.errors import MissingDependency, SettingError
from deepinfer_lab.kernels import dispatch
from deepinfer_lab.kernels.catalogue import KERNELS
from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.model import attention, invariance, ops
from deepinfer_lab.model.attention import torch_attention
from deepinfer_lab.model.build import build_block, build_decoder
from deepinfer_lab.model.load import load_model
from deepinfer_lab.model.ops import CudaOps
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.quant import linear
from deepinfer_lab.quant.linear import DenseLinear
from deepinfer_lab.quant.plan import plan_named

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CONFIG = dataclasses.replace(SHAPES["tiny"], head_dim=64)
BLOCK_SIZE = 4


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # float32 is prepacked for oneDNN
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 16, 21])
def test_fixed_rows_multiply_as_all_at_once(rows, biased, dtype):
    weight, bias, x = random(40, 96).to(dtype), random(40).to(dtype) if biased else None, random(rows, 96).to(dtype)
    out = DenseLinear(weight, bias, fixed_rows=8)(x)
    assert out.shape == (rows, 40)
    assert torch.allclose(out, DenseLinear(weight, bias)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 8, 21])
@pytest.mark.parametrize("layout", ["dense", "strided", "transposed", "offset"])
def test_every_dense_product_has_one_shape_layout_and_alignment(monkeypatch, rows, layout):
    views = {
        "dense": random(rows, 96),
        "strided": random(rows, 192)[:, ::2],
        "transposed": random(96, rows).t(),
        "offset": random(rows + 1, 96)[1:],
    }
    x, weight, seen = views[layout].double(), random(40, 96).double(), []

    def spy(part: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append((part.shape, part.stride(), part.data_ptr() % 64, part[-(-rows % 8) :].count_nonzero()))
        return torch.nn.functional.linear(part, *rest)

    monkeypatch.setattr(linear, "functional", SimpleNamespace(linear=spy))
    out = DenseLinear(weight, fixed_rows=8)(x)
    assert torch.allclose(out, x @ weight.t())
    assert [each[:3] for each in seen] == [((8, 96), (96, 1), 0)] * -(-rows // 8)
    assert rows % 8 == 0 or seen[-1][3] == 0  # the padding


def test_one_kernel_for_every_number_of_rows():
    dispatch.validate(invariance.TABLE, "invariance.TABLE")
    for bits in (3, 4):
        assert len({dispatch.choose(bits, m, table=invariance.TABLE) for m in (1, 2, 8, 9, 64, 5000)}) == 1
    assert not any(KERNELS[row.kernel].single_row for row in invariance.TABLE)


@pytest.mark.parametrize("bits", ["none", "w4"])
def test_a_block_takes_the_modes_kernels_and_not_its_callers(bits):
    source, where = SyntheticSource(CONFIG, "random"), {"device": CPU, "dtype": torch.float32, "group": 32}
    table = (dispatch.Row(4, 1, None, "w4_tiled_gemm"),)
    for invariant in (False, True):
        block = build_block(source, plan_named(bits), 0, table=table, batch_invariant=invariant, **where)
        for layer in (block.qkv, block.o, block.gate_up, block.down):
            if bits == "none":
                assert layer._fixed_rows == (invariance.FIXED_ROWS if invariant else None)
            else:
                assert layer._table == (invariance.TABLE[:1] if invariant else table)  # that of its own bits


def by_rows(calls: list[int], pool: KVPool):
    """Stands in for `paged_decode`: each query by itself, in float64, and only what its own length names."""

    def attend(q, *, k, v, block_table, seq_lens, block_size, max_context, fixed_split, k_scale=None, v_scale=None):
        table, lengths = block_table, seq_lens
        assert all(x.is_contiguous() for x in (q, k, v, table, lengths))
        assert q.shape[0] == table.shape[0] == lengths.shape[0]
        assert int(lengths.max()) <= max_context <= table.shape[1] * block_size
        assert fixed_split == 64
        calls.append(len(q))
        out = torch.empty_like(q)
        for row, blocks, length, to in zip(q, table, lengths.tolist(), out, strict=True):
            keys, values = (x[0, :length].double().transpose(0, 1) for x in pool.gather(0, blocks[None]))
            folded = row.double().view(keys.shape[0], -1, row.shape[-1])
            to.copy_(scaled_dot_product_attention(folded, keys, values).view(row.shape))
        return out

    return attend


def step_of(requests: list[tuple[int, int]], dtype: torch.dtype = torch.float16) -> tuple[StepInput, KVPool]:
    """Requests of (cached, new) tokens in scattered blocks, over a pool whose unused slots hold numbers of no meaning."""
    needed = [-(-(old + new) // BLOCK_SIZE) for old, new in requests]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(len(requests))).tolist()
    spans = [
        Span([1] * new, old, [order.pop() for _ in range(n)]) for (old, new), n in zip(requests, needed, strict=True)
    ]
    pool = KVPool(KVShape(1, 2, 16, dtype), sum(needed), BLOCK_SIZE, CPU)
    slots = torch.arange(sum(needed) * BLOCK_SIZE)
    pool.write(0, slots, *random(2, len(slots), 2, 16).to(dtype))
    return StepInput.build(spans, BLOCK_SIZE, CPU), pool


REQUESTS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=5)


@given(requests=REQUESTS, at_once=st.sampled_from((1, 3, 16, 256)))
@settings(deadline=None, max_examples=40)
def test_with_fixed_splits_each_new_token_is_a_query_of_its_own(requests, at_once):
    step, pool = step_of(requests)
    q, calls = random(len(step.positions), 6, 16).half(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "paged_decode", by_rows(calls, pool))
        patch.setattr(ops, "FIXED_SPLIT_QUERIES", at_once)
        out = CudaOps(fixed_split=64).step(step, pool, None)._attention(0, q)
    assert torch.allclose(out.float(), torch_attention(step, pool)(0, q).float(), rtol=4e-3, atol=4e-3)
    assert sum(calls) == len(q)
    assert max(calls) <= at_once
    assert len(calls) == sum(-(-(run.tokens.stop - run.tokens.start) // at_once) for run in attention.runs(step))


@given(requests=REQUESTS, padding=st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_lengths_on_the_host_are_only_upper_bounds(requests, padding):
    step, pool = step_of([*requests, (3, 2)], torch.float32)  # not a decode step
    q = random(len(step.positions), 6, 16)
    expected = torch_attention(step, pool)(0, q)
    table = torch.cat((step.block_table, step.block_table[:, -1:].expand(-1, padding)), dim=1)
    bounds = (table.shape[1] * BLOCK_SIZE,) * len(step.query_lens)
    padded = dataclasses.replace(step, block_table=table, context_lens=bounds)
    assert torch.allclose(torch_attention(padded, pool)(0, q), expected, rtol=1e-5, atol=1e-5)


def test_flash_attention_is_asked_for_on_a_gpu_only(monkeypatch):
    monkeypatch.setattr(attention, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))

    def takes(device: torch.device, dtype: torch.dtype = torch.float16, head_dim: int = 64) -> bool:
        return attention.flash_takes(KVPool(KVShape(1, 1, head_dim, dtype, True), 1, 4, CPU), device)

    assert takes(CUDA)
    assert takes(CUDA, torch.bfloat16)
    assert not takes(CPU)
    assert not takes(CUDA, torch.float32)
    assert not takes(CUDA, head_dim=264)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not takes(CUDA)


@pytest.fixture
def a_card(monkeypatch):
    """A machine on which everything that `obstacle` asks about is well."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(ops, "load_nvrtc", lambda: None)


@pytest.mark.parametrize(
    ("change", "dtype", "message"),
    [
        ({}, torch.bfloat16, r"torch.bfloat16, must be torch.float16"),
        ({"head_dim": 16}, torch.float16, r"head_dim = 16, must be one of 64, 80, 96, 128"),
        ({"head_dim": 258}, torch.float16, r"head_dim = 258, must be at most 256"),
        ({"hidden_size": 36}, torch.float16, r"hidden_size = 36, must be a multiple of 8"),
        ({"intermediate_size": 100}, torch.float16, r"intermediate_size = 100, must be a multiple of 8"),
    ],
)
def test_models_that_cannot_be_batch_invariant(a_card, change, dtype, message):
    invariance.require(CONFIG, CUDA, torch.float16)
    with pytest.raises(SettingError, match=f"batch_invariant: {message}"):
        invariance.require(dataclasses.replace(CONFIG, **change), CUDA, dtype)


def test_machines_that_cannot_be_batch_invariant(a_card, monkeypatch):
    with pytest.raises(SettingError, match="batch_invariant: device 'cpu', must be a CUDA GPU"):
        invariance.require(CONFIG, CPU, torch.float16)

    def missing() -> None:
        raise MissingDependency("NVRTC was not found")

    monkeypatch.setattr(ops, "load_nvrtc", missing)
    with pytest.raises(SettingError, match="batch_invariant: NVRTC was not found"):
        invariance.require(CONFIG, CUDA, torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(SettingError, match=r"batch_invariant: compute capability 7.5, must be 8.0 or higher"):
        invariance.require(CONFIG, CUDA, torch.float16)


def test_it_is_refused_before_any_weight_is_read(a_card):
    class Unread(SyntheticSource):
        def tensor(self, name: str) -> torch.Tensor:
            raise AssertionError(f"{name} was read")

    source = Unread(SHAPES["tiny"], "tiny")
    with pytest.raises(SettingError, match="head_dim = 16"):
        build_decoder(source, plan_named("none"), group=32, device=CUDA, dtype=torch.float16, batch_invariant=True)


def test_on_a_cpu_it_changes_nothing_and_says_so():
    step, _ = step_of([(0, 9), (0, 1)])
    logits = []
    for asked in (False, True):
        decoder = load_model("synthetic:tiny", device="cpu", batch_invariant=asked).decoder
        assert decoder.batch_invariant is False
        logits.append(decoder.forward(step, KVPool(decoder.kv_shape, 8, BLOCK_SIZE, CPU)))
    assert torch.equal(*logits)


def test_a_dispatch_table_beside_it_is_refused(tmp_path):
    table = tmp_path / "dispatch.json"
    table.write_text("{}")
    arguments = ["generate", "x", "--model", "synthetic:tiny", "--batch-invariant", "--dispatch", str(table)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert f"dispatch {table}: batch_invariant takes one kernel" in result.output
