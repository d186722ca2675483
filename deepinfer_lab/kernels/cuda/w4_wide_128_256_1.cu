// Blocks of 256 activation rows and 128 outputs of a W4 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w4_wide_128_256_1, W4Words, 2, 1, 256, 3, 3, 4)
