// Blocks of 64 activation rows and 64 outputs of a W4 weight in tiles, by four teams.
#include "wide.cuh"
WIDE_KERNEL(w4_wide_64_64_4, W4Words, 1, 4, 64, 6, 6, 2)
