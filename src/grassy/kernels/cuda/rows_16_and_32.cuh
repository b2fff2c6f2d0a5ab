// How a warp processes its columns with 16 or 32 rows: Gram matrices and new rows. For fewer rows see rows_up_to_8.cuh.

// ---- Gram matrices ----

// The 16 x 8 tiles of [W; B] [W; B]': m is the row of a tile, c its column. W B' is not needed, nor, with 32 rows, what
// is below the diagonal of W W' and B B'. The first half of the tiles needs fewer rows than the second.
struct Tile { int m, c; };

__device__ constexpr Tile tile_of(int number) {
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
        // Rows 16 m and 16 m + 8 of [W; B].
        const int m = tile_of(number).m, c = tile_of(number).c;
        mma_part<PART>(fresh, sums[number - FROM], first[2 * m], first[2 * m + 1], second[2 * m], second[2 * m + 1],
                       first[c], second[c]);
    }
}

// Sums the tiles from TEAM_NUMBER * SHARE on over this warp's columns from `begin` to `end`. Operands and columns are
// as in rows_up_to_8.cuh.
template <int TEAM_NUMBER>
__device__ void gram(const Columns& columns, int begin, int end, float (*total)[4]) {
    constexpr int FROM = TEAM_NUMBER * SHARE, TO = FROM + SHARE;
    const int lane = threadIdx.x % 32, member = threadIdx.x / 32 % TEAM, g = lane / 4, t = lane % 4;
    for (int column = begin + 32 * member; column < end; column += 32 * TEAM) {
        float part[SHARE][4];
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
            // With 32 rows there are not enough registers for partial sums: see all_tiles.
            float(*sums)[4] = ROWS == 32 ? total : part;
            add_products<0, FROM, TO>(ROWS < 32 && step == 0, sums, first, second);
            add_products<1, FROM, TO>(false, sums, first, second);
            add_products<2, FROM, TO>(false, sums, first, second);
        }
        if (ROWS < 32) {
#pragma unroll
            for (int tile = 0; tile < SHARE; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) total[tile][i] += part[tile][i];
        }
    }
}

// Stores element `i` of all sums, four entries of G, O, O' or N, in these matrices.
__device__ void spread(int i, float4 sum, float* G, float* O, float* Ot, float* N) {
    const int lane = i % 32;
    const Tile tile = tile_of(i / 32);
    const bool of_w = tile.c < GROUPS;
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const int row = 16 * tile.m + lane / 4 + (part & 2) * 4 - ROWS;  // of B; negative for rows of W
        const int column = 8 * (tile.c % GROUPS) + lane % 4 * 2 + (part & 1);
        if (of_w && row < 0) G[at(row + ROWS, column)] = values[part];
        if (of_w && row >= 0) O[at(row, column)] = Ot[at(column, row)] = values[part];
        if (!of_w && row >= 0) N[at(row, column)] = values[part];
        if (ROWS == 32 && tile.m == 0 && tile.c >= 2) G[at(column, row + ROWS)] = values[part];
        if (ROWS == 32 && tile.m == 2 && tile.c >= 6) N[at(column, row)] = values[part];
    }
}

// ---- new rows ----

// Adds f times eight rows, of which each lane has first[j] and second[j], to the 16 rows of sum[j]. Consecutive
// instructions have different j, so that none depends on the one before.
__device__ void add_rows(bool fresh, float (*sum)[4], const Split* f, const Split* first, const Split* second) {
#pragma unroll
    for (int j = 0; j < 4; j++) mma_part<0>(fresh, sum[j], f[0], f[1], f[2], f[3], first[j], second[j]);
#pragma unroll
    for (int j = 0; j < 4; j++) mma_part<1>(false, sum[j], f[0], f[1], f[2], f[3], first[j], second[j]);
#pragma unroll
    for (int j = 0; j < 4; j++) mma_part<2>(false, sum[j], f[0], f[1], f[2], f[3], first[j], second[j]);
}

// How many of the GROUPS tiles of 16 rows of [W'; M'] a warp computes from its columns. If it computes all of them,
// columns are split once. With 32 rows there are too many factors for the registers of one warp.
constexpr int MADE = ROWS == 32 ? 1 : GROUPS;

// Writes [W'; M'] = [W; B] + [SS SB; MS MB] [W; B] to global memory.
//
// Without parallel transport, MB is 0 except for the marks of absent rows.
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
        // A lane gets four neighbours from 4 t and from 16 + 4 t, so that the lanes of a row fill memory sectors.
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
            for (int part = 0; part < 4; part++) {  // two rows, two groups of four columns
                const int row = 16 * (first_tile + made) + g + (part & 2) * 4, r = row % ROWS;
                const int offset = 4 * t + (part & 1) * 16;
                const bool is_w = row < ROWS;
                float4 v = *(const float4*)(columns.row(is_w, r, column) + offset);
                v.x += sum[made][0][part], v.y += sum[made][1][part], v.z += sum[made][2][part],
                    v.w += sum[made][3][part];
                if (!is_w && MB[at(r, r)] == 1) v = make_float4(0, 0, 0, 0);  // absent rows stay exactly 0
                const int at_column = start + column + offset, inside = r < columns.k ? min(n - at_column, 4) : 0;
                const long long at = (long long)r * n + at_column;
                if (is_w && new_w) put_four(new_w + at, v, inside, vectors);
                if (!is_w && new_m) put_four(new_m + at, v, inside, vectors);
            }
    }
}
