// Softmax attention in f32 and its gradients, head by head and in blocks of queries: the scores of a block against the
// keys that it sees are made once, and stay in the cache (Dao et al., arXiv 2205.14135, without blocks of keys). With
// causality keys behind a block are left out. A lane is a query: scores lie as [keys, BLOCK].
#include "vectors.h"

// Queries of a block, and rows of a product's tile: with two vectors each, what registers hold.
#ifdef __AVX512F__
constexpr ptrdiff_t BLOCK = 32, ROWS = 8;
#else
constexpr ptrdiff_t BLOCK = 24, ROWS = 6;
#endif

// c[ROWS, VECTORS] = a·b, or added to it. An element of a is at i·ai + k·ak.
template <int VECTORS, bool ADDED>
static inline void tile(float* c, ptrdiff_t ldc, const float* a, ptrdiff_t ai, ptrdiff_t ak, const float* b,
                        ptrdiff_t ldb, ptrdiff_t inner) {
  Vector sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (ptrdiff_t i = 0; i < ROWS; i++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) sums[i][v] = ADDED ? load(c + i * ldc + v * LANES) : Vector{};
  for (ptrdiff_t k = 0; k < inner; k++) {
    Vector row[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) hold(row[v] = load(b + k * ldb + v * LANES));
#pragma GCC unroll 8
    for (ptrdiff_t i = 0; i < ROWS; i++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) sums[i][v] += a[i * ai + k * ak] * row[v];
  }
#pragma GCC unroll 8
  for (ptrdiff_t i = 0; i < ROWS; i++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) store(c + i * ldc + v * LANES, sums[i][v]);
}

// c[m, n] = a[m, inner]·b[inner, n], or added to it: m a multiple of ROWS, n of LANES.
template <bool ADDED>
static void product(float* c, ptrdiff_t ldc, const float* a, ptrdiff_t ai, ptrdiff_t ak, const float* b, ptrdiff_t ldb,
                    ptrdiff_t m, ptrdiff_t n, ptrdiff_t inner) {
  for (ptrdiff_t j = 0; j < n; j += 2 * LANES)
    for (ptrdiff_t i = 0; i < m; i += ROWS)
      if (n - j > LANES) tile<2, ADDED>(c + i * ldc + j, ldc, a + i * ai, ai, ak, b + j, ldb, inner);
      else tile<1, ADDED>(c + i * ldc + j, ldc, a + i * ai, ai, ak, b + j, ldb, inner);
}

// Rows one after the other, filled up with zeros to [rows, width], times a factor.
static void pack(float* to, ptrdiff_t rows, ptrdiff_t width, const float* from, ptrdiff_t stride, ptrdiff_t count,
                 ptrdiff_t size, float factor) {
  for (ptrdiff_t i = 0; i < count; i++)
    for (ptrdiff_t d = 0; d < width; d += LANES)
      store(to + i * width + d, size > d ? load(from + i * stride + d, size - d) * factor : Vector{});
  memset(to + count * width, 0, (rows - count) * width * sizeof(float));
}

// Packed rows to their places, times a factor.
static void unpack(float* to, ptrdiff_t stride, const float* from, ptrdiff_t count, ptrdiff_t width, ptrdiff_t size,
                   float factor) {
  for (ptrdiff_t i = 0; i < count; i++)
    for (ptrdiff_t d = 0; d < size; d += LANES)
      store(to + i * stride + d, load(from + i * width + d) * factor, size - d);
}

// The transposed of BLOCK packed rows: [width, BLOCK].
static void turn(float* to, const float* from, ptrdiff_t width) {
  for (ptrdiff_t i = 0; i < BLOCK; i += 8)
    for (ptrdiff_t d = 0; d < width; d++)
#pragma GCC unroll 8
      for (ptrdiff_t lane = 0; lane < 8; lane++) to[d * BLOCK + i + lane] = from[(i + lane) * width + d];
}

