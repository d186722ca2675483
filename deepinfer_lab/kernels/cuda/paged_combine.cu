// The splits of paged_attention.cuh to one result: each counts by exp2(its max - the highest max). Grid: (heads, sequences).
#include "mma.cuh"

extern "C" __global__ void __launch_bounds__(128)
    paged_combine(const float* partial, const float* stats, const long long* seq_lens,
                  half_t* __restrict__ out, int heads, int dims, int splits, int split_size) {
    take_turn();
    const int length = static_cast<int>(seq_lens[blockIdx.y]);
    const int used = min(splits, (length + split_size - 1) / split_size);  // the others were not written
    const size_t row = static_cast<size_t>(blockIdx.y) * heads + blockIdx.x;
    const float* stat = stats + row * splits * 2;
    float highest = -1e30f;
    for (int i = 0; i < used; ++i) highest = fmaxf(highest, stat[2 * i]);
    const int dim = threadIdx.x;
    if (dim >= dims) return;
    float total = 0.0f, value = 0.0f;
#pragma unroll 8
    for (int i = 0; i < used; ++i) {
        const float weight = exp2_approx(stat[2 * i] - highest);
        total += weight * stat[2 * i + 1];
        value += weight * partial[(row * splits + i) * dims + dim];
    }
    out[row * dims + dim] = to_half(length > 0 ? value / total : 0.0f);
}
