"""Linear layers on a CPU, against the plain product in float64."""

import subprocess
import sys

import pytest
import torch

from deepinfer_lab.kernels.dispatch import FALLBACK, Row
from deepinfer_lab.quant import linear
from deepinfer_lab.quant.linear import DenseLinear, QuantLinear, dequant_cublas
from deepinfer_lab.quant.rtn import quantise

ROWS = [0, 1, 2, 3, 8, 33]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.double() @ weight.double().t()
    return (out if bias is None else out + bias.double()).float()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_dense(rows, biased):
    weight, bias, x = random(40, 96), random(40) if biased else None, random(rows, 96)
    out = DenseLinear(weight, bias)(x)
    assert out.shape == (rows, 40)
    assert torch.allclose(out, product(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("most", [0, 2, 4])
def test_few_rows_of_a_dense_weight_have_a_kernel_where_it_takes_them(monkeypatch, most):
    weight, bias, taken = random(40, 96).half(), random(40).half(), []

    def kernel(x: torch.Tensor, its: torch.Tensor, its_bias: torch.Tensor) -> torch.Tensor:
        assert its is weight
        assert its_bias is bias
        taken.append(len(x))
        return torch.zeros(len(x), 40).half()

    monkeypatch.setattr(linear, "dense_rows", kernel)
    monkeypatch.setattr(linear, "most_rows", lambda its: most if its is weight else 0)
    layer, fixed = DenseLinear(weight, bias), DenseLinear(weight, bias, fixed_rows=2)
    for rows in range(7):
        x = random(rows, 96).half()
        assert layer(x).any() == (rows > most)
        assert fixed(x).any() == (rows > 0)
    assert taken == list(range(1, most + 1))
    with pytest.raises(RuntimeError):  # torch's own: it goes there
        layer(random(1, 96))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("bits", [3, 4])
def test_quantised_equals_dense_of_the_dequantised(rows, biased, bits):
    packed, bias, x = quantise(random(40, 96), bits, 32), random(40) if biased else None, random(rows, 96)
    out = QuantLinear(packed, bias)(x)
    assert out.shape == (rows, 40)
    assert torch.allclose(out, product(x, packed.dequantise(torch.float32), bias), rtol=1e-5, atol=1e-5)


def test_strided_input():
    x, weight = random(6, 192), random(40, 96)
    for view in (x[:, ::2], x[::2, :96], random(96, 3).t()):
        assert torch.allclose(DenseLinear(weight)(view), product(view, weight, None), rtol=1e-5, atol=1e-5)


def test_strided_weight():
    weight, x = random(96, 40).t(), random(3, 96)
    assert torch.allclose(DenseLinear(weight)(x), product(x, weight, None), rtol=1e-5, atol=1e-5)


def test_a_layer_keeps_its_own_values():
    weight = random(40, 96)
    layer, x, before = DenseLinear(weight), random(2, 96), weight.clone()
    layer(x)
    assert torch.equal(weight, before)


def test_repeated_calls_agree_and_leave_the_input_alone():
    layer, x = QuantLinear(quantise(random(40, 96), 4, 32)), random(3, 96)
    before = x.clone()
    assert torch.equal(layer(x), layer(x))
    assert torch.equal(x, before)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("biased", [False, True])
def test_dequant_cublas_in_pieces(monkeypatch, n, biased):
    monkeypatch.setattr(linear, "DEQUANT_ROWS", 8)
    packed, bias, x = quantise(random(n, 64), 3, 32), random(n) if biased else None, random(5, 64)
    expected = product(x, packed.dequantise(torch.float32), bias)
    assert torch.allclose(dequant_cublas(x, packed, bias), expected, rtol=1e-5, atol=1e-5)


def test_dequant_cublas_keeps_the_inputs_dtype():
    packed, x = quantise(random(8, 64), 4, 32), random(3, 64).to(torch.bfloat16)
    out = dequant_cublas(x, packed)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), product(x, packed.dequantise(torch.bfloat16), None), rtol=0.02, atol=0.05)


@pytest.mark.parametrize(("bits", "expected"), [(3, 40 * (36 + 6)), (4, 40 * (48 + 6))])
def test_nbytes_are_those_of_the_stored_weight(bits, expected):
    assert QuantLinear(quantise(random(40, 96), bits, 32)).nbytes == expected
    assert DenseLinear(random(40, 96)).nbytes == 40 * 96 * 4


@pytest.mark.parametrize("bits", [3, 4])
def test_a_layer_holds_the_forms_that_its_table_takes(bits):
    weight = quantise(random(40, 96), bits, 32).to("meta")  # anything but a CPU
    tiles = f"w{bits}_mma_small"
    stored_bytes, tiled_bytes = weight.nbytes, 3 * (256 * bits + 4 * 32)  # 48 x 128, and scales of 32
    for rows, expected in (
        ([Row(bits, 1, None, FALLBACK)], stored_bytes),
        ([Row(bits, 1, None, tiles)], tiled_bytes),
        ([Row(bits, 1, 32, tiles), Row(bits, 33, None, FALLBACK)], stored_bytes + tiled_bytes),
        ([Row(bits, 1, 32, tiles), Row(bits, 33, None, f"w{bits}_dequantise_cublas")], tiled_bytes),
        ([Row(bits, 1, None, tiles), Row(7 - bits, 1, None, FALLBACK)], tiled_bytes),
    ):
        layer = QuantLinear(weight, table=rows)
        assert layer.nbytes == expected
        assert layer.read_bytes == stored_bytes


WITHOUT_CUPY = """
import sys

class NoCupy:
    def find_spec(self, name, path=None, target=None):
        assert not name.startswith("cupy"), f"something imports {name}"

sys.meta_path.insert(0, NoCupy())
from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.sampling import SamplingParams
for bits in ("w3", "w4", "mixed"):
    with Engine.load("synthetic:tiny", bits=bits, device="cpu", config=EngineConfig(kv_cache_mib=1)) as engine:
        (done,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=5))
        print(len(done.tokens), [name for name in sys.modules if name.startswith("cupy")])
"""


def test_nothing_on_a_cpu_imports_cupy():
    done = subprocess.run([sys.executable, "-c", WITHOUT_CUPY], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["5 []"] * 3, done.stderr
