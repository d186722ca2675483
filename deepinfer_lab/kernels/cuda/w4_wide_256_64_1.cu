// Blocks of 64 activation rows and 256 outputs of a W4 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w4_wide_256_64_1, W4Words, 4, 1, 64, 6, 6, 4, false)
