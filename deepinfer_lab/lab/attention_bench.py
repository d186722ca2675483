"""How fast paged decode attention reads its cache:  python -m deepinfer_lab.lab.attention_bench [SHAPE ...]

Times are of CUDA graph replays (`kernel_timing.graph_cold`): successive launches read distinct layers of one cache, which
together exceed four times the L2. GB/s counts K, V and scales of the tokens attended, once. `sdpa` is torch's attention on
views gathered beforehand, as if gathering were free; `gather, sdpa` gathers too, as `model.attention` does.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from deepinfer_lab.errors import SettingError
from deepinfer_lab.kernels.paged_attention import paged_decode
from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.lab.kernel_timing import CudaGpu, Gpu, copies_for, graph_cold

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """One decode step: sequences of `length` tokens, and the heads of one layer."""

    sequences: int
    length: int
    heads: int = 16
    kv_heads: int = 2
    dim: int = 128


SHAPES = (
    Shape(32, 4096),  # the target
    *(Shape(sequences, 4096) for sequences in (1, 4, 8, 64, 128)),
    *(Shape(32, length) for length in (256, 1024, 16384)),
    Shape(1, 32768),
    Shape(32, 4096, 9, 3, 64),  # SmolLM2-135M
    Shape(32, 4096, 28, 4, 128),  # Qwen2.5-7B
)


class Step:
    """Random sequences in scattered blocks, one layer for each launch of a graph."""

    def __init__(self, gpu: Gpu, shape: Shape, quantised: bool) -> None:
        s, device = shape, gpu.device
        columns = -(-s.length // BLOCK_SIZE)
        one = KVShape(1, s.kv_heads, s.dim, torch.float16, quantised)
        self.nbytes = s.sequences * s.length * one.bytes_per_token
        self.copies = copies_for(gpu.l2_bytes, self.nbytes)
        kv_shape = KVShape(self.copies, s.kv_heads, s.dim, torch.float16, quantised)
        self.pool = KVPool(kv_shape, s.sequences * columns, BLOCK_SIZE, device)
        slots = torch.arange(self.pool.num_blocks * BLOCK_SIZE, device=device)
        for layer in range(self.copies):
            k, v = torch.randn(2, len(slots), s.kv_heads, s.dim, device=device).half()
            self.pool.write(layer, slots, k, v)
        self.table = torch.randperm(self.pool.num_blocks, device=device).view(s.sequences, columns)
        self.lengths = torch.full((s.sequences,), s.length, device=device)
        self.q = torch.randn(s.sequences, s.heads, s.dim, device=device).half()
        self._max_context = s.length

    def kernel(self, layer: int) -> torch.Tensor:
        memory = self.pool.layer(layer)
        return paged_decode(
            self.q, memory.k, memory.v, self.table, self.lengths, block_size=BLOCK_SIZE, max_context=self._max_context,
            k_scale=memory.k_scale, v_scale=memory.v_scale,
        )  # fmt: skip

    def gathered(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.pool.gather(layer, self.table)
        return k[:, : self._max_context].transpose(1, 2), v[:, : self._max_context].transpose(1, 2)

    def sdpa(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        folded = self.q.view(self.q.shape[0], k.shape[1], -1, self.q.shape[2])
        return scaled_dot_product_attention(folded, k, v)

    def error(self) -> float:
        """norm(kernel - float32 attention) / norm of the latter, on the first layer and at most 8 sequences."""
        k, v = (x[:8].float() for x in self.gathered(0))
        folded = self.q[:8].float().view(len(k), k.shape[1], -1, k.shape[3])
        expected = scaled_dot_product_attention(folded, k, v).flatten()
        return float((self.kernel(0)[:8].flatten() - expected).norm() / expected.norm())


def microseconds(gpu: Gpu, launch: Callable[[int], object], copies: int) -> float:
    return float(np.median(graph_cold(gpu, launch, copies)))


def rows(gpu: Gpu, shape: Shape, bandwidth: float) -> list[str]:
    """The table's lines for one shape: the kernel on both caches, and torch on the float16 one."""
    label = f"{shape.sequences:>4} x {shape.length:>5}  {shape.heads:>2}/{shape.kv_heads} x {shape.dim:<3}"
    lines = []

    def line(name: str, us: float, nbytes: int, note: str = "") -> None:
        rate = nbytes / us * 1e6
        lines.append(f"{label}  {name:<12} {us:>8.1f} us {rate / 1e9:>6.0f} GB/s {rate / bandwidth:>5.0%}  {note}")

    for quantised in (False, True):
        step = Step(gpu, shape, quantised)
        us = microseconds(gpu, step.kernel, step.copies)
        line("paged int8" if quantised else "paged fp16", us, step.nbytes, f"error {step.error():.1e}")
        if not quantised:
            views = [step.gathered(layer) for layer in range(step.copies)]
            line("sdpa", microseconds(gpu, lambda i, s=step, v=views: s.sdpa(*v[i]), step.copies), step.nbytes)
            del views
            both = microseconds(gpu, lambda i, s=step: s.sdpa(*s.gathered(i)), step.copies)
            line("gather, sdpa", both, step.nbytes)
    return lines


def main(arguments: list[str]) -> None:
    """Print the table: all shapes, or those named by their position in `SHAPES`.

    Raises:
        SettingError: no CUDA device, or no such position.
    """
    if not torch.cuda.is_available():
        raise SettingError("attention_bench needs an NVIDIA GPU: torch.cuda.is_available() is False here")
    allowed = [str(i) for i in range(len(SHAPES))]
    unknown = [a for a in arguments if a not in allowed]
    if unknown:
        raise SettingError(f"shape {unknown[0]!r}: allowed are {allowed[0]} to {allowed[-1]}")
    gpu = CudaGpu()
    bandwidth = gpu.read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: measured read bandwidth {bandwidth / 1e12:.2f} TB/s")
    for shape in [SHAPES[int(a)] for a in arguments] or SHAPES:
        print(*rows(gpu, shape, bandwidth), sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
