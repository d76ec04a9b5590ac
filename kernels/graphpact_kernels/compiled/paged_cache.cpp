// The compiled kernel that writes keys and values to a paged KV cache.
//
// Does not: attend; see attention.cpp.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "text.h"

namespace graphpact {
namespace {

// Copy each token's row to its slot. The rows of one tensor have equal lengths, and each row is dense.
void scatter(const Tensor& rows, const Tensor& slots, const Tensor& cache, const char* name) {
  TORCH_CHECK(rows.dim() == 3 && cache.dim() == 3 && rows.size(1) == cache.size(1) && rows.size(2) == cache.size(2) &&
                  rows.scalar_type() == cache.scalar_type(),
              text(name, " are ", rows.sizes(), " ", rows.scalar_type(), ", their cache is ", cache.sizes(), " ",
                   cache.scalar_type(), ": rows of both must agree"));
  const Tensor from = rows.contiguous();
  const int64_t count = from.size(0), heads = cache.size(1), width = cache.size(2), last = cache.size(0);
  const int64_t size = cache.element_size(), *slot = slots.const_data_ptr<int64_t>();
  const char* source = static_cast<const char*>(from.const_data_ptr());
  char* target = static_cast<char*>(cache.mutable_data_ptr());
  for (int64_t i = 0; i < count; i++)
    TORCH_CHECK_INDEX(slot[i] >= 0 && slot[i] < last,
                      text("out_cache_loc[", i, "] is ", slot[i], "; the cache has ", last, " slots"));
  const bool is_dense = cache.stride(2) == 1 && (heads == 1 || cache.stride(1) == width);
  if (!is_dense) {
    for (int64_t i = 0; i < count; i++) cache.select(0, slot[i]).copy_(from.select(0, i));
    return;
  }
  const int64_t bytes = heads * width * size, stride = cache.stride(0) * size;
  for (int64_t i = 0; i < count; i++) std::memcpy(target + slot[i] * stride, source + i * bytes, bytes);
}

}  // namespace

void write_kv_cache(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                    const Tensor& out_cache_loc) {
  TORCH_CHECK(out_cache_loc.scalar_type() == at::kLong && out_cache_loc.dim() == 1 &&
                  out_cache_loc.size(0) == k.size(0) && out_cache_loc.size(0) == v.size(0),
              text("out_cache_loc is ", out_cache_loc.sizes(), " ", out_cache_loc.scalar_type(), " for ", k.size(0),
                   " keys and ", v.size(0), " values: give one int64 for each"));
  const Tensor slots = out_cache_loc.contiguous();
  scatter(k, slots, k_cache, "keys");
  scatter(v, slots, v_cache, "values");
}

}  // namespace graphpact
