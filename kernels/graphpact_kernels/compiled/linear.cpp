// The compiled product of a few rows with a weight matrix: out = x * weight^T + bias.
//
// A decode step multiplies a few rows with every weight of the model, so its time is that of reading the weights once.
// They are read as a checkpoint has them, [out_features, in_features], row by row: nothing is packed, so no second copy
// can go stale when weights are changed in place. Rows of x are multiplied in groups of `kRows` with `kColumns` rows of
// the weight; sums stay in registers.
//
// The result of a row does not depend on the other rows, nor on the number of threads. Numbers of bfloat16 are
// multiplied in pairs where the CPU can (AVX512_BF16), elsewhere widened; sums are float32 in both.
//
// Does not: replace a matrix product of many rows.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <type_traits>
#include <vector>

namespace graphpact {
namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;
using Vec = at::vec::Vectorized<float>;

#ifdef CPU_CAPABILITY_AVX512
constexpr int64_t kRows = 8, kColumns = 3;  // 24 of 32 registers
#else
constexpr int64_t kRows = 4, kColumns = 2;  // 8 of 16
#endif
constexpr int64_t kAhead = 8 << 10;          // bytes of the weight that are fetched ahead of their use
constexpr int64_t kPanel = 128 << 10;        // bytes of the weight that all rows are multiplied with in turn
constexpr int64_t kMacsPerThread = 1 << 17;  // multiplications that are worth a thread

#ifdef CPU_CAPABILITY_AVX512
// Keep a vector in a register: the compiler would load it again for each product with it.
inline Vec in_register(__m512 x) {
  asm("" : "+v"(x));
  return x;
}

// The sums of the numbers of 16 vectors, in one vector: a tree of 15 additions, as deep for each.
inline __m512 sums_of(const __m512 (&v)[16]) {
  __m512 a[8], b[4];
  for (int i = 0; i < 8; i++)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    const __m512d low = _mm512_castps_pd(a[2 * i]), high = _mm512_castps_pd(a[2 * i + 1]);
    b[i] =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  const __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x44), _mm512_shuffle_f32x4(b[0], b[1], 0xEE));
  const __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x44), _mm512_shuffle_f32x4(b[2], b[3], 0xEE));
  return _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xDD));
}
#else
inline Vec in_register(Vec x) { return x; }
#endif

// sums[i] = the sum of the numbers of parts[i].
template <int64_t N>
inline void sum_each(const Vec (&parts)[N], float (&sums)[N]) {
#ifdef CPU_CAPABILITY_AVX512
  for (int64_t at = 0; at < N; at += 16) {
    __m512 group[16];
    for (int64_t i = 0; i < 16; i++) group[i] = at + i < N ? __m512(parts[at + i]) : _mm512_setzero_ps();
    Vec(sums_of(group)).store(sums + at, std::min<int64_t>(16, N - at));
  }
#else
  for (int64_t i = 0; i < N; i++)
    sums[i] = at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, parts[i]);
#endif
}

// Add the products of the numbers from `d` on, that fill no vector. Each is rounded once, for any `R` and `C`.
template <int64_t R, int64_t C, typename X, typename T>
inline void add_rest(const X* x, int64_t stride, const T* weight, int64_t d, int64_t k, float (&sums)[R * C]) {
  for (; d < k; d++)
    for (int64_t r = 0; r < R; r++)
      for (int64_t c = 0; c < C; c++)
        sums[r * C + c] =
            std::fma(static_cast<float>(x[r * stride + d]), static_cast<float>(weight[c * k + d]), sums[r * C + c]);
}

// The numbers of x as they are multiplied with a weight of `T`.
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

// How many rows of the weight ahead of those in use memory is fetched.
template <typename T>
inline int64_t rows_ahead(int64_t k, int64_t columns) {
  return std::max<int64_t>(columns, kAhead / (k * static_cast<int64_t>(sizeof(T))));
}

// sums[r * C + c] = x[r] . weight[c] for `R` rows and `C` columns. x has rows of `stride` numbers.
template <int64_t R, int64_t C>
inline void multiply(const float* x, int64_t stride, const float* weight, int64_t k, float (&sums)[R * C]) {
  Vec parts[R * C];
  for (auto& part : parts) part = Vec(0.f);
  const int64_t ahead = rows_ahead<float>(k, C);
  int64_t d = 0;
  for (; d + Vec::size() <= k; d += Vec::size()) {
    Vec of[C];
#pragma GCC unroll 8
    for (int64_t c = 0; c < C; c++) {
      of[c] = Vec::loadu(weight + c * k + d);
      __builtin_prefetch(weight + (c + ahead) * k + d);
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < R; r++) {
      const Vec its = in_register(Vec::loadu(x + r * stride + d));
#pragma GCC unroll 8
      for (int64_t c = 0; c < C; c++) parts[r * C + c] = at::vec::fmadd(its, of[c], parts[r * C + c]);
    }
  }
  sum_each(parts, sums);
  add_rest<R, C>(x, stride, weight, d, k, sums);
}

#ifdef __AVX512BF16__
inline __m512bh pairs_at(const at::BFloat16* numbers) { return (__m512bh)_mm512_loadu_si512(numbers); }

