// The transpose of a matrix, in squares that stay in registers: torch's copy takes one element at a time, in one thread.
#include <utility>

#include "vectors.h"

typedef std::make_integer_sequence<int, LANES> Lanes;

// Of two rows that are `apart` from each other in a square, exchanges the upper lanes of the first with the lower lanes of
// the second, in pairs of groups of so many lanes: done for 1, 2, 4 and so on, it transposes the square.
template <int apart, int... lane>
static inline void exchange(Vector& first, Vector& second, std::integer_sequence<int, lane...>) {
  Vector a = first, b = second;
#ifdef __clang__
  first = __builtin_shufflevector(a, b, ((lane & apart) ? (int)LANES + lane - apart : lane)...);
  second = __builtin_shufflevector(a, b, ((lane & apart) ? (int)LANES + lane : lane + apart)...);
#else
  first = __builtin_shuffle(a, b, Integers{((lane & apart) ? (int)LANES + lane - apart : lane)...});
  second = __builtin_shuffle(a, b, Integers{((lane & apart) ? (int)LANES + lane : lane + apart)...});
#endif
}

template <int apart>
static inline void exchange_all(Vector* rows) {
  for (int i = 0; i < LANES; i++)
    if (!(i & apart)) exchange<apart>(rows[i], rows[i + apart], Lanes{});
}

// Columns that are read row by row: four lines of a cache from each page.
constexpr ptrdiff_t STRIP = 64;

// [rows, columns] → [columns, rows].
extern "C" void transpose(float* to, const float* from, ptrdiff_t rows, ptrdiff_t columns) {
#pragma omp parallel for if (rows * columns > SHARED)
  for (ptrdiff_t strip = 0; strip < columns; strip += STRIP) {
    ptrdiff_t end = columns - strip < STRIP ? columns : strip + STRIP;
    for (ptrdiff_t row = 0; row < rows; row += LANES) {
      for (ptrdiff_t column = strip; column < end; column += LANES) {
        ptrdiff_t down = rows - row < LANES ? rows - row : LANES;
        ptrdiff_t across = end - column < LANES ? end - column : LANES;
        Vector square[LANES];
#pragma GCC unroll 16
        for (ptrdiff_t i = 0; i < LANES; i++)
          square[i] = i < down ? load(from + (row + i) * columns + column, across) : Vector{};
        exchange_all<1>(square);
        exchange_all<2>(square);
        exchange_all<4>(square);
        if (LANES == 16) exchange_all<LANES / 2>(square);
#pragma GCC unroll 16
        for (ptrdiff_t i = 0; i < LANES; i++)
          if (i < across) store(to + (column + i) * rows + row, square[i], down);
      }
    }
  }
}
