// Blocks of 128 arranged activation rows and 256 outputs of a W4 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w4_wide_256_128_1_arranged, W4Words, 4, 1, 128, 4, 5, 2, true)