// The same of bfloat16, by instructions that multiply pairs of numbers and add both products in float32.
template <int64_t R, int64_t C>
inline void multiply(const at::BFloat16* x, int64_t stride, const at::BFloat16* weight, int64_t k,
                     float (&sums)[R * C]) {
  constexpr int64_t kStep = 32;
  __m512 parts[R * C];
  for (auto& part : parts) part = _mm512_setzero_ps();
  const int64_t ahead = rows_ahead<at::BFloat16>(k, C);
  int64_t d = 0;
  for (; d + kStep <= k; d += kStep) {
    __m512bh of[C];
#pragma GCC unroll 8
    for (int64_t c = 0; c < C; c++) {
      of[c] = pairs_at(weight + c * k + d);
      __builtin_prefetch(weight + (c + ahead) * k + d);
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < R; r++) {
      const __m512bh its = pairs_at(x + r * stride + d);
#pragma GCC unroll 8
      for (int64_t c = 0; c < C; c++) parts[r * C + c] = _mm512_dpbf16_ps(parts[r * C + c], its, of[c]);
    }
  }
  Vec wide[R * C];
  for (int64_t i = 0; i < R * C; i++) wide[i] = parts[i];
  sum_each(wide, sums);
  add_rest<R, C>(x, stride, weight, d, k, sums);
}
#else
// The same of bfloat16, whose numbers are widened.
template <int64_t R, int64_t C>
inline void multiply(const float* x, int64_t stride, const at::BFloat16* weight, int64_t k, float (&sums)[R * C]) {
  using Narrow = at::vec::Vectorized<at::BFloat16>;
  Vec parts[R * C];
  for (auto& part : parts) part = Vec(0.f);
  const int64_t ahead = rows_ahead<at::BFloat16>(k, C);
  int64_t d = 0;
  for (; d + Narrow::size() <= k; d += Narrow::size()) {
    Vec low[C], high[C];
    for (int64_t c = 0; c < C; c++) {
      std::tie(low[c], high[c]) = at::vec::convert_to_float<at::BFloat16>(Narrow::loadu(weight + c * k + d));
      __builtin_prefetch(weight + (c + ahead) * k + d);
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < R; r++) {
      const Vec first = in_register(Vec::loadu(x + r * stride + d));
      const Vec second = in_register(Vec::loadu(x + r * stride + d + Vec::size()));
#pragma GCC unroll 8
      for (int64_t c = 0; c < C; c++)
        parts[r * C + c] = at::vec::fmadd(second, high[c], at::vec::fmadd(first, low[c], parts[r * C + c]));
    }
  }
  sum_each(parts, sums);
  add_rest<R, C>(x, stride, weight, d, k, sums);
}
#endif

template <typename T>
struct Product {
  const Input<T>* x;
  int64_t x_stride, rows, k;
  const T *weight, *bias;
  T* out;
  int64_t out_stride;

  template <int64_t R, int64_t C>
  void block(int64_t row, int64_t column) const {
    float sums[R * C];
    multiply<R, C>(x + row * x_stride, x_stride, weight + column * k, k, sums);
    for (int64_t r = 0; r < R; r++)
      for (int64_t c = 0; c < C; c++) {
        const float shift = bias == nullptr ? 0.f : static_cast<float>(bias[column + c]);
        out[(row + r) * out_stride + column + c] = static_cast<T>(sums[r * C + c] + shift);
      }
  }

  // `R` rows from `row` on, with the columns from `begin` to `end`.
  template <int64_t R, int64_t C>
  void strip(int64_t row, int64_t begin, int64_t end) const {
    int64_t column = begin;
    for (; column + C <= end; column += C) block<R, C>(row, column);
    for (; column < end; column++) block<R, 1>(row, column);
  }

  // All rows with the columns from `begin` to `end`: a part of the weight that stays in the second cache, while the
  // rows that are multiplied with it stay in the first.
  void run(int64_t begin, int64_t end) const {
    const int64_t most = kPanel / (k * static_cast<int64_t>(sizeof(T)));
    const int64_t panel = std::max(kColumns, most / kColumns * kColumns);
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
        case 1: strip<1, 1>(row, at, last); break;
        default: break;
      }
    }
  }
};

// Return the numbers of x as they are multiplied: widened, if they are to be.
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
  const Product<T> product{
      .x = input_of<T>(dense),
      .x_stride = k,
      .rows = rows,
      .k = k,
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

void linear(const Tensor& x, const Tensor& weight, const OptTensor& bias, Tensor& out) {
  const auto type = x.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "compiled linear takes float32 and bfloat16, not ", type);
  TORCH_CHECK(weight.dim() == 2 && weight.size(1) > 0 && weight.is_contiguous() && weight.scalar_type() == type,
              "weight is ", weight.sizes(), " ", weight.scalar_type(), " with strides ", weight.strides(), "; give ",
              type, " [out_features, in_features], dense and not empty");
  const int64_t n = weight.size(0), k = weight.size(1);
  TORCH_CHECK(x.dim() == 2 && x.size(1) == k && out.dim() == 2 && out.size(0) == x.size(0) && out.size(1) == n &&
                  out.is_contiguous() && out.scalar_type() == type,
              "x ", x.sizes(), " * weight ", weight.sizes(), " does not give out ", out.sizes(), " ",
              out.scalar_type());
  TORCH_CHECK(!bias.has_value() || (bias->numel() == n && bias->scalar_type() == type), "bias must be ", type, " [", n,
              "]");
  (type == at::kFloat ? run<float> : run<at::BFloat16>)(x, weight, bias, out);
}

}  // namespace

TORCH_LIBRARY_IMPL(graphpact_compiled, CPU, m) { m.impl("linear", &linear); }

}  // namespace graphpact
