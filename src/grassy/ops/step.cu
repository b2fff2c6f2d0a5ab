// One Riemannian step of all classes of one or several heads in one launch: `reference._step`, with every number read
// and written once.
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
// Tensor cores work on 8 rows at least. With k up to 4 two neighbouring classes are therefore taken together, as one whose
// matrices are zero but for two blocks on the diagonal, unless one of them needs more than the usual.
//
// Compile with -DROWS=8|16|32 (k rounded up, or 2 k for pairs), -DPAIRS=0|1, -DCLUSTER=1|2|4|8, -DWARPS=2|4|8|16,
// -DBLOCKS= how many of these thread blocks a multiprocessor is to hold, -DHEADS= how many heads a launch may have,
// -DGRAD_BF16=0|1, -DMOMENTUM_BF16=0|1.

#define THREADS (32 * WARPS)
#define GROUPS (ROWS / 8)
#define MATRIX (ROWS * ROWS)
#define PAD 4                           // columns between rows, so that no two lanes meet in a bank
#define TILES (GROUPS * GROUPS + (GROUPS + 1) / 2 * GROUPS)  // 16 x 8 pieces of the Gram matrices
#define TEAMS (ROWS == 32 ? 2 : 1)      // warps share the tiles, of which there are too many for the registers of one
#define TEAM (WARPS / TEAMS)            // warps that add up the same tiles
#define BUFFERS (ROWS == 8 ? WARPS : ROWS == 16 ? WARPS / 2 : 2)  // places in which the warps of a team do so at once
#define CHAINS (ROWS == 8 ? 3 : 1)       // sums that do not wait for each other; more rows have enough tiles for that
#define MIDDLE (ROWS == 8 ? 32 : MATRIX / 4)  // threads for the k x k matrices, four entries each
static_assert(MIDDLE <= THREADS && TEAM % BUFFERS == 0 && WARPS % GROUPS == 0, "more warps are needed");
#define BATCH 4                         // loads of a thread that are under way at once, of each of W, D and M
#define LARGEST_TURN 64.0f  // 2**MAX_DOUBLINGS of the reference
#define SMALL_TURN 0.01f    // of squared angles, in all

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
    const uint2 v = __ldcs((const uint2*)p);
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

// One of the three products that make up a b in almost float32, the small ones first.
template <int PART>
__device__ void mma_part(bool fresh, float* c, Split a0, Split a1, Split a2, Split a3, Split b0, Split b1) {
    if (PART == 0) mma(fresh, c, a0.low, a1.low, a2.low, a3.low, b0.high, b1.high);
    if (PART == 1) mma(fresh, c, a0.high, a1.high, a2.high, a3.high, b0.low, b1.low);
    if (PART == 2) mma(fresh, c, a0.high, a1.high, a2.high, a3.high, b0.high, b1.high);
}

// ---- columns in shared memory ----

// `rows` rows of W, as many of B, and 32 zeros: that is what shared memory begins with. Of them the k rows from `first` on
// are worked on; all rows from k on are zero.
struct Columns {
    int rows, first, k, slice, stride;

    __device__ float* w() const { return (float*)shared4 + (PAIRS ? first * stride : 0); }
    __device__ float* b() const { return w() + rows * stride; }
    __device__ float* zeros() const { return (float*)shared4 + 2 * rows * stride; }

    // 32 columns, from `column` on, of a row of W or B. By one number, so that the compiler sees whose memory it is.
    __device__ const float* row(bool of_w, int row, int column) const {
        const int place = (of_w ? 0 : rows) + (PAIRS ? first : 0) + row;
        return (float*)shared4 + (row < k ? place * stride + column : 2 * rows * stride);
    }
};

// ---- Gram matrices ----

// Tiles of 16 x 8: first [W; B] W', row by row of tiles, then the lower half of [W; B] B', which is B B'.
constexpr int FIRST = GROUPS * GROUPS, LOWER = GROUPS / 2;

