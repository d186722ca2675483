// Stands in for kernels/cuda/wgmma_ptx.cuh on a CPU. Bulk copies happen as late as they may, products when all other threads can
// do nothing but wait. There is NaN in a copy's place from the moment that it is ordered, and what a product reads must not
// change while it is under way. Descriptors and the swizzle follow the PTX ISA literally: "Matrix Descriptor Format", "Swizzling
// Modes".
#pragma once
#include <map>

#include "async_ptx.cuh"

using PhaseBarrier = unsigned long long;

inline unsigned shared_address(const void* p) { return static_cast<const char*>(p) - shared_bytes.get(); }
inline char* launch_patterns() { return shared_bytes.get(); }

[[noreturn]] inline void complain(const char* of) {
    std::fprintf(stderr, "%s\n", of);
    std::exit(5);
}

struct Phases {
    int count = 0, missing = 0;  // arrivals
    long long bytes = 0;         // expected, and not here yet
    unsigned over = 0;
    std::vector<Copy> copies;

    void settle() {
        long long ordered = 0;
        for (const Copy& copy : copies) ordered += copy.bytes;
        if (ordered > bytes) complain("a barrier expects fewer bytes than were ordered");
        if (missing > 0 || ordered < bytes) return;
        for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
        copies.clear();
        bytes = 0, missing = count, ++over;
    }
};
inline std::map<const PhaseBarrier*, Phases> phases;
inline std::mutex phases_mutex;
inline void phases_changed() { progress = true, ++steps; }
inline bool others_wait[32];  // as a lane of this warp has found
inline void let_others_go_on() {
    bool& found = others_wait[threadIdx.x / 32];
    for (unsigned before = steps - 1; !found && before != steps;) {
        before = steps;
        progress = true;
        swapcontext(&fibers[threadIdx.x]->context, &scheduler);
    }
    found = true;
    sync_warp();
    found = false;
}
inline void await_change(std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    swapcontext(&fibers[threadIdx.x]->context, &scheduler);
    lock.lock();
}

inline void start(PhaseBarrier* barrier, int count) {
    if (reinterpret_cast<size_t>(barrier) % 8) std::abort();
    *barrier = 0;  // there is room
    const std::lock_guard lock(phases_mutex);
    phases[barrier] = {count, count};
}
inline void publish_barriers() {}
inline void arrive_expecting(PhaseBarrier* barrier, int bytes) {
    const std::lock_guard lock(phases_mutex);
    Phases& its = phases.at(barrier);
    its.bytes += bytes;
    if (--its.missing < 0) complain("more have arrived at a barrier than it waits for");
    phases_changed();
}
inline void arrive(PhaseBarrier* barrier) { arrive_expecting(barrier, 0); }
inline void await(PhaseBarrier* barrier, unsigned parity) {
    std::unique_lock lock(phases_mutex);
    Phases& its = phases.at(barrier);
    for (;; await_change(lock)) {
        if (its.over % 2 == parity) its.settle();
        if (its.over % 2 != parity) break;
    }
    phases_changed();
}

inline void copy_bulk(char* to, const char* from, int bytes, PhaseBarrier* barrier) {
    if ((reinterpret_cast<size_t>(to) | reinterpret_cast<size_t>(from) | bytes) % 16) std::abort();
    const std::lock_guard lock(phases_mutex);
    std::memset(to, 0xFF, bytes);
    phases.at(barrier).copies.push_back({to, from, static_cast<size_t>(bytes)});
    phases_changed();
}

inline void load_ahead(uint4& to, const char* from, bool there) {
    if (reinterpret_cast<size_t>(from) % 16) std::abort();
    if (there) to = *reinterpret_cast<const uint4*>(from);
}
inline void clear(uint4& value, bool cleared) {
    if (cleared) value = {0, 0, 0, 0};
}

