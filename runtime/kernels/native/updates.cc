// What ends a step, over many tensors at once: AdamW, and the sum of squares that clipping takes: see
// runtime/kernels/optimizers.py.
#include "vectors.h"

// AdamW of parameters in place, like torch.optim.AdamW: `tensors` has the addresses of each parameter, its gradient, mean
// and mean square, and how many elements they have. Gradients are multiplied by `factor` first, `kept` of a parameter
// remains after its decay, and `step` and `root` correct the means for the number of updates.
extern "C" void adamw(const int64_t* tensors, ptrdiff_t count, float factor, float kept, float of_mean, float beta2,
                      float of_square, float root, float eps, float step) {
  ptrdiff_t elements = 0;
  for (ptrdiff_t i = 0; i < count; i++) elements += tensors[5 * i + 4];
#pragma omp parallel if (elements > SHARED)
  for (ptrdiff_t i = 0; i < count; i++) {
    const int64_t* own = tensors + 5 * i;
    float *parameter = (float*)own[0], *mean = (float*)own[2], *square = (float*)own[3];
    const float* gradient = (const float*)own[1];
#pragma omp for nowait
    for (ptrdiff_t j = 0; j < own[4]; j += LANES) {
      ptrdiff_t left = own[4] - j;
      Vector d = load(gradient + j, left) * factor;
      hold(d);  // rounded, as where clipping is an operation of its own
      Vector first = load(mean + j, left);
      first += of_mean * (d - first);
      Vector second = load(square + j, left) * beta2 + of_square * d * d;
      Vector weight = load(parameter + j, left) * kept - step * (first / (square_root(second) / root + eps));
      store(parameter + j, weight, left);
      store(mean + j, first, left);
      store(square + j, second, left);
    }
  }
}

// Elements whose squares are added in f32, all sums of these in f64: in blocks, so that the bits do not depend on threads.
constexpr ptrdiff_t BLOCK = 1 << 13;

// The sum of the squares of all elements; `tensors` has the address of each tensor, and how many elements it has.
extern "C" void sum_of_squares(double* total, const int64_t* tensors, ptrdiff_t count) {
  *total = 0.0;
  for (ptrdiff_t i = 0; i < count; i++) {
    const float* from = (const float*)tensors[2 * i];
    ptrdiff_t elements = tensors[2 * i + 1], blocks = (elements + BLOCK - 1) / BLOCK;
    static thread_local Scratch scratch;
    double* sums = (double*)scratch.of(2 * blocks);
#pragma omp parallel for if (elements > SHARED)
    for (ptrdiff_t block = 0; block < blocks; block++) {
      ptrdiff_t j = block * BLOCK, end = j + BLOCK < elements ? j + BLOCK : elements;
      Vector totals[4] = {};
      for (; j + 4 * LANES <= end; j += 4 * LANES)
        for (ptrdiff_t part = 0; part < 4; part++) {
          Vector each = load(from + j + part * LANES);
          totals[part] += each * each;
        }
      for (; j < end; j += LANES) {
        Vector each = load(from + j, end - j);
        totals[0] += each * each;
      }
      sums[block] = sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
    }
    for (ptrdiff_t block = 0; block < blocks; block++) *total += sums[block];
  }
}
