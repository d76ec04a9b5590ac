// The compiled product of a few rows with a weight matrix: out = x * weight^T + bias.
//
// A decode step multiplies a few rows with every weight of the model, so its time is that of reading the weights once.
// They are read as a checkpoint has them, [out_features, in_features], row by row: nothing is packed, so no second copy
// can go stale when weights are changed in place. Rows of x are multiplied in groups of `kRows` with `kColumns` rows of
// the weight; sums stay in registers.
//
// The result of a row does not depend on the other rows, nor on the number of threads.
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
constexpr int64_t kWide = 8;                 // columns of a single row
constexpr int64_t kAhead = 24 << 10;         // bytes of the weight that are fetched ahead of their use
constexpr int64_t kMacsPerThread = 1 << 17;  // multiplications that are worth a thread

// sums[r][c] = x[r] . weight[c] for `R` rows and `C` columns. x has rows of `stride` numbers, zeros after `k`.
template <typename T, int64_t R, int64_t C>
inline void multiply(const float* x, int64_t stride, const T* weight, int64_t k, float (&sums)[R][C]) {
  Vec parts[R][C];
  for (auto& row : parts)
    for (auto& part : row) part = Vec(0.f);
  int64_t d = 0;
  const int64_t ahead = std::max<int64_t>(C, kAhead / (k * static_cast<int64_t>(sizeof(T))));
  if constexpr (std::is_same_v<T, float>) {
    for (; d + Vec::size() <= k; d += Vec::size()) {
      Vec of[C];
      for (int64_t c = 0; c < C; c++) {
        of[c] = Vec::loadu(weight + c * k + d);
        __builtin_prefetch(weight + (c + ahead) * k + d);
      }
      for (int64_t r = 0; r < R; r++) {
        const Vec its = Vec::loadu(x + r * stride + d);
        for (int64_t c = 0; c < C; c++) parts[r][c] = at::vec::fmadd(its, of[c], parts[r][c]);
      }
    }
  } else {
    for (; d + 2 * Vec::size() <= k; d += 2 * Vec::size()) {
      Vec low[C], high[C];
      for (int64_t c = 0; c < C; c++) __builtin_prefetch(weight + (c + ahead) * k + d);
      for (int64_t c = 0; c < C; c++) std::tie(low[c], high[c]) = at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(weight + c * k + d));
      for (int64_t r = 0; r < R; r++) {
        const Vec first = Vec::loadu(x + r * stride + d), second = Vec::loadu(x + r * stride + d + Vec::size());
        for (int64_t c = 0; c < C; c++)
          parts[r][c] = at::vec::fmadd(second, high[c], at::vec::fmadd(first, low[c], parts[r][c]));
      }
    }
  }
  for (int64_t r = 0; r < R; r++)
    for (int64_t c = 0; c < C; c++)
      sums[r][c] = at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, parts[r][c]);
  for (; d < k; d++)  // rounded once, in each form of this function
    for (int64_t r = 0; r < R; r++)
      for (int64_t c = 0; c < C; c++)
        sums[r][c] = std::fma(x[r * stride + d], static_cast<float>(weight[c * k + d]), sums[r][c]);
}

template <typename T>
struct Product {
  const float* x;
  int64_t x_stride, rows, k;
  const T *weight, *bias;
  T* out;
  int64_t out_stride;

  template <int64_t R, int64_t C>
  void block(int64_t row, int64_t column) const {
    float sums[R][C];
    multiply<T, R, C>(x + row * x_stride, x_stride, weight + column * k, k, sums);
    for (int64_t r = 0; r < R; r++)
      for (int64_t c = 0; c < C; c++) {
        const float shift = bias == nullptr ? 0.f : static_cast<float>(bias[column + c]);
        out[(row + r) * out_stride + column + c] = static_cast<T>(sums[r][c] + shift);
      }
  }

  // All rows of x with the columns from `column` on.
  template <int64_t C>
  void columns(int64_t column) const {
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows) block<kRows, C>(row, column);
    if constexpr (kRows > 4)
      for (; row + 4 <= rows; row += 4) block<4, C>(row, column);
    for (; row + 2 <= rows; row += 2) block<2, C>(row, column);
    if (row < rows) block<1, C>(row, column);
  }

  void run(int64_t begin, int64_t end) const {
    int64_t column = begin;
    if (rows == 1)
      for (; column + kWide <= end; column += kWide) block<1, kWide>(0, column);
    for (; column + kColumns <= end; column += kColumns) columns<kColumns>(column);
    for (; column < end; column++) columns<1>(column);
  }
};

template <typename T>
void run(const float* x, int64_t rows, const Tensor& weight, const OptTensor& bias, const Tensor& out) {
  const int64_t n = weight.size(0), k = weight.size(1);
  const Tensor shift = bias.has_value() ? bias->contiguous() : Tensor();
  const Product<T> product{x, k, rows, k, weight.const_data_ptr<T>(),
                           bias.has_value() ? shift.const_data_ptr<T>() : nullptr, out.mutable_data_ptr<T>(), n};
  const int64_t step = rows == 1 ? kWide : kColumns, groups = (n + step - 1) / step;
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
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.scalar_type() == type, "weight is ",
              weight.sizes(), " ", weight.scalar_type(), " with strides ", weight.strides(), "; give ", type,
              " [out_features, in_features], dense");
  const int64_t n = weight.size(0), k = weight.size(1);
  TORCH_CHECK(x.dim() == 2 && x.size(1) == k && out.dim() == 2 && out.size(0) == x.size(0) && out.size(1) == n &&
                  out.is_contiguous() && out.scalar_type() == type,
              "x ", x.sizes(), " * weight ", weight.sizes(), " does not give out ", out.sizes(), " ",
              out.scalar_type());
  TORCH_CHECK(!bias.has_value() || (bias->numel() == n && bias->scalar_type() == type), "bias must be ", type, " [", n,
              "]");
  const Tensor dense = x.contiguous();
  const int64_t rows = x.size(0);
  if (type == at::kFloat) {
    run<float>(dense.const_data_ptr<float>(), rows, weight, bias, out);
    return;
  }
  static thread_local std::vector<float> wide;  // its memory is kept, so that a step allocates nothing
  if (static_cast<int64_t>(wide.size()) < rows * k) wide.resize(rows * k);
  const at::BFloat16* narrow = dense.const_data_ptr<at::BFloat16>();
  for (int64_t i = 0; i < rows * k; i++) wide[i] = static_cast<float>(narrow[i]);
  run<at::BFloat16>(wide.data(), rows, weight, bias, out);
}

}  // namespace

TORCH_LIBRARY_IMPL(graphpact_compiled, CPU, m) { m.impl("linear", &linear); }

}  // namespace graphpact
