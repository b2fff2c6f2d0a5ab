// The k x k arithmetic of a class between two passes over its columns: from the Gram matrices to the factors of the new
// rows.

// ---- k x k matrices in shared memory ----

// A barrier for the first MIDDLE threads.
__device__ void wait_for_middle() {
    if (MIDDLE == 32) __syncwarp();
    else if (MIDDLE == THREADS) __syncthreads();
    else wait_for_first<MIDDLE>();
}

// Four neighbouring entries in a row of a matrix, which one thread computes. With 8 rows two threads compute the same.
struct Four {
    float value[4];
    __device__ float operator[](int i) const { return value[i]; }
};

__device__ int row_here() { return 4 * threadIdx.x % MATRIX / ROWS; }
__device__ int column_here() { return 4 * threadIdx.x % ROWS; }

__device__ Four four(const float* matrix) {
    __builtin_assume(__isShared(matrix));  // to use shared-memory instructions
    const float4 v = *(const float4*)(matrix + at(row_here(), column_here()));
    return {v.x, v.y, v.z, v.w};
}

// Sets each entry to f(row, column, j), where j counts the four entries of this thread.
template <typename F>
__device__ void set(float* matrix, F f) {
    __builtin_assume(__isShared(matrix));
    const int row = row_here(), column = column_here();
    *(float4*)(matrix + at(row, column)) =
        make_float4(f(row, column, 0), f(row, column + 1, 1), f(row, column + 2, 2), f(row, column + 3, 3));
}

