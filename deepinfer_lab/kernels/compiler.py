"""CUDA sources to machine code, with NVRTC and without a GPU.

NVRTC is reached through CuPy's bindings, which are imported only inside functions: a machine without CUDA can import all of
this package. Results are kept in `DEEPINFER_CACHE` (or the user's cache folder), under the SHA-256 of everything that could
change them.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import struct
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import platformdirs

from deepinfer_lab.errors import KernelError, MissingDependency
from deepinfer_lab.kernels.catalogue import headers
from deepinfer_lab.kernels.ops_catalogue import COMPILED, runs_on
from deepinfer_lab.progress import bar

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")  # compiled in every test run
OPTIONS = ("--std=c++17", "--ptxas-options=-v")  # -v: the log names registers, shared memory and spills
OWN_CACHE = (12, 9)  # from this version on NVRTC keeps a cache, and says nothing about a source that it finds there
INSTALL = "install CuPy and NVRTC for your CUDA version: pip install 'deepinfer-lab[cuda12]' or 'deepinfer-lab[cuda13]'"


@dataclass(frozen=True)
class Binary:
    """One kernel compiled for one architecture: ELF `cubin`, its `ptx`, the compiler's `log`, and the cache `key`."""

    kernel: str
    arch: str
    cubin: bytes
    ptx: str
    log: str
    key: str


def compile_kernel(name: str, arch: str) -> Binary:
    """Compile one kernel, or take it from the cache.

    Args:
        name: a key of `ops_catalogue.COMPILED`. arch: "sm_86", say.

    Raises:
        KernelError: unknown kernel, an architecture that this NVRTC does not know or the kernel is not for, or a source that
            does not compile.
        MissingDependency: CuPy or NVRTC is not installed.
    """
    if name not in COMPILED:
        raise KernelError(f"unknown kernel {name!r}: there are {', '.join(COMPILED)}")
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise KernelError(f"architecture {arch!r}: must look like sm_86")
    kernel = COMPILED[name]
    if not runs_on(kernel, arch):
        raise KernelError(f"{name} for {arch}: it can be compiled for {kernel.only} alone")
    nvrtc = load_nvrtc()
    source = kernel.source.read_bytes()
    included = {path.name: path.read_bytes() for path in headers()}
    target = f"{arch}a" if kernel.only else arch  # a: with what later ones lack
    key = _key(target, nvrtc.getVersion(), source, included)
    stem = cache_folder() / f"{name}-{arch}-{key[:16]}"
    cached = _read(stem)
    cubin, ptx, log = cached or _compile(nvrtc, name, target, source, included)
    if cached is None:
        _write(stem, cubin, ptx, log)
    return Binary(name, arch, cubin, ptx, log, key)


def compile_all(pairs: Iterable[tuple[str, str]]) -> list[Binary]:
    """`compile_kernel` for pairs of kernel and architecture, as many at a time as there are processors, in the given order.

    Raises:
        KernelError, MissingDependency: as `compile_kernel`, for the first pair that does not compile.
    """
    load_nvrtc()
    pairs = list(pairs)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC runs without the interpreter's lock
        binaries = pool.map(lambda pair: compile_kernel(*pair), pairs)
        return list(bar(binaries, total=len(pairs), desc="compiling kernels", unit="kernel"))


def arch_for(capability: tuple[int, int]) -> str:
    """The newest architecture that this NVRTC can target and a device of this compute capability can run.

    Machine code runs on its own major version, at the same or a later minor version.

    Raises:
        KernelError: none exists, or the device is older than sm_75.
    """
    major, minor = capability
    known = [divmod(number, 10) for number in load_nvrtc().getSupportedArchs()]
    fits = [pair for pair in known if pair[0] == major and pair[1] <= minor]
    if capability < (7, 5) or not fits:
        version = ".".join(map(str, load_nvrtc().getVersion()))
        raise KernelError(
            f"compute capability {major}.{minor}: NVRTC {version} and these kernels support sm_75 and later"
        )
    return "sm_{}{}".format(*max(fits))


