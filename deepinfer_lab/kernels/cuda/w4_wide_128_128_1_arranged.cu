// Blocks of 128 arranged activation rows and 128 outputs of a W4 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w4_wide_128_128_1_arranged, W4Words, 2, 1, 128, 5, 6, 4, true)
