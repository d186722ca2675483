"""What has changed since an H200 last ran the GPU tests to their end and filed the records. The lists are true or tests fail:
what has been measured again must go from here.

The kernels on tensor cores have run there: of 1,319 tests 1,230 passed and one asked for what is no longer so, before the time
was up; `kernel_ladder` holds each of their results' errors. No verification.json came of it, since the run did not end.
"""

import fnmatch

SOURCES = (
    "arrange_rows.cu", "async_ptx.cuh", "cluster_ptx.cuh", "dependent.cuh", "dequantise_tiles.cuh", "mma_block.cuh",
    "mma_ptx.cuh", "mma_small.cuh", "mma_unit.cuh", "norm.cuh", "paged_attention.cuh", "paged_combine.cu", "paged_tile.cuh",
    "prefetch.cuh", "rms_norm.cu", "rope.cuh", "rope_write.cuh", "silu.cuh", "silu_mul.cu", "small_rows.cuh",
    "tile_units.cuh", "unpack_field.cuh", "unpack_w?_mma.cuh", "w?_dequantise_tiles.cu", "w?_mma_*.cu", "w?_wgmma_*.cu",
    "w?_wide_*.cu", "wgmma*.cuh", "wide*.cuh",
)  # fmt: skip
RECORDS = (
    "batch_invariance", "chunk_inflight", "cpu_gpu_gap", "few_bits", "long_insertion", "overlap_ablation", "overlap_proof",
    "overlap_sweep", "sanitizer", "serve_real_model", "verification",
)  # fmt: skip


def awaits(source: str) -> bool:
    return any(fnmatch.fnmatch(source, pattern) for pattern in SOURCES)


def listed_in_vain(sources: set[str]) -> list[str]:
    """Patterns that none of these sources, which have not been verified as they are, bears out."""
    return [pattern for pattern in SOURCES if not fnmatch.filter(sources, pattern)]
