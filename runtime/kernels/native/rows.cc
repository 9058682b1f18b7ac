// Layer norm and RMS norm of rows, and their gradients: see runtime/kernels/rows.py.
#include "vectors.h"

#ifdef _OPENMP
#include <omp.h>
#endif

// The mean over a row of what `term` makes of its elements from i on; lanes behind the last have to be zero. Four sums at
// a time: one alone would wait for each addition.
template <typename Term>
static inline float mean(ptrdiff_t n, Term term) {
  Vector totals[4] = {};
  ptrdiff_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (ptrdiff_t part = 0; part < 4; part++) totals[part] += term(i + part * LANES);
  for (; i < n; i += LANES) totals[0] += term(i);
  return sum((totals[0] + totals[1]) + (totals[2] + totals[3])) / (float)n;
}

extern "C" void normalize(float* y, float* rate, const float* x, ptrdiff_t rows, ptrdiff_t n, float eps, int center) {
#pragma omp parallel for if (rows * n > SHARED)
  for (ptrdiff_t row = 0; row < rows; row++) {
    const float* own = x + row * n;
    float middle = center ? mean(n, [=](ptrdiff_t i) { return load(own + i, n - i); }) : 0.0f;
    auto centered = [=](ptrdiff_t i) { return load(own + i, n - i) - middle; };
    float square = mean(n, [=](ptrdiff_t i) {
      Vector each = centered(i);
      if (n - i < LANES) each = first(n - i) ? each : Vector{};
      return each * each;
    });
    float factor = 1.0f / std::sqrt(square + eps);
    rate[row] = factor;
    for (ptrdiff_t i = 0; i < n; i += LANES) store(y + row * n + i, centered(i) * factor, n - i);
  }
}

// Gradients of x and, if there is a scale, of scale and shift; `plus`, `scale` and `to_shift` may be null. The sums over
// rows are those of each thread's rows, added in the order of the threads.
extern "C" void normalize_gradient(float* to_x, float* to_scale, float* to_shift, const float* d, const float* y,
                                   const float* rate, const float* scale, const float* plus, ptrdiff_t rows,
                                   ptrdiff_t n, int center) {
  ptrdiff_t width = padded(n);
#ifdef _OPENMP
  ptrdiff_t threads = rows * n > SHARED ? omp_get_max_threads() : 1;
#else
  ptrdiff_t threads = 1;
#endif
  static thread_local Scratch scratch;
  float* sums = scratch.of(2 * width * threads);
  memset(sums, 0, 2 * width * threads * sizeof(float));
  ptrdiff_t share = (rows + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (ptrdiff_t part = 0; part < threads; part++) {
    float *by_scale = sums + 2 * width * part, *by_shift = by_scale + width;
    ptrdiff_t end = (part + 1) * share < rows ? (part + 1) * share : rows;
    for (ptrdiff_t row = part * share; row < end; row++) {
      const float *own = d + row * n, *of_y = y + row * n;
      auto inner = [=](ptrdiff_t i) {
        Vector each = load(own + i, n - i);
        return scale ? each * load(scale + i, n - i) : each;
      };
      Vector along = {}, total = {};
      for (ptrdiff_t i = 0; i < n; i += LANES) {
        Vector each = load(own + i, n - i), position = load(of_y + i, n - i);
        if (scale) {
          store(by_scale + i, load(by_scale + i) + each * position);
          store(by_shift + i, load(by_shift + i) + each);
          each = each * load(scale + i, n - i);
        }
        along += each * position;
        total += each;
      }
      float slope = sum(along) / (float)n, middle = center ? sum(total) / (float)n : 0.0f, factor = rate[row];
      for (ptrdiff_t i = 0; i < n; i += LANES) {
        Vector each = (inner(i) - middle - load(of_y + i, n - i) * slope) * factor;
        if (plus) each += load(plus + row * n + i, n - i);
        store(to_x + row * n + i, each, n - i);
      }
    }
  }
  if (!scale) return;
  for (ptrdiff_t part = 1; part < threads; part++)
    for (ptrdiff_t i = 0; i < 2 * width; i += LANES)
      store(sums + i, load(sums + i) + load(sums + 2 * width * part + i));
  memcpy(to_scale, sums, n * sizeof(float));
  if (to_shift) memcpy(to_shift, sums + width, n * sizeof(float));
}
