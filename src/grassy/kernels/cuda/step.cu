// One Riemannian step of all classes of one or several heads in one launch: `reference._step`, reading and writing each
// element once.
//
// A class is W (k x n), and B = mu M + D. A cluster of CLUSTER thread blocks processes one class. Each block holds a
// slice of the columns in shared memory. Columns interact only through the Gram matrices G = W W', O = B W' and N = B
// B'. The rest is k x k arithmetic, and the new W and M are linear in W and B:
//
//     T = O (2 - diag G)       B - T W is tangent: 2 - G inverts G, and off its diagonal G is rounding
//     A = N - T O'             H H' of the tangent H = B - T W
//     P = cos(t sqrt A), Q = -t sinc(t sqrt A), polar = 3/2 - (P G P + Q A Q)/2
//     W' = polar (P W + Q H)   M' = H, or P H + t A sinc W if transported in parallel
//
// Matmuls over the n columns run on tensor cores. TF32 has 11 bits, so each operand is split into two parts, and x y is
// computed as three products (high high, high low, low high), accurate to 2^-22. Tensor cores truncate sums instead of
// rounding, which would bias long sums. They therefore sum high high of a Gram matrix over at most 32 columns, and W'
// is computed as W plus a small correction.
//
// The careful path handles rotations so large that rounding in A matters, and cancellation in A where its size matters:
// H replaces B, and the new W is corrected by its own Gram matrix, as in the reference.
//
// Tensor cores work on at least 8 rows. With k up to 4, two neighbouring classes are therefore processed together, as
// one class with block-diagonal matrices, unless one of them is unusual.
//
// Compile with -DROWS=8|16|32 (k rounded up, or 2 k for pairs), -DPAIRS=0|1, -DCLUSTER=1|2|4|8, -DWARPS=2|4|8|16,
// -DBLOCKS=(thread blocks per multiprocessor), -DPIECES_AT_ONCE=(pieces of 128 columns of a row loaded at once),
// -DHEADS=(largest number of heads per launch), -DGRAD_BF16=0|1, -DMOMENTUM_BF16=0|1.

