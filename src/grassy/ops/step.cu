// One Riemannian step of all classes in one launch: `reference._step`, with every number read and written once.
//
// A class is W (k x n), and B = mu M + D. A cluster of CLUSTER thread blocks takes one class, each block a slice of the
// columns, which stays in shared memory. All that couples columns are the Gram matrices G = W W', O = B W', N = B B';
// all that a class needs afterwards are k x k matrices, and new W and M are linear in W and B:
//
//     T = O (2 - diag G)       B - T W is horizontal: 2 - G inverts G, and beside its diagonal G is but rounding
//     A = N - T O'             H H' of the horizontal H
//     P = cos(t sqrt A), Q = -t sinc(t sqrt A), polar = 3/2 - (P G P + Q A Q)/2
//     W' = polar (P W + Q H)   M' = H, or P H + t A sinc W if transported in parallel
//
// The products with n columns run on tensor cores. A TF32 number has 11 bits, so x is split into two of them, and x y is
// taken as three products (high high, high low, low high), good to 2^-22. Tensor cores cut off instead of rounding when
// they add up, which would bias long sums: a Gram matrix is summed by them over 32 columns at most, and W' is formed as
// W plus a small correction.
//
// If the turn is so large that the rounding of A is felt, or A is lost in cancellation where it matters, the class is
// treated with care: H replaces B, and the new W is corrected by its own Gram matrix, as the reference does.
//
// Compile with -DROWS=8|16|32 (k rounded up), -DCLUSTER=1|2|4|8, -DWARPS=4|8, -DBLOCKS= how many of these thread blocks
// a multiprocessor is to hold, -DGRAD_BF16=0|1, -DMOMENTUM_BF16=0|1.

#define THREADS (32 * WARPS)
#define GROUPS (ROWS / 8)
#define MATRIX (ROWS * ROWS)
#define PAD 4                           // columns between rows, so that no two lanes meet in a bank
#define BATCH 2                         // loads of a thread that are under way at once, of each of W, D and M
#define TILES (GROUPS * GROUPS + (GROUPS + 1) / 2 * GROUPS)  // 16 x 8 pieces of the Gram matrices
#define BUFFERS 2                       // warps add up their pieces in so many places at once
#define CHAINS (ROWS == 8 ? 3 : 1)       // sums that do not wait for each other; more rows have enough tiles for that
#define ALONE (ROWS == 32 && CLUSTER > 1)  // whether the first block of a cluster works on k x k matrices for all
#define MIDDLE (ROWS == 8 ? 32 : MATRIX / 4)  // threads for the k x k matrices, four entries each
#define LARGEST_TURN 64.0f  // 2**MAX_DOUBLINGS of the reference

typedef unsigned int u32;

enum Flags { HAS_MOMENTUM = 1, PARALLEL = 2, CAPPED = 4, MAXIMIZE = 8, LR_ON_DEVICE = 16, MOMENTUM_ON_DEVICE = 32,
             VECTORS = 64, CAN_SKIP = 128 };

#if GRAD_BF16
typedef unsigned short Grad;
#else
typedef float Grad;
#endif
#if MOMENTUM_BF16
typedef unsigned short Momentum;
#else
typedef float Momentum;
#endif

// ---- loads and stores; bfloat16 is the upper half of a float ----

__device__ float get(const float* p) { return *p; }
__device__ float get(const unsigned short* p) { return __uint_as_float((u32)*p << 16); }
__device__ float4 get4(const float* p) { return __ldcs((const float4*)p); }
__device__ float4 get4(const unsigned short* p) {
    uint2 v = __ldcs((const uint2*)p);
    return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
                       __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
}
__device__ u32 rounded_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
__device__ void put(float* p, float x) { *p = x; }
__device__ void put(unsigned short* p, float x) { *p = (unsigned short)rounded_bf16(x); }
__device__ void put4(float* p, float4 v) { __stcs((float4*)p, v); }
__device__ void put4(unsigned short* p, float4 v) {
    __stcs((uint2*)p, make_uint2(rounded_bf16(v.x) | rounded_bf16(v.y) << 16,
                                 rounded_bf16(v.z) | rounded_bf16(v.w) << 16));
}

