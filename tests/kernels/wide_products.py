"""Cuts of the wide kernels as small as a CPU wants them: those of host_wide/run_wide.cpp."""

from deepinfer_lab.kernels.wide_cuts import WideCut

KINDS = ((2, 1, 32, 5, 3, 4, False), (1, 1, 128, 2, 4, 2, True), (1, 2, 32, 6, 3, 4, False))
CUTS = tuple(WideCut(bits, *kind) for bits in (4, 3) for kind in KINDS)
