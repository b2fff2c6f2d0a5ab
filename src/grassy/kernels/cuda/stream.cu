// The step of classes of 17 to 32 rows for which step.cu would need a cluster, in three launches: `grams`, `turns` and
// `moves`. Names are those of step.cu, which keeps such a class on the chip and therefore runs few warps. Here W, D and
// M are read twice, but blocks are independent, and the whole GPU does the same kind of work.
//
// Classes on the careful path, which needs more passes, are left to step.cu, launched after these three.
//
// Compile with -DROWS=32, -DPAIRS=0, -DCLUSTER=1, -DWARPS=8, and the rest as for step.cu.

#include "hardware.cuh"
#include "launch.cuh"
#include "shared_columns.cuh"
#include "rows_16_and_32.cuh"
#include "small_matrices.cuh"

#define STREAM 4    // warps per block
#define RESIDENT 2  // blocks per multiprocessor; more would have too few registers
#define STRIDE 36   // floats between rows of 32 columns, which avoids bank conflicts
static_assert(ROWS == 32 && WARPS == 8, "made for 32 rows");

// The arguments of a block for its class.
struct Streamed {
    float* weight;
    const Grad* grad;
    Momentum* momentum;
    float mu, sign;
    bool has_momentum, vectors;
    int k, n;

    __device__ Streamed(const Heads& heads, int number, const float* momentum_on_device, double momentum_value, int k,
                        int n, int flags)
        : mu(flags & MOMENTUM_ON_DEVICE ? *momentum_on_device : (float)momentum_value),
          sign(flags & MAXIMIZE ? -1.0f : 1.0f), has_momentum(flags & HAS_MOMENTUM), vectors(flags & VECTORS), k(k), n(n) {
        const Taken taken = taken_by(heads, number);
        const long long first = (long long)taken.first * k * n;
        weight = heads.weight[taken.head] + first, grad = heads.grad[taken.head] + first;
        momentum = has_momentum ? heads.momentum[taken.head] + first : nullptr;
    }

    template <typename T>
    __device__ float4 some(const T* p, int count) const {
        if (vectors && count >= 4) return get4(p);
        return make_float4(count > 0 ? get(p) : 0, count > 1 ? get(p + 1) : 0, count > 2 ? get(p + 2) : 0,
                           count > 3 ? get(p + 3) : 0);
    }

    // Loads four columns of W, D and M from `column` on, zero beyond the end. The loads are in flight on return.
    __device__ void load(int row, int column, float4& w, float4& d, float4& m) const {
        const int count = row < k ? n - column : 0;
        const long long at = (long long)row * n + column;
        w = some(weight + at, count), d = some(grad + at, count);
        m = has_momentum ? some(momentum + at, count) : make_float4(0, 0, 0, 0);
    }

    __device__ float4 sum(float4 d, float4 m) const {
        if (!has_momentum) return make_float4(sign * d.x, sign * d.y, sign * d.z, sign * d.w);
        return make_float4(fmaf(mu, m.x, sign * d.x), fmaf(mu, m.y, sign * d.y), fmaf(mu, m.z, sign * d.z),
                           fmaf(mu, m.w, sign * d.w));
    }
};

