// The step of Algorithm 1 for float32 on a CPU: `_step` of reference.py, one class after the other.
//
// A class, K x N, fits into the cache of a core, so one thread does the whole step while it is there. Weight, gradient
// and momentum are read from memory once, and weight and momentum are written once. Meanwhile the next class is
// prefetched, so that the step is compute-bound. Batched BLAS calls would make a pass over all classes for each matmul
// and, for matrices this small, run at half the speed.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <utility>

#if defined(__AVX512F__)
constexpr int BYTES = 64, ROWS = 4;  // sums in tiles of ROWS x 4 leave registers for their operands
#else
constexpr int BYTES = 32, ROWS = 2;
#endif
constexpr long LANES = BYTES / sizeof(float);
constexpr long GROUP = 4;           // vectors of a row that are transformed together
constexpr float LARGEST_TURN = 64;  // 2**MAX_DOUBLINGS of reference.py

typedef float Vector __attribute__((vector_size(BYTES), aligned(sizeof(float))));
typedef float Four __attribute__((vector_size(16), aligned(sizeof(float))));

static inline Vector& vector(float* p) { return *reinterpret_cast<Vector*>(p); }
static inline const Vector& vector(const float* p) { return *reinterpret_cast<const Vector*>(p); }

// The vector at column x of a row of n floats. Elements beyond the end read as zero and are not written.
static inline Vector load(const float* row, long x, long n) {
  if (x + LANES <= n) return vector(row + x);
  Vector v = {};
  for (long lane = 0; x + lane < n; lane++) v[lane] = row[x + lane];
  return v;
}
static inline void store(float* row, long x, long n, Vector v) {
  if (x + LANES <= n) vector(row + x) = v;
  for (long lane = 0; x + LANES > n && x + lane < n; lane++) row[x + lane] = v[lane];
}

// Returns v. It keeps the compiler from reloading v from the cache for every product, which would stall the tiles.
static inline Vector in_register(Vector v) {
#if defined(__AVX__)
  asm("" : "+v"(v));
#endif
  return v;
}

static inline float sum_of_lanes(const Vector& v) {
  Four sum = {};
  for (long lane = 0; lane < LANES; lane += 4)
    sum += *reinterpret_cast<const Four*>(reinterpret_cast<const float*>(&v) + lane);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Prefetches the next class in small parts, since only a few requests can be in flight.
struct Ahead {
  const float* arrays[3];
  long done, size;
  inline void fetch() {
    if (done >= size) return;
    for (const float* array : arrays) __builtin_prefetch(array + done, 0, 2);
    done += 64 / sizeof(float);
  }
};

// out[r][c] = a_r . b_c for R rows from a and C rows from b. Consecutive vectors of a row are `step` vectors apart.
// LANES separate sums keep rounding small.
template <int R, int C>
static void dots(const Vector* a, const Vector* b, long step, long columns, float (&out)[R][C], Ahead& ahead) {
  Vector sums[R][C] = {};
  for (long y = 0; y < columns; y++, a += step, b += step) {
    ahead.fetch();
    Vector left[R], right[C];
    for (int r = 0; r < R; r++) left[r] = in_register(a[r]);
    for (int c = 0; c < C; c++) right[c] = in_register(b[c]);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) sums[r][c] += left[r] * right[c];
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) out[r][c] = sum_of_lanes(sums[r][c]);
}

struct Options {
  long k, n;
  float lr, momentum, sign;
  bool parallel;
};

enum Outcome { MOVED, CAPPED, SKIPPED };

// Makes the steps of classes, one at a time. R x C is the size of a tile.
template <int R, int C>
class Worker {
  const Options o;
  long k, columns, stride;  // rows, vectors per row, floats per row of a k x k matrix, all padded
  // z holds W and B, later H, by columns: the 2k vectors of the first LANES columns, W before B, then of the next ones.
  // Padding is zero, so that no loop has a remainder. A padding row is an absent direction like any other.
  Vector *z, *moved, *transported;
  float *ww, *bw, *wb, *bb;   // W Wᵀ, B Wᵀ, W Bᵀ, B Bᵀ
  float *c, *p, *q, *r, *s;   // H = B + c W, W' = p W + q H, M' = H or r W + s H
  float *a, *x, *xx, *t, *u;  // H Hᵀ; x and x² of cosm1_sinc; scratch
  Ahead ahead;