#include "hardware.cuh"
#include "launch.cuh"
#include "shared_columns.cuh"
#if ROWS == 8
#include "rows_up_to_8.cuh"
#else
#include "rows_16_and_32.cuh"
#endif
#include "grams.cuh"
#include "small_matrices.cuh"

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, BLOCKS)
step(const __grid_constant__ Heads heads, const float* lr_on_device, const float* momentum_on_device, const float* skip,
     const int* verdicts, double lr_value, double momentum_value, double max_angle, int k, int n, int slice, int resident,
     int pause, int flags) {
    __shared__ int verdict;
    if ((flags & CAN_SKIP) && *skip != 0) return;
    if ((flags & CAREFUL_ONLY) && verdicts[blockIdx.x / CLUSTER] != AGAIN) return;  // stream.cu made this step
    const float rate = flags & LR_ON_DEVICE ? *lr_on_device : (float)lr_value;
    const float mu = flags & MOMENTUM_ON_DEVICE ? *momentum_on_device : (float)momentum_value;
    const bool has_momentum = flags & HAS_MOMENTUM, vectors = flags & VECTORS;
    const float sign = flags & MAXIMIZE ? -1.0f : 1.0f;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stride = slice + PAD;
    const u32 rank = rank_in_cluster();
    const int start = rank * slice, inside = min(slice, n - start);

    // A cluster processes one class, or two neighbours, of one head.
    const Taken taken = taken_by(heads, blockIdx.x / CLUSTER);
    const bool pair = PAIRS && taken.first + 1 < heads.classes[taken.head];
    unsigned long long* counts = heads.counts[taken.head];
    const long long first = (long long)taken.first * k * n;
    float* weight = heads.weight[taken.head] + first;
    const Grad* grad = heads.grad[taken.head] + first;
    Momentum* momentum = has_momentum ? heads.momentum[taken.head] + first : nullptr;

    const int rows = pair ? 2 * k : k;
    Columns columns = {rows, 0, rows, slice, stride};
    float* rest = (float*)shared4 + 2 * (1 + PAIRS) * k * stride + 32;
    float4* mine = (float4*)rest;
    if (CLUSTER > 1 && !SENT_FROM_MATRICES) rest += (ROWS == 32 ? 2 : 1) * TILES * 128;
    auto matrix = [&](int i) { return rest + i * MATRIX; };
    const Matrices m = {matrix(0), matrix(1), matrix(2), matrix(4), matrix(5),
                        matrix(6), matrix(7), matrix(8), matrix(3)};
    float* sums = ROWS == 8 ? m.G : m.T;  // shares memory with the matrices, which are filled later
    if (SENT_FROM_MATRICES) mine = (float4*)m.T;

    // Blocks that start together would load together and then all compute while memory idles. In the first round,
    // blocks on the same multiprocessor therefore start one after the other.
    const int cluster = blockIdx.x / CLUSTER;
    if (pause && cluster < resident) {
        const unsigned long long begin = cycles(), wait = (unsigned)pause * (cluster * BLOCKS / resident);
        while (cycles() - begin < wait) {}  // nanosleep may take twice as long as asked
    }

    // Steps 1 to 3 of Algorithm 1 without the projection: load W and B = mu M + D, zero beyond n.
    if (warp == 0) columns.zeros()[lane] = 0;
    const u32 w_here = shared_address(columns.w()), b_here = w_here + 4 * rows * stride;
    auto sum = [&](float y, const float& z) { return has_momentum ? fmaf(mu, z, sign * y) : sign * y; };
#pragma unroll 1
    for (int first_row = warp; first_row < ROWS && vectors; first_row += WARPS * ROWS_AT_ONCE)
#pragma unroll 1
        for (int column = 4 * lane; column < inside; column += 128 * PIECES_AT_ONCE) {
            // All loads are issued before any is waited for. W goes to shared memory asynchronously.
            float4 y[ROWS_AT_ONCE][PIECES_AT_ONCE], z[ROWS_AT_ONCE][PIECES_AT_ONCE];
#pragma unroll
            for (int r = 0; r < ROWS_AT_ONCE; r++) {
                const int row = first_row + r * WARPS, at = row * n + start + column;
                const float* from_w = weight + at;
                const Grad* from_d = grad + at;
                const Momentum* from_m = momentum + at;
#pragma unroll
                for (int i = 0; i < PIECES_AT_ONCE; i++) {
                    const bool here = row < rows && column + 128 * i < inside;
                    copy_to_shared(here, w_here + 4 * (row * stride + column + 128 * i), from_w + 128 * i);
                    if (here) y[r][i] = get4(from_d + 128 * i);
                    if (here && has_momentum) z[r][i] = get4(from_m + 128 * i);
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS_AT_ONCE; r++)
#pragma unroll
                for (int i = 0; i < PIECES_AT_ONCE; i++) {
                    const int row = first_row + r * WARPS;
                    if (row >= rows || column + 128 * i >= inside) continue;
                    const float4 &u = y[r][i], &v = z[r][i];
                    put_to_shared(b_here + 4 * (row * stride + column + 128 * i),
                                  make_float4(sum(u.x, v.x), sum(u.y, v.y), sum(u.z, v.z), sum(u.w, v.w)));
                }
        }
    for (int row = warp; row < rows; row += WARPS) {
        const int at = row * n + start;
        float *w_row = columns.w() + row * stride, *b_row = columns.b() + row * stride;
#pragma unroll 4
        for (int column = lane; column < inside && !vectors; column += 32) {
            w_row[column] = weight[at + column];
            b_row[column] = sum(get(grad + at + column), has_momentum ? get(momentum + at + column) : 0);
        }
        for (int column = max(inside, 0) + lane; column < slice; column += 32) w_row[column] = b_row[column] = 0;
    }
    // While this cluster computes, memory would idle: prefetch the data of a later cluster into the L2 cache. The first
    // `resident` clusters load their own data at once.
    const int later = cluster + resident / 2;
    if (later >= resident && later < gridDim.x / CLUSTER) {
        const Taken next = taken_by(heads, later);
        const int last = min(1 + PAIRS, heads.classes[next.head] - next.first) * k;
        for (int row = warp; row < last; row += WARPS)
            for (int column = 32 * lane; column < inside; column += 1024) {
                const long long at = ((long long)next.first * k + row) * n + start + column;
                bring_to_l2(heads.weight[next.head] + at), bring_to_l2(heads.grad[next.head] + at);
                if (has_momentum) bring_to_l2(heads.momentum[next.head] + at);
            }
    }
    wait_for_copies();
    __syncthreads();

    // A class usually needs one round. The careful path has three: H replaces B, the step, the correction of the new W.
    enum { STEP, CAREFUL_STEP, CORRECT } round = STEP;
    while (true) {
        all_grams(columns, k, sums, mine, rank, m.G, m.U, m.V, m.C);
        const bool both = PAIRS && columns.k > k;
        int found = UNUSUAL;
#if ROWS <= 16
        if (round == STEP) {
            if (warp == 0) found = usual(m, rate, flags, (float)max_angle, both ? k : 0);
            if (threadIdx.x == 0) verdict = found;
            __syncthreads();
            found = verdict;
        }
#endif
        // No block overwrites its sums, or exits, before all have read them.
        const bool unusual = found == UNUSUAL && !both;
        if (READ_LATE && unusual) wait_for_cluster();
        if (unusual) {
            __syncthreads();  // all have read the verdict before it is overwritten
            if (threadIdx.x < MIDDLE) {
                found = MOVE;
                if (round == CORRECT) {
                    const Four g = four(m.G);
                    set(m.Y, [&](int r, int c, int j) { return 0.5f * (r == c) - 0.5f * g[j]; });
                    set(m.V, [&](int, int, int) { return 0.0f; });
                } else {
                    found = middle(m, rate, flags, (float)max_angle, round == CAREFUL_STEP, rank == 0, counts);
                }
                if (threadIdx.x == 0) verdict = found;
            }
            __syncthreads();
            found = verdict;
        }
        if (READ_LATE && !unusual) wait_for_cluster();
        if (found == UNUSUAL) {
            columns.k = k;  // process the pair one after the other
            continue;
        }
        if (found == AGAIN) {
            round = CAREFUL_STEP;
            move_here(columns.b(), columns, m.X, m.U);
            continue;
        }
        if (found == SKIP && threadIdx.x == 0 && rank == 0) atomicAdd(counts, 1ull);
        if (found != SKIP) {
            // A class that does not move stays bit-identical.
            const long long at = PAIRS ? (long long)columns.first * n : 0;
            move(columns, m.Y, m.V, m.X, m.U, found == MOVE && round != CAREFUL_STEP ? weight + at : nullptr,
                 has_momentum && round != CORRECT ? momentum + at : nullptr, n, start, vectors, flags & PARALLEL);
            if (found == MOVE && round == CAREFUL_STEP) {
                round = CORRECT;
                __syncthreads();
                move_here(columns.w(), columns, m.Y, m.V);
                continue;
            }
        }
        if (!PAIRS || columns.first + columns.k == rows) return;
        columns.first = k;  // the second class of a split pair
        round = STEP;
        __syncthreads();
    }
}