template <typename T>
__device__ void put_some(T* p, float4 v, int count, bool vectors) {
    if (vectors && count == 4) {
        put4(p, v);
        return;
    }
    if (count > 0) put(p, v.x);
    if (count > 1) put(p + 1, v.y);
    if (count > 2) put(p + 2, v.z);
    if (count > 3) put(p + 3, v.w);
}

// ---- tensor cores ----

struct Split { u32 high, low; };

// To nearest, by integers: that is cheaper than the instruction for it. Of the low part the tensor cores take 11 bits.
__device__ Split split(float x) {
    Split s;
    s.high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    s.low = __float_as_uint(x - __uint_as_float(s.high));
    return s;
}

// c += a b: a is 16 x 8, b is 8 x 8.
__device__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// One of the three products that make up a b in almost float32, the small ones first.
template <int PART>
__device__ void mma_part(float* c, Split a0, Split a1, Split a2, Split a3, Split b0, Split b1) {
    if (PART == 0) mma(c, a0.low, a1.low, a2.low, a3.low, b0.high, b1.high);
    if (PART == 1) mma(c, a0.high, a1.high, a2.high, a3.high, b0.low, b1.low);
    if (PART == 2) mma(c, a0.high, a1.high, a2.high, a3.high, b0.high, b1.high);
}

// ---- the cluster ----

__device__ u32 rank_in_cluster() {
    u32 rank = 0;
    if (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ void wait_for_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

__device__ float of_block(const float* p, u32 rank) {
#if CLUSTER > 1
    float x;
    u32 address = (u32)__cvta_generic_to_shared(p), remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(remote));
    return x;
#else
    return *p;
#endif
}

// ---- columns in shared memory ----

// k rows of W, then k rows of B, then 32 zeros, which stand for all rows from k on.
struct Columns {
    float *w, *b, *zeros;
    int k, slice, stride;

    // 32 columns, from `column` on, of a row of W or B.
    __device__ const float* row(bool of_w, int row, int column) const {
        return row < k ? (of_w ? w : b) + row * stride + column : zeros;
    }
};

// ---- Gram matrices ----

// Tiles of 16 x 8: first [W; B] W', row by row of tiles, then the lower half of [W; B] B', which is B B'.
constexpr int FIRST = GROUPS * GROUPS, LOWER = GROUPS / 2;

template <int PART, bool W_SIDE, bool B_SIDE, typename Sums>
__device__ void add_products(Sums& sums, const Split* first, const Split* second) {
#pragma unroll
    for (int m = 0; m < GROUPS; m++) {
        // Rows 8 m and 8 m + 8 of [W; B]; with 8 rows, W and B themselves.
        const Split a0 = first[2 * m], a1 = first[2 * m + 1], a2 = second[2 * m], a3 = second[2 * m + 1];
#pragma unroll
        for (int c = 0; c < GROUPS; c++) {
            if (W_SIDE) mma_part<PART>(sums[m * GROUPS + c], a0, a1, a2, a3, first[c], second[c]);
            if (B_SIDE && m >= LOWER)
                mma_part<PART>(sums[FIRST + (m - LOWER) * GROUPS + c], a0, a1, a2, a3, first[GROUPS + c],
                               second[GROUPS + c]);
        }
    }
}

// The tiles of the columns that this warp takes, added up over all warps, into `buffers` as [tile][lane][4].
//
// The operands of m16n8k8 are such that a lane that holds 2 columns of row `lane/4` has what it needs on both sides.
// Which columns those are does not matter, as long as they are the same for all rows.
template <bool W_SIDE, bool B_SIDE>
__device__ void gram(const Columns& columns, float* buffers) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float total[TILES][4] = {};
    for (int column = 32 * warp; column < columns.slice; column += 32 * WARPS) {
        float part[CHAINS][TILES][4] = {};
        const float* rows[2 * GROUPS];
#pragma unroll
        for (int i = 0; i < 2 * GROUPS; i++) rows[i] = columns.row(i < GROUPS, 8 * i % ROWS + g, column) + 8 * t;
#pragma unroll(ROWS == 8 ? 4 : 1)
        for (int step = 0; step < 8; step += 2) {
            Split first[2 * GROUPS], second[2 * GROUPS];
#pragma unroll
            for (int i = 0; i < 2 * GROUPS; i++) {
                const bool used = W_SIDE || ROWS == 8 || i >= GROUPS;
                const float2 v = used ? *(const float2*)(rows[i] + step) : make_float2(0, 0);
                first[i] = split(v.x), second[i] = split(v.y);
            }
            // With 32 rows there are not enough registers for sums of sums, and slices are short.
            add_products<0, W_SIDE, B_SIDE>(ROWS == 32 ? total : part[0], first, second);
            add_products<1, W_SIDE, B_SIDE>(ROWS == 32 ? total : part[1 % CHAINS], first, second);
            add_products<2, W_SIDE, B_SIDE>(ROWS == 32 ? total : part[2 % CHAINS], first, second);
        }
        if (ROWS < 32) {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int chain = 0; chain < CHAINS; chain++) total[tile][i] += part[chain][tile][i];
        }
    }
    // Always in the same order, for the same sum in every run.
    for (int turn = 0; turn < WARPS / BUFFERS; turn++) {
        if (turn == warp / BUFFERS) {
            float4* sums = (float4*)buffers + warp % BUFFERS * TILES * 32 + lane;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                if (!(tile < FIRST ? W_SIDE : B_SIDE)) continue;
                float4 v = turn ? sums[32 * tile] : make_float4(0, 0, 0, 0);
                v.x += total[tile][0], v.y += total[tile][1], v.z += total[tile][2], v.w += total[tile][3];
                sums[32 * tile] = v;
            }
        }
        __syncthreads();
    }
}