// Returns a b. Not inlined, because code that runs once must be fetched first.
__device__ __noinline__ Four times(const float* a, const float* b) {
    __builtin_assume(__isShared(a));
    __builtin_assume(__isShared(b));
    const int row = row_here(), column = column_here();
    Four sum = {};
#pragma unroll(ROWS <= 16 ? ROWS / 4 : 2)
    for (int l = 0; l < ROWS; l += 4) {
        const float4 x = *(const float4*)(a + at(row, l));
        const float factors[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float4 y = *(const float4*)(b + at(l + j, column));
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
    for (int i = 0; i < ROWS; i++) sum += a[at(i, i)];
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

// The square root of `reference._largest_eigenvalue` of A.
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

// ---- the step ----

// Names are those at the top of step.cu, with C = cos - 1 and S = sinc. X, Y, U and V are scratch. On entry U, V and C
// hold O, O' and N. On return Y, V, X and U are the factors of W' and M', in the argument order of `move`.
struct Matrices {
    float *G, *T, *A, *X, *Y, *U, *V, *C, *S;
};

// Entries of cos - 1 and sinc - 1 of sqrt(X) for small X, from the entries of X and its square.
__device__ float small_cosine(float x, float square) { return square * (1 / 24.0f) - 0.5f * x; }
__device__ float small_sine(float x, float square) { return square * (1 / 120.0f) - x * (1 / 6.0f); }

// The part of `middle` that computes X and V, for any rotation angle: polynomials of degree 5, doublings of the angle,
// and the Gram matrix P G P + Q A Q of P W + Q H for the polar factor. U holds scale A, and Y its square.
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
// A k x k matrix in the registers of a warp, in the output layout of tensor cores: entry e of tile j is in row
// lane/4 + 8 (e/2) and column 8 j + 2 (lane%4) + e%2.
struct Held {
    float at[GROUPS][2 * GROUPS];

    // Sets each entry to f(row, column, j, e).
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
    Held x([](int, int, int, int) { return 0.0f; });
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int e = 0; e < 2 * GROUPS; e += 2) {
            const float2 v = *(const float2*)(matrix + (lane / 4 + 4 * e) * ROWS + 8 * j + lane % 4 * 2);
            x.at[j][e] = v.x, x.at[j][e + 1] = v.y;
        }
    return x;
}

__device__ void keep(float* matrix, const Held& x) {
    __builtin_assume(__isShared(matrix));
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int e = 0; e < 2 * GROUPS; e += 2)
            *(float2*)(matrix + (lane / 4 + 4 * e) * ROWS + 8 * j + lane % 4 * 2) = {x.at[j][e], x.at[j][e + 1]};
}

// Returns x y' in almost float32. Renaming columns 2 t and 2 t + 1 to t and t + 4 changes no sum and makes what a lane
// holds of x and y the operands of the tensor cores.
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

// A fast `middle` for the usual case: a class (`paired` is 0), or two classes of `paired` rows each, that is finite,
// moves by a small angle and is not capped. For a pair it tests the sums over both. It runs in one warp and writes
// nothing if the case is not usual.
__device__ Verdict usual(Matrices m, float rate, int flags, float max_angle, int paired) {
    const Held g = held(m.G), o = held(m.U), ot = held(m.V), n = held(m.C);
    const Held row_length([&](int r, int, int, int) { return m.G[at(r, r)]; });
    const Held column_length([&](int, int c, int, int) { return m.G[at(c, c)]; });
    auto here = [&](int j, int e) { return row_length.at[j][e] != 0; };
    auto both = [&](int j, int e) { return here(j, e) && column_length.at[j][e] != 0; };

    const Held t([&](int, int, int j, int e) { return here(j, e) ? o.at[j][e] * (2 - column_length.at[j][e]) : 0; });
    const Held tt([&](int, int, int j, int e) {  // the transpose of t
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
    float squares = 0;
    Held([&](int r, int c, int j, int e) { return squares += r == c ? square.at[j][e] : 0; });
    length = over_warp(length, false), left = over_warp(left, false), squares = over_warp(squares, false);
    const float energy = fmaxf(left, 0.0f);
    const bool moves = __any_sync(0xffffffffu, last_moves) && (!paired || __any_sync(0xffffffffu, first_moves));
    const bool finite = length - length == 0 && left - left == 0 && rate - rate == 0;
    // The error of |H| may be of the size of rounding in |B|.
    const bool small = scale * length <= 1 && squares <= SMALL_TURN * SMALL_TURN &&
                       scale * (energy + 1e-5f * length) < limit;
    if (!(finite && moves && small)) return UNUSUAL;

    auto cosine = [&](int j, int e) { return small_cosine(turn.at[j][e], square.at[j][e]); };
    auto sine = [&](int j, int e) { return small_sine(turn.at[j][e], square.at[j][e]); };
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

// Everything between two passes over the columns of a class, by the first MIDDLE threads.
//
// Takes G, O (in U), O' (in V) and N (in C). Leaves the factors of W' - W = Y W + V B and M' - B = X W + U B. If the
// class needs the careful path first, it leaves those of H - B = X W + U B. Counts the class if it is capped. A 1 on
// the diagonal of U, which cannot occur otherwise, marks an absent row.
__device__ Verdict middle(Matrices m, float rate, int flags, float max_angle, bool careful, bool counting,
                          unsigned long long* counts) {
    auto present = [&](int i) { return m.G[at(i, i)] != 0; };  // absent rows are zero
    const bool here = present(row_here());
    bool both[4];
    for (int j = 0; j < 4; j++) both[j] = here && present(column_here() + j);
    const Four o = four(m.U), n = four(m.C), g = four(m.G);
    set(m.T, [&](int, int c, int j) { return here ? o[j] * (2 - m.G[at(c, c)]) : 0; });
    wait_for_middle();
    Four product = times(m.T, m.V);
    set(m.A, [&](int, int, int j) { return both[j] ? n[j] - product[j] : 0; });
    const float length = trace(m.C);  // |B|^2, before another thread overwrites C
    wait_for_middle();
    const Four t = four(m.T), a = four(m.A);
    const float left = trace(m.A), energy = fmaxf(left, 0.0f);      // |H|^2
    if (!(length - length == 0 && left - left == 0 && rate - rate == 0)) return SKIP;  // a NaN or Inf anywhere
    // Cancellation leaves an error in A of the size of rounding in N. It matters only for large rotation angles, or if
    // the length of H itself matters.
    if (!careful && (rate * rate * length > 1 || ((flags & CAPPED) && 64 * energy < length))) {
        set(m.X, [&](int, int, int j) { return -t[j]; });
        set(m.U, [&](int r, int c, int) { return here ? 0 : -(float)(r == c); });
        return AGAIN;
    }
    if (careful && 2 * energy < length) {
        // The second projection removed most of H, so H is rounding only, from a gradient inside the subspace or from
        // k = n. The class does not move.
        set(m.X, [&](int, int, int j) { return -t[j]; });
        set(m.U, [&](int r, int c, int) { return here ? 0 : (float)(r == c); });
        return STAY;
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
        // The usual case. Taylor polynomials of degree 2 suffice. Since cos^2 + sin^2 = 1, P W + Q H has the same error
        // of orthonormality as W: polar = 1 - (G - 1)/2, up to (G - 1) t.
        Four cosine, sine;
        for (int j = 0; j < 4; j++) {
            cosine.value[j] = small_cosine(scale * a[j], product[j]);
            sine.value[j] = small_sine(scale * a[j], product[j]);
        }
        set(m.C, [&](int, int, int j) { return cosine[j]; });
        set(m.S, [&](int r, int c, int j) { return (r == c) + sine[j]; });
        set(m.V, [&](int r, int c, int j) { return both[j] ? -tau * ((r == c) + sine[j]) : 0; });
        set(m.X, [&](int r, int c, int j) { return cosine[j] - 0.5f * (g[j] - (here && r == c)); });
    } else {
        set(m.Y, [&](int, int, int j) { return product[j]; });
        wait_for_middle();
        large_turn(m, tau, doublings);
        const Four v = four(m.V);  // entries of this thread
        set(m.V, [&](int, int, int j) { return both[j] ? v[j] : 0; });
    }
    wait_for_middle();

    const bool parallel = flags & PARALLEL;
    Four first = {}, second = {};
    if (parallel) first = times(m.A, m.S), second = times(m.C, m.T);
    product = times(m.V, m.T);
    const Four x = four(m.X), cosine = four(m.C);
    wait_for_middle();  // with 8 rows another thread reads the same entries
    set(m.Y, [&](int, int, int j) { return x[j] - product[j]; });
    set(m.X, [&](int, int, int j) { return tau * first[j] - second[j] - t[j]; });
    set(m.U, [&](int r, int c, int j) { return !here ? (float)(r == c) : parallel ? cosine[j] : 0; });
    return length > 0 ? MOVE : STAY;
}