template <int PART, int FROM, int TO>
__device__ void add_products(bool fresh, float (*sums)[4], const Split* first, const Split* second) {
#pragma unroll
    for (int m = 0; m < GROUPS; m++) {
        // Rows 8 m and 8 m + 8 of [W; B]; with 8 rows, W and B themselves.
        const Split a0 = first[2 * m], a1 = first[2 * m + 1], a2 = second[2 * m], a3 = second[2 * m + 1];
#pragma unroll
        for (int c = 0; c < 2 * GROUPS; c++) {
            if (c >= GROUPS && m < LOWER) continue;
            const int tile = c < GROUPS ? m * GROUPS + c : FIRST + (m - LOWER) * GROUPS + c - GROUPS;
            if (tile >= FROM && tile < TO) mma_part<PART>(fresh, sums[tile - FROM], a0, a1, a2, a3, first[c], second[c]);
        }
    }
}

constexpr int SHARE = TILES / TEAMS;  // tiles of a warp

// The tiles from TEAM_NUMBER * SHARE on, of the columns from `begin` to `end` that this warp takes.
//
// The operands of m16n8k8 are such that a lane that holds 2 columns of row `lane/4` has what it needs on both sides.
// Which columns those are does not matter, as long as they are the same for all rows: they are those that no two lanes
// find in the same bank.
template <int TEAM_NUMBER>
__device__ void gram(const Columns& columns, int begin, int end, float (*total)[4]) {
    constexpr int FROM = TEAM_NUMBER * SHARE, TO = FROM + SHARE;
    const int lane = threadIdx.x % 32, member = threadIdx.x / 32 % TEAM, g = lane / 4, t = lane % 4;
    for (int column = begin + 32 * member; column < end; column += 32 * TEAM) {
        float part[CHAINS][SHARE][4];
        const float* rows[2 * GROUPS];
#pragma unroll
        for (int i = 0; i < 2 * GROUPS; i++)
            rows[i] = columns.row(i < GROUPS, 8 * i % ROWS + g, column) + 16 * (t & 1) + (t & 2);
#pragma unroll(ROWS == 32 ? 1 : 4)
        for (int step = 0; step < 16; step += 4) {
            Split first[2 * GROUPS], second[2 * GROUPS];
#pragma unroll
            for (int i = 0; i < 2 * GROUPS; i++) {
                const float2 v = *(const float2*)(rows[i] + step);
                first[i] = split(v.x), second[i] = split(v.y);
            }
            // With 32 rows there are not enough registers for sums of sums: see all_tiles.
            const bool fresh = ROWS < 32 && step == 0;
            add_products<0, FROM, TO>(fresh, ROWS == 32 ? total : part[0], first, second);
            add_products<1, FROM, TO>(fresh && CHAINS > 1, ROWS == 32 ? total : part[1 % CHAINS], first, second);
            add_products<2, FROM, TO>(fresh && CHAINS > 2, ROWS == 32 ? total : part[2 % CHAINS], first, second);
        }
        if (ROWS < 32) {
#pragma unroll
            for (int tile = 0; tile < SHARE; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int chain = 0; chain < CHAINS; chain++) total[tile][i] += part[chain][tile][i];
        }
    }
}

// The tiles of all warps of a team, added up in `buffers` as [buffer][tile][lane][4]. With 32 rows that is done for every 32
// columns of a warp.
__device__ void all_tiles(const Columns& columns, float* buffers) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, team = warp / TEAM, member = warp % TEAM;
    const int width = ROWS == 32 ? 32 * TEAM : columns.slice;
    for (int begin = 0; begin < columns.slice; begin += width) {
        const int end = min(begin + width, columns.slice);
        float total[SHARE][4] = {};
        if (TEAMS == 1 || team == 0) gram<0>(columns, begin, end, total);
        else gram<TEAMS - 1>(columns, begin, end, total);
        // Always in the same order, for the same sum in every run.
        for (int turn = 0; turn < TEAM / BUFFERS; turn++) {
            if (turn == member / BUFFERS) {
                float4* sums = (float4*)buffers + (member % BUFFERS * TILES + team * SHARE) * 32 + lane;
#pragma unroll
                for (int tile = 0; tile < SHARE; tile++) {
                    float4 v = turn || begin ? sums[32 * tile] : make_float4(0, 0, 0, 0);
                    v.x += total[tile][0], v.y += total[tile][1], v.z += total[tile][2], v.w += total[tile][3];
                    sums[32 * tile] = v;
                }
            }
            __syncthreads();
        }
    }
}

