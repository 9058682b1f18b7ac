// Cross entropy of rows of logits, and its gradient: see runtime/kernels/rows.py. A target out of range has no logit.
#include "vectors.h"

// The negative log-likelihoods of targets, and the logarithms of the sums of exponentials.
extern "C" void nll(float* loss, float* denominator, const float* x, const int64_t* targets, ptrdiff_t rows,
                    ptrdiff_t n) {
#pragma omp parallel for if (rows * n > SHARED)
  for (ptrdiff_t row = 0; row < rows; row++) {
    const float* own = x + row * n;
    Vector peaks = all(-INFINITY), total = {};
    for (ptrdiff_t i = 0; i < n; i += LANES) {
      Vector each = load(own + i, n - i);
      if (n - i < LANES) each = first(n - i) ? each : all(-INFINITY);
      peaks = each > peaks ? each : peaks;
    }
    float peak = -INFINITY;
    for (ptrdiff_t lane = 0; lane < LANES; lane++) peak = peaks[lane] > peak ? peaks[lane] : peak;
    for (ptrdiff_t i = 0; i < n; i += LANES) {
      Vector each = exponential_bounded(load(own + i, n - i) - peak);
      if (n - i < LANES) each = first(n - i) ? each : Vector{};
      total += each;
    }
    float logarithm = std::log(sum(total));
    int64_t target = targets[row];
    denominator[row] = peak + logarithm;
    // Not of the denominator: a small loss would be the difference of large numbers.
    loss[row] = (0 <= target && target < n ? peak - own[target] : peak) + logarithm;
  }
}

// d·(softmax(x) − one_hot(targets)); d of each row, or the same of all if `of_rows` is null.
extern "C" void nll_gradient(float* result, const float* of_rows, const float* x, const int64_t* targets,
                             const float* denominator, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t start, float of_all) {
#pragma omp parallel for if (rows * n > SHARED)
  for (ptrdiff_t row = 0; row < rows; row++) {
    float d = of_rows ? of_rows[row] : of_all, *to = result + row * n;
    for (ptrdiff_t i = 0; i < n; i += LANES) {
      Vector each = load(x + row * n + i, n - i) - denominator[row];
      store(to + i, exponential_bounded(each) * d, n - i);
    }
    int64_t target = targets[row] - start;
    if (0 <= target && target < n) to[target] -= d;
  }
}
