"""Tests that need an NVIDIA GPU, and the record of what they found.

    DEEPINFER_VERIFICATION=data/<gpu-slug>/verification.json pytest tests/gpu

writes every test's outcome there, with the SHA-256 of each CUDA source that it ran on, also where pytest-xdist runs them side
by side. `tests/kernels/test_verification.py` compares that file with the sources, on any machine.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from deepinfer_lab import kernels
from deepinfer_lab.kernels.catalogue import PRODUCTS, TILED
from deepinfer_lab.lab import provenance
from deepinfer_lab.quant.layout import PackedWeight, pack
from deepinfer_lab.quant.tiles import to_tiles

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False here")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(no_gpu)


@dataclass
class Recorder:
    """Collects outcomes of the GPU tests; the worst of setup, call and teardown counts."""

    path: Path
    outcomes: dict[str, str] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.nodeid.startswith("tests/gpu/"):
            return
        if report.outcome != "passed" or report.when == "call":
            if self.outcomes.get(report.nodeid) in ("failed", "skipped"):
                return
            self.outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        if not torch.cuda.is_available():
            return
        facts = provenance.collect()
        document = {
            "schema_version": 1,
            "kernels": facts.pop("kernels"),
            "provenance": facts,
            "tests": dict(sorted(self.outcomes.items())),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("DEEPINFER_VERIFICATION")
    if path and not hasattr(config, "workerinput"):  # under pytest-xdist the controller hears of all outcomes
        config.pluginmanager.register(Recorder(config.rootpath / path), "deepinfer-verification")


@pytest.fixture(scope="session", autouse=True)
def loaded_kernels() -> None:
    """Compile once, so that no test's first launch does, least of all under graph capture."""
    if torch.cuda.is_available():
        kernels.preload()


@dataclass(frozen=True)
class Problem:
    """One multiplication on the GPU: x float16 [M, K], a packed weight, a bias or None."""

    x: torch.Tensor
    weight: PackedWeight
    bias: torch.Tensor | None = None

    def run(self, name: str, **more: torch.Tensor) -> torch.Tensor:
        """The kernel's answer, into memory that held NaN, so that an output that is not written shows."""
        out = torch.full((self.x.shape[0], self.weight.n), torch.nan, dtype=torch.float16, device="cuda")
        w = self.weight
        arguments = {"bias": self.bias, "out": out, **more}
        if name in kernels.TILED_LAUNCHERS:
            tiled = to_tiles(w)
            return kernels.TILED_LAUNCHERS[name](self.x, tiled.tiles, tiled.scales, w.n, w.group, **arguments)
        return kernels.LAUNCHERS[name](self.x, w.packed, w.scales, w.group, **arguments)

    def reference(self) -> torch.Tensor:
        """In float32 from float32 weights, dequantised by the layout's own code."""
        assert not torch.backends.cuda.matmul.allow_tf32
        out = self.x.float() @ self.weight.dequantise(torch.float32).T
        return out if self.bias is None else out + self.bias.float()

    def check(self, name: str) -> None:
        """Relative error below 2e-3 against the reference and, where there are enough outputs to tell, cosine above 0.99999.

        The error is relative to the reference's norm or to that of its terms added with random signs, whichever is larger:
        a handful of outputs can cancel to almost nothing, which says nothing about the kernel.
        """
        out, reference = self.run(name).float(), self.reference()
        label = f"{name} {tuple(self.x.shape)} x {self.weight.n}, group {self.weight.group}"
        assert not out.isnan().any(), f"{label}: an output was not written"
        terms = (self.x.float().square() @ self.weight.dequantise(torch.float32).square().T).sum().sqrt()
        error = ((out - reference).norm() / torch.maximum(reference.norm(), terms)).item()
        assert error < 2e-3, f"{label}: relative error {error}"
        if out.numel() >= 64:
            cosine = torch.nn.functional.cosine_similarity(out.flatten(), reference.flatten(), dim=0).item()
            assert cosine > 0.99999, f"{label}: cosine {cosine}"

    def check_one_hot(self, name: str, rows: int) -> None:
        """Activations that pick one k each, so many at a time, return the weights."""
        self.weight.scales.fill_(0.25)
        hot = torch.eye(self.weight.k, device="cuda").half()
        out = torch.cat([Problem(part, self.weight).run(name) for part in hot.split(rows)])
        assert torch.equal(out, self.weight.dequantise(torch.float16).T)

    def check_propagation(self, name: str, column: int, value: float) -> None:
        """NaN or infinity makes of its own row what it makes of the terms one by one, and of other rows nothing."""
        x = self.x.clone()
        x[len(x) * 2 // 3, column] = value
        reference = (x.double()[:, None] * self.weight.dequantise(torch.float64)[None]).sum(2)
        out, finite = Problem(x, self.weight).run(name), reference.isfinite()
        assert torch.equal(out.isnan(), reference.isnan())
        assert torch.equal(out[reference.isinf()], reference[reference.isinf()].half())
        assert torch.allclose(out[finite].double(), reference[finite], rtol=2e-3, atol=2e-3)

    def check_loose_activations(self, name: str) -> None:
        """Those that are not dense, or not aligned, give the same bits."""
        (m, k), right = self.x.shape, self.run(name)
        strided = torch.full((m, 2 * k), torch.nan, dtype=torch.float16, device="cuda")
        strided[:, ::2] = self.x
        misaligned = torch.full((m * k + 1,), torch.nan, dtype=torch.float16, device="cuda")[1:].view(m, k)
        misaligned.copy_(self.x)
        for x in (strided[:, ::2], self.x.T.contiguous().T, misaligned):
            assert torch.equal(Problem(x, self.weight).run(name), right)


@pytest.fixture
def problem(request: pytest.FixtureRequest) -> Callable[..., Problem]:
    """Fresh random problems; a failing test prints the seed that repeats them."""
    seed = int(os.environ.get("DEEPINFER_SEED") or torch.seed() % 2**31)
    random = torch.Generator("cuda").manual_seed(seed)

    def make(name: str, m: int, n: int, k: int, group: int, *, bias: bool = False) -> Problem:
        bits = (TILED if name in TILED else PRODUCTS)[name].bits
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
        q = torch.randint(low, high, (n, k), generator=random, device="cuda", dtype=torch.int8)
        scales = (torch.rand(n, k // group, generator=random, device="cuda") * 0.02 + 0.005).half()
        x = torch.randn(m, k, generator=random, device="cuda").half()
        offset = torch.randn(n, generator=random, device="cuda").half() if bias else None
        return Problem(x, PackedWeight(bits, group, n, k, pack(q, bits), scales), offset)

    print(f"repeat with DEEPINFER_SEED={seed}")
    return make
