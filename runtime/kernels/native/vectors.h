// Vectors of f32, as wide as a register, by the vector extensions of GCC and Clang. What is the last of a row is
// computed in a vector that is filled up, by the same instructions: the bits of an element do not depend on its place.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __AVX__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
constexpr ptrdiff_t LANES = 16;
#else
constexpr ptrdiff_t LANES = 8;
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

constexpr ptrdiff_t padded(ptrdiff_t count, ptrdiff_t to = LANES) { return (count + to - 1) / to * to; }

static inline Vector load(const float* from) {
  Vector x;
  memcpy(&x, from, sizeof x);
  return x;
}

static inline void store(float* to, Vector x) { memcpy(to, &x, sizeof x); }

// Says that a vector is to stay in a register: compilers would load it for each use, and loads are what limits products.
static inline void hold(Vector& x) {
#ifdef __AVX__
  asm("" : "+v"(x));
#endif
}

static inline Vector load(const float* from, ptrdiff_t count) {
  if (count >= LANES) return load(from);
  Vector x = {};
  memcpy(&x, from, count * sizeof(float));
  return x;
}

static inline void store(float* to, Vector x, ptrdiff_t count) {
  if (count >= LANES) store(to, x);
  else memcpy(to, &x, count * sizeof(float));
}

static inline Vector all(float x) { return x - Vector{}; }

static inline float sum(Vector x) {
  float lanes[LANES];
  store(lanes, x);
  for (ptrdiff_t half = LANES / 2; half; half /= 2)
    for (ptrdiff_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

static inline Vector square_root(Vector x) {
#if defined(__AVX512F__)
  return (Vector)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX__)
  return (Vector)_mm256_sqrt_ps((__m256)x);
#else
  for (ptrdiff_t i = 0; i < LANES; i++) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

// True for the first `count` lanes.
static inline Integers first(ptrdiff_t count) {
  Integers lane;
  for (ptrdiff_t i = 0; i < LANES; i++) lane[i] = (int32_t)i;
  return lane < (int32_t)(count < 0 ? 0 : count < LANES ? count : LANES);
}

// exp of what is at most 88.37, to about one unit in the last place (Cephes' expf); below -87.7 it is zero.
static inline Vector exponential_bounded(Vector x) {
  x = all(-88.0f) > x ? all(-88.0f) : x;
  Vector shifted = x * 1.44269504f + 12582912.0f;  // whose last bits are those of the nearest integer
  Vector n = shifted - 12582912.0f;
  Vector r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Integers bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;
  Vector power;
  memcpy(&power, &bits, sizeof power);
  return p * power;
}

// exp; from 88.37 on it is infinite.
static inline Vector exponential(Vector x) {
  Vector y = exponential_bounded(all(88.37f) < x ? all(88.37f) : x);
  return x > 88.37f ? all(INFINITY) : y;
}

// Memory for intermediate results, one of each thread, which grows and is kept.
struct Scratch {
  float* memory = nullptr;
  size_t size = 0;
  ~Scratch() { free(memory); }
  float* of(size_t count) {
    if (count > size) {
      free(memory);
      size = count;
      memory = (float*)aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
      if (!memory) abort();
    }
    return memory;
  }
};

// Fewer elements are not worth the threads.
constexpr ptrdiff_t SHARED = 1 << 15;
