// paged_attention.cuh for int8 K and V, head_dim 128.
#include "paged_attention.cuh"

PAGED_DECODE(paged_decode_i8_128, 128, 1, 4)
