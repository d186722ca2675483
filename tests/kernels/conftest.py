"""Kernels without a GPU: the real CUDA sources, compiled as C++ and run on the CPU under sanitizers."""

import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from wide_products import CUTS

from deepinfer_lab.errors import MissingDependency
from deepinfer_lab.kernels import resources
from deepinfer_lab.kernels.catalogue import KERNELS, SOURCES
from deepinfer_lab.kernels.ops_catalogue import OPS, Op
from deepinfer_lab.quant.layout import PackedWeight, pack

FOLDERS = ("host", "host_ops", "host_chain", "host_wide")
HOST, HOST_OPS, HOST_CHAIN, HOST_WIDE = (Path(__file__).parent / name for name in FOLDERS)
# The order of the table in host/run_kernels.cpp.
NUMBERS = {
    name: number
    for number, name in enumerate(
        (
            "w4_gemv",
            "w3_gemv",
            "w4_gemv_batch_tile",
            "w3_gemv_grid_y",
            "w3_gemv_batch_tile",
            "w3_gemv_warp_tile",
            "w4_tiled_gemm",
            "w3_tiled_gemm",
            "w4_tiled_gemm_split_k",
            "w3_tiled_gemm_split_k",
        )
    )
}
UNPACK = {4: 100, 3: 101}  # requests that run one thread's unpacking
DEQUANTISE = {"w4_dequantise": 102, "w3_dequantise": 103}
OP_NUMBERS = {name: number for number, name in enumerate(OPS)}  # host_ops/run_ops.cpp numbers the kernels in this order
WIDE_NUMBERS = {name: number for number, name in enumerate(("arrange_rows", *(cut.name for cut in CUTS)))}  # host_wide


