"""The CUDA sources themselves, run on the CPU: right results, no access out of bounds, no race."""

import pytest
import torch

from deepinfer_lab.kernels.catalogue import KERNELS

GROUPED = (  # n, k, group: sizes that divide no block evenly, and one warp's worth of K, less, and more
    (1, 32, 32),
    (3, 64, 64),
    (17, 96, 32),
    (33, 128, 128),
    (65, 384, 64),
    (67, 1152, 128),
)


def expected(x, weight, bias=None):
    """In float64, from unrounded weights."""
    out = x.double() @ weight.dequantise(torch.float64).T
    return out if bias is None else out + bias.double()


def activations(m, k, seed=1):
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).half()


def check_close(out, reference):
    assert not out.isnan().any(), "an output was not written"
    difference = (out.double() - reference).norm() / reference.norm()
    cosine = torch.nn.functional.cosine_similarity(out.double().flatten(), reference.flatten(), dim=0)
    assert difference < 2e-3
    assert cosine > 0.99999


def rows_for(kernel):
    return (1,) if kernel.single_row else (1, 2, 5, kernel.block_m, kernel.block_m + 1)


@pytest.mark.parametrize("name", KERNELS)
def test_matches_reference_on_every_edge(host, make_weight, name):
    kernel = KERNELS[name]
    rows = rows_for(kernel)
    for i, (n, k, group) in enumerate(GROUPED):
        weight = make_weight(kernel.bits, n, k, group, seed=n)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(n)).half() if i % 2 else None
        x = activations(rows[-1 - i % len(rows)], k)
        check_close(host.run(name, x, weight, bias), expected(x, weight, bias))


@pytest.mark.parametrize("bits", [4, 3])
def test_every_value_is_unpacked_exactly(host, make_weight, bits):
    """With one-hot activations and power-of-two scales the product is the weight itself, all rounding aside."""
    weight = make_weight(bits, 16, 32, 32)
    weight.scales.fill_(0.25)
    one_hot = torch.eye(32).half()
    for name, kernel in KERNELS.items():
        if kernel.bits != bits:
            continue
        step = 1 if kernel.single_row else 32
        out = torch.cat([host.run(name, one_hot[i : i + step], weight) for i in range(0, 32, step)])
        assert torch.equal(out, weight.dequantise(torch.float16).T), name


@pytest.mark.parametrize(
    ("single", "batched"),
    [("w4_gemv", "w4_gemv_batch_tile"), ("w3_gemv", "w3_gemv_grid_y"), ("w3_gemv", "w3_gemv_warp_tile")],
)
def test_a_row_does_not_depend_on_its_batch(host, make_weight, single, batched):
    weight = make_weight(KERNELS[single].bits, 19, 640, 64)
    x = activations(11, 640)
    together = host.run(batched, x, weight)
    apart = torch.cat([host.run(single, row, weight) for row in x.split(1)])
    assert torch.equal(together, apart)


@pytest.mark.parametrize("name", KERNELS)
def test_nan_and_infinity_propagate(host, make_weight, name):
    kernel = KERNELS[name]
    weight = make_weight(kernel.bits, 21, 96, 32)
    x = activations(1 if kernel.single_row else 5, 96)
    for column, value in ((0, float("inf")), (37, float("-inf")), (95, float("nan"))):
        poisoned = x.clone()
        poisoned[-1, column] = value
        reference = (poisoned.double()[:, None] * weight.dequantise(torch.float64)[None]).sum(2).half()
        out = host.run(name, poisoned, weight)
        finite = reference.isfinite()
        assert torch.equal(out.isnan(), reference.isnan())
        assert torch.equal(out[reference.isinf()], reference[reference.isinf()])
        assert finite[:-1].all()  # other rows are untouched
        assert torch.allclose(out[finite], reference[finite], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", KERNELS)
def test_output_overflows_to_infinity(host, make_weight, name):
    weight = make_weight(KERNELS[name].bits, 5, 64, 32)
    weight.scales.fill_(8.0)
    weight.packed.copy_(weight.packed[:1].expand_as(weight.packed).clone())
    x = torch.full((1, 64), 60000.0).half()
    reference = expected(x, weight)
    assert (reference.abs() > 70000).all()
    assert torch.equal(host.run(name, x, weight), reference.half())


@pytest.mark.parametrize("name", ["w4_tiled_gemm", "w3_tiled_gemm_split_k", "w3_gemv_batch_tile"])
def test_shared_memory_is_free_of_races(racing_host, make_weight, name):
    n, m = (70, 35) if "gemm" in name else (5, 2)
    weight = make_weight(KERNELS[name].bits, n, 128, 32)
    x = activations(m, 128)
    check_close(racing_host.run(name, x, weight), expected(x, weight))