// G, O, O' and N of the whole class; with 32 rows, which are a lot to send around, for the first block alone.
__device__ void all_grams(const Columns& columns, float* buffers, bool first, float* G, float* O, float* Ot, float* N) {
    if (ROWS == 32) {
        gram<true, false>(columns, buffers);
        gram<false, true>(columns, buffers);
    } else {
        gram<true, true>(columns, buffers);
    }
    wait_for_cluster();
    constexpr int EACH = (TILES * 128 + THREADS - 1) / THREADS;
    float x[EACH] = {};
    if (!ALONE || first) {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int i = min((int)threadIdx.x + j * THREADS, TILES * 128 - 1);
#pragma unroll
            for (u32 block = 0; block < CLUSTER; block++)
#pragma unroll
                for (int buffer = 0; buffer < BUFFERS; buffer++)
                    x[j] += of_block(buffers + buffer * TILES * 128 + i, block);
        }
    }
    wait_for_cluster();  // nobody overwrites its sums, or leaves, before all have read them
    if (!ALONE || first) {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int i = threadIdx.x + j * THREADS, lane = i % 128 / 4, part = i % 4, all = i / 128;
            if (all >= TILES) break;
            const int tile = all < FIRST ? all : all - FIRST + LOWER * GROUPS;
            const int row = 16 * (tile / GROUPS) + lane / 4 + (part & 2) * 4 - ROWS;  // of B; negative for rows of W
            const int column = 8 * (tile % GROUPS) + lane % 4 * 2 + (part & 1);
            if (all < FIRST && row < 0) G[(row + ROWS) * ROWS + column] = x[j];
            if (all < FIRST && row >= 0) O[row * ROWS + column] = x[j], Ot[column * ROWS + row] = x[j];
            if (all >= FIRST && row >= 0) N[row * ROWS + column] = x[j];
        }
    }
    __syncthreads();
}

// ---- k x k matrices in shared memory ----

// By the first MIDDLE threads alone.
__device__ void wait_for_middle() {
    if (MIDDLE == 32) __syncwarp();
    else if (MIDDLE == THREADS) __syncthreads();
    else asm volatile("bar.sync 1, %0;" ::"n"(MIDDLE) : "memory");
}

