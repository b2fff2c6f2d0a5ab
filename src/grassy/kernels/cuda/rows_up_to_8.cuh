// How a warp processes its columns with at most 8 rows: Gram matrices and new rows. For more rows see
// rows_16_and_32.cuh.

// ---- Gram matrices ----

// Sums two tiles of Z over this warp's columns from `begin` to `end`, where Z + Z' = [W; B] [W; B]'. Z contains half of
// high high' and all of high low', so that two products replace three.
//
// In the layout of m16n8k8, a lane that holds 2 columns of row `lane/4` has its part of both operands. Any columns work
// if they are the same for all rows. These are chosen to avoid bank conflicts.
template <int>
__device__ void gram(const Columns& columns, int begin, int end, float (*total)[4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first = begin + 32 * warp, ahead = g < columns.k ? 32 * WARPS : 0;
    const float* w = columns.row(true, g, first) + 16 * (t & 1) + (t & 2);
    const float* b = columns.row(false, g, first) + 16 * (t & 1) + (t & 2);
    float crossed[2][4] = {};  // high low', so small that truncated sums in tensor cores are harmless
    for (int column = first; column < end; column += 32 * WARPS, w += ahead, b += ahead) {
        float part[2][4];
#pragma unroll
        for (int step = 0; step < 16; step += 4) {
            const float2 v = *(const float2*)(w + step), u = *(const float2*)(b + step);
            const Split w0 = split(v.x), w1 = split(v.y), b0 = split(u.x), b1 = split(u.y);
            mma_part<1>(false, crossed[0], w0, b0, w1, b1, w0, w1);
            mma_part<1>(false, crossed[1], w0, b0, w1, b1, b0, b1);
            mma_part<2>(step == 0, part[0], w0, b0, w1, b1, w0, w1);
            mma_part<2>(step == 0, part[1], w0, b0, w1, b1, b0, b1);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) total[0][i] += part[0][i], total[1][i] += part[1][i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        total[0][i] = fmaf(0.5f, total[0][i], crossed[0][i]), total[1][i] = fmaf(0.5f, total[1][i], crossed[1][i]);
}

// One warp computes G, O, O' and N from two tiles of Z. G and N are sums of a part of Z and its transpose, O of one
// part and the transpose of another. The first class of a pair has `k` rows.
__device__ void symmetric(const float4* z, int k, float* G, float* O, float* Ot, float* N) {
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    auto set = [&](float* part, float x, float y) { *(float2*)(part + at(row, column)) = {x, y}; };
    __syncwarp();
    set(G, z[0].x, z[0].y), set(O, z[0].z, z[0].w), set(Ot, z[1].x, z[1].y), set(N, z[1].z, z[1].w);
    __syncwarp();
    // Entries between the two classes of a pair are 0.
    const bool same[2] = {!PAIRS || (row < k) == (column < k), !PAIRS || (row < k) == (column + 1 < k)};
    auto sum = [&](float x, const float* part, int i) { return same[i] ? x + part[at(column + i, row)] : 0; };
    const float g[2] = {sum(z[0].x, G, 0), sum(z[0].y, G, 1)}, o[2] = {sum(z[0].z, Ot, 0), sum(z[0].w, Ot, 1)};
    const float ot[2] = {sum(z[1].x, O, 0), sum(z[1].y, O, 1)}, n[2] = {sum(z[1].z, N, 0), sum(z[1].w, N, 1)};
    __syncwarp();
    set(G, g[0], g[1]), set(O, o[0], o[1]), set(Ot, ot[0], ot[1]), set(N, n[0], n[1]);
    __syncwarp();
}

// ---- new rows ----

// Adds f times eight rows of 16 columns to sums[j]: columns 0 and 2 of each four for j = 0, 1 and 3 for j = 1.
__device__ void add_columns(bool fresh, float (*sums)[4], const float4* rows, const Split* f) {
    const Split x[2][4] = {{split(rows[0].x), split(rows[0].z), split(rows[1].x), split(rows[1].z)},
                           {split(rows[0].y), split(rows[0].w), split(rows[1].y), split(rows[1].w)}};
#pragma unroll
    for (int j = 0; j < 2; j++) mma_part<0>(fresh, sums[j], x[j][0], x[j][1], x[j][2], x[j][3], f[0], f[1]);
#pragma unroll
    for (int j = 0; j < 2; j++) mma_part<1>(false, sums[j], x[j][0], x[j][1], x[j][2], x[j][3], f[0], f[1]);
#pragma unroll
    for (int j = 0; j < 2; j++) mma_part<2>(false, sums[j], x[j][0], x[j][1], x[j][2], x[j][3], f[0], f[1]);
}

// Writes [W'; M'] = [W; B] + [SS SB; MS MB] [W; B] to global memory.
//
// Without parallel transport, MB is 0 except for the marks of absent rows.
//
// Columns form the rows of the left operand of the tensor cores. A lane holds four neighbouring columns of rows t and
// t + 4 of W and B, and gets the same columns of the same rows of W' and M'.
__device__ void move(const Columns& columns, const float* SS, const float* SB, const float* MS, const float* MB,
                     float* new_w, Momentum* new_m, int n, int start, bool vectors, bool parallel) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int made = g / 2 + g % 2 * 4;  // output row of column g of a factor; a lane gets rows t and t + 4
    auto factor = [&](const float* f, int row) { return split(f[at(made, row)]); };
    const Split ss[2] = {factor(SS, t), factor(SS, t + 4)}, sb[2] = {factor(SB, t), factor(SB, t + 4)};
    const Split ms[2] = {factor(MS, t), factor(MS, t + 4)}, mb[2] = {factor(MB, t), factor(MB, t + 4)};
    const bool here[2] = {t < columns.k, t + 4 < columns.k};
    const bool absent[2] = {MB[at(t, t)] == 1, MB[at(t + 4, t + 4)] == 1};  // and must stay exactly 0
    const int from = (g & 1) * 16 + (g & 6) * 2;  // avoids bank conflicts
    const float *w[2], *b[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        w[i] = columns.row(true, t + 4 * i, 32 * warp) + from, b[i] = columns.row(false, t + 4 * i, 32 * warp) + from;
    for (int column = 32 * warp; column < columns.slice; column += 32 * WARPS) {
        float4 of_w[2], of_b[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            of_w[i] = *(const float4*)w[i], of_b[i] = *(const float4*)b[i];
            if (here[i]) w[i] += 32 * WARPS, b[i] += 32 * WARPS;
        }
        float to_w[2][4], to_m[2][4];
        add_columns(true, to_w, of_w, ss), add_columns(true, to_m, of_w, ms);
        add_columns(false, to_w, of_b, sb);
        if (parallel) add_columns(false, to_m, of_b, mb);
        auto plus = [&](float4 v, float (*sums)[4], int i) {
            return make_float4(v.x + sums[0][i], v.y + sums[1][i], v.z + sums[0][2 + i], v.w + sums[1][2 + i]);
        };
#pragma unroll
        for (int i = 0; i < 2; i++) {
            of_w[i] = plus(of_w[i], to_w, i), of_b[i] = plus(of_b[i], to_m, i);
            if (absent[i]) of_b[i] = make_float4(0, 0, 0, 0);
        }
        const int first = start + column + from;
        const int at[2] = {t * n + first, (t + 4) * n + first};
#pragma unroll
        for (int i = 0; i < 2 && vectors; i++) {
            if (new_w && here[i] && first < n) put4(new_w + at[i], of_w[i]);
            if (new_m && here[i] && first < n) put4(new_m + at[i], of_b[i]);
        }
#pragma unroll
        for (int i = 0; i < 2 && !vectors; i++) {
            if (new_w && here[i]) put_some(new_w + at[i], of_w[i], n - first);
            if (new_m && here[i]) put_some(new_m + at[i], of_b[i], n - first);
        }
    }
}