 public:
  long size;  // of `memory`, in floats

  Worker(const Options& options, float* memory) : o(options) {
    auto round_up = [](long value, long multiple) { return (value + multiple - 1) / multiple * multiple; };
    k = round_up(o.k, C);
    columns = round_up(o.n, GROUP * LANES) / LANES;
    stride = round_up(k, LANES);
    float* next = memory;
    auto take = [&](long floats) { return std::exchange(next, next + floats); };
    z = reinterpret_cast<Vector*>(take(columns * 2 * k * LANES));
    moved = reinterpret_cast<Vector*>(take(GROUP * 2 * k * LANES));
    transported = reinterpret_cast<Vector*>(take(GROUP * 2 * k * LANES));
    for (float** matrix : {&ww, &bw, &wb, &bb, &c, &p, &q, &r, &s, &a, &x, &xx, &t, &u}) *matrix = take(k * stride);
    size = next - memory;
    if (memory) std::fill(memory, next, 0.0f);
  }

  Outcome step(float* w, const float* d, float* m) {
    const long block = o.k * o.n;
    ahead = {{w + block, d + block, (m ? m : d) + block}, 0, block};
    pack(w, d, m);
    gram_matrices();

    // The Gram matrix A of H follows from those of W and B, up to rounding of the size of that in B Bᵀ. It does not
    // matter in lr² A while lr‖B‖ <= 1. Otherwise, or if rows of B must be dropped, H replaces B first and is projected
    // a second time below, which suffices. If that removes most of H, then H was rounding only, from a gradient inside
    // the subspace or from k = n, and the class does not move.
    bool absent = false;
    for (long i = 0; i < k; i++) absent |= !(ww[i * stride + i] > 0) && bb[i * stride + i] != 0;
    if (absent || !(o.lr * o.lr * trace(bb) <= 1)) {
      for (long i = 0; i < k; i++) {
        const float present = ww[i * stride + i] > 0;  // as a factor, so that a NaN remains and makes the energy NaN
        for (long j = 0; j < k; j++) c[i * stride + j] *= present;
        for (long y = 0; y < columns; y++) z[(2 * y + 1) * k + i] *= present;
      }
      set(p, 1), set(q, 0);
      transform_in_place(false);
      gram_matrices();
      product(a, c, wb), add(a, 1, a, 1, bb);
      if (2 * trace(a) < trace(bb)) {
        for (long y = 0; y < columns; y++) std::fill_n(z + (2 * y + 1) * k, k, Vector{});
        set(c, 0), set(wb, 0), set(bb, 0);
      }
    }
    product(a, c, wb), add(a, 1, a, 1, bb);  // H Hᵀ = (B + c W) Bᵀ, since H Wᵀ = 0
    const float energy = trace(a);  // ‖H‖²
    if (!std::isfinite(energy) || !std::isfinite(o.lr)) {
      std::fill_n(z, columns * 2 * k, Vector{});  // other classes rely on zero padding
      return SKIPPED;
    }

    const float speed = std::sqrt(std::max(energy, 0.0f));
    const bool within = o.lr * speed <= LARGEST_TURN;
    const float tau = within ? o.lr : LARGEST_TURN / speed;
    add(x, tau * tau, a, 0, a);
    cosm1_sinc(p, q);
    add(p, 1, p, 0, p, 1), add(q, -tau, q, 0, q);
    bool parallel = o.parallel;
    if (parallel) product(r, a, q), add(r, -1, r, 0, r), add(s, 1, p, 0, p);
    if (energy != 0) {  // a class that does not move stays bit-identical
      product(t, p, ww), product(u, t, p);
      product(t, q, a), product(x, t, q);
      add(u, -0.5f, u, -0.5f, x, 1.5f);  // one Newton–Schulz iteration, from the Gram matrix of p W + q H
      product(t, u, p), std::swap(t, p);
      product(t, u, q), std::swap(t, q);
    }
    if (o.lr * o.lr * energy > 1) {  // rounding in A matters: another iteration, from the result itself
      transform_in_place(parallel);
      gram_matrices();
      add(p, -0.5f, ww, 0, ww, 1.5f), set(q, 0), set(c, 0);
      parallel = false;
    }
    for (long y = 0; y < columns; y += GROUP) {
      const bool direct = k == o.k && (y + GROUP) * LANES <= o.n;  // no padding
      const Vector* with_momentum = transform(y, parallel, direct ? w : nullptr);
      if (!direct) write(w, moved, y);
      if (m) write(m, with_momentum + k, y);
    }
    return within ? MOVED : CAPPED;
  }

