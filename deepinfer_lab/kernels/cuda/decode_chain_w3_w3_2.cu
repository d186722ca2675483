// A decode step of 2 rows in one launch: 3 bits.
#include "decode_chain.cuh"

DECODE_CHAIN(decode_chain_w3_w3_2, W3Tiles, W3Tiles, 2)
