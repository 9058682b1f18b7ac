// gelu by tanh, x·sigmoid(ROOT·(x + CUBE·x³)), and its gradient: see runtime/kernels/pointwise.py.
#include "vectors.h"

constexpr float ROOT = 1.5957691216057308f, CUBE = 0.044715f;

static inline Vector inner(Vector x) { return x * (ROOT + CUBE * ROOT * x * x); }

static inline Vector sigmoid(Vector x) { return 1.0f / (1.0f + exponential(-x)); }

extern "C" void gelu(float* y, const float* x, ptrdiff_t count) {
#pragma omp parallel for if (count > SHARED)
  for (ptrdiff_t i = 0; i < count; i += LANES) {
    Vector own = load(x + i, count - i);
    store(y + i, own / (1.0f + exponential(-inner(own))), count - i);
  }
}

extern "C" void gelu_gradient(float* result, const float* d, const float* x, ptrdiff_t count) {
#pragma omp parallel for if (count > SHARED)
  for (ptrdiff_t i = 0; i < count; i += LANES) {
    Vector own = load(x + i, count - i), u = inner(own), s = sigmoid(u);
    Vector slope = s + 3.0f * (s * (1.0f - s)) * (u - 2.0f / 3.0f * ROOT * own);
    store(result + i, slope * load(d + i, count - i), count - i);
  }
}
