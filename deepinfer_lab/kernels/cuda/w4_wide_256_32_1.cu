// Blocks of 32 activation rows and 256 outputs of a W4 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w4_wide_256_32_1, W4Words, 4, 1, 32, 12, 6, 4, false)