@dataclass(frozen=True)
class HostKernels:
    """A running host/run_kernels.cpp."""

    process: subprocess.Popen

    def run(self, name: str, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """What the kernel computes from float16 x [M, K]: float16 [M, N]."""
        kernel, m = KERNELS[name], x.shape[0]
        header = [NUMBERS[name], *kernel.grid(m, weight.n), kernel.threads, m, weight.n, weight.k, weight.group]
        tensors = [x, weight.packed, weight.scales] + ([] if bias is None else [bias])
        splits = kernel.splits(weight.n, weight.k, multiprocessors=4)
        answer = self._ask([*header, bias is not None, splits], tensors, m * weight.n * 2)
        return torch.from_numpy(np.frombuffer(answer, np.float16).copy()).view(m, weight.n)

    def unpack(self, thread: int, weight: PackedWeight) -> np.ndarray:
        """shared_b [32, 65] after one thread alone unpacked its part of the first tile; NaN where it wrote nothing."""
        header = [UNPACK[weight.bits], 1, 1, 1, thread, weight.n, weight.k, weight.group, 0, 1]
        answer = self._ask(header, [weight.packed, weight.scales], 32 * 65 * 2)
        return np.frombuffer(answer, np.float16).reshape(32, 65)

    def launch_op(self, op: Op, grid: tuple[int], tensors: tuple[torch.Tensor, ...], units: int, group: int) -> None:
        """Stands in for `loader.launch_op` where the kernel dequantises."""
        *weight, out = tensors
        assert [len(tensor) for tensor in weight] == [len(out)] * 2, "rows of weights, scales and output"
        header = [DEQUANTISE[op.name], *grid, 1, op.threads, 1, *out.shape, group, 0, 1, int(units)]
        answer = self._ask(header, weight, out.numel() * 2)
        out.copy_(torch.from_numpy(np.frombuffer(answer, np.float16).copy()).view_as(out))

    def _ask(self, header: list[int], tensors: list[torch.Tensor], size: int) -> bytes:
        stdin, stdout = self.process.stdin, self.process.stdout
        try:
            stdin.write(struct.pack("12i", *header, *[0] * (12 - len(header))))
            for tensor in tensors:
                stdin.write(tensor.contiguous().numpy().tobytes())
            stdin.flush()
            answer = stdout.read(size)
        except BrokenPipeError:
            answer = b""
        if len(answer) != size:
            pytest.fail(
                f"the kernel stopped with status {self.process.wait()}:\n{self.process.stderr.read().decode()[:4000]}"
            )
        return answer


@dataclass(frozen=True)
class HostOps:
    """A running host_ops/run_ops.cpp, or host_wide/run_wide.cpp. Stands in for `loader.launch_op`. numbers: of its kernels."""

    process: subprocess.Popen
    numbers: Mapping[str, int]

    def launch(
        self,
        op: Op,
        grid: tuple[int, ...],
        tensors: tuple,
        *numbers: float,
        shared: int = 0,
        cluster: int = 1,
        shuffle: int = 0,
    ) -> None:
        """Run the kernel and copy what it left in its buffers back into the tensors.

        shuffle: a seed of the order in which blocks run, 0 for the usual one.
        """
        shape = *(*grid, cluster)[:2], op.threads  # grids of clusters have no y
        spans = [None if t is None else self._storage(t) for t in tensors]
        request = [struct.pack("8i", self.numbers[op.name], *shape, len(tensors), len(numbers), shared, shuffle)]
        for span in spans:
            request += [struct.pack("q", -1)] if span is None else [struct.pack("q", span.nbytes), span.tobytes()]
        request.append(struct.pack(f"{len(numbers)}d", *map(float, numbers)))
        try:
            self.process.stdin.write(b"".join(request))
            self.process.stdin.flush()
            for span in spans:
                if span is not None and span.nbytes:
                    span[:] = np.frombuffer(self.process.stdout.read(span.nbytes), np.uint8)
        except (BrokenPipeError, ValueError):
            self.process.wait()
            pytest.fail(f"the kernel stopped:\n{self.process.stderr.read().decode()[:4000]}")

    @staticmethod
    def _storage(tensor: torch.Tensor) -> np.ndarray:
        """The bytes from the tensor's first value to its last, those between its rows included."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.as_strided((last + 1,), (1,))
        return flat.view(torch.uint8).numpy() if flat.dtype != torch.uint8 else flat.numpy()


@dataclass(frozen=True)
class HostChain:
    """A running host_chain/run_chain.cpp. Stands in for `loader.launch_op` where a launch's blocks wait for one another."""

    process: subprocess.Popen
    seed: int = 0  # of the order in which blocks get their turns, 0 for the usual one

    def launch(self, op: Op, grid: tuple[int], tensors: tuple, *numbers: float, shared: int, reached: list) -> None:
        """As `HostOps.launch`. The second tensor holds addresses, of the tensors `reached` or 0."""
        places = {tensor.data_ptr(): at for at, tensor in enumerate(reached, 1)}
        table = torch.tensor([places.get(address, 0) for address in tensors[1].flatten().tolist()])
        every = [tensors[0], table, *tensors[2:], *reached]
        spans = [None if t is None else HostOps._storage(t) for t in every]
        kernel = [name for name in OPS if OPS[name].together].index(op.name)
        request = [
            struct.pack("8i", kernel, *grid, op.threads, len(tensors), len(every), len(numbers), shared, self.seed)
        ]
        for span in spans:
            request += [struct.pack("q", -1)] if span is None else [struct.pack("q", span.nbytes), span.tobytes()]
        request.append(struct.pack(f"{len(numbers)}d", *map(float, numbers)))
        try:
            self.process.stdin.write(b"".join(request))
            self.process.stdin.flush()
            for at, span in enumerate(spans):
                if at != 1 and span is not None:
                    span[:] = np.frombuffer(self.process.stdout.read(span.nbytes), np.uint8)
        except (BrokenPipeError, ValueError):
            self.process.wait()
            pytest.fail(f"the kernel stopped:\n{self.process.stderr.read().decode()[:4000]}")


ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RACES = ("-fsanitize=thread", "-DHOST_THREADS")


@contextmanager
def _running(folder: Path, program: str, sources: Sequence[Path], flags: Sequence[str]) -> Iterator[subprocess.Popen]:
    """Compile `program`.cpp among the CUDA sources and these folders, the later over the earlier, and start it."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler to run the CUDA sources on the CPU")
    for source in (SOURCES, *sources):
        for path in source.iterdir():
            shutil.copy(path, folder)
    command = [compiler, "-std=c++20", "-O1", "-g", "-fno-strict-aliasing", "-Wno-unknown-pragmas", *flags]
    built = subprocess.run(
        [*command, "-x", "c++", f"{program}.cpp", "-o", program, "-pthread"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if built.returncode:
        if "sanitize" in built.stderr or "cannot find -l" in built.stderr:
            pytest.skip(f"this C++ compiler has no {flags[0]}")
        pytest.fail(f"the CUDA sources do not compile as C++:\n{built.stderr[:4000]}")
    pipe = subprocess.PIPE
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}  # or races fill the pipe and hold the program up
    with subprocess.Popen([folder / program], stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        yield process
        process.stdin.close()
        assert process.wait() == 0, process.stderr.read().decode()[:4000]


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostKernels]:
    """Kernels that stop at any access outside a buffer, misalignment or undefined arithmetic (compute-sanitizer's memcheck)."""
    with _running(tmp_path_factory.mktemp("address"), "run_kernels", [HOST], ADDRESS) as process:
        yield HostKernels(process)


@pytest.fixture(scope="session")
def racing_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostKernels]:
    """Kernels whose unsynchronised shared accesses are reported (compute-sanitizer's racecheck)."""
    with _running(tmp_path_factory.mktemp("thread"), "run_kernels", [HOST], RACES) as process:
        yield HostKernels(process)


@pytest.fixture(scope="session")
def host_ops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostOps]:
    """As `host`, for the kernels of `ops_catalogue`."""
    with _running(tmp_path_factory.mktemp("ops"), "run_ops", [HOST, HOST_OPS], ADDRESS) as process:
        yield HostOps(process, OP_NUMBERS)


