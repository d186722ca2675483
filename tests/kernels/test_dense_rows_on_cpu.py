"""Products of a few rows with a dense weight: the CUDA source, run on the CPU as C++ under the address sanitizer."""

from functools import partial

import pytest
import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import dense_rows
from deepinfer_lab.kernels.resources import LIMITS

PROCESSORS, SHARED = 2, 99 * 1024


@pytest.fixture
def on_host(host_ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher, sending its work to the CPU program: to a card of two multiprocessors, blocks in a random order."""
    monkeypatch.setattr(dense_rows, "launch_op", partial(host_ops.launch, shuffle=5))
    monkeypatch.setattr(dense_rows, "expect", lambda *_, **__: None)  # it asks for a CUDA device
    monkeypatch.setattr(dense_rows, "multiprocessors", lambda _: PROCESSORS)
    monkeypatch.setattr(dense_rows, "max_shared", lambda _: SHARED)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The kernel's, into memory that held NaN, checked against float64."""
    out = torch.full((len(x), len(weight)), torch.nan).half()
    dense_rows.dense_rows(x, weight, bias, out)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert torch.allclose(out.double(), exact, rtol=2**-10, atol=2e-4)
    return out


# Four rows have 16 warps here, one row 32: fewer pairs than those, as many, one more, several times as many. K: a part of a
# step, a lane less or more than one, as many steps as a ring has, one less and one more.
@pytest.mark.parametrize(("n", "k"), [
    (1, 8), (2, 248), (3, 256), (31, 264), (33, 1280), (34, 1536), (65, 1544), (97, 24), (130, 512), (17, 2048),
])  # fmt: skip
def test_rows_are_right_and_the_same_bits_in_any_company(on_host, n, k):
    random = torch.Generator().manual_seed(n * k)
    x, weight, bias = (torch.randn(*s, generator=random).half() for s in ((4, k), (n, k), (n,)))
    weight = (weight * k**-0.5).half()
    whole = product(x, weight, bias)
    for rows in (slice(0, 3), slice(2, 4), slice(1, 2)):
        assert torch.equal(product(x[rows], weight, bias), whole[rows])
    product(x[:1], weight, None)


def test_nan_and_infinities_stay_in_their_rows_and_columns(on_host):
    x, weight = torch.randn(3, 520).half(), torch.randn(37, 520).half()
    weight /= 32
    right = product(x, weight, None)
    x[1, 300], weight[20, 511], weight[7, 3] = torch.inf, torch.nan, torch.inf
    out = torch.zeros(3, 37).half()
    dense_rows.dense_rows(x, weight, None, out)
    others = torch.ones(37, dtype=torch.bool)
    others[[7, 20]] = False
    assert torch.equal(out[::2, others], right[::2, others])
    assert out[:, 20].isnan().all()
    assert not out[:, 7].isfinite().any()
    assert torch.equal(out[1, others], torch.where(weight[others, 300] > 0, torch.inf, -torch.inf).half())


def test_strided_and_misaligned_rows_are_copied(on_host):
    x, weight = torch.randn(6, 97).half(), torch.randn(9, 96).half()
    weight /= 10
    product(x[::2, :96], weight, None)
    product(x.flatten()[1:97].view(1, 96), weight, None)


def test_no_two_threads_race(on_host, racing_host_ops, monkeypatch):
    monkeypatch.setattr(dense_rows, "launch_op", racing_host_ops.launch)
    product(torch.randn(2, 520).half(), torch.randn(67, 520).half() / 32, None)


@pytest.mark.parametrize("n", [1, 2, 3, 5000, 151_936])
@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize(("m", "k"), [(1, 576), (2, 2048), (3, 3584), (4, 4096)])
def test_blocks_are_resident_together(arch, n, m, k):
    available = LIMITS[arch].shared - LIMITS[arch].reserved
    shared = dense_rows.shared_bytes(m, k)
    assert shared >= dense_rows.RING + m * k * 2
    blocks = dense_rows.grid(n, shared, 132, available)
    assert 1 <= blocks <= (n + 1) // 2
    assert -(-blocks // 132) * (shared + LIMITS[arch].reserved) <= LIMITS[arch].shared
    assert n < 5000 or blocks % 132 == 0


def test_no_rows_where_there_is_no_gpu():
    assert dense_rows.most_rows(torch.zeros(8, 8).half()) == 0


def test_refusals(on_host):
    x, weight = torch.zeros(1, 16).half(), torch.zeros(9, 16).half()
    with pytest.raises(KernelError, match=r"dense_rows: M = 5, must be 1 to 4"):
        dense_rows.dense_rows(x.expand(5, 16), weight)
    with pytest.raises(KernelError, match=r"dense_rows: M = 0, must be 1 to 4"):
        dense_rows.dense_rows(x[:0], weight)
    with pytest.raises(KernelError, match=r"dense_rows: N = 0, must be 1 to"):
        dense_rows.dense_rows(x, weight[:0])
    with pytest.raises(KernelError, match=r"dense_rows: K = 12, must be a positive multiple of 8"):
        dense_rows.dense_rows(x[:, :12], weight[:, :12])
    with pytest.raises(KernelError, match=r"dense_rows: x requires a gradient"):
        dense_rows.dense_rows(x.clone().requires_grad_(), weight)
    with pytest.raises(
        KernelError, match=r"dense_rows: M = 4, K = 6912: 104448 bytes of shared memory, must be at most"
    ):
        dense_rows.dense_rows(torch.zeros(4, 6912).half(), torch.zeros(1, 6912).half())