 private:
  // Steps 1 and 2: W and B = momentum * M + D to z.
  void pack(const float* w, const float* d, const float* m) {
    for (long i = 0; i < o.k; i++, w += o.n, d += o.n, m += m ? o.n : 0)
      for (long y = 0; y < columns; y++) {
        Vector b = o.sign * load(d, y * LANES, o.n);
        if (m) b += o.momentum * load(m, y * LANES, o.n);
        z[2 * y * k + i] = load(w, y * LANES, o.n);
        z[(2 * y + 1) * k + i] = b;
      }
  }

  // Computes ww, wb, bw and bb, the four quarters of z zᵀ, from its tiles on and above the diagonal, and then c, so
  // that H = B + c W = B − (B Wᵀ)(2I − W Wᵀ) W.
  void gram_matrices() {
    float* const quarters[2][2] = {{ww, wb}, {bw, bb}};
    auto entry = [&](long i, long j) -> float& {
      return quarters[i >= k][j >= k][(i >= k ? i - k : i) * stride + (j >= k ? j - k : j)];
    };
    for (long i = 0; i < 2 * k; i += R)
      for (long j = i / C * C; j < 2 * k; j += C) {
        float tile[R][C];
        dots<R, C>(z + i, z + j, 2 * k, columns, tile, ahead);
        for (long r = 0; r < R; r++)
          for (long c = 0; c < C; c++) entry(i + r, j + c) = entry(j + c, i + r) = tile[r][c];
      }
    product(c, bw, ww), add(c, 1, c, -2, bw);
  }

  // Writes start + f w + g h for GROUP vectors of all rows. start, or both g and h, may be null. In `out` the next
  // vector of a row is `across` floats away, and the next row `down`.
  void combine(float* out, long across, long down, const Vector* start, const float* f, const Vector* w, const float* g,
               const Vector* h) const {
    for (long i = 0; i < k; i += R) {
      Vector sums[R][GROUP] = {};
      for (int r = 0; start && r < R; r++)
        for (int v = 0; v < GROUP; v++) sums[r][v] = start[v * 2 * k + i + r];
      for (auto [factor, rows] : {std::pair(f, w), std::pair(g, h)})
        for (long j = 0; factor && j < k; j++)
          for (int v = 0; v < GROUP; v++) {
            const Vector row = in_register(rows[v * 2 * k + j]);
            for (int r = 0; r < R; r++) sums[r][v] += factor[(i + r) * stride + j] * row;
          }
      for (int r = 0; r < R; r++)
        for (int v = 0; v < GROUP; v++) vector(out + v * across + (i + r) * down) = sums[r][v];
    }
  }

  // Computes GROUP vectors from y of W', H and, if parallel, M'. `moved` gets W' before H, and `transported` gets M' in
  // the place of H. If `direct` is given, W' goes there, which saves a copy. Returns the buffer that holds M'.
  const Vector* transform(long y, bool parallel, float* direct = nullptr) {
    const Vector *w = z + y * 2 * k, *h = moved + k;
    const long across = 2 * k * LANES;
    combine(reinterpret_cast<float*>(moved + k), across, LANES, w + k, c, w, nullptr, nullptr);
    if (direct) combine(direct + y * LANES, LANES, o.n, nullptr, p, w, q, h);
    else combine(reinterpret_cast<float*>(moved), across, LANES, nullptr, p, w, q, h);
    if (!parallel) return moved;
    combine(reinterpret_cast<float*>(transported + k), across, LANES, nullptr, r, w, s, h);
    return transported;
  }

  void transform_in_place(bool parallel) {
    for (long y = 0; y < columns; y += GROUP) {
      const Vector* with_momentum = transform(y, parallel);
      for (long v = 0; v < GROUP * 2 * k; v++) z[y * 2 * k + v] = (v / k % 2 ? with_momentum : moved)[v];
    }
  }

