// Blocks of 128 activation rows and 128 outputs of a W4 weight in tiles, by two teams.
#include "wide.cuh"
WIDE_KERNEL(w4_wide_128_128_2, W4Words, 2, 2, 128, 4, 5, 2)
