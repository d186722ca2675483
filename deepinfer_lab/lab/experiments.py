"""All experiments, by name."""

from deepinfer_lab.lab.batch_invariance import BATCH_INVARIANCE
from deepinfer_lab.lab.capacity_experiments import CAPACITY
from deepinfer_lab.lab.decode_step import DECODE_STEP
from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.first_model import FEW_BITS, SERVE_REAL_MODEL
from deepinfer_lab.lab.ghost_reply import GHOST_REPLY
from deepinfer_lab.lab.kernel_experiments import TILED_GEMM, W3_BATCH_TILE
from deepinfer_lab.lab.kernel_ladder import KERNEL_LADDER
from deepinfer_lab.lab.kernel_peers import KERNEL_PEERS
from deepinfer_lab.lab.overlap_experiments import (
    CHUNK_INFLIGHT,
    CPU_GPU_GAP,
    LONG_INSERTION,
    OVERLAP_ABLATION,
    OVERLAP_SWEEP,
)
from deepinfer_lab.lab.overlap_proof import OVERLAP_PROOF
from deepinfer_lab.lab.quantisation_quality import QUANTISATION_QUALITY

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        SERVE_REAL_MODEL,
        FEW_BITS,
        TILED_GEMM,
        W3_BATCH_TILE,
        KERNEL_LADDER,
        KERNEL_PEERS,
        DECODE_STEP,
        QUANTISATION_QUALITY,
        GHOST_REPLY,
        OVERLAP_SWEEP,
        LONG_INSERTION,
        CHUNK_INFLIGHT,
        OVERLAP_ABLATION,
        CPU_GPU_GAP,
        OVERLAP_PROOF,
        BATCH_INVARIANCE,
        CAPACITY,
    )
}
