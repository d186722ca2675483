// out[row] = table[token of row], eight values a thread. Rows from `known` on may have a source: then their token is
// last[source], and takes the place of tokens[row]. A token beyond the table stops the kernel, as it does torch's.
// Grid: (rows, columns / 2048 rounded up).
#include "ptx.cuh"
#include "dependent.cuh"

extern "C" __global__ void __launch_bounds__(256)
    embed(long long* tokens, const long long* sources, const long long* last, const half_t* table, half_t* out, int known,
          int columns, int vocabulary) {
    take_turn();
    const int row = blockIdx.x, i = (blockIdx.y * 256 + threadIdx.x) * 8;
    const long long source = row < known ? -1 : sources[row - known];
    const long long token = source < 0 ? tokens[row] : last[source];
    if (token < 0 || token >= vocabulary) __trap();
    if (source >= 0 && i == 0) tokens[row] = token;  // nobody else reads it here
    if (i >= columns) return;
    *reinterpret_cast<uint4*>(out + static_cast<size_t>(row) * columns + i) =
        *reinterpret_cast<const uint4*>(table + token * columns + i);
}
