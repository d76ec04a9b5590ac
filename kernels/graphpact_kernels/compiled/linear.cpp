// The compiled product of rows with a weight matrix: out = x * weight^T + bias.
//
// A decode step multiplies a few rows with every weight of the model, so it takes about as long as reading the weights
// once. Weights are read row by row in the layout of checkpoints, [out_features, in_features]. Nothing is packed, so
// no second copy can become stale when weights are changed in place. Rows of x are multiplied in groups of `kRows` with
// `kColumns` rows of the weight; sums stay in registers. Rows of x that do not fit the L1 cache are multiplied in
// chunks; the sums of earlier chunks are kept in memory.
//
// A prefill multiplies many rows. From `kMany` rows on, a product transposes the weight by panels, see `ManyRows`. On
// an EPYC (Zen 4), with weights that are in no cache, it reaches 98 GFLOP/s of float32 with 64 rows and 104 with 128;
// MKL reaches 82 and 92, and oneDNN 88 and 98. Of bfloat16 it reaches 190 and 205, and oneDNN 155 and 187.
//
// The result of a row does not depend on the number of threads, nor on the other rows, except on whether they are
// `kMany`. Numbers of bfloat16 are multiplied in pairs where the CPU can (AVX512_BF16), elsewhere widened; sums are
// float32 in both.
//
// Does not: replace torch's product of many rows of bfloat16 on another CPU, which is faster.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "sums.h"
#include "text.h"

