// Blocks of 32 activation rows and 128 outputs of a W4 weight in tiles, by two teams.
#include "wide.cuh"
WIDE_KERNEL(w4_wide_128_32_2, W4Words, 2, 2, 32, 12, 6, 4, false)
