// A decode step of 1 row in one launch: 3 bits.
#include "decode_chain.cuh"

DECODE_CHAIN(decode_chain_w3_w3_1, W3Tiles, W3Tiles, 1)