namespace graphpact {
namespace {

using Vec = at::vec::Vectorized<float>;

#ifdef CPU_CAPABILITY_AVX512
constexpr int64_t kRows = 8, kColumns = 3;  // 24 of 32 registers
#else
constexpr int64_t kRows = 4, kColumns = 2;  // 8 of 16
#endif
constexpr int64_t kChunk = 24 << 10;         // bytes of rows of x that stay in the first cache
constexpr int64_t kAhead = 8 << 10;          // bytes of the weight that are fetched ahead of their use
constexpr int64_t kPanel = 128 << 10;        // bytes of the weight that all rows are multiplied with in turn
constexpr int64_t kMacsPerThread = 1 << 17;  // the fewest multiplications for which a thread is used
constexpr int64_t kMany = 24;                // from so many rows on, weights are transposed by panels
constexpr int64_t kFar = 4;                  // columns of a single row that are multiplied side by side

// Weights are fetched to the L2 cache. On an EPYC (Zen 4), products of 2 to 8 rows with weights that are in no cache
// read 10 GB/s if they fetch to the L1 cache, and 17 to 20 GB/s if to L2.
constexpr int kCache = 2;

#ifdef CPU_CAPABILITY_AVX512
// Keep a vector in a register: the compiler would load it again for each product with it.
inline Vec in_register(__m512 x) {
  asm("" : "+v"(x));
  return x;
}
#else
inline Vec in_register(Vec x) { return x; }
#endif

// The type of the numbers of x in a product with a weight of type `T`.
template <typename T>
struct InputOf {
  using type = float;
};
#ifdef __AVX512BF16__
template <>
struct InputOf<at::BFloat16> {
  using type = at::BFloat16;
};
#endif
template <typename T>
using Input = typename InputOf<T>::type;

// The number of elements in a vector.
template <typename T>
constexpr int64_t kStep = at::vec::Vectorized<T>::size();

// parts[r * C + c] += the products of x[r], a row of `k` numbers, and weight[c * apart], from `begin` to `end`, which
// are multiples of `kStep`. Memory is fetched `ahead` rows of the weight before its use; for one row of x, the CPU does
// that.
template <int64_t R, int64_t C>
C10_ALWAYS_INLINE void add_products(const float* x, const float* weight, int64_t k, int64_t apart, int64_t ahead,
                                    int64_t begin, int64_t end, Vec (&parts)[R * C]) {
  for (int64_t d = begin; d < end; d += kStep<float>) {
    Vec of[C];
#pragma GCC unroll 8
    for (int64_t c = 0; c < C; c++) {
      of[c] = Vec::loadu(weight + c * apart * k + d);
      if constexpr (R > 1) __builtin_prefetch(weight + (c + ahead) * k + d, 0, kCache);
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < R; r++) {
      const Vec its = in_register(Vec::loadu(x + r * k + d));
#pragma GCC unroll 8
      for (int64_t c = 0; c < C; c++) parts[r * C + c] = at::vec::fmadd(its, of[c], parts[r * C + c]);
    }
  }
}

#ifdef __AVX512BF16__
inline __m512bh pairs_at(const at::BFloat16* numbers) { return (__m512bh)_mm512_loadu_si512(numbers); }

// The same for bfloat16, by instructions that multiply pairs of numbers and add both products in float32.
template <int64_t R, int64_t C>
C10_ALWAYS_INLINE void add_products(const at::BFloat16* x, const at::BFloat16* weight, int64_t k, int64_t apart,
                                    int64_t ahead, int64_t begin, int64_t end, Vec (&parts)[R * C]) {
  for (int64_t d = begin; d < end; d += kStep<at::BFloat16>) {
    __m512bh of[C];
#pragma GCC unroll 8
    for (int64_t c = 0; c < C; c++) {
      of[c] = pairs_at(weight + c * apart * k + d);
      if constexpr (R > 1) __builtin_prefetch(weight + (c + ahead) * k + d, 0, kCache);
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < R; r++) {
      const __m512bh its = pairs_at(x + r * k + d);
#pragma GCC unroll 8
      for (int64_t c = 0; c < C; c++) parts[r * C + c] = _mm512_dpbf16_ps(parts[r * C + c], its, of[c]);
    }
  }
}
#else
// The same for bfloat16, with widened numbers.
template <int64_t R, int64_t C>
C10_ALWAYS_INLINE void add_products(const float* x, const at::BFloat16* weight, int64_t k, int64_t apart, int64_t ahead,
                                    int64_t begin, int64_t end, Vec (&parts)[R * C]) {
  using Narrow = at::vec::Vectorized<at::BFloat16>;
  for (int64_t d = begin; d < end; d += kStep<at::BFloat16>) {
    Vec low[C], high[C];
    for (int64_t c = 0; c < C; c++) {
      std::tie(low[c], high[c]) = at::vec::convert_to_float<at::BFloat16>(Narrow::loadu(weight + c * apart * k + d));
      if constexpr (R > 1) __builtin_prefetch(weight + (c + ahead) * k + d, 0, kCache);
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < R; r++) {
      const Vec first = in_register(Vec::loadu(x + r * k + d));
      const Vec second = in_register(Vec::loadu(x + r * k + d + Vec::size()));
#pragma GCC unroll 8
      for (int64_t c = 0; c < C; c++)
        parts[r * C + c] = at::vec::fmadd(second, high[c], at::vec::fmadd(first, low[c], parts[r * C + c]));
    }
  }
}
#endif

// Add the products of the numbers from `d` on, which do not fill a vector. Each is rounded once, for any `R` and `C`.
template <int64_t R, int64_t C, typename X, typename T>
inline void add_rest(const X* x, const T* weight, int64_t d, int64_t k, int64_t apart, float (&sums)[R * C]) {
  for (; d < k; d++)
    for (int64_t r = 0; r < R; r++)
      for (int64_t c = 0; c < C; c++)
        sums[r * C + c] =
            std::fma(static_cast<float>(x[r * k + d]), static_cast<float>(weight[c * apart * k + d]), sums[r * C + c]);
}

template <typename T>
struct Product {
  const Input<T>* x;
  int64_t rows, k, ahead;
  const T *weight, *bias;
  T* out;
  int64_t out_stride;

  // How many numbers of a row are in whole vectors.
  int64_t whole() const { return k / kStep<T> * kStep<T>; }

  void write(int64_t row, int64_t column, float sum) const {
    const float shift = bias == nullptr ? 0.f : static_cast<float>(bias[column]);
    out[row * out_stride + column] = static_cast<T>(sum + shift);
  }

