// Blocks of 128 activation rows and 64 outputs of a W3 weight in tiles, by two teams.
#include "wide.cuh"
WIDE_KERNEL(w3_wide_64_128_2, W3Words, 1, 2, 128, 5, 6, 2)
