// How operands come to the blocks of wide.cuh, of which this is a part.
#pragma once

// Units of a stretch that a team has.
template <class C>
__device__ __forceinline__ int team_units(const Stretch& part, int team) {
    return max(part.count - team + C::TEAMS - 1, 0) / C::TEAMS;
}

// A unit of a warp's tile in its registers. scale: of outputs g and g + 8 in each quarter.
template <class C>
struct Piece {
    typename C::Words words;
    unsigned scale[QUARTERS];
};

// A warp's units, copied ahead in order, from one stretch to the next: DEPTH - 1 of them, each a group of copies.
template <class C>
struct Weights {
    char* ring;
    int team, tile;           // the warp's, of the block's
    int index = 0, left = 0;  // the next stretch; units of the one at hand
    int place = 0;            // in the ring, of the next copy
    unsigned at;              // the next unit, of all tiles

    __device__ __forceinline__ Weights(const Block<C>& block, const Operands& of, int warp)
        : ring(block.weights(warp)), team(warp / C::TILES), tile(warp % C::TILES) {}
    // The next stretch, if there is one. Where the output ends before a warp's tile it copies the last one, for nobody.
    __device__ __forceinline__ void begin(const Block<C>& block) {
        if (index == block.stretches()) return;
        const Stretch part = block.stretch(index++);
        const int own = min(block.first_tile(part) + tile, block.count - 1);
        left = team_units<C>(part, team);
        at = own * block.units + part.begin + team;
    }
    // Orders the copy of the next unit, if there is one.
    __device__ __forceinline__ void fetch(const Block<C>& block, const Operands& of) {
        if (left == 0) begin(block);
        if (left > 0) {
            const int lane = threadIdx.x % 32, scale_bytes = 16 << 8 - of.group_shift;
            char* const to = ring + place * C::UNIT + lane * 16;
            const char* const from = of.tiles + static_cast<size_t>(at) * C::Words::BYTES + lane * 16;
            copy_async(to, from, true);
            if (512 + lane * 16 < C::Words::BYTES) copy_async(to + 512, from + 512, true);
            const char* const scales = of.scales + static_cast<size_t>(at) * scale_bytes + lane * 16;
            copy_async_where(to + C::Words::BYTES, scales, lane * 16 < scale_bytes);
            at += C::TEAMS, --left;
        }
        commit_copies();
        if (++place == C::DEPTH) place = 0;
    }
    // The oldest unit that has been copied, or nothing of use where there is none. Its place is free then.
    __device__ __forceinline__ void take(const Block<C>& block, const Operands& of, Piece<C>& piece) {
        const int lane = threadIdx.x % 32;
        wait_copies<C::DEPTH - 2>();
        __syncwarp();  // all lanes' copies are there; and all have read the unit before, in whose place the next one goes
        fetch(block, of);
        const char* const unit = ring + place * C::UNIT;  // of DEPTH - 1 in flight, the place after the newest has the oldest
        piece.words.load(unit, lane);
#pragma unroll
        for (int quarter = 0; quarter < QUARTERS; ++quarter) {
            const char* const scales = unit + C::Words::BYTES + (quarter * 32 >> of.group_shift) * 32;
            piece.scale[quarter] = reinterpret_cast<const unsigned*>(scales)[lane / 4];
        }
    }
};

// By one thread of the copiers. arrivals: those that a slot waits for to be full.
template <class C>
__device__ __forceinline__ void start_barriers(const Block<C>& block, int arrivals) {
    if (threadIdx.x != C::MULTIPLIERS) return;
    for (int slot = 0; slot < C::STAGES; ++slot) {
        start(block.full(slot), arrivals);
        start(block.empty(slot), C::TEAM / 32);
    }
}

// A thread's part of a batch, 32 rows by 128 of k: 16 bytes of two rows' two halves.
struct Batch {
    uint4 of[4] = {};
    int at;            // bytes of a slot's half before the batch
    bool there, last;  // in its unit
};

// What a thread reads of activations, in order, from one stretch to the next. Eight lanes read 64 of k of a row: whole lines.
template <class C>
struct Rows {
    static constexpr int BATCHES = C::ROWS / BATCH;
    const char* from;         // in the first row of the next batch
    int index = 0, left = 0;  // the next stretch; units of the one at hand
    int batch;                // the next one of its unit
    int first, rows, k;       // of the thread's rows of a unit, the first; from `from` on, rows to M, and k to K
    const size_t apart;       // bytes from a batch to the next

