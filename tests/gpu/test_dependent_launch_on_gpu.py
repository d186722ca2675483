"""Programmatic dependent launch: chains of captured kernels give what the same kernels give one by one."""

import pytest
import torch

from deepinfer_lab.kernels import dependent_launch, elementwise

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not dependent_launch.available(torch.cuda.get_device_capability()),
    reason="needs compute capability 9.0",
)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").half()


@pytest.mark.parametrize("rows", [1, 700])  # less than one wave of blocks, and several
def test_a_long_chain_in_a_graph(rows):
    """Every kernel reads what the one before it wrote, and writes what the one before that has read: were one not to wait, or
    the next to start too early, some value would be another's."""
    weight = random(4096)
    first = random(rows, 4096)

    def chain(x: torch.Tensor) -> torch.Tensor:
        other = torch.empty_like(x)
        for _ in range(40):
            elementwise.rms_norm(x, weight, 1e-5, out=other)
            elementwise.rms_norm(other, weight, 1e-5, out=x)
        return elementwise.silu_mul(x)

    expected = chain(first.clone())
    x = first.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x)
    for _ in range(5):
        x.copy_(first)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