@pytest.fixture(scope="session")
def host_chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostChain]:
    """As `host_ops`, for kernels whose blocks wait for one another."""
    with _running(tmp_path_factory.mktemp("chain"), "run_chain", [HOST, HOST_OPS, HOST_CHAIN], ADDRESS) as process:
        yield HostChain(process)


@pytest.fixture(scope="session")
def racing_host_ops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostOps]:
    """As `racing_host`, for the kernels of `ops_catalogue`."""
    with _running(tmp_path_factory.mktemp("racing_ops"), "run_ops", [HOST, HOST_OPS], RACES) as process:
        yield HostOps(process, OP_NUMBERS)


@pytest.fixture(scope="session")
def host_wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostOps]:
    """As `host_ops`, for kernels whose blocks form clusters."""
    with _running(tmp_path_factory.mktemp("wide"), "run_wide", [HOST, HOST_OPS, HOST_WIDE], ADDRESS) as process:
        yield HostOps(process, WIDE_NUMBERS)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[resources.Row]:
    """Every kernel compiled afresh for every architecture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPINFER_CACHE", str(tmp_path_factory.mktemp("cache")))
        try:
            return resources.report()
        except MissingDependency as error:
            pytest.skip(str(error))


@pytest.fixture
def make_weight() -> Callable[..., PackedWeight]:
    """Random packed weights: every value of the range occurs, and scales of a layer's size."""

    def make(bits: int, n: int, k: int, group: int, seed: int = 0) -> PackedWeight:
        random = torch.Generator().manual_seed(seed)
        q = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, k), generator=random, dtype=torch.int8)
        scales = (torch.rand(n, k // group, generator=random) * 0.02 + 0.005).half()
        return PackedWeight(bits, group, n, k, pack(q, bits), scales)

    return make
