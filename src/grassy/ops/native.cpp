// The two passes over the data of a Riemannian step, for float32 on a CPU: see native.py.
//
// A class is a K x N block of rows that fits into the cache of a core, so everything about it is done while it is
// there, by one thread. Batched BLAS calls make a pass over all classes for each product and, for matrices this
// small, reach less than half of the speed of the machine.

#include <algorithm>
#include <cmath>
#include <vector>

#if defined(__AVX512F__)
constexpr int BYTES = 64, ROWS = 4, COLUMNS = 4;  // a tile of accumulators that leaves registers for its operands
#else
constexpr int BYTES = 32, ROWS = 2, COLUMNS = 4;
#endif
constexpr long LANES = BYTES / sizeof(float);
typedef float Vector __attribute__((vector_size(BYTES), aligned(sizeof(float))));

static inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
static inline void store(float* p, Vector v) { *reinterpret_cast<Vector*>(p) = v; }

// out[r][c] = a_r . b_c for R rows of a and C rows of b, all of length n; LANES sums at once keep rounding small.
template <int R, int C>
static void dots(const float* a, const float* b, long n, float* out, long k) {
  Vector sums[R][C] = {};
  long x = 0;
  for (; x + LANES <= n; x += LANES) {
    Vector rows[R], columns[C];
    for (int r = 0; r < R; r++) rows[r] = load(a + r * n + x);
    for (int c = 0; c < C; c++) columns[c] = load(b + c * n + x);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) sums[r][c] += rows[r] * columns[c];
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) {
      float sum = 0;
      for (long lane = 0; lane < LANES; lane++) sum += sums[r][c][lane];
      for (long y = x; y < n; y++) sum += a[r * n + y] * b[c * n + y];
      out[r * k + c] = sum;
    }
}

// out (k x k) = a bᵀ for a and b (k x n); if a is b, from the tiles on and above the diagonal.
static void gram(const float* a, const float* b, long k, long n, float* out) {
  long r = 0;
  for (; r + ROWS <= k; r += ROWS) {
    long c = a == b ? r / COLUMNS * COLUMNS : 0;
    for (; c + COLUMNS <= k; c += COLUMNS) dots<ROWS, COLUMNS>(a + r * n, b + c * n, n, out + r * k + c, k);
    for (; c < k; c++) dots<ROWS, 1>(a + r * n, b + c * n, n, out + r * k + c, k);
  }
  for (; r < k; r++) {
    long c = 0;
    for (; c + COLUMNS <= k; c += COLUMNS) dots<1, COLUMNS>(a + r * n, b + c * n, n, out + r * k + c, k);
    for (; c < k; c++) dots<1, 1>(a + r * n, b + c * n, n, out + r * k + c, k);
  }
  if (a == b)
    for (long i = 0; i < k; i++)
      for (long j = 0; j < i; j++) out[i * k + j] = out[j * k + i];
}

// Rows i .. i + R, W * LANES columns from x, of scale * out + p w + q h, into `block` (k x W vectors). q may be null.
template <int R, int W>
static inline void combine_tile(const float* out, float scale, const float* p, const float* w, const float* q,
                                const float* h, long k, long n, long i, long x, Vector* block) {
  Vector sums[R][W] = {};
  if (scale != 0)
    for (int r = 0; r < R; r++)
      for (int v = 0; v < W; v++) sums[r][v] = scale * load(out + (i + r) * n + x + v * LANES);
  for (long j = 0; j < k; j++)
    for (int v = 0; v < W; v++) {
      const Vector row = load(w + j * n + x + v * LANES);
      for (int r = 0; r < R; r++) sums[r][v] += p[(i + r) * k + j] * row;
    }
  for (long j = 0; q && j < k; j++)
    for (int v = 0; v < W; v++) {
      const Vector row = load(h + j * n + x + v * LANES);
      for (int r = 0; r < R; r++) sums[r][v] += q[(i + r) * k + j] * row;
    }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < W; v++) block[(i + r) * W + v] = sums[r][v];
}