inline uint4 lanes_words[1024];
inline void store_matrices(char* row, const uint4& words) {
    if (reinterpret_cast<size_t>(row) % 16) std::abort();
    lanes_words[threadIdx.x] = words;
    sync_warp();
    const int warp = threadIdx.x / 32 * 32, matrix = threadIdx.x % 32 / 8, g = threadIdx.x % 8;
    for (int t = 0; t < 4; ++t) {
        const uint4& from = lanes_words[warp + 4 * g + t];
        const unsigned of[4] = {from.x, from.y, from.z, from.w};
        std::memcpy(row + 4 * t, of + matrix, 4);
    }
    sync_warp();
}
inline void publish_stores() {}
template <int N>
inline void give_registers() {}
template <int N>
inline void take_registers() {}
inline void pin(unsigned&) {}
inline void pin(float&) {}

struct Product {
    unsigned a[4];
    unsigned long long b;
    float* d;
    int rows;
    std::vector<half_t> seen;  // of b, by the first lane

    half_t at(int row, int k) const {
        const unsigned start = (b & 0x3FFF) << 4, eight_rows = (b >> 32 & 0x3FFF) << 4;
        if (b >> 62 != 1 || (b >> 49 & 7) != 0) complain("not the 128-byte swizzle from its base");
        unsigned address = start + row / 8 * eight_rows + row % 8 * 128 + k * 2;
        address ^= address >> 3 & 0x70;  // bits 4-6 with bits 7-9
        half_t value;
        std::memcpy(&value, shared_bytes.get() + address, 2);
        return value;
    }
    std::vector<half_t> all() const {
        std::vector<half_t> values;
        for (int i = 0; i < rows * 16; ++i) values.push_back(at(i / 16, i % 16));
        return values;
    }
};
inline std::vector<Product> open_products[1024];
inline std::vector<std::vector<Product>> product_groups[1024];  // oldest first
inline const std::vector<float> every_half = [] {
    std::vector<float> values;
    for (int bits = 0; bits < 65536; ++bits) values.push_back(to_float(static_cast<half_t>(bits)));
    return values;
}();

inline void begin_products() {}
template <int ROWS>
inline void multiply_async(float (&d)[ROWS / 2], const unsigned (&a)[4], unsigned long long b) {
    Product product = {{a[0], a[1], a[2], a[3]}, b, d, ROWS, {}};
    if (threadIdx.x % 32 == 0) product.seen = product.all();
    open_products[threadIdx.x].push_back(std::move(product));
}
inline void end_products() {
    product_groups[threadIdx.x].push_back(std::move(open_products[threadIdx.x]));
    open_products[threadIdx.x].clear();
}
// Element k of the row of A that this lane has in `half` 0, or 8 rows below.
inline float element_of_a(int group, int product, int half, int k) {
    const int quad = threadIdx.x / 4 * 4;
    const unsigned word = product_groups[quad + k % 8 / 2][group][product].a[half + k / 8 * 2];
    return every_half[word >> 16 * (k % 2) & 0xFFFF];
}
template <int N>
inline void await_products() {
    auto& groups = product_groups[threadIdx.x];
    const int done = std::max(static_cast<int>(groups.size()) - N, 0);
    if (done > 0) let_others_go_on();
    sync_warp();
    for (int group = 0; group < done; ++group) {
        for (int p = 0; p < static_cast<int>(groups[group].size()); ++p) {
            const Product& product = groups[group][p];
            const std::vector<half_t>& b = product_groups[threadIdx.x / 32 * 32][group][p].seen;
            if (threadIdx.x % 32 == 0 && product.seen != product.all()) complain("what a product reads has changed meanwhile");
            for (int half = 0; half < 2; ++half) {
                float a[16];
                for (int k = 0; k < 16; ++k) a[k] = element_of_a(group, p, half, k);
                for (int i = 0; i < product.rows / 4; ++i) {
                    const int column = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
                    float& d = product.d[i / 2 * 4 + half * 2 + i % 2];
                    for (int k = 0; k < 16; ++k) d += a[k] * every_half[b[column * 16 + k]];
                }
            }
        }
    }
    sync_warp();
    groups.erase(groups.begin(), groups.begin() + done);
}
