// The columns of a class, of which a thread block holds a slice: how they get into shared memory and out, their Gram
// matrices, and the new rows that are made of them.

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

// Tiles of 16 x 8 of [W; B] [W; B]', m counting rows of tiles and c columns. W B' is not needed; with 32 rows, neither
// is what lies below the diagonal of W W' and B B'. The first half of the tiles needs fewer rows than the second.
struct Tile { int m, c; };

__device__ constexpr Tile tile_of(int number) {
    if (ROWS == 8) return {0, number};
    if (ROWS == 16) return number < 4 ? Tile{number / 2, number % 2} : Tile{1, number - 2};
    return number < 4    ? Tile{0, number}
           : number < 6  ? Tile{1, number - 2}
           : number < 10 ? Tile{2, number - 6}
           : number < 14 ? Tile{3, number - 10}
           : number < 18 ? Tile{2, number - 10}
                         : Tile{3, number - 12};
}

template <int PART, int FROM, int TO>
__device__ void add_products(bool fresh, float (*sums)[4], const Split* first, const Split* second) {
#pragma unroll
    for (int number = FROM; number < TO; number++) {
        // Rows 16 m and 16 m + 8 of [W; B]; with 8 rows, W and B themselves.
        const int m = tile_of(number).m, c = tile_of(number).c;
        mma_part<PART>(fresh, sums[number - FROM], first[2 * m], first[2 * m + 1], second[2 * m], second[2 * m + 1],
                       first[c], second[c]);
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

// The tiles of all warps of a team, added up in `buffers` as [buffer][tile][lane][4]. With 32 rows that is done for every
// 32 columns of a warp.
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

// Where the entry of a k x k matrix is. With 32 rows groups of four are moved such that no two lanes meet in a bank.
__device__ int at(int row, int column) { return row * ROWS + (ROWS == 32 ? column ^ row % 8 * 4 : column); }

// Number `i` of all sums, four entries of G, O, O' or N, to where they belong. Of a pair the first class has `k` rows.
__device__ void spread(int i, float4 sum, int k, float* G, float* O, float* Ot, float* N) {
    const int lane = i % 32;
    const Tile tile = tile_of(i / 32);
    const bool of_w = tile.c < GROUPS;
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const int row = 16 * tile.m + lane / 4 + (part & 2) * 4 - ROWS;  // of B; negative for rows of W
        const int column = 8 * (tile.c % GROUPS) + lane % 4 * 2 + (part & 1);
        // Two classes have nothing to do with each other.
        const float value = PAIRS && ((row & (ROWS - 1)) < k) != (column < k) ? 0 : values[part];
        if (of_w && row < 0) G[at(row + ROWS, column)] = value;
        if (of_w && row >= 0) O[at(row, column)] = value, Ot[at(column, row)] = value;
        if (!of_w && row >= 0) N[at(row, column)] = value;
        if (ROWS == 32 && tile.m == 0 && tile.c >= 2) G[at(column, row + ROWS)] = value;
        if (ROWS == 32 && tile.m == 2 && tile.c >= 6) N[at(column, row)] = value;
    }
}

// Whether what a block sends around is where T, A and S will be, so that three such blocks fit on a multiprocessor.
constexpr bool SENT_FROM_MATRICES = ROWS == 16;
static_assert(!SENT_FROM_MATRICES || TILES * 128 <= 3 * MATRIX, "T, A and S are too small");

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
    }
    if (CLUSTER == 1 || SENT_FROM_MATRICES) __syncthreads();  // before anybody overwrites the buffers
    if (CLUSTER > 1) {
#pragma unroll
        for (int j = 0; j < EACH; j++) mine[min((int)threadIdx.x + j * THREADS, TILES * 32 - 1)] = x[j];
        over_cluster(mine, rank, x);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = threadIdx.x + j * THREADS;
        if (i < TILES * 32) spread(i, x[j], k, G, O, Ot, N);
    }
    __syncthreads();
    if (READ_LATE) arrive_at_cluster();  // now that what was read has been used, and so is here
}

// ---- new rows ----