// What a call is given: sizes, and strides of batch, head and position, in elements; a row's elements are neighbours.
struct Shape {
  int64_t batch, heads, queries, keys, size, causal;
  int64_t q[3], k[3], v[3], o[3], l[3], d[3], dq[3], dk[3], dv[3];

  ptrdiff_t at(const int64_t* strides, ptrdiff_t head) const {
    return head / heads * strides[0] + head % heads * strides[1];
  }
  // The keys that queries before this one see.
  ptrdiff_t seen(ptrdiff_t end) const { return causal && end < keys ? end : keys; }
};

// Lanes of queries from this one on that see a key.
static inline Integers sees(const Shape& s, ptrdiff_t query, ptrdiff_t key) {
  return s.causal ? ~first(key - query) : first(LANES);
}

extern "C" void attend(float* o, float* l, const float* q, const float* k, const float* v, const Shape* shape,
                       float scale) {
  const Shape s = *shape;
  ptrdiff_t keys = padded(s.keys, ROWS), width = padded(s.size);
#pragma omp parallel for if (s.batch * s.heads * s.queries * s.size > SHARED)
  for (ptrdiff_t head = 0; head < s.batch * s.heads; head++) {
    static thread_local Scratch scratch;
    float* of_k = scratch.of(2 * keys * width + keys * BLOCK + 2 * BLOCK * width);
    float *of_v = of_k + keys * width, *scores = of_v + keys * width, *rows = scores + keys * BLOCK;
    float* turned = rows + BLOCK * width;
    pack(of_k, keys, width, k + s.at(s.k, head), s.k[2], s.keys, s.size, 1.0f);
    pack(of_v, keys, width, v + s.at(s.v, head), s.v[2], s.keys, s.size, 1.0f);
    for (ptrdiff_t block = 0; block < s.queries; block += BLOCK) {
      ptrdiff_t count = s.queries - block < BLOCK ? s.queries - block : BLOCK, own = s.seen(block + count);
      ptrdiff_t lanes = padded(count);
      pack(rows, BLOCK, width, q + s.at(s.q, head) + block * s.q[2], s.q[2], count, s.size, scale);
      turn(turned, rows, width);
      product<false>(scores, BLOCK, of_k, width, 1, turned, BLOCK, padded(own, ROWS), lanes, s.size);
      float peaks[BLOCK], totals[BLOCK];
      for (ptrdiff_t part = 0; part < lanes; part += LANES) {
        Vector peak = all(-INFINITY), total = {};
        ptrdiff_t clear = s.seen(block + part + 1);  // keys that all lanes see
        for (ptrdiff_t j = 0; j < own; j++) {
          Vector each = load(scores + j * BLOCK + part);
          if (j >= clear) each = sees(s, block + part, j) ? each : all(-INFINITY);
          peak = each > peak ? each : peak;
        }
        for (ptrdiff_t j = 0; j < own; j++) {
          Vector each = exponential_bounded(load(scores + j * BLOCK + part) - peak);
          if (j >= clear) each = sees(s, block + part, j) ? each : Vector{};
          store(scores + j * BLOCK + part, each);
          total += each;
        }
        store(peaks + part, peak);
        store(totals + part, total);
      }
      product<false>(rows, width, scores, 1, BLOCK, of_v, width, padded(count, ROWS), width, own);
      for (ptrdiff_t i = 0; i < count; i++) {
        l[s.at(s.l, head) + (block + i) * s.l[2]] = peaks[i] + std::log(totals[i]);
        unpack(o + s.at(s.o, head) + (block + i) * s.o[2], 0, rows + i * width, 1, width, s.size, 1.0f / totals[i]);
      }
    }
  }
}