__device__ float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Whether blocks still read each other's sums when a thread has its own: all wait for that later.
constexpr bool READ_LATE = CLUSTER > 1 && ROWS < 32;

// The sum over the blocks of a cluster of what they have in `mine`, TILES * 32 times four numbers, for every thread those
// that it takes: x[j] is number threadIdx.x + j THREADS.
template <int EACH>
__device__ void over_cluster(float4* mine, u32 rank, float4 (&x)[EACH]) {
#if CLUSTER > 1
    constexpr int ALL = TILES * 32, PART = ALL / CLUSTER;
    arrive_at_cluster();
    wait_for_cluster();
    if (ROWS == 32) {
        // These are a lot to send around: a block adds up a part, and sends the sums to all.
        float4* sums = mine + ALL;
        for (int i = rank * PART + threadIdx.x; i < (rank + 1) * PART; i += THREADS) {
            float4 sum = of_block(mine + i, 0);
#pragma unroll
            for (u32 block = 1; block < CLUSTER; block++) sum = sum + of_block(mine + i, block);
#pragma unroll
            for (u32 block = 0; block < CLUSTER; block++) to_block(sums + i, sum, block);
        }
        arrive_at_cluster_with_all();
        wait_for_cluster();
#pragma unroll
        for (int j = 0; j < EACH; j++) x[j] = sums[min((int)threadIdx.x + j * THREADS, ALL - 1)];
    } else {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int i = threadIdx.x + j * THREADS;
            if (i >= ALL) break;
            x[j] = of_block(mine + i, 0);
#pragma unroll
            for (u32 block = 1; block < CLUSTER; block++) x[j] = x[j] + of_block(mine + i, block);
        }
    }
#endif
}

// G, O, O' and N of the whole class, or of both of a pair, the first of which has `k` rows.
__device__ void all_grams(const Columns& columns, int k, float* buffers, float4* mine, u32 rank, float* G, float* O,
                          float* Ot, float* N) {
    all_tiles(columns, buffers);
    constexpr int EACH = (TILES * 32 + THREADS - 1) / THREADS;
    float4 x[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = min((int)threadIdx.x + j * THREADS, TILES * 32 - 1);
        x[j] = ((const float4*)buffers)[i];
#pragma unroll
        for (int buffer = 1; buffer < BUFFERS; buffer++)
            x[j] = x[j] + ((const float4*)buffers)[buffer * TILES * 32 + i];
        if (CLUSTER > 1) mine[i] = x[j];
    }
    if (CLUSTER > 1) over_cluster(mine, rank, x);
    else __syncthreads();  // before anybody overwrites the buffers
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = threadIdx.x + j * THREADS, lane = i % 32, all = i / 32;
        if (all >= TILES) break;
        const int tile = all < FIRST ? all : all - FIRST + LOWER * GROUPS;
        const float values[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int row = 16 * (tile / GROUPS) + lane / 4 + (part & 2) * 4 - ROWS;  // of B; negative for rows of W
            const int column = 8 * (tile % GROUPS) + lane % 4 * 2 + (part & 1);
            // Two classes have nothing to do with each other.
            const float value = PAIRS && ((row & (ROWS - 1)) < k) != (column < k) ? 0 : values[part];
            if (all < FIRST && row < 0) G[(row + ROWS) * ROWS + column] = value;
            if (all < FIRST && row >= 0) O[row * ROWS + column] = value, Ot[column * ROWS + row] = value;
            if (all >= FIRST && row >= 0) N[row * ROWS + column] = value;
        }
    }
    __syncthreads();
    if (READ_LATE) arrive_at_cluster();  // now that what was read has been used, and so is here
}

