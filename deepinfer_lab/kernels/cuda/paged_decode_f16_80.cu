// paged_attention.cuh for fp16 K and V, head_dim 80.
#include "paged_attention.cuh"

PAGED_DECODE(paged_decode_f16_80, 80, 2, 3)
