"""Every kernel compiles for every architecture without a GPU, and the cache knows what it holds."""

import subprocess
import sys

import pytest

from deepinfer_lab.errors import KernelError, MissingDependency
from deepinfer_lab.kernels import compiler
from deepinfer_lab.kernels.catalogue import KERNELS
from deepinfer_lab.kernels.compiler import arch_for, compile_all, compile_kernel


@pytest.fixture
def nvrtc():
    try:
        return compiler.load_nvrtc()
    except MissingDependency as error:
        pytest.skip(str(error))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPINFER_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def test_no_kernel_spills_on_any_architecture(compiled):
    assert {(row.kernel, row.arch) for row in compiled} == {(k, a) for k in KERNELS for a in compiler.ARCHS}
    spilling = [r for r in compiled if r.usage.spill_stores or r.usage.spill_loads or r.usage.stack]
    assert spilling == []


def test_second_compilation_comes_from_the_cache(nvrtc, cache, monkeypatch):
    first = compile_kernel("w4_gemv", "sm_90")
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compile_kernel("w4_gemv", "sm_90") == first
    assert sorted(path.suffix for path in cache.iterdir()) == [".cubin", ".log", ".ptx"]


def test_the_compiler_says_what_a_source_costs_every_time(nvrtc, tmp_path, monkeypatch):
    """Its own cache, from 12.9 on, would return an empty log."""
    logs = []
    for folder in ("one", "two"):
        monkeypatch.setenv("DEEPINFER_CACHE", str(tmp_path / folder))
        logs.append(compile_kernel("silu_mul", "sm_86").log)
    assert logs[0] == logs[1]
    assert "registers" in logs[0]


def test_many_at_once_are_the_same_in_order(nvrtc, cache):
    pairs = [(name, arch) for name in ("rms_norm", "silu_mul", "w4_gemv") for arch in ("sm_86", "sm_90")]
    binaries = compile_all(pairs)
    assert [(binary.kernel, binary.arch) for binary in binaries] == pairs
    assert binaries == [compile_kernel(*pair) for pair in pairs]
    with pytest.raises(KernelError, match="unknown kernel 'none'"):
        compile_all([("w4_gemv", "sm_86"), ("none", "sm_86")])


def test_a_changed_source_or_header_is_compiled_again(nvrtc, cache):
    version = nvrtc.getVersion()
    base = compiler._key("sm_90", version, b"kernel", {"a.cuh": b"1"})
    changed = [
        compiler._key("sm_86", version, b"kernel", {"a.cuh": b"1"}),
        compiler._key("sm_90", (1, 0), b"kernel", {"a.cuh": b"1"}),
        compiler._key("sm_90", version, b"kernel ", {"a.cuh": b"1"}),
        compiler._key("sm_90", version, b"kernel", {"a.cuh": b"2"}),
        compiler._key("sm_90", version, b"kernel", {"b.cuh": b"1"}),
    ]
    assert len({base, *changed}) == 6


def test_a_cache_that_cannot_be_written_is_no_error(nvrtc, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("DEEPINFER_CACHE", str(tmp_path / "file"))
    assert compile_kernel("w4_gemv", "sm_86").cubin.startswith(b"\x7fELF")


def test_an_unfinished_cache_entry_is_compiled_again(nvrtc, cache):
    whole = compile_kernel("w3_gemv", "sm_86")
    next(cache.glob("*.cubin")).unlink()
    assert compile_kernel("w3_gemv", "sm_86") == whole


def test_cubin_is_a_whole_elf_file(nvrtc, cache):
    cubin = compile_kernel("w4_gemv", "sm_90").cubin
    program_headers = int.from_bytes(cubin[0x20:0x28], "little")
    size, count = (int.from_bytes(cubin[at : at + 2], "little") for at in (0x36, 0x38))
    assert len(cubin) >= program_headers + size * count


def test_ptx_and_cubin_hold_the_entry(nvrtc, cache):
    for name in KERNELS:
        binary = compile_kernel(name, "sm_86")
        assert f".entry {name}(" in binary.ptx
        assert name.encode() in binary.cubin


def test_bad_requests_name_the_value(nvrtc, cache):
    with pytest.raises(KernelError, match=r"unknown kernel 'w5_gemv': there are w4_gemv"):
        compile_kernel("w5_gemv", "sm_86")
    with pytest.raises(KernelError, match=r"architecture 'ampere'"):
        compile_kernel("w4_gemv", "ampere")
    with pytest.raises(KernelError, match=r"w4_gemv for sm_42"):
        compile_kernel("w4_gemv", "sm_42")


def test_a_source_that_does_not_compile_shows_the_compilers_words(nvrtc):
    with pytest.raises(KernelError, match=r"identifier .nonsense. is undefined"):
        compiler._compile(nvrtc, "w4_gemv", "sm_86", b"__global__ void f() { nonsense(); }", {})


def test_architecture_of_a_device(nvrtc):
    assert arch_for((8, 6)) == "sm_86"
    assert arch_for((9, 0)) == "sm_90"
    assert arch_for((8, 8)) in ("sm_87", "sm_88")  # the newest of its major version that is not newer
    with pytest.raises(KernelError, match=r"compute capability 7\.0"):
        arch_for((7, 0))
    with pytest.raises(KernelError, match=r"compute capability 99\.0"):
        arch_for((99, 0))


def test_importing_the_package_does_not_import_cupy():
    code = (
        "import sys, deepinfer_lab.kernels, deepinfer_lab.kernels.resources, deepinfer_lab.kernels.dispatch, "
        "deepinfer_lab.kernels.maps; assert not [m for m in sys.modules if m.startswith('cupy')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
