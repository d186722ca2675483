"""What has changed since an H200's records were filed. The lists are true or tests fail: what has been measured again must go.

verification.json is of sources before these. Of these, an H200 has run the tests of what is new alone. All passed of test_ends,
test_dense_rows, test_wide (of which some are one test now) and test_chained_steps_on_gpu, and 36 of 37 of
test_decode_chain_on_gpu; the other missed a tolerance by a fifteenth, which has allowed for what softmax magnifies since then.

compute-sanitizer has seen none of what is new. Of 110 tests of the sources before, memcheck finds nothing, and racecheck
reports races in w4_mma_block_192_16 and w4_mma_block_192_32 (its list ends at a hundred lines), between accesses with a barrier
of the whole block between them. Whether the tool misreads barriers of a part of the block, whose numbers are in a register
there, or the kernel is at fault, is not settled, and so there is no new sanitizer.json.
"""

import fnmatch

SOURCES = (
    "arrange_rows.cu", "async_ptx.cuh", "chain_*.cuh", "cluster_ptx.cuh", "decode_chain*", "dense_*.cu*", "dependent.cuh",
    "dequantise_tiles.cuh", "digits_ptx.cuh", "embed.cu", "fetch.cu", "grid_ptx.cuh", "likeliest.cu", "max_ptx.cuh",
    "mma_block.cuh", "mma_ptx.cuh", "mma_small.cuh", "mma_unit.cuh", "norm.cuh", "paged_attention.cuh", "paged_tile.cuh",
    "patience.cuh", "prefetch.cuh", "rms_norm.cu", "rope.cuh", "rope_write.cuh", "silu.cuh", "silu_mul.cu", "small_rows.cuh",
    "tile_units.cuh", "unpack_field.cuh", "unpack_w?_mma.cuh", "w?_dequantise_tiles.cu", "w?_mma_*.cu",
    "w?_wide_*.cu", "wgmma*.cuh", "wide*.cuh",
)  # fmt: skip
RECORDS = (  # that other sources made, or sources that there are no more
    "batch_invariance", "chunk_inflight", "cpu_gpu_gap", "few_bits", "kernel_ladder", "kernel_peers", "long_insertion",
    "overlap_ablation", "overlap_proof", "overlap_sweep", "sanitizer", "serve_real_model", "verification",
)  # fmt: skip
UNMEASURED = ("decode_step",)  # what a notebook asks for, and no device has yet


def awaits(source: str) -> bool:
    return any(fnmatch.fnmatch(source, pattern) for pattern in SOURCES)


def listed_in_vain(sources: set[str]) -> list[str]:
    """Patterns that none of these sources, which compute-sanitizer has not seen as they are, bears out."""
    return [pattern for pattern in SOURCES if not fnmatch.filter(sources, pattern)]
