// paged_attention.cuh for int8 K and V, head_dim 64.
#include "paged_attention.cuh"

PAGED_DECODE(paged_decode_i8_64, 64, 1, 4)