// Four neighbours in a row of a matrix: what a thread works on. (With 8 rows two threads do the same.)
struct Four {
    float value[4];
    __device__ float operator[](int i) const { return value[i]; }
};

__device__ int place() { return 4 * threadIdx.x % MATRIX; }

__device__ Four four(const float* matrix) {
    const float4 v = *(const float4*)(matrix + place());
    return {v.x, v.y, v.z, v.w};
}

// Entry by entry: f(row, column, j), j counting this thread's four.
template <typename F>
__device__ void set(float* matrix, F f) {
    const int row = place() / ROWS, column = place() % ROWS;
    *(float4*)(matrix + place()) = make_float4(f(row, column, 0), f(row, column + 1, 1), f(row, column + 2, 2),
                                               f(row, column + 3, 3));
}

// a b. Not inlined: code that runs once has to be fetched first.
__device__ __noinline__ Four times(const float* a, const float* b) {
    const int row = place() / ROWS, column = place() % ROWS;
    Four sum = {};
#pragma unroll(ROWS <= 16 ? ROWS / 4 : 2)
    for (int l = 0; l < ROWS; l += 4) {
        const float4 x = *(const float4*)(a + row * ROWS + l);
        const float factors[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float4 y = *(const float4*)(b + (l + j) * ROWS + column);
            sum.value[0] = fmaf(factors[j], y.x, sum.value[0]), sum.value[1] = fmaf(factors[j], y.y, sum.value[1]);
            sum.value[2] = fmaf(factors[j], y.z, sum.value[2]), sum.value[3] = fmaf(factors[j], y.w, sum.value[3]);
        }
    }
    return sum;
}

__device__ float trace(const float* a) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i++) sum += a[i * ROWS + i];
    return sum;
}

__device__ float over_warp(float x, bool largest) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, x, offset);
        x = largest ? fmaxf(x, other) : x + other;
    }
    return x;
}

__device__ float frobenius(const float* a) {
    float sum = 0;
    for (int i = threadIdx.x % 32; i < MATRIX; i += 32) sum = fmaf(a[i], a[i], sum);
    return fmaxf(sqrtf(over_warp(sum, false)), 1.1754944e-38f);
}

// The root of `reference._largest_eigenvalue` of A.
__device__ __noinline__ float largest_singular_value(const float* A, float* a, float* b) {
    float largest = 1.1754944e-38f;
    for (int i = threadIdx.x % 32; i < MATRIX; i += 32) largest = fmaxf(largest, fabsf(A[i]));
    largest = over_warp(largest, true);
    const Four mine = four(A);
    set(a, [&](int, int, int j) { return mine[j] / largest; });
    wait_for_middle();
    float norm = frobenius(a), logarithm = logf(largest) + logf(norm), share = 0.5f;
    for (int squaring = 0; squaring < 8; squaring++, share *= 0.5f) {
        const Four square = times(a, a);
        set(b, [&](int, int, int j) { return square[j] / (norm * norm); });
        wait_for_middle();
        float* other = a;
        a = b;
        b = other;
        norm = frobenius(a);
        logarithm += logf(norm) * share;
    }
    wait_for_middle();
    return expf(0.5f * logarithm);
}

// ---- new rows ----