// All rows of W * LANES columns, through `block`, so that out may be w.
template <int W>
static void combine_columns(float* out, float scale, const float* p, const float* w, const float* q, const float* h,
                            long k, long n, long x, Vector* block) {
  long i = 0;
  for (; i + ROWS <= k; i += ROWS) combine_tile<ROWS, W>(out, scale, p, w, q, h, k, n, i, x, block);
  for (; i < k; i++) combine_tile<1, W>(out, scale, p, w, q, h, k, n, i, x, block);
  for (i = 0; i < k; i++)
    for (int v = 0; v < W; v++) store(out + i * n + x + v * LANES, block[i * W + v]);
}

// out = scale * out + p w + q h for one class; `memory` has room for k x COLUMNS vectors.
static void combine_class(float* out, float scale, const float* p, const float* w, const float* q, const float* h, long k,
                          long n, float* memory) {
  Vector* block = reinterpret_cast<Vector*>(memory);
  long x = 0;
  for (; x + COLUMNS * LANES <= n; x += COLUMNS * LANES)
    combine_columns<COLUMNS>(out, scale, p, w, q, h, k, n, x, block);
  for (; x + LANES <= n; x += LANES) combine_columns<1>(out, scale, p, w, q, h, k, n, x, block);
  for (; x < n; x++) {
    for (long i = 0; i < k; i++) {
      float sum = scale == 0 ? 0 : scale * out[i * n + x];
      for (long j = 0; j < k; j++) sum += p[i * k + j] * w[j * n + x] + (q ? q[i * k + j] * h[j * n + x] : 0);
      memory[i] = sum;
    }
    for (long i = 0; i < k; i++) out[i * n + x] = memory[i];
  }
}

extern "C" {

// h = B − B Wᵀ (2I − W Wᵀ) W with B = momentum * m + d, gram_w = W Wᵀ, a = h hᵀ, for each class. m may be null, or be h;
// then it stays as it is for classes where the result is not finite, which shows in a.
void tangent(float* h, float* gram_w, float* a, const float* w, const float* d, const float* m, float momentum,
             long classes, long k, long n, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> overlap(k * k), correction(k * k), memory(k * COLUMNS * LANES), rows(k * n);
    float* b = rows.data();
#pragma omp for schedule(static)
    for (long c = 0; c < classes; c++) {
      const float *wc = w + c * k * n, *dc = d + c * k * n;
      float *g = gram_w + c * k * k, *ac = a + c * k * k;
      if (m) {
        const float* mc = m + c * k * n;
        for (long x = 0; x < k * n; x++) b[x] = dc[x] + momentum * mc[x];
      } else {
        std::copy(dc, dc + k * n, b);
      }
      gram(wc, wc, k, n, g);
      gram(b, wc, k, n, overlap.data());
      for (long i = 0; i < k; i++)
        for (long j = 0; j < k; j++) {
          float sum = 0;
          for (long l = 0; l < k; l++) sum += overlap[i * k + l] * g[l * k + j];
          correction[i * k + j] = sum - 2 * overlap[i * k + j];
        }
      combine_class(b, 1, correction.data(), wc, nullptr, nullptr, k, n, memory.data());
      gram(b, b, k, n, ac);
      float energy = 0;
      for (long i = 0; i < k; i++) energy += ac[i * k + i];
      if (std::isfinite(energy)) std::copy(b, b + k * n, h + c * k * n);
      else if (h != m) std::fill_n(h + c * k * n, k * n, 0.0f);
    }
  }
}

// w = p w + q h for each class, in place.
void combine(float* w, const float* p, const float* q, const float* h, long classes, long k, long n, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> memory(k * COLUMNS * LANES);
#pragma omp for schedule(static)
    for (long c = 0; c < classes; c++)
      combine_class(w + c * k * n, 0, p + c * k * k, w + c * k * n, q + c * k * k, h + c * k * n, k, n, memory.data());
  }
}
}