  // Add the products of the numbers from `from` to `to` to `kept`, which has the sums of the numbers before. The
  // columns are `column`, `column + apart` and so on. The case of all numbers at once, `kIsWhole`, is compiled
  // separately; its sums never leave the registers. If this is not inlined, a product with a weight of 128 x 128 takes
  // up to 1.4 times as long.
  template <int64_t R, int64_t C, bool kIsWhole>
  C10_ALWAYS_INLINE void block(int64_t row, int64_t column, int64_t apart, int64_t from, int64_t to, Vec* kept) const {
    const Input<T>* its = x + row * k;
    const T* of = weight + column * k;
    Vec parts[R * C];
    for (int64_t i = 0; i < R * C; i++) parts[i] = kIsWhole || from == 0 ? Vec(0.f) : kept[i];
    add_products<R, C>(its, of, k, apart, std::max(C, ahead), from, to, parts);
    if constexpr (!kIsWhole) {
      for (int64_t i = 0; i < R * C; i++) kept[i] = parts[i];
      if (to == whole()) finish<C>(row, column, apart, R, kept);
    } else {
      float sums[R * C];
      sum_each(parts, sums);
      add_rest<R, C>(its, of, to, k, apart, sums);
      for (int64_t r = 0; r < R; r++)
        for (int64_t c = 0; c < C; c++) write(row + r, column + c * apart, sums[r * C + c]);
    }
  }

  // Write the results of a block of `R` rows and `C` columns, whose products are in `kept`: what `block` does with all
  // numbers at once. `R` is no parameter of the template, because the rows are long here: less is compiled.
  template <int64_t C>
  void finish(int64_t row, int64_t column, int64_t apart, int64_t R, const Vec* kept) const {
    constexpr int64_t kGroup = 16, kGroups = (kRows * C + kGroup - 1) / kGroup;
    float sums[kGroups * kGroup];
    for (int64_t at = 0; at < R * C; at += kGroup) {
      Vec parts[kGroup];
      for (int64_t i = 0; i < kGroup; i++) parts[i] = at + i < R * C ? kept[at + i] : Vec(0.f);
      float of_group[kGroup];
      sum_each(parts, of_group);
      std::copy_n(of_group, kGroup, sums + at);
    }
    for (int64_t r = 0; r < R; r++) {
      float of_row[C];
      std::copy_n(sums + r * C, C, of_row);
      add_rest<1, C>(x + (row + r) * k, weight + column * k, whole(), k, apart, of_row);
      for (int64_t c = 0; c < C; c++) write(row + r, column + c * apart, of_row[c]);
    }
  }

  // `R` rows from `row` on, with the columns from `begin` to `end`, and the numbers from `from` to `to`. For a single
  // row the columns of a block are far apart, one in each of `C` parts of them: the CPU then fetches `C` places of the
  // weight side by side. With weights that are in no cache this takes 0.85 of the time on an EPYC (Zen 4).
  template <int64_t R, int64_t C, bool kIsWhole>
  void columns(int64_t row, int64_t begin, int64_t end, int64_t from, int64_t to, Vec* kept) const {
    const int64_t blocks = (end - begin) / C, apart = R == 1 ? blocks : 1, next = R == 1 ? 1 : C;
    for (int64_t i = 0; i < blocks; i++, kept += R * C)
      block<R, C, kIsWhole>(row, begin + i * next, apart, from, to, kept);
    for (int64_t column = begin + blocks * C; column < end; column++, kept += R)
      block<R, 1, kIsWhole>(row, column, 1, from, to, kept);
  }

  // `R` rows from `row` on, with the columns from `begin` to `end`.
  template <int64_t R, int64_t C>
  void strip(int64_t row, int64_t begin, int64_t end) const {
    const int64_t fits = kChunk / (R * static_cast<int64_t>(sizeof(Input<T>))) / kStep<T> * kStep<T>;
    if (k <= fits + fits / 2) {  // a short second chunk costs more than it saves
      columns<R, C, true>(row, begin, end, 0, whole(), nullptr);
      return;
    }
    static thread_local std::vector<Vec> kept;  // its memory is kept, so that a step allocates nothing
    if (static_cast<int64_t>(kept.size()) < R * (end - begin)) kept.resize(R * (end - begin));
    for (int64_t from = 0; from < whole(); from += fits)
      columns<R, C, false>(row, begin, end, from, std::min(from + fits, whole()), kept.data());
  }

