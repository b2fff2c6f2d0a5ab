// Sums the Gram matrices of all warps over a thread block, and over the blocks of a cluster.

// Sums the tiles of all warps of a team in `buffers`, as [buffer][tile][lane][4]. With 32 rows it does so for every 32
// columns of a warp.
__device__ void all_tiles(const Columns& columns, float* buffers) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, team = warp / TEAM, member = warp % TEAM;
    const int width = ROWS == 32 ? 32 * TEAM : columns.slice;
    for (int begin = 0; begin < columns.slice; begin += width) {
        const int end = min(begin + width, columns.slice);
        float total[SHARE][4] = {};
        if (TEAMS == 1 || team == 0) gram<0>(columns, begin, end, total);
        else gram<TEAMS - 1>(columns, begin, end, total);
        // In a fixed order, so that every run gives the same sum.
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

// Whether other blocks may still read the sums of this one after a thread has its own. All wait for that later.
constexpr bool READ_LATE = CLUSTER > 1 && ROWS < 32;

// Threads that finish the sums. With 8 rows it is the warp that uses them, which needs no barrier.
constexpr int ADDING = ROWS == 8 ? 32 : THREADS;

// Sums `mine`, TILES * 32 float4, over the blocks of a cluster. Each adding thread gets its part: x[j] is element
// threadIdx.x + j ADDING.
template <int EACH>
__device__ void over_cluster(float4* mine, u32 rank, float4 (&x)[EACH]) {
#if CLUSTER > 1
    constexpr int ALL = TILES * 32, PART = ALL / CLUSTER;
    arrive_at_cluster();
    wait_for_cluster();
    if (ROWS == 32) {
        // Too much for all-to-all reads: each block sums one part and sends it to all.
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
    } else if (threadIdx.x < ADDING) {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int i = threadIdx.x + j * ADDING;
            if (i >= ALL) break;
            x[j] = of_block(mine + i, 0);
#pragma unroll
            for (u32 block = 1; block < CLUSTER; block++) x[j] = x[j] + of_block(mine + i, block);
        }
    }
#endif
}

// Whether the exchanged sums share memory with T, A and S, so that three such blocks fit on a multiprocessor.
constexpr bool SENT_FROM_MATRICES = ROWS == 16;
static_assert(!SENT_FROM_MATRICES || TILES * 128 <= 3 * MATRIX, "T, A and S are too small");

// Computes G, O, O' and N of a whole class, or of a pair whose first class has `k` rows.
__device__ void all_grams(const Columns& columns, int k, float* buffers, float4* mine, u32 rank, float* G, float* O,
                          float* Ot, float* N) {
    all_tiles(columns, buffers);
    constexpr int EACH = (TILES * 32 + ADDING - 1) / ADDING;
    const bool adding = ADDING == THREADS || threadIdx.x < ADDING;
    float4 x[EACH];
#pragma unroll
    for (int j = 0; j < EACH && adding; j++) {
        const int i = min((int)threadIdx.x + j * ADDING, TILES * 32 - 1);
        x[j] = ((const float4*)buffers)[i];
#pragma unroll
        for (int buffer = 1; buffer < BUFFERS; buffer++)
            x[j] = x[j] + ((const float4*)buffers)[buffer * TILES * 32 + i];
    }
    if (ADDING == THREADS && (CLUSTER == 1 || SENT_FROM_MATRICES)) __syncthreads();  // before the buffers are overwritten
    if (CLUSTER > 1) {
#pragma unroll
        for (int j = 0; j < EACH && adding; j++) mine[min((int)threadIdx.x + j * ADDING, TILES * 32 - 1)] = x[j];
        over_cluster(mine, rank, x);
    }
#if ROWS == 8
    if (adding) symmetric(x, k, G, O, Ot, N);
#else
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = threadIdx.x + j * THREADS;
        if (i < TILES * 32) spread(i, x[j], G, O, Ot, N);
    }
    __syncthreads();
#endif
    if (READ_LATE) arrive_at_cluster();  // the reads have completed, since their values were used
}