extern "C" void attend_gradient(float* dq, float* dk, float* dv, const float* q, const float* k, const float* v,
                                const float* o, const float* l, const float* d, const Shape* shape, float scale) {
  const Shape s = *shape;
  ptrdiff_t keys = padded(s.keys, ROWS), width = padded(s.size);
#pragma omp parallel for if (s.batch * s.heads * s.queries * s.size > SHARED)
  for (ptrdiff_t head = 0; head < s.batch * s.heads; head++) {
    static thread_local Scratch scratch;
    float* of_k = scratch.of(4 * keys * width + 2 * keys * BLOCK + 4 * BLOCK * width);
    float *of_v = of_k + keys * width, *to_k = of_v + keys * width, *to_v = to_k + keys * width;
    float *weights = to_v + keys * width, *slopes = weights + keys * BLOCK, *rows = slopes + keys * BLOCK;
    float *given = rows + BLOCK * width, *turned = given + BLOCK * width, *made = turned + BLOCK * width;
    pack(of_k, keys, width, k + s.at(s.k, head), s.k[2], s.keys, s.size, 1.0f);
    pack(of_v, keys, width, v + s.at(s.v, head), s.v[2], s.keys, s.size, 1.0f);
    memset(to_k, 0, 2 * keys * width * sizeof(float));
    for (ptrdiff_t block = 0; block < s.queries; block += BLOCK) {
      ptrdiff_t count = s.queries - block < BLOCK ? s.queries - block : BLOCK, own = s.seen(block + count);
      ptrdiff_t lanes = padded(count);
      ptrdiff_t across = padded(own, ROWS);
      pack(rows, BLOCK, width, q + s.at(s.q, head) + block * s.q[2], s.q[2], count, s.size, scale);
      pack(given, BLOCK, width, d + s.at(s.d, head) + block * s.d[2], s.d[2], count, s.size, 1.0f);
      turn(turned, rows, width);
      product<false>(weights, BLOCK, of_k, width, 1, turned, BLOCK, across, lanes, s.size);
      turn(turned, given, width);
      product<false>(slopes, BLOCK, of_v, width, 1, turned, BLOCK, across, lanes, s.size);
      float denominators[BLOCK] = {}, means[BLOCK] = {};
      for (ptrdiff_t i = 0; i < count; i++) {
        const float* of_o = o + s.at(s.o, head) + (block + i) * s.o[2];
        Vector mean = {};
        for (ptrdiff_t e = 0; e < s.size; e += LANES) mean += load(of_o + e, s.size - e) * load(given + i * width + e);
        means[i] = sum(mean);
        denominators[i] = l[s.at(s.l, head) + (block + i) * s.l[2]];
      }
      for (ptrdiff_t part = 0; part < lanes; part += LANES) {
        Vector denominator = load(denominators + part), mean = load(means + part);
        ptrdiff_t clear = s.seen(block + part + 1);
        for (ptrdiff_t j = 0; j < own; j++) {
          float *weight = weights + j * BLOCK + part, *slope = slopes + j * BLOCK + part;
          Vector each = exponential_bounded(load(weight) - denominator), to_score = each * (load(slope) - mean);
          if (j >= clear) {
            Integers seen = sees(s, block + part, j);
            each = seen ? each : Vector{};
            to_score = seen ? to_score : Vector{};
          }
          store(weight, each);
          store(slope, to_score);
        }
      }
      // Keys that fill up the last tile are not seen.
      memset(weights + own * BLOCK, 0, (across - own) * BLOCK * sizeof(float));
      memset(slopes + own * BLOCK, 0, (across - own) * BLOCK * sizeof(float));
      product<true>(to_v, width, weights, BLOCK, 1, given, width, across, width, count);
      product<true>(to_k, width, slopes, BLOCK, 1, rows, width, across, width, count);
      product<false>(made, width, slopes, 1, BLOCK, of_k, width, padded(count, ROWS), width, own);
      unpack(dq + s.at(s.dq, head) + block * s.dq[2], s.dq[2], made, count, width, s.size, scale);
    }
    unpack(dk + s.at(s.dk, head), s.dk[2], to_k, s.keys, width, s.size, 1.0f);
    unpack(dv + s.at(s.dv, head), s.dv[2], to_v, s.keys, width, s.size, 1.0f);
  }
}
