// rope_write.cuh into an fp16 cache.
#include "rope_write.cuh"

ROPE_WRITE(rope_write_f16, half_t)
