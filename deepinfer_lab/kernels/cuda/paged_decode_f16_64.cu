// paged_attention.cuh for fp16 K and V, head_dim 64.
#include "paged_attention.cuh"

PAGED_DECODE(paged_decode_f16_64, 64, 2, 3)
