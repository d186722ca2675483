"""The compiler's report is read right, and occupancy follows from it as NVIDIA's calculator has it."""

import pytest

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import maps, resources
from deepinfer_lab.kernels.compiler import ARCHS
from deepinfer_lab.kernels.resources import Usage, occupancy, parse_log, ptx_instructions

LOG = """ptxas info    : 12 bytes gmem
ptxas info    : Compiling entry function 'f' for 'sm_86'
ptxas info    : Function properties for f
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 105 registers, used 1 barriers, 512 bytes smem, 408 bytes cmem[0]
ptxas info    : Compile time = 52.504 ms
"""


def test_log_is_parsed():
    assert parse_log(LOG, "f") == Usage(registers=105, shared=512, stack=8, spill_stores=4, spill_loads=12)
    assert parse_log(LOG.replace("512 bytes smem, ", ""), "f").shared == 0
    with pytest.raises(KernelError, match="no resource report"):
        parse_log(LOG, "g")


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks", "fraction", "limiter"),
    [
        ("sm_86", 256, 40, 6208, 6, 1.0, "warps"),
        ("sm_86", 128, 105, 512, 4, 1 / 3, "registers"),  # 3584 registers a warp: 18 warps, so 16
        ("sm_90", 256, 64, 0, 4, 0.5, "registers"),
        ("sm_90", 256, 32, 0, 8, 1.0, "warps"),
        ("sm_86", 32, 16, 0, 16, 1 / 3, "blocks"),
        ("sm_80", 64, 32, 48 * 1024, 3, 6 / 64, "shared memory"),  # 49 KiB with the system's share: 3 in 164
        ("sm_86", 64, 32, 48 * 1024, 2, 4 / 48, "shared memory"),
        ("sm_120", 1024, 48, 0, 1, 2 / 3, "warps"),
    ],
)
def test_occupancy(arch, threads, registers, shared, blocks, fraction, limiter):
    result = occupancy(arch, threads, registers, shared)
    assert (result.blocks, result.limiter) == (blocks, limiter)
    assert result.fraction == pytest.approx(fraction)
    assert result.warps == blocks * threads // 32


def test_occupancy_of_what_does_not_fit():
    with pytest.raises(KernelError, match="does not fit sm_86"):
        occupancy("sm_86", 1024, 255, 0)
    with pytest.raises(KernelError, match="sm_70: limits are known for"):
        occupancy("sm_70", 256, 32, 0)


def test_every_card_and_every_architecture_has_limits():
    assert set(resources.CARDS.values()) == set(ARCHS) == set(resources.LIMITS)


def test_report_shows_the_articles_tile_and_the_failed_experiment(compiled):
    rows = {(row.kernel, row.arch): row for row in compiled}
    for bits in (3, 4):
        assert rows[f"w{bits}_tiled_gemm", "sm_86"].usage.shared == 2048 + 4160
        assert rows[f"w{bits}_tiled_gemm", "sm_86"].cards == ("RTX 3050 Laptop", "A10")
    # Section 3.2: eight groups of accumulators cost occupancy.
    for arch in ARCHS:
        tile, grid_y = rows["w3_gemv_batch_tile", arch], rows["w3_gemv_grid_y", arch]
        assert tile.usage.registers > grid_y.usage.registers
        assert tile.occupancy.fraction < grid_y.occupancy.fraction


PTX = """
.visible .entry f(
	.param .u64 f_param_0
)
{
	.reg .pred 	%p<2>;
	ld.param.u64 	%rd1, [f_param_0];
	// begin inline asm
	cvt.f32.f16 %f1, %rs1;
	// end inline asm
$L__BB0_1:
	fma.rn.f32 	%f2, %f1, %f1, %f1;
	{ fma.rn.f32 	%f2, %f1, %f1, %f1; }
	shfl.sync.bfly.b32 	%r1|%p1, %r2, 16, 31, -1;
	@%p1 bra 	$L__BB0_1;
	st.global.f32 	[%rd1], %f2;
	ret;
}
"""


def test_ptx_instructions_are_counted():
    assert ptx_instructions(PTX, "f") == {
        "ld.param": 1, "cvt": 1, "fma": 2, "shfl.sync": 1, "bra": 1, "st.global": 1, "ret": 1,
    }  # fmt: skip
    with pytest.raises(KernelError, match="no such entry"):
        ptx_instructions(PTX, "g")


@pytest.mark.parametrize("kernel", ["w4_tiled_gemm", "w4_tiled_gemm_split_k"])
def test_tiled_gemm_does_eight_fmas_a_k_and_reads_as_wide_as_the_maps_say(compiled, kernel):
    """Section 2.2, read off the compiled code: 32 unrolled k."""
    from deepinfer_lab.kernels.compiler import compile_kernel

    counts = ptx_instructions(compile_kernel(kernel, "sm_86").ptx, kernel)
    assert counts["fma"] == maps.BK * 8
    assert counts["ld.shared"] == len(maps.wide())