// ---- k x k matrices in shared memory ----

// By the first MIDDLE threads alone.
__device__ void wait_for_middle() {
    if (MIDDLE == 32) __syncwarp();
    else if (MIDDLE == THREADS) __syncthreads();
    else wait_for_first<MIDDLE>();
}

// Four neighbours in a row of a matrix: what a thread works on. (With 8 rows two threads do the same.)
struct Four {
    float value[4];
    __device__ float operator[](int i) const { return value[i]; }
};

__device__ int place() { return 4 * threadIdx.x % MATRIX; }

__device__ Four four(const float* matrix) {
    __builtin_assume(__isShared(matrix));  // for the instruction that is made for it
    const float4 v = *(const float4*)(matrix + place());
    return {v.x, v.y, v.z, v.w};
}

// Entry by entry: f(row, column, j), j counting this thread's four.
template <typename F>
__device__ void set(float* matrix, F f) {
    __builtin_assume(__isShared(matrix));
    const int row = place() / ROWS, column = place() % ROWS;
    *(float4*)(matrix + place()) = make_float4(f(row, column, 0), f(row, column + 1, 1), f(row, column + 2, 2),
                                               f(row, column + 3, 3));
}

// a b. Not inlined: code that runs once has to be fetched first.
__device__ __noinline__ Four times(const float* a, const float* b) {
    __builtin_assume(__isShared(a));
    __builtin_assume(__isShared(b));
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
    __builtin_assume(__isShared(a));
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
//
// MB is 0, but for marks of absent rows, if momentum is not transported in parallel.
__device__ void move(const Columns& columns, const float* SS, const float* SB, const float* MS, const float* MB,
                     float* new_w, Momentum* new_m, int n, int start, bool vectors, bool parallel) {
    constexpr int STEPS = 2 * ROWS / 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int tile = warp % GROUPS, first_chunk = warp / GROUPS;  // some warps make some of the rows
    const int upper = 16 * tile + g, lower = upper + 8;
    if (!new_w && 16 * tile + 15 < ROWS) return;
    if (!new_m && 16 * tile >= ROWS) return;
    Split factor[STEPS][4];
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = i & 1 ? lower : upper, column = 8 * step + t + (i & 2) * 2;
            const float* part = row < ROWS ? (8 * step < ROWS ? SS : SB) : (8 * step < ROWS ? MS : MB);
            factor[step][i] = split(part[row % ROWS * ROWS + column % ROWS]);
        }
    const int steps = ROWS > 8 && 16 * tile >= ROWS && !parallel ? STEPS / 2 : STEPS;
    for (int column = 32 * first_chunk; column < columns.slice; column += 32 * (WARPS / GROUPS)) {
        // Such that what a lane gets are twice four neighbours, 4 t and 16 + 4 t, and a row's lanes fill sectors.
        const int from = (g & 1) * 16 + (g & 6) * 2;
        float sum[4][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            if (ROWS > 8 && step >= steps) break;
            const bool of_w = 8 * step < ROWS;
            const float4 v = *(const float4*)(columns.row(of_w, 8 * step % ROWS + t, column) + from);
            const float4 u = *(const float4*)(columns.row(of_w, 8 * step % ROWS + t + 4, column) + from);
            const Split first[4] = {split(v.x), split(v.y), split(v.z), split(v.w)};
            const Split second[4] = {split(u.x), split(u.y), split(u.z), split(u.w)};
            const Split* f = factor[step];
#pragma unroll
            for (int j = 0; j < 4; j++) mma_part<0>(step == 0, sum[j], f[0], f[1], f[2], f[3], first[j], second[j]);
#pragma unroll
            for (int j = 0; j < 4; j++) mma_part<1>(false, sum[j], f[0], f[1], f[2], f[3], first[j], second[j]);
#pragma unroll
            for (int j = 0; j < 4; j++) mma_part<2>(false, sum[j], f[0], f[1], f[2], f[3], first[j], second[j]);
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

// x += L W + R B in shared memory, for x either W or B: a thread a column, in full float32. For the rare, careful path.
__device__ __noinline__ void move_here(float* x, Columns columns, const float* L, const float* R) {
    for (int column = threadIdx.x; column < columns.slice; column += THREADS) {
        float sum[ROWS] = {};
        for (int l = 0; l < columns.k; l++) {
            const float left = *(columns.row(true, l, column)), right = *(columns.row(false, l, column));
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

enum Verdict { SKIP, AGAIN, MOVE, STAY, UNUSUAL };

// The names are those of the head of this file, with C = cos - 1 and S = sinc. X, Y, U and V are room: on the way in U, V
// and C hold O, O' and N; on the way out Y, V, X and U are what W' and M' are made of, in the order in which `move` takes
// them.
struct Matrices {
    float *G, *T, *A, *X, *Y, *U, *V, *C, *S;
};

// The rest of `middle` up to X and V, for turns of any size: polynomials of degree 5, doublings of the angle, and the
// Gram matrix P G P + Q A Q of P W + Q H for the polar factor. U is scale A, and Y its square.
__device__ __noinline__ void large_turn(Matrices m, float tau, int doublings) {
    const Four a = four(m.U), y = four(m.Y), g = four(m.G), cube = times(m.Y, m.U);
    wait_for_middle();
    set(m.U, [&](int r, int c, int j) {
        return (r == c) * (1 / 24.0f) - a[j] * (1 / 720.0f) + y[j] * (1 / 40320.0f) - cube[j] * (1 / 3628800.0f);
    });
    set(m.V, [&](int r, int c, int j) {
        return (r == c) * (1 / 120.0f) - a[j] * (1 / 5040.0f) + y[j] * (1 / 362880.0f) - cube[j] * (1 / 39916800.0f);
    });
    wait_for_middle();
    Four first = times(m.Y, m.U), second = times(m.Y, m.V);
    set(m.C, [&](int, int, int j) { return -0.5f * a[j] + first[j]; });
    set(m.S, [&](int r, int c, int j) { return (r == c) - a[j] * (1 / 6.0f) + second[j]; });
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

#if ROWS <= 16
// A k x k matrix in the registers of a warp, as tensor cores leave it: entry e of tile j is in row lane/4 + 8 (e/2) and
// column 8 j + 2 (lane%4) + e%2.
struct Held {
    float at[GROUPS][2 * GROUPS];

    // f(row, column, j, e), entry by entry.
    template <typename F>
    __device__ explicit Held(F f) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
#pragma unroll
            for (int e = 0; e < 2 * GROUPS; e++) at[j][e] = f(lane / 4 + e / 2 * 8, 8 * j + lane % 4 * 2 + e % 2, j, e);
    }
};

__device__ Held held(const float* matrix) {
    __builtin_assume(__isShared(matrix));
    return Held([&](int r, int c, int, int) { return matrix[r * ROWS + c]; });
}

__device__ void keep(float* matrix, const Held& x) {
    __builtin_assume(__isShared(matrix));
    Held([&](int r, int c, int j, int e) { return matrix[r * ROWS + c] = x.at[j][e]; });
}

// x y', in almost float32. If columns 2 t and 2 t + 1 are called t and t + 4, which changes no sum, what a lane holds of
// x and y are the operands.
__device__ Held times_transposed(const Held& x, const Held& y) {
    float sums[GROUPS][3][4];
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        Split a[4] = {};
#pragma unroll
        for (int e = 0; e < 2 * GROUPS; e++) a[e] = split(x.at[j][e]);
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            const Split b0 = split(y.at[j][2 * i]), b1 = split(y.at[j][2 * i + 1]);
            mma_part<0>(j == 0, sums[i][0], a[0], a[2], a[1], a[3], b0, b1);
            mma_part<1>(j == 0, sums[i][1], a[0], a[2], a[1], a[3], b0, b1);
            mma_part<2>(j == 0, sums[i][2], a[0], a[2], a[1], a[3], b0, b1);
        }
    }
    return Held([&](int, int, int j, int e) { return sums[j][2][e] + (sums[j][0][e] + sums[j][1][e]); });
}

// `middle` for a class (`paired` is 0), or two of `paired` rows each, that is finite, has something to turn it, turns but little and
// is certainly not capped: what it asks of one class it asks of the sum over both. By one warp, which writes nothing if
// that is not so.
__device__ Verdict usual(Matrices m, float rate, int flags, float max_angle, int paired) {
    const Held g = held(m.G), o = held(m.U), ot = held(m.V), n = held(m.C);
    const Held row_length([&](int r, int, int, int) { return m.G[r * ROWS + r]; });
    const Held column_length([&](int, int c, int, int) { return m.G[c * ROWS + c]; });
    auto here = [&](int j, int e) { return row_length.at[j][e] != 0; };
    auto both = [&](int j, int e) { return here(j, e) && column_length.at[j][e] != 0; };

    const Held t([&](int, int, int j, int e) { return here(j, e) ? o.at[j][e] * (2 - column_length.at[j][e]) : 0; });
    const Held tt([&](int, int, int j, int e) {  // its transpose
        return column_length.at[j][e] != 0 ? ot.at[j][e] * (2 - row_length.at[j][e]) : 0;
    });
    const Held to = times_transposed(t, o);
    const Held a([&](int, int, int j, int e) { return both(j, e) ? n.at[j][e] - to.at[j][e] : 0; });
    float length = 0, left = 0;
    bool first_moves = false, last_moves = false;
    Held([&](int r, int c, int j, int e) {
        if (r != c) return 0.0f;
        length += n.at[j][e], left += a.at[j][e];
        if (n.at[j][e] > 0) (r < paired ? first_moves : last_moves) = true;
        return 0.0f;
    });
    const float scale = rate * rate, limit = flags & CAPPED ? max_angle * max_angle : 1;
    const Held turn([&](int, int, int j, int e) { return scale * a.at[j][e]; });  // of which the square is finite
    const Held square = times_transposed(turn, turn);
    length = over_warp(length, false), left = over_warp(left, false);
    const float energy = fmaxf(left, 0.0f);
    const bool moves = __any_sync(0xffffffffu, last_moves) && (!paired || __any_sync(0xffffffffu, first_moves));
    const bool finite = length - length == 0 && left - left == 0;
    // The length of H may be off by the rounding of that of B.
    const bool small = scale * length <= 1 && scale * energy <= SMALL_TURN && scale * (energy + 1e-5f * length) < limit;
    if (!(finite && moves && small)) return UNUSUAL;

    auto cosine = [&](int j, int e) { return square.at[j][e] * (1 / 24.0f) - 0.5f * turn.at[j][e]; };
    auto sine = [&](int j, int e) { return square.at[j][e] * (1 / 120.0f) - turn.at[j][e] * (1 / 6.0f); };
    const Held v([&](int r, int c, int j, int e) { return both(j, e) ? -rate * ((r == c) + sine(j, e)) : 0; });
    const Held vt = times_transposed(v, tt);
    const Held y([&](int r, int c, int j, int e) {
        return cosine(j, e) - 0.5f * (g.at[j][e] - (here(j, e) && r == c)) - vt.at[j][e];
    });
    const bool parallel = flags & PARALLEL;
    Held x([&](int, int, int j, int e) { return -t.at[j][e]; });
    if (parallel) {
        const Held s([&](int r, int c, int j, int e) { return (r == c) + sine(j, e); });
        const Held cos([&](int, int, int j, int e) { return cosine(j, e); });
        const Held along = times_transposed(a, s), off = times_transposed(cos, tt);
        x = Held([&](int, int, int j, int e) { return rate * along.at[j][e] - off.at[j][e] - t.at[j][e]; });
    }
    const Held u([&](int r, int c, int j, int e) {
        return !here(j, e) ? (float)(r == c) : parallel ? cosine(j, e) : 0;
    });
    __syncwarp();
    keep(m.Y, y), keep(m.V, v), keep(m.X, x), keep(m.U, u);
    return MOVE;
}
#endif

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
    set(m.U, [&](int, int, int j) { return scale * a[j]; });  // of which the square is finite
    wait_for_middle();
    product = times(m.U, m.U);
    if (size <= SMALL_TURN) {
        // The usual case. Taylor polynomials of degree 2 suffice, and since cos^2 + sin^2 = 1, what P W + Q H lacks in
        // orthonormality is what W lacked: polar = 1 - (G - 1)/2, up to (G - 1) t.
        Four cosine, sine;
        for (int j = 0; j < 4; j++) {
            cosine.value[j] = product[j] * (1 / 24.0f) - 0.5f * scale * a[j];
            sine.value[j] = product[j] * (1 / 120.0f) - scale * a[j] * (1 / 6.0f);
        }
        set(m.C, [&](int, int, int j) { return cosine[j]; });
        set(m.S, [&](int r, int c, int j) { return (r == c) + sine[j]; });
        set(m.V, [&](int r, int c, int j) { return both[j] ? -tau * ((r == c) + sine[j]) : 0; });
        set(m.X, [&](int r, int c, int j) { return cosine[j] - 0.5f * (g[j] - (here && r == c)); });
    } else {
        set(m.Y, [&](int, int, int j) { return product[j]; });
        wait_for_middle();
        large_turn(m, tau, doublings);
        const Four v = four(m.V);  // this thread's own
        set(m.V, [&](int, int, int j) { return both[j] ? v[j] : 0; });
    }
    wait_for_middle();

    const bool parallel = flags & PARALLEL;
    Four first = {}, second = {};
    if (parallel) first = times(m.A, m.S), second = times(m.C, m.T);
    product = times(m.V, m.T);
    const Four x = four(m.X), cosine = four(m.C);
    wait_for_middle();  // with 8 rows another thread has the same entries
    set(m.Y, [&](int, int, int j) { return x[j] - product[j]; });
    set(m.X, [&](int, int, int j) { return tau * first[j] - second[j] - t[j]; });
    set(m.U, [&](int r, int c, int j) { return !here ? (float)(r == c) : parallel ? cosine[j] : 0; });
    return length > 0 ? MOVE : STAY;
}

// The heads of a launch, in its arguments; all have the same k and n.
struct Heads {
    float* weight[HEADS];
    const Grad* grad[HEADS];
    Momentum* momentum[HEADS];
    unsigned long long* counts[HEADS];  // of classes that were skipped, and capped
    int classes[HEADS];
    int end[HEADS];                     // of the clusters that work on this head and those before it
};

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, BLOCKS)
step(const __grid_constant__ Heads heads, const float* lr_on_device, const float* momentum_on_device, const float* skip,
     double lr_value, double momentum_value, double max_angle, int k, int n, int slice, int resident, int flags) {
    __shared__ int verdict;
    if ((flags & CAN_SKIP) && *skip != 0) return;
    const float rate = flags & LR_ON_DEVICE ? *lr_on_device : (float)lr_value;
    const float mu = flags & MOMENTUM_ON_DEVICE ? *momentum_on_device : (float)momentum_value;
    const bool has_momentum = flags & HAS_MOMENTUM, vectors = flags & VECTORS;
    const float sign = flags & MAXIMIZE ? -1.0f : 1.0f;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stride = slice + PAD;
    const u32 rank = rank_in_cluster();
    const int start = rank * slice, inside = min(slice, n - start);

    // A cluster takes a class, or two neighbours, of one of the heads.
    struct Classes { int head, first; };
    auto find = [&](int number) {
        int head = 0;
        while (number >= heads.end[head]) head++;
        return Classes{head, (number - (head ? heads.end[head - 1] : 0)) * (1 + PAIRS)};
    };
    const Classes taken = find(blockIdx.x / CLUSTER);
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
    if (CLUSTER > 1) rest += (ROWS == 32 ? 2 : 1) * TILES * 128;
    auto matrix = [&](int i) { return rest + i * MATRIX; };
    const Matrices m = {matrix(0), matrix(1), matrix(2), matrix(3), matrix(4),
                        matrix(5), matrix(6), matrix(7), matrix(8)};
    float* sums = m.T;  // before there is anything from T to S

    // Steps 1 to 3 of Algorithm 1, but for the projection: W and B = mu M + D, zero beyond n.
    if (warp == 0) columns.zeros()[lane] = 0;
    auto sum = [&](float y, float z) { return has_momentum ? fmaf(mu, z, sign * y) : sign * y; };
    for (int row = warp; row < rows; row += WARPS) {
        const long long at = (long long)row * n + start;
        float *w_row = columns.w() + row * stride, *b_row = columns.b() + row * stride;
        if (vectors) {
            for (int column = 4 * lane; column < slice; column += 128 * BATCH) {
                float4 x[BATCH], y[BATCH], z[BATCH];
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    const int here = column + 128 * i;
                    x[i] = y[i] = z[i] = make_float4(0, 0, 0, 0);
                    if (here < inside) {
                        x[i] = get4(weight + at + here);
                        y[i] = get4(grad + at + here);
                        if (has_momentum) z[i] = get4(momentum + at + here);
                    }
                }
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    const int here = column + 128 * i;
                    if (here >= slice) continue;
                    *(float4*)(w_row + here) = x[i];
                    *(float4*)(b_row + here) =
                        make_float4(sum(y[i].x, z[i].x), sum(y[i].y, z[i].y), sum(y[i].z, z[i].z), sum(y[i].w, z[i].w));
                }
            }
        } else {
#pragma unroll 4
            for (int column = lane; column < slice; column += 32) {
                const bool here = column < inside;
                w_row[column] = here ? weight[at + column] : 0;
                b_row[column] = here ? sum(get(grad + at + column), has_momentum ? get(momentum + at + column) : 0) : 0;
            }
        }
    }
    // While this cluster computes, memory would idle: what a later one will need is brought into the L2 cache.
    const int later = blockIdx.x / CLUSTER + resident / 2;
    if (later >= resident && later < gridDim.x / CLUSTER) {
        const Classes next = find(later);
        const int last = min(1 + PAIRS, heads.classes[next.head] - next.first) * k;
        for (int row = warp; row < last; row += WARPS)
            for (int column = 32 * lane; column < inside; column += 1024) {
                const long long at = ((long long)next.first * k + row) * n + start + column;
                bring_to_l2(heads.weight[next.head] + at), bring_to_l2(heads.grad[next.head] + at);
                if (has_momentum) bring_to_l2(heads.momentum[next.head] + at);
            }
    }
    __syncthreads();

    // A class usually needs one round. With care it takes three: H for B, the step, its own Gram matrix for the new W.
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
        if (found == UNUSUAL && !both) {
            __syncthreads();
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
        if (READ_LATE) wait_for_cluster();  // nobody overwrites its sums, or leaves, before all have read them
        if (found == UNUSUAL) {
            columns.k = k;  // one after the other
            continue;
        }
        if (found == AGAIN) {
            round = CAREFUL_STEP;
            move_here(columns.b(), columns, m.X, m.U);
            continue;
        }
        if (found == SKIP && threadIdx.x == 0 && rank == 0) atomicAdd(counts, 1ull);
        if (found != SKIP) {
            // A class that stays is left alone, to the bit.
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
        columns.first = k;  // the other one of two that were taken apart
        round = STEP;
        __syncthreads();
    }
}
