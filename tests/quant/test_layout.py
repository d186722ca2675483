"""The byte formulas, against scalar Python that was written from the article's formulas alone."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_lab.errors import QuantisationError
from deepinfer_lab.quant.layout import GROUPS, PackedWeight, check_shape, concatenate, pack, packed_columns, unpack


def signed(field: int, bits: int) -> int:
    return field - (1 << bits) if field >= 1 << (bits - 1) else field


def scalar_unpack4(byte: int) -> list[int]:
    return [signed(byte & 15, 4), signed(byte >> 4, 4)]


def scalar_unpack3(b0: int, b1: int, b2: int) -> list[int]:
    fields = [
        b0 & 7,
        (b0 >> 3) & 7,
        ((b0 >> 6) & 3) | ((b1 & 1) << 2),
        (b1 >> 1) & 7,
        (b1 >> 4) & 7,
        ((b1 >> 7) & 1) | ((b2 & 3) << 1),
        (b2 >> 2) & 7,
        (b2 >> 5) & 7,
    ]
    return [signed(field, 3) for field in fields]


def every_neighbouring_pair() -> list[tuple[int, int, int]]:
    """No value spans more than two neighbouring bytes, so all pairs of neighbours cover all cases of all values."""
    pairs = list(itertools.product(range(256), repeat=2))
    return [(a, b, (a * 7 + b) % 256) for a, b in pairs] + [((a * 5 + b) % 256, a, b) for a, b in pairs]


@st.composite
def integer_matrices(draw: st.DrawFn) -> tuple[int, torch.Tensor]:
    bits = draw(st.sampled_from((3, 4)))
    rows, octets = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    level = st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    values = draw(st.lists(level, min_size=rows * octets * 8, max_size=rows * octets * 8))
    return bits, torch.tensor(values, dtype=torch.int8).view(rows, octets * 8)


def packed_weight(bits: int = 4, group: int = 32, n: int = 3, k: int = 128) -> PackedWeight:
    generator = torch.Generator().manual_seed(bits + group + n + k)
    packed = torch.randint(0, 256, (n, packed_columns(k, bits)), dtype=torch.uint8, generator=generator)
    scales = torch.randn((n, k // group), generator=generator).half()
    return PackedWeight(bits, group, n, k, packed, scales)


def test_w4_unpacks_every_byte_as_the_formula_says():
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    expected = [value for byte in range(256) for value in scalar_unpack4(byte)]
    assert unpack(packed, 4, 256).flatten().tolist() == expected


def test_w3_unpacks_every_byte_as_the_formula_says():
    triples = every_neighbouring_pair()
    packed = torch.tensor(triples, dtype=torch.uint8).view(2, -1)
    expected = [value for triple in triples for value in scalar_unpack3(*triple)]
    assert unpack(packed, 3, len(triples) * 4).flatten().tolist() == expected


def test_w4_packs_every_pair():
    pairs = list(itertools.product(range(-8, 8), repeat=2))
    q = torch.tensor(pairs, dtype=torch.int8).view(2, -1)
    assert pack(q, 4).flatten().tolist() == [(even & 15) | ((odd & 15) << 4) for even, odd in pairs]


@pytest.mark.parametrize("background", [0, -1, -4, 3])
def test_w3_packs_every_value_at_every_place(background):
    for place, value in itertools.product(range(8), range(-4, 4)):
        octet = [background] * 8
        octet[place] = value
        (packed,) = pack(torch.tensor([octet], dtype=torch.int8), 3).tolist()
        assert len(packed) == 3
        assert scalar_unpack3(*packed) == octet


@given(integer_matrices())
@settings(deadline=None)
def test_packing_loses_nothing(case):
    bits, q = case
    packed = pack(q, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (q.shape[0], q.shape[1] * bits // 8)
    assert torch.equal(unpack(packed, bits, q.shape[1]), q)


@given(integer_matrices())
@settings(deadline=None, max_examples=30)
def test_packing_does_not_depend_on_strides(case):
    bits, q = case
    packed = pack(q.t().contiguous().t(), bits)
    assert torch.equal(packed, pack(q, bits))
    assert torch.equal(unpack(packed.t().contiguous().t(), bits, q.shape[1]), q)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("group", GROUPS)
def test_dequantise_is_the_integer_times_its_groups_scale(bits, group):
    w = packed_weight(bits, group, n=3, k=2 * group)
    q, scales = unpack(w.packed, bits, w.k).tolist(), w.scales.tolist()
    dense = w.dequantise(torch.float32).tolist()
    for n, k in itertools.product(range(w.n), range(w.k)):
        assert dense[n][k] == q[n][k] * scales[n][k // group]  # exact: 4 bits times 11 fit a float32


def test_dequantise_rounds_once():
    w = packed_weight(3)
    assert torch.equal(w.dequantise(torch.float16), w.dequantise(torch.float32).half())


@pytest.mark.parametrize("rows", [slice(1, 2), slice(1, None), slice(None)])
def test_dequantise_some_rows(rows):
    w = packed_weight()
    assert torch.equal(w.dequantise(torch.float32, rows), w.dequantise(torch.float32)[rows])


@pytest.mark.parametrize(("bits", "per_row"), [(3, 48), (4, 64)])
def test_nbytes_counts_values_and_scales(bits, per_row):
    assert packed_weight(bits, group=32, n=3, k=128).nbytes == 3 * (per_row + 4 * 2)


def test_concatenate_stacks_rows():
    parts = [packed_weight(n=n) for n in (1, 4, 2)]
    whole = concatenate(parts)
    assert whole.n == 7
    assert torch.equal(whole.dequantise(torch.float32), torch.cat([p.dequantise(torch.float32) for p in parts]))


@pytest.mark.parametrize("other", [{"bits": 3}, {"group": 64}, {"k": 256}])
def test_concatenate_refuses_what_differs(other):
    with pytest.raises(QuantisationError, match="share bits, group and K"):
        concatenate([packed_weight(), packed_weight(**other)])


@pytest.mark.parametrize(
    ("k", "group", "divides"),
    [
        (96, 64, "groups that divide it: 32$"), (192, 128, "groups that divide it: 32, 64$"), (576, 128, "32, 64$"),
        (100, 64, "none of 32, 64, 128 divides it"), (0, 32, "none of"), (-64, 32, "none of"), (16, 32, "none of"),
    ],
)  # fmt: skip
def test_k_that_its_group_does_not_divide(k, group, divides):
    with pytest.raises(QuantisationError, match=f"K = {k} .*group {group}.*{divides}"):
        check_shape(k, 4, group)


@pytest.mark.parametrize("bits", [0, 1, 2, 5, 8, 16, -4])
def test_bits_without_a_layout(bits):
    with pytest.raises(QuantisationError, match=rf"^{bits} bits.*3 and 4"):
        check_shape(128, bits, 64)


@pytest.mark.parametrize("group", [0, 1, 16, 48, 256, -32])
def test_groups_without_a_layout(group):
    with pytest.raises(QuantisationError, match=rf"group {group}: allowed are 32, 64, 128"):
        check_shape(768, 4, group)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("packed", (3, 48), r"\(3, 64\)"), ("packed", (2, 64), r"\(3, 64\)"), ("packed", (192,), r"\(3, 64\)"),
        ("scales", (3, 2), r"\(3, 4\)"), ("scales", (4, 3), r"\(3, 4\)"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(name, shape, expected):
    tensors = {"packed": torch.zeros(3, 64, dtype=torch.uint8), "scales": torch.ones(3, 4, dtype=torch.float16)}
    tensors[name] = torch.zeros(shape, dtype=tensors[name].dtype)
    with pytest.raises(QuantisationError, match=f"{name} has shape .*expected {expected}"):
        PackedWeight(4, 32, 3, 128, **tensors)