// [W'; M'] = [W; B] + [SS SB; MS MB] [W; B], to memory.
__device__ void move(const Columns& columns, const float* SS, const float* SB, const float* MS, const float* MB,
                     float* new_w, Momentum* new_m, int n, int start, bool vectors) {
    constexpr int STEPS = 2 * ROWS / 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    for (int tile = 0; tile < 2 * ROWS / 16; tile++) {
        const int upper = 16 * tile + g, lower = upper + 8;
        if (!new_w && 16 * tile + 15 < ROWS) continue;
        if (!new_m && 16 * tile >= ROWS) continue;
        Split factor[STEPS][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = i & 1 ? lower : upper, column = 8 * step + t + (i & 2) * 2;
                const float* part = row < ROWS ? (8 * step < ROWS ? SS : SB) : (8 * step < ROWS ? MS : MB);
                factor[step][i] = split(part[row % ROWS * ROWS + column % ROWS]);
            }
        for (int column = 32 * warp; column < columns.slice; column += 32 * WARPS) {
            // Such that what a lane gets are twice four neighbours, 4 t and 16 + 4 t, and a row's lanes fill sectors.
            const int from = (g & 1) * 16 + (g & 6) * 2;
            float sum[4][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const bool of_w = 8 * step < ROWS;
                const float4 v = *(const float4*)(columns.row(of_w, 8 * step % ROWS + t, column) + from);
                const float4 u = *(const float4*)(columns.row(of_w, 8 * step % ROWS + t + 4, column) + from);
                const Split first[4] = {split(v.x), split(v.y), split(v.z), split(v.w)};
                const Split second[4] = {split(u.x), split(u.y), split(u.z), split(u.w)};
                const Split* f = factor[step];
#pragma unroll
                for (int j = 0; j < 4; j++) mma_part<0>(sum[j], f[0], f[1], f[2], f[3], first[j], second[j]);
#pragma unroll
                for (int j = 0; j < 4; j++) mma_part<1>(sum[j], f[0], f[1], f[2], f[3], first[j], second[j]);
#pragma unroll
                for (int j = 0; j < 4; j++) mma_part<2>(sum[j], f[0], f[1], f[2], f[3], first[j], second[j]);
            }
#pragma unroll
            for (int part = 0; part < 4; part++) {  // of the two rows the first four columns, and the next four
                const int row = part & 2 ? lower : upper, r = row % ROWS, offset = 4 * t + (part & 1) * 16;
                const bool is_w = row < ROWS;
                float4 v = *(const float4*)(columns.row(is_w, r, column) + offset);
                v.x += sum[0][part], v.y += sum[1][part], v.z += sum[2][part], v.w += sum[3][part];
                if (!is_w && MB[r * ROWS + r] == 1) v = make_float4(0, 0, 0, 0);  // absent, and to stay so exactly
                const int at_column = start + column + offset, inside = r < columns.k ? min(n - at_column, 4) : 0;
                const long long at = (long long)r * n + at_column;
                if (is_w && new_w) put_some(new_w + at, v, inside, vectors);
                if (!is_w && new_m) put_some(new_m + at, v, inside, vectors);
            }
        }
    }
}

// x += L W + R B in shared memory, for x either W or B: a thread a column, in full float32. For the rare, careful path.
__device__ __noinline__ void move_here(float* x, Columns columns, const float* L, const float* R) {
    for (int column = threadIdx.x; column < columns.slice; column += THREADS) {
        float sum[ROWS] = {};
        for (int l = 0; l < columns.k; l++) {
            const float left = columns.w[l * columns.stride + column], right = columns.b[l * columns.stride + column];
#pragma unroll
            for (int r = 0; r < ROWS; r++) sum[r] = fmaf(R[r * ROWS + l], right, fmaf(L[r * ROWS + l], left, sum[r]));
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r < columns.k) x[r * columns.stride + column] += sum[r];
    }
    __syncthreads();
}

// ---- the step ----

enum Verdict { SKIP, AGAIN, MOVE, STAY };

// The names are those of the head of this file, with C = cos - 1 and S = sinc. X, Y, U and V are room: on the way in U, V
// and C hold O, O' and N; on the way out Y, V, X and U are what W' and M' are made of, in the order in which `move` takes
// them.
struct Matrices {
    float *G, *T, *A, *X, *Y, *U, *V, *C, *S;
};