  // All rows with the columns from `begin` to `end`. This part of the weight stays in the L2 cache, and the rows that
  // are multiplied with it stay in the L1 cache.
  void run(int64_t begin, int64_t end) const {
    const int64_t most = kPanel / (k * static_cast<int64_t>(sizeof(T)));
    const int64_t panel = rows == 1 ? end - begin : std::max(16 * kColumns, most / kColumns * kColumns);
    for (int64_t at = begin; at < end; at += panel) {
      const int64_t last = std::min(at + panel, end);
      int64_t row = 0;
      for (; row + kRows <= rows; row += kRows) strip<kRows, kColumns>(row, at, last);
      if constexpr (kRows > 4) {
        switch (rows - row) {
          case 7: strip<7, kColumns>(row, at, last); break;
          case 6: strip<6, kColumns>(row, at, last); break;
          case 5: strip<5, kColumns>(row, at, last); break;
          case 4: strip<4, kColumns>(row, at, last); break;
          default: break;
        }
        if (rows - row > 3) continue;
      }
      switch (rows - row) {
        case 3: strip<3, kColumns>(row, at, last); break;
        case 2: strip<2, kColumns>(row, at, last); break;
        case 1: strip<1, kFar>(row, at, last); break;
        default: break;
      }
    }
  }
};

// A unit is what a lane multiplies at once: a number of float32, or two neighbours of bfloat16. Both have 32 bits.
template <typename T>
constexpr int64_t kUnit = sizeof(float) / sizeof(T);

template <typename T>
C10_ALWAYS_INLINE Vec add_product(Vec sums, Vec its, Vec of) {
  return at::vec::fmadd(its, of, sums);
}
#ifdef __AVX512BF16__
template <>
C10_ALWAYS_INLINE Vec add_product<at::BFloat16>(Vec sums, Vec its, Vec of) {
  return _mm512_dpbf16_ps(sums, (__m512bh)__m512(its), (__m512bh)__m512(of));
}
#endif

inline void store_numbers(Vec first, Vec second, float* to, int64_t count) {
  first.store(to, std::min<int64_t>(count, Vec::size()));
  second.store(to + Vec::size(), std::max<int64_t>(0, count - Vec::size()));
}
inline void store_numbers(Vec first, Vec second, at::BFloat16* to, int64_t count) {
  at::vec::convert_from_float<at::BFloat16>(first, second).store(to, count);
}

// The product of many rows. A panel of the weight is transposed, so that a vector holds one unit of input for several
// outputs, and no vector has to be summed at the end. All rows are multiplied with a panel while it is in the L2 cache,
// and the next panel is fetched meanwhile.
template <typename T>
struct ManyRows {
#ifdef CPU_CAPABILITY_AVX512
  static constexpr int64_t kRowsAtOnce = 14;  // with two vectors of sums each, 28 of 32 registers
#else
  static constexpr int64_t kRowsAtOnce = 6;  // 12 of 16
#endif
  static constexpr int64_t kWidth = 2 * Vec::size();
  static constexpr int64_t kDepth = 640;  // the most units in a panel; longer sums of number by number are less exact

  const float* x;  // units
  int64_t rows, n, k;
  float* turned_x;      // `x` with each block of rows transposed, see `turn`
  const float* weight;  // units
  const T* bias;
  T* out;

  // The outputs from `column` on, of which there are `width`, and `depth` units of their input from `from` on.
  struct Panel {
    const float* turned;
    int64_t column, width, from, depth;
    float* kept;         // the sums of earlier units, for each row
    const float* shift;  // the bias; null if there is none
  };