// Writes the Gram matrices of class first + blockIdx.x to `tiles`.
extern "C" __global__ void __launch_bounds__(32 * STREAM, RESIDENT)
grams(const __grid_constant__ Heads heads, const float* momentum_on_device, const float* skip, float4* tiles,
      double momentum_value, int first, int k, int n, int flags) {
    if ((flags & CAN_SKIP) && *skip != 0) return;
    const Streamed of(heads, first + blockIdx.x, momentum_on_device, momentum_value, k, n, flags);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float4* totals = shared4 + warp * TILES * 32 + lane;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) totals[32 * tile] = make_float4(0, 0, 0, 0);

    float4 w[GROUPS], d[GROUPS], m[GROUPS];
    auto load = [&](int column) {
#pragma unroll
        for (int i = 0; i < GROUPS; i++) of.load(8 * i + lane / 4, column + lane % 4 * 4, w[i], d[i], m[i]);
    };
    load(32 * warp);
    for (int column = 32 * warp; column < n; column += 32 * STREAM) {
        float part[TILES][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float4 rows[2 * GROUPS];
#pragma unroll
            for (int i = 0; i < GROUPS; i++) rows[i] = w[i], rows[GROUPS + i] = of.sum(d[i], m[i]);
            load(half ? column + 32 * STREAM : column + 16);
#pragma unroll
            for (int step = 0; step < 2; step++) {
                Split left[2 * GROUPS], right[2 * GROUPS];
#pragma unroll
                for (int i = 0; i < 2 * GROUPS; i++)
                    left[i] = split(step ? rows[i].z : rows[i].x), right[i] = split(step ? rows[i].w : rows[i].y);
                add_products<0, 0, TILES>(half == 0 && step == 0, part, left, right);
                add_products<1, 0, TILES>(false, part, left, right);
                add_products<2, 0, TILES>(false, part, left, right);
            }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            totals[32 * tile] =
                totals[32 * tile] + make_float4(part[tile][0], part[tile][1], part[tile][2], part[tile][3]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILES * 32; i += 32 * STREAM) {
        float4 sum = shared4[i];
#pragma unroll
        for (int other = 1; other < STREAM; other++) sum = sum + shared4[other * TILES * 32 + i];
        tiles[(long long)blockIdx.x * TILES * 32 + i] = sum;
    }
}

// Computes the factors of W' and M' from the Gram matrices.
extern "C" __global__ void __launch_bounds__(256, 4)
turns(const __grid_constant__ Heads heads, const float* lr_on_device, const float* skip, const float4* tiles,
      float4* factors, int* verdicts, double lr_value, double max_angle, int first, int flags) {
    if ((flags & CAN_SKIP) && *skip != 0) return;
    const float rate = flags & LR_ON_DEVICE ? *lr_on_device : (float)lr_value;
    auto matrix = [&](int i) { return (float*)shared4 + i * MATRIX; };
    const Matrices m = {matrix(0), matrix(1), matrix(2), matrix(3), matrix(4),
                        matrix(5), matrix(6), matrix(7), matrix(8)};
    for (int i = threadIdx.x; i < TILES * 32; i += 256)
        spread(i, tiles[(long long)blockIdx.x * TILES * 32 + i], m.G, m.U, m.V, m.C);
    __syncthreads();
    unsigned long long* counts = heads.counts[taken_by(heads, first + blockIdx.x).head];
    const Verdict found = middle(m, rate, flags, (float)max_angle, false, true, counts);
    if (threadIdx.x == 0) {
        verdicts[first + blockIdx.x] = found;
        if (found == SKIP) atomicAdd(counts, 1ull);
    }
    if (found == SKIP || found == AGAIN) return;
    __syncthreads();
    float4* mine = factors + (long long)blockIdx.x * MATRIX + threadIdx.x;
    const float* made[4] = {m.Y, m.V, m.X, m.U};
#pragma unroll
    for (int i = 0; i < 4; i++) mine[i * MATRIX / 4] = ((const float4*)made[i])[threadIdx.x];
}

// Computes W' = W + Y W + V B and M' = B + X W + U B of class first + blockIdx.x.
extern "C" __global__ void __launch_bounds__(32 * STREAM, RESIDENT)
moves(const __grid_constant__ Heads heads, const float* momentum_on_device, const float* skip, const float4* factors,
      const int* verdicts, double momentum_value, int first, int k, int n, int flags) {
    if ((flags & CAN_SKIP) && *skip != 0) return;
    const int verdict = verdicts[first + blockIdx.x];
    if (verdict == SKIP || verdict == AGAIN) return;
    const bool parallel = flags & PARALLEL;
    const Streamed of(heads, first + blockIdx.x, momentum_on_device, momentum_value, k, n, flags);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float4 w[8], d[8], m[8];  // four rows each, 32 columns
    auto load = [&](int column) {
#pragma unroll
        for (int i = 0; i < 8; i++) of.load(4 * i + lane / 8, column + lane % 8 * 4, w[i], d[i], m[i]);
    };
    load(32 * warp);

    // The split factors in the operand layout of tensor cores. A piece is 16 rows and 8 columns of [Y V; X U].
    constexpr int PIECES = 32;
    float4* pieces = shared4;  // [step][tile][high, low][lane]
    float* absent = (float*)(pieces + 64 * PIECES);
    float* stages = absent + ROWS;
    float* stage = stages + warp * 2 * ROWS * STRIDE;  // 32 columns of W and of B
    const float4* given = factors + (long long)blockIdx.x * MATRIX;
    for (int i = threadIdx.x; i < MATRIX; i += 32 * STREAM) ((float4*)stages)[i] = given[i];
    __syncthreads();
    if (warp == 0) absent[lane] = stages[3 * MATRIX + at(lane, lane)];
    for (int piece = warp; piece < PIECES; piece += STREAM) {
        const int step = piece / 4, tile = piece % 4;
        const float* part = stages + ((tile >= 2) * 2 + (step >= 4)) * MATRIX;
        auto entry = [&](int e) {
            return split(part[at((16 * tile + g + (e & 1) * 8) % ROWS, (8 * step + t + (e & 2) * 2) % ROWS)]);
        };
        const Split s[4] = {entry(0), entry(1), entry(2), entry(3)};
        pieces[64 * piece + lane] = make_float4(__uint_as_float(s[0].high), __uint_as_float(s[1].high),
                                                __uint_as_float(s[2].high), __uint_as_float(s[3].high));
        pieces[64 * piece + 32 + lane] = make_float4(__uint_as_float(s[0].low), __uint_as_float(s[1].low),
                                                     __uint_as_float(s[2].low), __uint_as_float(s[3].low));
    }
    __syncthreads();

    for (int column = 32 * warp; column < n; column += 32 * STREAM) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float* place = stage + (4 * i + lane / 8) * STRIDE + lane % 8 * 4;
            *(float4*)place = w[i], *(float4*)(place + ROWS * STRIDE) = of.sum(d[i], m[i]);
        }
        __syncwarp();
        load(column + 32 * STREAM);
        // As in `move`: a lane gets four neighbours from 4 t and from 16 + 4 t.
        const int from = (g & 1) * 16 + (g & 6) * 2;
        float sums[4][4][4];
#pragma unroll
        for (int step = 0; step < 8; step++) {
            const float4 v = *(const float4*)(stage + (8 * step + t) * STRIDE + from);
            const float4 u = *(const float4*)(stage + (8 * step + t + 4) * STRIDE + from);
            const Split left[4] = {split(v.x), split(v.y), split(v.z), split(v.w)};
            const Split right[4] = {split(u.x), split(u.y), split(u.z), split(u.w)};
#pragma unroll
            for (int tile = 0; tile < 4; tile++) {
                if (tile >= 2 && step >= 4 && !parallel) continue;
                const float4* piece = pieces + 64 * (4 * step + tile) + lane;
                const float4 high = piece[0], low = piece[32];
                const Split f[4] = {{__float_as_uint(high.x), __float_as_uint(low.x)},
                                    {__float_as_uint(high.y), __float_as_uint(low.y)},
                                    {__float_as_uint(high.z), __float_as_uint(low.z)},
                                    {__float_as_uint(high.w), __float_as_uint(low.w)}};
                add_rows(step == 0, sums[tile], f, left, right);
            }
        }
#pragma unroll
        for (int tile = 0; tile < 4; tile++)
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const int row = 16 * tile + g + (part & 2) * 4, r = row % ROWS, offset = 4 * t + (part & 1) * 16;
                float4 v = *(const float4*)(stage + row * STRIDE + offset) +
                           make_float4(sums[tile][0][part], sums[tile][1][part], sums[tile][2][part], sums[tile][3][part]);
                const int count = r < k ? min(n - column - offset, 4) : 0;
                const long long at = (long long)r * n + column + offset;
                if (tile < 2) {
                    if (verdict == MOVE) put_four(of.weight + at, v, count, of.vectors);
                } else if (of.has_momentum) {
                    if (absent[r] == 1) v = make_float4(0, 0, 0, 0);  // absent rows stay exactly 0
                    put_four(of.momentum + at, v, count, of.vectors);
                }
            }
        __syncwarp();
    }
}