// The rest of `middle` up to X and V, for turns of any size: polynomials of degree 5, doublings of the angle, and the
// Gram matrix P G P + Q A Q of P W + Q H for the polar factor. Y is (scale A)^2.
__device__ __noinline__ void large_turn(Matrices m, float tau, float scale, int doublings) {
    const Four a = four(m.A), y = four(m.Y), g = four(m.G), cube = times(m.Y, m.A);
    set(m.U, [&](int r, int c, int j) {
        return (r == c) * (1 / 24.0f) - scale * a[j] * (1 / 720.0f) + y[j] * (1 / 40320.0f) -
               scale * cube[j] * (1 / 3628800.0f);
    });
    set(m.V, [&](int r, int c, int j) {
        return (r == c) * (1 / 120.0f) - scale * a[j] * (1 / 5040.0f) + y[j] * (1 / 362880.0f) -
               scale * cube[j] * (1 / 39916800.0f);
    });
    wait_for_middle();
    Four first = times(m.Y, m.U), second = times(m.Y, m.V);
    set(m.C, [&](int, int, int j) { return -0.5f * scale * a[j] + first[j]; });
    set(m.S, [&](int r, int c, int j) { return (r == c) - scale * a[j] * (1 / 6.0f) + second[j]; });
    wait_for_middle();
    for (int doubling = 0; doubling < doublings; doubling++) {
        first = times(m.C, m.C), second = times(m.C, m.S);
        const Four cosine = four(m.C), sine = four(m.S);
        wait_for_middle();
        set(m.C, [&](int, int, int j) { return 2 * first[j] + 4 * cosine[j]; });
        set(m.S, [&](int, int, int j) { return sine[j] + second[j]; });
        wait_for_middle();
    }
    first = times(m.C, m.G), second = times(m.S, m.A);
    set(m.X, [&](int, int, int j) { return g[j] + first[j]; });
    set(m.Y, [&](int, int, int j) { return second[j]; });
    wait_for_middle();
    first = times(m.X, m.C), second = times(m.Y, m.S);
    const Four x = four(m.X);
    set(m.U, [&](int r, int c, int j) {
        return 1.5f * (r == c) - 0.5f * (x[j] + first[j] + tau * tau * second[j]);
    });
    wait_for_middle();
    first = times(m.U, m.S), second = times(m.U, m.C);
    const Four polar = four(m.U);
    set(m.V, [&](int, int, int j) { return -tau * first[j]; });
    set(m.X, [&](int r, int c, int j) { return polar[j] - (r == c) + second[j]; });
}

