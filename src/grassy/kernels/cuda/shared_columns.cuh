// A thread block's slice of the columns of a class: loads, stores, and operands of tensor cores.

// ---- loads and stores; bfloat16 is the upper half of a float ----

__device__ float get(const float* p) { return *p; }
__device__ float get(const unsigned short* p) { return __uint_as_float((u32)*p << 16); }
// The streaming hint makes loads slower with 8 rows and faster with more.
template <typename T>
__device__ T load(const T* p) { return ROWS == 8 ? __ldcg(p) : __ldcs(p); }
__device__ float4 get4(const float* p) { return load((const float4*)p); }
__device__ float4 get4(const unsigned short* p) {
    const uint2 v = load((const uint2*)p);
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
__device__ void put_some(T* p, float4 v, int count) {
    if (count > 0) put(p, v.x);
    if (count > 1) put(p + 1, v.y);
    if (count > 2) put(p + 2, v.z);
    if (count > 3) put(p + 3, v.w);
}

template <typename T>
__device__ void put_four(T* p, float4 v, int count, bool vectors) {
    if (vectors && count >= 4) put4(p, v);
    if (!vectors) put_some(p, v, count);
}

// ---- tensor cores ----

struct Split { u32 high, low; };

// Rounds to nearest by integer arithmetic, which is cheaper than cvt. Tensor cores read 11 bits of the low part.
__device__ Split split(float x) {
    Split s;
    s.high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    s.low = __float_as_uint(x - __uint_as_float(s.high));
    return s;
}

// One of the three TF32 products whose sum is a b in almost float32. Small ones come first.
template <int PART>
__device__ void mma_part(bool fresh, float* c, Split a0, Split a1, Split a2, Split a3, Split b0, Split b1) {
    if (PART == 0) mma(fresh, c, a0.low, a1.low, a2.low, a3.low, b0.high, b1.high);
    if (PART == 1) mma(fresh, c, a0.high, a1.high, a2.high, a3.high, b0.low, b1.low);
    if (PART == 2) mma(fresh, c, a0.high, a1.high, a2.high, a3.high, b0.high, b1.high);
}

// ---- columns in shared memory ----

// Shared memory begins with `rows` rows of W, `rows` rows of B, and 32 zeros. The k rows from `first` on are processed.
// Rows from k on read as zero.
struct Columns {
    int rows, first, k, slice, stride;

    __device__ float* w() const { return (float*)shared4 + (PAIRS ? first * stride : 0); }
    __device__ float* b() const { return w() + rows * stride; }
    __device__ float* zeros() const { return (float*)shared4 + 2 * rows * stride; }

    // 32 columns, from `column` on, of a row of W or B. One offset, so that the compiler infers shared memory.
    __device__ const float* row(bool of_w, int row, int column) const {
        const int place = (of_w ? 0 : rows) + (PAIRS ? first : 0) + row;
        return (float*)shared4 + (row < k ? place * stride + column : 2 * rows * stride);
    }
};

__device__ float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Offset of an entry of a k x k matrix. With 32 rows, groups of four are permuted to avoid bank conflicts.
__device__ int at(int row, int column) { return row * ROWS + (ROWS == 32 ? column ^ row % 8 * 4 : column); }

// x += L W + R B in shared memory, where x is W or B: one thread per column, in float32. For the rare, careful path.
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