// To sum[j], of 16 rows, f times eight rows and four columns, of which each lane has first[j] and second[j]. Neighbours
// are of different j, so that none waits for the one before.
__device__ void add_rows(bool fresh, float (*sum)[4], const Split* f, const Split* first, const Split* second) {
#pragma unroll
    for (int j = 0; j < 4; j++) mma_part<0>(fresh, sum[j], f[0], f[1], f[2], f[3], first[j], second[j]);
#pragma unroll
    for (int j = 0; j < 4; j++) mma_part<1>(false, sum[j], f[0], f[1], f[2], f[3], first[j], second[j]);
#pragma unroll
    for (int j = 0; j < 4; j++) mma_part<2>(false, sum[j], f[0], f[1], f[2], f[3], first[j], second[j]);
}

// How many of the GROUPS tiles of 16 rows of [W'; M'] a warp makes of its columns. If that is all of them, columns are
// split once; 32 rows have too many factors for the registers of one warp.
constexpr int MADE = ROWS == 32 ? 1 : GROUPS;

// [W'; M'] = [W; B] + [SS SB; MS MB] [W; B], to memory.
//
// MB is 0, but for marks of absent rows, if momentum is not transported in parallel.
__device__ void move(const Columns& columns, const float* SS, const float* SB, const float* MS, const float* MB,
                     float* new_w, Momentum* new_m, int n, int start, bool vectors, bool parallel) {
    constexpr int STEPS = 2 * ROWS / 8, SHARING = GROUPS / MADE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first_tile = warp % SHARING;
    if (ROWS == 32 && (16 * first_tile < ROWS ? !new_w : !new_m)) return;
    Split factor[MADE][STEPS][4];
#pragma unroll
    for (int made = 0; made < MADE; made++)
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = 16 * (first_tile + made) + g + (i & 1) * 8, column = 8 * step + t + (i & 2) * 2;
                const float* part = row < ROWS ? (8 * step < ROWS ? SS : SB) : (8 * step < ROWS ? MS : MB);
                factor[made][step][i] = split(part[at(row % ROWS, column % ROWS)]);
            }
    for (int column = 32 * (warp / SHARING); column < columns.slice; column += 32 * (WARPS / SHARING)) {
        // Such that what a lane gets are twice four neighbours, 4 t and 16 + 4 t, and a row's lanes fill sectors.
        const int from = (g & 1) * 16 + (g & 6) * 2;
        float sum[MADE][4][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const bool of_w = 8 * step < ROWS;
            if (ROWS == 32 && 16 * first_tile >= ROWS && !of_w && !parallel) break;
            const float4 v = *(const float4*)(columns.row(of_w, 8 * step % ROWS + t, column) + from);
            const float4 u = *(const float4*)(columns.row(of_w, 8 * step % ROWS + t + 4, column) + from);
            const Split first[4] = {split(v.x), split(v.y), split(v.z), split(v.w)};
            const Split second[4] = {split(u.x), split(u.y), split(u.z), split(u.w)};
#pragma unroll
            for (int made = 0; made < MADE; made++) {
                if (ROWS == 16 && made == 1 && !of_w && !parallel) continue;
                add_rows(step == 0, sum[made], factor[made][step], first, second);
            }
        }
#pragma unroll
        for (int made = 0; made < MADE; made++)
#pragma unroll
            for (int part = 0; part < 4; part++) {  // of the two rows the first four columns, and the next four
                const int row = 16 * (first_tile + made) + g + (part & 2) * 4, r = row % ROWS;
                const int offset = 4 * t + (part & 1) * 16;
                const bool is_w = row < ROWS;
                float4 v = *(const float4*)(columns.row(is_w, r, column) + offset);
                v.x += sum[made][0][part], v.y += sum[made][1][part], v.z += sum[made][2][part],
                    v.w += sum[made][3][part];
                if (!is_w && MB[at(r, r)] == 1) v = make_float4(0, 0, 0, 0);  // absent, and to stay so exactly
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
            for (int r = 0; r < ROWS; r++) sum[r] = fmaf(R[at(r, l)], right, fmaf(L[at(r, l)], left, sum[r]));
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r < columns.k) x[r * columns.stride + column] += sum[r];
    }
    __syncthreads();
}
