// Blocks of 64 activation rows and 256 outputs of a W3 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w3_wide_256_64_1, W3Words, 4, 1, 64, 6, 6, 4, false)