@functools.cache
def load_nvrtc() -> ModuleType:
    """CuPy's NVRTC bindings, checked to work.

    Raises:
        MissingDependency: they, or the library, are not there.
    """
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise MissingDependency(f"CuPy is not usable ({error}); {INSTALL}") from error
    try:
        nvrtc.getVersion()
    except (RuntimeError, OSError) as error:
        # Older CuPy looks for the library on the system's path only, not where pip puts it.
        if not _preload_nvrtc():
            raise MissingDependency(f"NVRTC was not found ({error}); {INSTALL}") from error
        try:
            nvrtc.getVersion()
        except (RuntimeError, OSError) as still:
            raise MissingDependency(f"NVRTC was not found ({still}); {INSTALL}") from still
    return nvrtc


def _preload_nvrtc() -> bool:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    found = [path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*") if "alt" not in path.name]
    for path in found:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return bool(found)


def _key(arch: str, version: tuple[int, int], source: bytes, included: dict[str, bytes]) -> str:
    digest = hashlib.sha256(repr((arch, OPTIONS, version)).encode())
    for name, text in (("", source), *sorted(included.items())):
        digest.update(f"{name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()


def _compile(
    nvrtc: ModuleType, name: str, arch: str, source: bytes, included: dict[str, bytes]
) -> tuple[bytes, str, str]:
    names = tuple(header.encode() for header in included)
    program = nvrtc.createProgram(source.decode(), f"{name}.cu", tuple(included.values()), names)
    try:
        try:
            no_cache = ("--no-cache",) if nvrtc.getVersion() >= OWN_CACHE else ()
            nvrtc.compileProgram(program, (*OPTIONS, *no_cache, f"--gpu-architecture={arch}"))
        except nvrtc.NVRTCError as error:
            raise KernelError(f"{name} for {arch}: {error}\n{nvrtc.getProgramLog(program)}") from error
        ptx = nvrtc.getPTX(program)
        text = ptx.decode() if isinstance(ptx, bytes) else ptx
        return _whole_elf(nvrtc.getCUBIN(program)), text.rstrip("\0"), _reproducible(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def _reproducible(log: str) -> str:
    """The log without how long ptxas took, which differs every time."""
    return re.sub(r"ptxas info\s*: Compile time.*\n?", "", log).rstrip("\0\n") + "\n"


def _whole_elf(cubin: bytes) -> bytes:
    """CuPy takes the image for a C string and drops its last byte, a zero that belongs to the last ELF program header.

    The driver does not mind; cuobjdump and nvdisasm refuse such a file.
    """
    (offset,) = struct.unpack_from("<Q", cubin, 0x20)
    size, count = struct.unpack_from("<HH", cubin, 0x36)
    return cubin + b"\0" * (len(cubin) == offset + size * count - 1)


def cache_folder() -> Path:
    """Where compiled kernels are kept: `DEEPINFER_CACHE`/kernels if set, otherwise in the user's cache folder."""
    return Path(os.environ.get("DEEPINFER_CACHE") or platformdirs.user_cache_dir("deepinfer-lab")) / "kernels"


def _read(stem: Path) -> tuple[bytes, str, str] | None:
    try:  # the cubin is written last: if it is there, all three are
        cubin = stem.with_name(stem.name + ".cubin").read_bytes()
        ptx, log = (stem.with_name(stem.name + suffix).read_text(encoding="utf-8") for suffix in (".ptx", ".log"))
    except OSError:
        return None
    return cubin, ptx, log


def _write(stem: Path, cubin: bytes, ptx: str, log: str) -> None:
    """Each file appears whole or not at all. A cache that cannot be written costs time, nothing else."""
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for suffix, content in ((".log", log.encode()), (".ptx", ptx.encode()), (".cubin", cubin)):
            handle, temporary = tempfile.mkstemp(dir=stem.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, stem.with_name(stem.name + suffix))
    except OSError:
        return