// All that happens to a class between two passes over its columns, by the first MIDDLE threads.
//
// Takes G, O (in U), O' (in V) and N (in C). Leaves what W' - W = Y W + V B and M' - B = X W + U B are made of, or, if
// the class is to be treated with care first, H - B = X W + U B. Counts the class if it is capped. A 1 on the diagonal of
// U, where there is never one otherwise, marks a row that is absent.
__device__ Verdict middle(Matrices m, float rate, int flags, float max_angle, bool careful, bool counting,
                          unsigned long long* counts) {
    auto present = [&](int i) { return m.G[i * ROWS + i] != 0; };  // an absent row has no direction of its own
    const bool here = present(place() / ROWS);
    bool both[4];
    for (int j = 0; j < 4; j++) both[j] = here && present(place() % ROWS + j);
    const Four o = four(m.U), n = four(m.C), g = four(m.G);
    set(m.T, [&](int, int c, int j) { return here ? o[j] * (2 - m.G[c * ROWS + c]) : 0; });
    wait_for_middle();
    Four product = times(m.T, m.V);
    set(m.A, [&](int, int, int j) { return both[j] ? n[j] - product[j] : 0; });
    const float length = trace(m.C);  // of B, squared; before anybody is far enough to overwrite C
    wait_for_middle();
    const Four t = four(m.T), a = four(m.A);
    const float left = trace(m.A), energy = fmaxf(left, 0.0f);      // of H, squared
    if (!(length - length == 0 && left - left == 0)) return SKIP;  // a NaN or Inf anywhere shows here
    // What cancellation leaves in A is of the size of rounding in N, and is felt only in large turns, or if the length
    // of H itself matters.
    if (!careful && (rate * rate * length > 1 || ((flags & CAPPED) && 64 * energy < length))) {
        set(m.X, [&](int, int, int j) { return -t[j]; });
        set(m.U, [&](int r, int c, int) { return here ? 0 : -(float)(r == c); });
        return AGAIN;
    }
    float speed = sqrtf(energy), tau = rate, limit = LARGEST_TURN;
    if (flags & CAPPED) {
        speed = largest_singular_value(m.A, m.X, m.Y);
        limit = fminf(limit, max_angle);
    }
    if (rate * speed > limit) {
        tau = limit / speed;
        if (counting && threadIdx.x == 0) atomicAdd(counts + 1, 1ull);
    }

    // C = cos - 1 and S = sinc of sqrt(t^2 A), and W' - W = X W + V H.
    const float size = tau * tau * energy;
    const int doublings = size > 1 ? (int)ceilf(0.5f * log2f(size)) : 0;
    const float scale = tau * tau * exp2f(-2.0f * doublings);
    product = times(m.A, m.A);
    if (size <= 0.01f) {
        // The usual case. Taylor polynomials of degree 2 suffice, and since cos^2 + sin^2 = 1, what P W + Q H lacks in
        // orthonormality is what W lacked: polar = 1 - (G - 1)/2, up to (G - 1) t.
        Four cosine, sine;
        for (int j = 0; j < 4; j++) {
            cosine.value[j] = scale * (scale * product[j] * (1 / 24.0f) - 0.5f * a[j]);
            sine.value[j] = scale * (scale * product[j] * (1 / 120.0f) - a[j] * (1 / 6.0f));
        }
        set(m.C, [&](int, int, int j) { return cosine[j]; });
        set(m.S, [&](int r, int c, int j) { return (r == c) + sine[j]; });
        set(m.V, [&](int r, int c, int j) { return both[j] ? -tau * ((r == c) + sine[j]) : 0; });
        set(m.X, [&](int r, int c, int j) { return cosine[j] - 0.5f * (g[j] - (here && r == c)); });
    } else {
        set(m.Y, [&](int, int, int j) { return scale * scale * product[j]; });
        wait_for_middle();
        large_turn(m, tau, scale, doublings);
        const Four v = four(m.V);  // this thread's own
        set(m.V, [&](int, int, int j) { return both[j] ? v[j] : 0; });
    }
    wait_for_middle();

    const bool parallel = flags & PARALLEL;
    Four first = {}, second = {};
    if (parallel) first = times(m.A, m.S), second = times(m.C, m.T);
    product = times(m.V, m.T);
    const Four x = four(m.X), cosine = four(m.C);
    set(m.Y, [&](int, int, int j) { return x[j] - product[j]; });
    set(m.X, [&](int, int, int j) { return tau * first[j] - second[j] - t[j]; });
    set(m.U, [&](int r, int c, int j) { return !here ? (float)(r == c) : parallel ? cosine[j] : 0; });
    return length > 0 ? MOVE : STAY;
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, BLOCKS)
step(float* weight, const Grad* grad, Momentum* momentum, unsigned long long* counts, const float* lr_on_device,
     const float* momentum_on_device, const float* skip, double lr_value, double momentum_value, double max_angle, int k,
     int n, int slice, int flags) {
    extern __shared__ float4 shared4[];
    __shared__ int verdict;
    const int stride = slice + PAD, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* w = (float*)shared4;
    const Columns columns = {w, w + k * stride, w + 2 * k * stride, k, slice, stride};
    float* rest = columns.zeros + 32;
    auto matrix = [&](int i) { return rest + i * MATRIX; };
    const Matrices m = {matrix(0), matrix(1), matrix(2), matrix(3), matrix(4),
                        matrix(5), matrix(6), matrix(7), matrix(8)};
    float* sums = m.T;  // BUFFERS times TILES tiles, before there is anything from T to S

    if ((flags & CAN_SKIP) && *skip != 0) return;
    const float rate = flags & LR_ON_DEVICE ? *lr_on_device : (float)lr_value;
    const float mu = flags & MOMENTUM_ON_DEVICE ? *momentum_on_device : (float)momentum_value;
    const bool has_momentum = flags & HAS_MOMENTUM, vectors = flags & VECTORS;
    const float sign = flags & MAXIMIZE ? -1.0f : 1.0f;
    const u32 rank = rank_in_cluster();
    const int start = rank * slice;
    const long long first = (long long)(blockIdx.x / CLUSTER) * k * n;
    weight += first, grad += first;
    if (has_momentum) momentum += first;

    // Steps 1 to 3 of Algorithm 1, but for the projection: W and B = mu M + D, zero beyond n.
    if (warp == 0) columns.zeros[lane] = 0;
    for (int row = warp; row < k; row += WARPS) {
        const long long at = (long long)row * n + start;
        float *w_row = columns.w + row * stride, *b_row = columns.b + row * stride;
        int column = 4 * lane;
        if (vectors) {
            // Whole batches, all of whose loads are under way at once.
            const int end = min(slice, n - start) - 128 * (BATCH - 1) - 3;
            for (; column < end; column += 128 * BATCH) {
                float4 x[BATCH], y[BATCH], z[BATCH];
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    x[i] = get4(weight + at + column + 128 * i);
                    y[i] = get4(grad + at + column + 128 * i);
                    if (has_momentum) z[i] = get4(momentum + at + column + 128 * i);
                }
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    if (has_momentum) {
                        y[i].x = fmaf(mu, z[i].x, sign * y[i].x), y[i].y = fmaf(mu, z[i].y, sign * y[i].y);
                        y[i].z = fmaf(mu, z[i].z, sign * y[i].z), y[i].w = fmaf(mu, z[i].w, sign * y[i].w);
                    } else {
                        y[i].x *= sign, y[i].y *= sign, y[i].z *= sign, y[i].w *= sign;
                    }
                    *(float4*)(w_row + column + 128 * i) = x[i];
                    *(float4*)(b_row + column + 128 * i) = y[i];
                }
            }
        }
        for (; column < slice; column += 128)
            for (int j = column; j < column + 4; j++) {
                const bool inside = start + j < n;
                w_row[j] = inside ? get(weight + at + j) : 0;
                float y = inside ? sign * get(grad + at + j) : 0;
                if (inside && has_momentum) y = fmaf(mu, get(momentum + at + j), y);
                b_row[j] = y;
            }
    }
    __syncthreads();

    // A class usually needs one round. With care it takes three: H for B, the step, its own Gram matrix for the new W.
    enum { STEP, CAREFUL_STEP, CORRECT } round = STEP;
    while (true) {
        all_grams(columns, sums, rank == 0, m.G, m.U, m.V, m.C);
        if (threadIdx.x < MIDDLE && (!ALONE || rank == 0)) {
            int found = MOVE;
            if (round == CORRECT) {
                const Four g = four(m.G);
                set(m.Y, [&](int r, int c, int j) { return 0.5f * (r == c) - 0.5f * g[j]; });
                set(m.V, [&](int, int, int) { return 0.0f; });
            } else {
                found = middle(m, rate, flags, (float)max_angle, round == CAREFUL_STEP, rank == 0, counts);
            }
            if (threadIdx.x == 0) verdict = found;
        }
        if (ALONE) {
            wait_for_cluster();
            if (rank != 0) {
                if (threadIdx.x == 0) verdict = __float_as_int(of_block((const float*)&verdict, 0));
                for (int i = threadIdx.x; i < MATRIX; i += THREADS) {
                    m.Y[i] = of_block(m.Y + i, 0), m.V[i] = of_block(m.V + i, 0);
                    m.X[i] = of_block(m.X + i, 0), m.U[i] = of_block(m.U + i, 0);
                }
            }
            wait_for_cluster();
        } else {
            __syncthreads();
        }
        if (verdict == SKIP) {
            if (threadIdx.x == 0 && rank == 0) atomicAdd(counts, 1ull);
            return;
        }
        if (verdict == AGAIN) {
            round = CAREFUL_STEP;
            move_here(columns.b, columns, m.X, m.U);
            continue;
        }
        // A class that stays is left alone, to the bit.
        move(columns, m.Y, m.V, m.X, m.U, verdict == MOVE && round != CAREFUL_STEP ? weight : nullptr,
             has_momentum && round != CORRECT ? momentum : nullptr, n, start, vectors);
        if (verdict == STAY || round != CAREFUL_STEP) return;
        round = CORRECT;
        __syncthreads();
        move_here(columns.w, columns, m.Y, m.V);
    }
}
