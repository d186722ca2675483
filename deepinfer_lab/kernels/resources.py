"""What each kernel costs a multiprocessor, known without a GPU: the compiler's own report, and the occupancy that follows."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels.catalogue import KERNELS
from deepinfer_lab.kernels.compiler import ARCHS, Binary, compile_all
from deepinfer_lab.kernels.ops_catalogue import COMPILED, runs_on

REGISTER_UNIT = 256  # registers are allocated to warps in units of this many
WARP_UNIT = 4  # a multiprocessor's four partitions each hold whole warps
SHARED_UNIT = 128  # bytes


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one streaming multiprocessor: resident blocks and warps, 32-bit registers, bytes of shared memory at its
    largest carve-out, and bytes of it that each block loses to the system."""

    blocks: int
    warps: int
    registers: int
    shared: int
    reserved: int = 1024


# CUDA C++ Programming Guide 12.9, table "Technical Specifications per Compute Capability"; granularities as in the occupancy
# calculator of Nsight Compute.
LIMITS = {
    "sm_80": Multiprocessor(blocks=32, warps=64, registers=65536, shared=164 * 1024),
    "sm_86": Multiprocessor(blocks=16, warps=48, registers=65536, shared=100 * 1024),
    "sm_89": Multiprocessor(blocks=24, warps=48, registers=65536, shared=100 * 1024),
    "sm_90": Multiprocessor(blocks=32, warps=64, registers=65536, shared=228 * 1024),
    "sm_120": Multiprocessor(blocks=24, warps=48, registers=65536, shared=100 * 1024),
}

# Named cards and their architecture (NVIDIA, "CUDA GPU Compute Capability").
CARDS = {
    "RTX 3050 Laptop": "sm_86",
    "RTX 4090": "sm_89",
    "A10": "sm_86",
    "A100": "sm_80",
    "H100": "sm_90",
    "H200": "sm_90",
    "RTX 5090": "sm_120",
}


@dataclass(frozen=True)
class Usage:
    """From the compiler's log. Registers of one thread; bytes of static shared memory of one block; bytes of stack, spill
    stores and spill loads of one thread."""

    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps that a multiprocessor holds at once, the share of its warp slots, and what stops it from holding more:
    "warps", "registers", "shared memory" or "blocks"."""

    blocks: int
    warps: int
    fraction: float
    limiter: str


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture. `cards` are those of `CARDS` that have it."""

    kernel: str
    arch: str
    cards: tuple[str, ...]
    threads: int
    usage: Usage
    occupancy: Occupancy
    instructions: int  # PTX instructions, as written: a loop's body counts once


def parse_log(log: str, kernel: str) -> Usage:
    """Read the ptxas part of an NVRTC log.

    Raises:
        KernelError: the log does not speak of the kernel, or not in the expected form.
    """
    section = re.search(rf"Compiling entry function '{re.escape(kernel)}'.*?Used .*?(?:\n|$)", log, re.DOTALL)
    if section is None:
        raise KernelError(f"{kernel}: no resource report in the compiler's log: {log[:300]!r}")
    text = section.group()

    def number(pattern: str, default: int | None = None) -> int:
        found = re.search(pattern, text)
        if found is None and default is None:
            raise KernelError(f"{kernel}: no {pattern!r} in the compiler's log: {text!r}")
        return int(found.group(1)) if found else int(default or 0)

    return Usage(
        registers=number(r"Used (\d+) registers"),
        shared=number(r"(\d+) bytes smem", 0),  # left out where there is none
        stack=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
    )


def usage(binary: Binary) -> Usage:
    """Resources of a compiled kernel."""
    return parse_log(binary.log, binary.kernel)


def blocks_by_limit(arch: str, threads: int, registers: int, shared: int) -> dict[str, int]:
    """How many blocks of `threads` threads with so many registers each and `shared` bytes every limit allows: of "warps",
    "registers", "shared memory" and "blocks".

    Raises:
        KernelError: an architecture without a row in `LIMITS`.
    """
    if arch not in LIMITS:
        raise KernelError(f"{arch}: limits are known for {', '.join(LIMITS)}")
    limits = LIMITS[arch]
    warps = -(-threads // 32)
    per_warp = _round_up(registers * 32, REGISTER_UNIT)
    resident = limits.registers // per_warp // WARP_UNIT * WARP_UNIT
    return {
        "warps": limits.warps // warps,
        "registers": resident // _round_up(warps, WARP_UNIT),
        "shared memory": limits.shared // _round_up(shared + limits.reserved, SHARED_UNIT),
        "blocks": limits.blocks,
    }


def occupancy(arch: str, threads: int, registers: int, shared: int) -> Occupancy:
    """Theoretical occupancy of blocks of `threads` threads with so many registers each and `shared` bytes.

    Raises:
        KernelError: an architecture without a row in `LIMITS`, or a block that fits no multiprocessor.
    """
    by = blocks_by_limit(arch, threads, registers, shared)
    limits, warps = LIMITS[arch], -(-threads // 32)
    limiter = min(by, key=by.__getitem__)
    blocks = by[limiter]
    if blocks == 0:
        raise KernelError(f"a block of {threads} threads, {registers} registers and {shared} bytes does not fit {arch}")
    return Occupancy(blocks, blocks * warps, blocks * warps / limits.warps, limiter)


def ptx_instructions(ptx: str, kernel: str) -> Counter[str]:
    """Instructions of a kernel's PTX by opcode without its types: {"fma": 256, "ld.global": 12, ...}. Memory operations keep
    their state space. A loop's body counts once."""
    body = re.search(rf"\.entry {re.escape(kernel)}\(.*?\)[^{{]*\{{(.*)\}}", ptx, re.DOTALL)
    if body is None:
        raise KernelError(f"{kernel}: no such entry in the PTX")
    counts: Counter[str] = Counter()
    for line in body.group(1).splitlines():
        found = re.match(r"\s*\{?\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*)[\s;]", line)
        if found is None:  # a label, a directive, a comment, a brace
            continue
        parts = found.group(1).split(".")
        keep = 2 if parts[0] in ("ld", "st", "bar", "shfl") else 1
        counts[".".join(parts[:keep])] += 1
    return counts


def report(kernels: Iterable[str] = tuple(KERNELS), archs: Iterable[str] = ARCHS) -> list[Row]:
    """Compile every kernel for every architecture that it is for (from the cache where nothing changed); say what it costs.

    Raises:
        KernelError, MissingDependency: as `compile_all`.
    """
    rows = []
    kernels = tuple(kernels)
    pairs = ((name, arch) for arch in archs for name in kernels if runs_on(COMPILED[name], arch))
    for binary in compile_all(pairs):
        name, arch, used = binary.kernel, binary.arch, usage(binary)
        threads = COMPILED[name].threads
        rows.append(
            Row(
                kernel=name,
                arch=arch,
                cards=tuple(card for card, its in CARDS.items() if its == arch),
                threads=threads,
                usage=used,
                occupancy=occupancy(arch, threads, used.registers, used.shared),
                instructions=ptx_instructions(binary.ptx, name).total(),
            )
        )
    return rows


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