  // Multiply `R` rows from `row` on with a panel. Meanwhile `lines` lines of memory are fetched from `next` on.
  template <int64_t R>
  void block(const Panel& panel, int64_t row, const char* next, int64_t lines) const {
    const float* its = turned_x + row * k + panel.from * R;
    Vec sums[R][2];
#pragma GCC unroll 16
    for (int64_t r = 0; r < R; r++) sums[r][0] = sums[r][1] = Vec(0.f);
    for (int64_t d = 0; d < panel.depth; d++) {
      if (d < lines) __builtin_prefetch(next + d * 64, 0, kCache);
      const float* of = panel.turned + d * kWidth;
      const Vec first = Vec::loadu(of), second = Vec::loadu(of + Vec::size());
#pragma GCC unroll 16
      for (int64_t r = 0; r < R; r++) {
        float unit;
        std::memcpy(&unit, its + d * R + r, sizeof(unit));  // two numbers of bfloat16 are no float to the compiler
        sums[r][0] = add_product<T>(sums[r][0], Vec(unit), first);
        sums[r][1] = add_product<T>(sums[r][1], Vec(unit), second);
      }
    }
    const bool is_last = panel.from + panel.depth == k;
#pragma GCC unroll 16
    for (int64_t r = 0; r < R; r++) {
      float* kept = panel.kept + (row + r) * kWidth;
      for (int64_t v = 0; v < 2; v++) {
        if (panel.from > 0) sums[r][v] = sums[r][v] + Vec::loadu(kept + v * Vec::size());
        if (!is_last) sums[r][v].store(kept + v * Vec::size());
        if (is_last && panel.shift != nullptr) sums[r][v] = sums[r][v] + Vec::loadu(panel.shift + v * Vec::size());
      }
      if (is_last) store_numbers(sums[r][0], sums[r][1], out + (row + r) * n + panel.column, panel.width);
    }
  }

  // Multiply `count` rows, at most `kRowsAtOnce` and more than half of it.
  template <int64_t R = kRowsAtOnce>
  void rows_of(int64_t count, const Panel& panel, int64_t row, const char* next, int64_t lines) const {
    if constexpr (R > kRowsAtOnce / 2) {
      if (count == R) {
        block<R>(panel, row, next, lines);
      } else {
        rows_of<R - 1>(count, panel, row, next, lines);
      }
    }
  }

  int64_t blocks() const { return (rows + kRowsAtOnce - 1) / kRowsAtOnce; }

  // The first row of a block of rows. Blocks have about equal lengths: a short one takes longer for each of its rows.
  int64_t row_of(int64_t block) const { return rows * block / blocks(); }

  // Transpose each block of rows, so that a unit of all its rows is in one place.
  void turn() const {
    for (int64_t i = 0; i < blocks(); i++) {
      const int64_t row = row_of(i), count = row_of(i + 1) - row;
      at::vec::transpose_mxn<float>(x + row * k, k, turned_x + row * k, count, count, k);
    }
  }

