"""All experiments, by name."""

from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.first_model import FEW_BITS, SERVE_REAL_MODEL
from deepinfer_lab.lab.kernel_experiments import TILED_GEMM, W3_BATCH_TILE
from deepinfer_lab.lab.quantisation_quality import QUANTISATION_QUALITY

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (SERVE_REAL_MODEL, FEW_BITS, TILED_GEMM, W3_BATCH_TILE, QUANTISATION_QUALITY)
}