  void write(float* out, const Vector* rows, long y) const {
    for (long i = 0; i < o.k; i++, out += o.n)
      for (long v = 0; v < GROUP; v++) store(out, (y + v) * LANES, o.n, rows[v * 2 * k + i]);
  }

  // cos√x − I and sin√x/√x, as `cosm1_sinc` of geometry.py. Overwrites x.
  void cosm1_sinc(float* cosm1, float* sinc) {
    int doublings = 0;
    float scale = 1;
    for (float size = trace(x); size > 1; size /= 4, scale /= 4) doublings++;
    add(x, scale, x, 0, x);
    product(xx, x, x);
    taylor(cosm1, {0, -1 / 2.0f, 1 / 24.0f, -1 / 720.0f, 1 / 40320.0f, -1 / 3628800.0f});
    taylor(sinc, {1, -1 / 6.0f, 1 / 120.0f, -1 / 5040.0f, 1 / 362880.0f, -1 / 39916800.0f});
    for (; doublings; doublings--) {
      product(t, cosm1, sinc), add(sinc, 1, sinc, 1, t);
      product(t, cosm1, cosm1), add(cosm1, 4, cosm1, 2, t);
    }
  }

  struct Coefficients {
    float f[6];
  };
  void taylor(float* out, Coefficients of) {
    add(out, of.f[5], x, 0, x, of.f[4]);
    for (int j = 2; j >= 0; j -= 2) product(t, xx, out), add(out, 1, t, of.f[j + 1], x, of.f[j]);
  }

  // k x k matrices: out = f g, where out is neither f nor g
  void product(float* out, const float* f, const float* g) const {
    for (long i = 0; i < k; i++)
      for (long y = 0; y < stride; y += LANES) {
        Vector sum = {};
        for (long j = 0; j < k; j++) sum += f[i * stride + j] * vector(g + j * stride + y);
        vector(out + i * stride + y) = sum;
      }
  }

  // out = α f + β g + γ I
  void add(float* out, float alpha, const float* f, float beta, const float* g, float gamma = 0) const {
    for (long y = 0; y < k * stride; y += LANES) vector(out + y) = alpha * vector(f + y) + beta * vector(g + y);
    for (long i = 0; i < k; i++) out[i * stride + i] += gamma;
  }

  void set(float* out, float diagonal) const {
    std::fill_n(out, k * stride, 0.0f);
    for (long i = 0; i < k; i++) out[i * stride + i] = diagonal;
  }

  float trace(const float* f) const {
    float sum = 0;
    for (long i = 0; i < k; i++) sum += f[i * stride + i];
    return sum;
  }
};

template <int R, int C>
static void run(float* w, const float* d, float* m, long classes, const Options& o, float* scratch, long* counts,
                int threads) {
  long skipped = 0, capped = 0;
#pragma omp parallel num_threads(threads) reduction(+ : skipped, capped)
  {
    const long size = Worker<R, C>(o, nullptr).size, block = o.k * o.n;
    Worker<R, C> worker(o, scratch + omp_get_thread_num() * size);
#pragma omp for schedule(dynamic, 4)  // not static: another process may use part of a core
    for (long i = 0; i < classes; i++) {
      const Outcome outcome = worker.step(w + i * block, d + i * block, m ? m + i * block : nullptr);
      skipped += outcome == SKIPPED;
      capped += outcome == CAPPED;
    }
  }
  counts[0] += skipped;
  counts[1] += capped;
}

extern "C" {

// Floats of scratch per thread.
long scratch_size(long k, long n) {
  const Options o = {k, n, 0, 0, 0, false};
  return k == 1 ? Worker<1, 1>(o, nullptr).size : Worker<ROWS, 4>(o, nullptr).size;
}

// Makes one step of all classes in place. m may be null. Adds the numbers of skipped and capped classes to counts.
void step(float* w, const float* d, float* m, long classes, long k, long n, float lr, float momentum, int maximize,
          int parallel, float* scratch, long* counts, int threads) {
  const Options o = {k, n, lr, momentum, maximize ? -1.0f : 1.0f, parallel != 0};
  (k == 1 ? run<1, 1> : run<ROWS, 4>)(w, d, m, classes, o, scratch, counts, threads);
}
}