  // All rows, with the panels from `begin` to `end`.
  void run(int64_t begin, int64_t end) const {
    alignas(64) static thread_local float turned[kDepth * kWidth];  // loads from two cache lines take twice as long
    static thread_local std::vector<float> kept;                    // its memory is kept: a step allocates nothing
    const int64_t parts = (k + kDepth - 1) / kDepth, longest = ((k + parts - 1) / parts + 15) / 16 * 16;
    kept.resize(parts > 1 ? rows * kWidth : 0);
    float shift[kWidth] = {};
    for (int64_t at = begin; at < end; at++) {
      const int64_t column = at * kWidth, width = std::min(kWidth, n - column);
      const char* next = reinterpret_cast<const char*>(weight + (column + kWidth) * k);
      const int64_t lines = column + 2 * kWidth > n ? 0 : kWidth * k * 4 / 64 / (blocks() * parts) + 1;
      if (bias != nullptr) std::copy_n(bias + column, width, shift);
      for (int64_t from = 0; from < k; from += longest) {
        const int64_t depth = std::min(longest, k - from);
        at::vec::transpose_mxn<float>(weight + column * k + from, k, turned, kWidth, width, depth);
        const Panel panel{turned, column, width, from, depth, kept.data(), bias != nullptr ? shift : nullptr};
        for (int64_t i = 0; i < blocks(); i++, next += lines * 64)
          rows_of(row_of(i + 1) - row_of(i), panel, row_of(i), next, lines);
      }
    }
  }
};

// Return the numbers of x in the type of the product, widened if necessary.
template <typename T>
const Input<T>* input_of(const Tensor& x) {
  const T* numbers = x.const_data_ptr<T>();
  if constexpr (std::is_same_v<Input<T>, T>) {
    return numbers;
  } else {
    static thread_local std::vector<float> wide;  // its memory is kept, so that a step allocates nothing
    const int64_t count = x.numel();
    if (static_cast<int64_t>(wide.size()) < count) wide.resize(count);
    for (int64_t i = 0; i < count; i++) wide[i] = static_cast<float>(numbers[i]);
    return wide.data();
  }
}

template <typename T>
void run(const Tensor& x, const Tensor& weight, const OptTensor& bias, const Tensor& out) {
  const int64_t rows = x.size(0), n = weight.size(0), k = weight.size(1);
  const Tensor dense = x.contiguous(), shift = bias.has_value() ? bias->contiguous() : Tensor();
  if constexpr (std::is_same_v<Input<T>, T>) {  // it has instructions for whole units
    if (rows >= kMany && k % kUnit<T> == 0) {
      static thread_local std::vector<float> turned;  // its memory is kept, so that a step allocates nothing
      turned.resize(rows * (k / kUnit<T>));
      const ManyRows<T> product{
          .x = reinterpret_cast<const float*>(dense.const_data_ptr<T>()),
          .rows = rows,
          .n = n,
          .k = k / kUnit<T>,
          .turned_x = turned.data(),
          .weight = reinterpret_cast<const float*>(weight.const_data_ptr<T>()),
          .bias = bias.has_value() ? shift.const_data_ptr<T>() : nullptr,
          .out = out.mutable_data_ptr<T>(),
      };
      product.turn();
      at::parallel_for(0, (n + product.kWidth - 1) / product.kWidth, 1,
                       [&](int64_t begin, int64_t end) { product.run(begin, end); });
      return;
    }
  }
  const Product<T> product{
      .x = input_of<T>(dense),
      .rows = rows,
      .k = k,
      .ahead = kAhead / (k * static_cast<int64_t>(sizeof(T))),
      .weight = weight.const_data_ptr<T>(),
      .bias = bias.has_value() ? shift.const_data_ptr<T>() : nullptr,
      .out = out.mutable_data_ptr<T>(),
      .out_stride = n,
  };
  const int64_t step = rows == 1 ? 1 : kColumns, groups = (n + step - 1) / step;
  const auto part = [&](int64_t begin, int64_t end) { product.run(begin * step, std::min(end * step, n)); };
  if (rows * n * k <= kMacsPerThread) {
    part(0, groups);
  } else {
    at::parallel_for(0, groups, std::max<int64_t>(1, kMacsPerThread / (rows * k * step)), part);
  }
}

}  // namespace

void linear(const Tensor& x, const Tensor& weight, const OptTensor& bias, Tensor& out) {
  const auto type = x.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16,
              text("compiled linear takes float32 and bfloat16, not ", type));
  TORCH_CHECK(weight.dim() == 2 && weight.size(1) > 0 && weight.is_contiguous() && weight.scalar_type() == type,
              text("weight is ", weight.sizes(), " ", weight.scalar_type(), " with strides ", weight.strides(),
                   "; give ", type, " [out_features, in_features], dense and not empty"));
  const int64_t n = weight.size(0), k = weight.size(1);
  TORCH_CHECK(
      x.dim() == 2 && x.size(1) == k && out.dim() == 2 && out.size(0) == x.size(0) && out.size(1) == n &&
          out.is_contiguous() && out.scalar_type() == type,
      text("x ", x.sizes(), " * weight ", weight.sizes(), " does not give out ", out.sizes(), " ", out.scalar_type()));
  TORCH_CHECK(!bias.has_value() || (bias->numel() == n && bias->scalar_type() == type),
              text("bias must be ", type, " [", n, "]"));
  (type == at::kFloat ? run<float> : run<at::BFloat16>)(x, weight, bias, out);
}

}  // namespace graphpact
