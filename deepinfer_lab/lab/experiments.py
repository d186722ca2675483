"""All experiments, by name."""

from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.first_model import FEW_BITS, SERVE_REAL_MODEL

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in (SERVE_REAL_MODEL, FEW_BITS)}
