// The kernels of wide.cuh in one CPU program; requests and answers as those of host_ops/run_ops.cpp, where grid_y is the number
// of blocks of a cluster. Kernel 0 arranges rows.
#include "cuda_host.h"

inline unsigned words_exchanged[1024];
inline unsigned __shfl_xor_sync(unsigned, unsigned value, int distance) {
    words_exchanged[threadIdx.x] = value;
    sync_warp();
    const unsigned got = words_exchanged[threadIdx.x ^ distance];
    sync_warp();
    return got;
}

#include "arrange_rows.cu"
#include "wide.cuh"

// The order of CUTS in wide_products.py.
template <class Words>
struct Cuts {
    using A = WideCut<Words, 2, 1, 32, 5, 3, 4, false>;
    using B = WideCut<Words, 1, 1, 128, 2, 4, 2, true>;
    using C = WideCut<Words, 1, 2, 32, 6, 3, 4, false>;
};

struct Buffer {
    long long bytes = -1;
    std::unique_ptr<char[]> data;
    template <class T>
    operator T*() const { return reinterpret_cast<T*>(data.get()); }
};

void read(void* to, size_t bytes) {
    if (std::fread(to, 1, bytes, stdin) != bytes) std::exit(3);
}

int main() {
    int h[8];
    while (std::fread(h, sizeof h, 1, stdin) == 1) {
        std::vector<Buffer> b(h[4]);
        for (Buffer& buffer : b) {
            read(&buffer.bytes, 8);
            if (buffer.bytes < 0) continue;
            buffer.data = std::make_unique<char[]>(buffer.bytes);
            read(buffer.data.get(), buffer.bytes);
        }
        std::vector<double> f(h[5]);
        read(f.data(), 8 * f.size());
        const std::vector<int> n(f.begin(), f.end());
        const auto wide = [&](auto cut) {
            if (decltype(cut)::THREADS != h[3] || decltype(cut)::SHARED != h[6]) complain("not as Python has it");
            wide_block<decltype(cut)>(b[0], b[1], b[2], b[3], b[4], n[0], n[1], n[2], n[3]);
        };
        launch_clusters(h[1], h[2], h[3], h[6], h[7], [&] {
            switch (h[0]) {
                case 0: return arrange_rows(b[0], b[1], n[0], n[1]);
                case 1: return wide(Cuts<W4Words>::A{});
                case 2: return wide(Cuts<W4Words>::B{});
                case 3: return wide(Cuts<W4Words>::C{});
                case 4: return wide(Cuts<W3Words>::A{});
                case 5: return wide(Cuts<W3Words>::B{});
                case 6: return wide(Cuts<W3Words>::C{});
            }
        });
        for (const Buffer& buffer : b)
            if (buffer.bytes > 0) std::fwrite(buffer.data.get(), 1, buffer.bytes, stdout);
        std::fflush(stdout);
    }
}
