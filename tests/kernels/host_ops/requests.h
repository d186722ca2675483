// Requests of Python's to a CPU program, binary, from standard input until it ends; answers go to standard output.
//
// Request: 8 ints (kernel, grid_x, grid_y, threads, buffers, numbers, bytes of shared memory beyond what the kernel declares, a
// seed of the blocks' order or 0); of each buffer its bytes as int64 (-1: a null pointer) and its content; then the numbers as
// doubles. Answer: all buffers, as the kernel left them.
#pragma once
#include "cuda_host.h"

// A heap block of exactly the right size, for the address sanitizer.
struct Buffer {
    long long bytes = -1;
    std::unique_ptr<char[]> data;
    template <class T>
    operator T*() const { return reinterpret_cast<T*>(data.get()); }
};

inline void read(void* to, size_t bytes) {
    if (std::fread(to, 1, bytes, stdin) != bytes) std::exit(3);
}

// run(the request's ints, its buffers, its numbers) for each of them. left_out: a buffer that is no part of the answer, or -1.
template <class Run>
void serve(Run run, int left_out = -1) {
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
        run(h, b, f);
        for (int i = 0; i < h[4]; ++i)
            if (i != left_out && b[i].bytes > 0) std::fwrite(b[i].data.get(), 1, b[i].bytes, stdout);
        std::fflush(stdout);
    }
}
