// Blocks of 64 arranged activation rows and 192 outputs of a W4 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w4_wide_192_64_1_arranged, W4Words, 3, 1, 64, 7, 6, 4, true)