    __device__ __forceinline__ Rows(const Block<C>& block, const Operands& of, int warp)
        : first(4 * warp + threadIdx.x % 32 / 8), apart(static_cast<size_t>(of.k) * 2 * BATCH) {}
    __device__ __forceinline__ void begin(const Block<C>& block, const Operands& of) {
        if (index == block.stretches()) return;
        const Stretch part = block.stretch(index++);
        const int block_row = block.first_row(part), at = part.begin * MMA_K + threadIdx.x % 8 * 8;
        left = part.count, batch = 0, rows = of.m - block_row - first, k = of.k - at;
        from = of.x + (static_cast<size_t>(block_row + first) * of.k + at) * 2;
    }
    __device__ __forceinline__ void load(const Block<C>& block, const Operands& of, Batch& to) {
        if (left == 0) begin(block, of);
        to.there = left > 0;
        if (!to.there) return;
        to.at = batch * BATCH * ROW_BYTES, to.last = batch + 1 == BATCHES;
        if (k + threadIdx.x % 8 * 8 < MMA_K) {  // K ends in this unit, for all lanes: zeros from there on
#pragma unroll
            for (int i = 0; i < 4; ++i) clear(to.of[i], k <= i % 2 * 64);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            load_ahead(to.of[i], from + i / 2 * (apart / 2) + i % 2 * ROW_BYTES, rows > i / 2 * 16 && k > i % 2 * 64);
        }
        ++batch, from += apart, rows -= BATCH;
        if (!to.last) return;
        from += 2 * ROW_BYTES - BATCHES * apart, rows += C::ROWS, k -= MMA_K, batch = 0, --left;
    }
};

// A copier: activations to slots (wide_units.cuh). What storing fragments as matrices makes of 16 bytes a lane is their
// transposition.
template <class C>
__device__ __forceinline__ void copy_rows(const Block<C>& block, const Operands& of, int warp) {
    const int lane = threadIdx.x % 32, row = 4 * warp + lane % 8 / 2, chunk = lane % 2 * 4 + lane / 8;
    char* const own = block.shared + row * ROW_BYTES + (chunk ^ row % 8) * 16;
    Rows<C> rows(block, of, warp);
    await_previous();
    Batch ahead[C::AHEAD];
#pragma unroll
    for (int i = 0; i < C::AHEAD; ++i) rows.load(block, of, ahead[i]);
    start_barriers(block, COPIERS);
    __syncthreads();
    Turn<C::STAGES> turn(0);
    int next = 0;  // the slot that is the next to be full
    while (ahead[0].there) {
        int units = 0;
#pragma unroll
        for (int i = 0; i < C::AHEAD; ++i) {
            if (!ahead[i].there) break;
            if (ahead[i].at == 0) await_or_trap(block.empty(turn.slot), turn.parity ^ 1);
            char* const to = own + turn.slot * 2 * C::HALF + ahead[i].at;
#pragma unroll
            for (int j = 0; j < 4; ++j) store_matrices(to + j / 2 * 16 * ROW_BYTES + j % 2 * C::HALF, ahead[i].of[j]);
            if (ahead[i].last) turn.advance(1), ++units;
        }
        publish_stores();  // while nothing is on its way: it would wait for loads, too
        __syncwarp();
        for (; units > 0; --units) {
            if (lane == 0) arrive(block.full(next));
            if (++next == C::STAGES) next = 0;
        }
#pragma unroll
        for (int i = 0; i < C::AHEAD; ++i) rows.load(block, of, ahead[i]);
    }
}

// The copiers where activations come arranged: one thread orders copies of whole slots, the others have nothing to do.
template <class C>
__device__ __forceinline__ void copy_arranged(const Block<C>& block, const Operands& of, int warp) {
    start_barriers(block, 1);
    publish_barriers();
    __syncthreads();
    await_previous();
    if (warp == C::WARPS && elected()) {
        const int rows = padded_rows(of.m), stretches = block.stretches();
        const size_t half = static_cast<size_t>(rows) * ROW_BYTES;
        Turn<C::STAGES> turn(0);
        for (int index = 0; index < stretches; ++index) {
            const Stretch part = block.stretch(index);
            const int first = block.first_row(part), bytes = min(rows - first, C::ROWS) * ROW_BYTES;
            const char* from = of.x + 2 * part.begin * half + static_cast<size_t>(first) * ROW_BYTES;
            for (int left = part.count; left > 0; --left) {
                await_or_trap(block.empty(turn.slot), turn.parity ^ 1);
                PhaseBarrier* const full = block.full(turn.slot);
                char* const to = block.slot(turn.slot);
                arrive_expecting(full, 2 * bytes);
                copy_bulk(to, from, bytes, full);
                copy_bulk(to + C::HALF, from + half, bytes, full);
                from += 2 * half;
                turn.advance(1);
            }
        }
    }
    __syncwarp();
}
