// rope_write.cuh into an int8 cache.
#include "rope_write.cuh"

ROPE_WRITE(rope_write_i8, signed char)
