// The compiled kernels that fill the index tensors of a step; see graphpact_kernels/indices.py.
//
// Each computes what the portable kernel of the same name computes. `fill_paged_indices` returns false if a batch does
// not fit.
//
// Does not: attend; see attention.cpp.
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "index.h"
#include "kernels.h"
#include "text.h"

namespace graphpact {
namespace {

// Quotients and remainders as in Python: rounded down.
int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
int64_t floor_mod(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }

Tensor wide(const Tensor& tensor) { return tensor.to(at::kLong).contiguous(); }

int32_t* written(const Tensor& tensor, const char* name) {
  TORCH_CHECK(
      tensor.scalar_type() == at::kInt && (tensor.numel() < 2 || tensor.stride(-1) == 1),
      text(name, " is ", tensor.scalar_type(), " with strides ", tensor.strides(), ": give dense int32 memory"));
  return tensor.mutable_data_ptr<int32_t>();
}

void require_page_size(int64_t page_size) {
  TORCH_CHECK(page_size > 0, text("page_size is ", page_size, ", not positive"));
}

// The KV slots of the positions of every request row.
struct Slots {
  const Tensor kept;
  const int32_t* data;
  int64_t rows, columns, row, column;

  explicit Slots(const Tensor& table)
      : kept(table.scalar_type() == at::kInt ? table : table.to(at::kInt)),
        data(kept.const_data_ptr<int32_t>()),
        rows(table.size(0)),
        columns(table.size(1)),
        row(kept.stride(0)),
        column(kept.stride(1)) {}

  const int32_t* of(int64_t request) const {
    TORCH_CHECK_INDEX(request >= -rows && request < rows,
                      text("index ", request, " is out of bounds: req_to_token has ", rows, " rows"));
    return data + (request < 0 ? request + rows : request) * row;
  }
};

}  // namespace

bool fill_paged_indices(const Tensor& req_to_token, const Tensor& req_pool_indices, const Tensor& kv_lens,
                        const OptTensor& num_q, int64_t width, int64_t sliding_window, int64_t page_size,
                        const Tensor& kv_indptr, const Tensor& kv_indices, const Tensor& kv_last_page_len) {
  require_page_size(page_size);
  const Tensor requests = wide(req_pool_indices), lens = wide(kv_lens);
  const Tensor queries = num_q.has_value() ? wide(*num_q) : lens;
  const int64_t real = requests.size(0), rows = lens.size(0), capacity = kv_indices.size(0);
  TORCH_CHECK(
      real <= rows && kv_indptr.size(0) == rows + 1 && kv_last_page_len.size(0) == rows && queries.size(0) == rows,
      text(rows, " rows of ", real, " requests: kv_indptr has ", kv_indptr.size(0), " entries, kv_last_page_len ",
           kv_last_page_len.size(0), ", num_q ", queries.size(0)));
  const Slots slots(req_to_token);
  const int64_t *request = requests.const_data_ptr<int64_t>(), *len = lens.const_data_ptr<int64_t>(),
                *its_q = queries.const_data_ptr<int64_t>();
  int32_t *indptr = written(kv_indptr, "kv_indptr"), *last = written(kv_last_page_len, "kv_last_page_len"),
          *out = written(kv_indices, "kv_indices");
  int64_t next = 0;
  indptr[0] = 0;
  for (int64_t i = 0; i < rows; i++) {
    const int64_t q = num_q.has_value() ? its_q[i] : width;
    const int64_t first =
        sliding_window > 0 ? floor_div(std::max<int64_t>(0, len[i] - q + 1 - sliding_window), page_size) : 0;
    const int64_t held = len[i] - first * page_size, pages = floor_div(held + page_size - 1, page_size);
    last[i] = static_cast<int32_t>(floor_mod(held - 1, page_size) + 1);
    if (i < real) {
      if (pages < 0 || next + pages > capacity) return false;
      const int32_t* of = slots.of(request[i]);
      for (int64_t page = 0; page < pages; page++) {
        const int64_t column = (first + page) * page_size;
        const int64_t slot = column < slots.columns ? of[column * slots.column] : 0;  // scratch past its end
        out[next + page] = static_cast<int32_t>(floor_div(slot, page_size));
      }
    }
    next += pages;
    indptr[i + 1] = static_cast<int32_t>(next);
  }
  if (real < rows) std::fill(out + indptr[real], out + capacity, 0);  // their keys are in scratch
  return true;
}

void fill_page_table(const Tensor& req_to_token, const Tensor& req_pool_indices, const Tensor& seq_lens,
                     int64_t uncounted, int64_t page_size, const Tensor& cache_seqlens, const OptTensor& cu_seqlens_k,
                     const Tensor& page_table) {
  require_page_size(page_size);
  const Tensor requests = wide(req_pool_indices), lens = wide(seq_lens);
  const int64_t bs = lens.size(0);
  TORCH_CHECK(requests.size(0) == bs && cache_seqlens.size(0) == bs && page_table.size(0) == bs &&
                  (!cu_seqlens_k.has_value() || cu_seqlens_k->size(0) == bs + 1),
              text(bs, " requests: req_pool_indices has ", requests.size(0), ", cache_seqlens ", cache_seqlens.size(0),
                   ", page_table ", page_table.size(0), " rows; cu_seqlens_k has one more"));
  const Slots slots(req_to_token);
  const int64_t *request = requests.const_data_ptr<int64_t>(), *len = lens.const_data_ptr<int64_t>();
  int32_t *total = written(cache_seqlens, "cache_seqlens"), *table = written(page_table, "page_table");
  int32_t* ends = cu_seqlens_k.has_value() ? written(*cu_seqlens_k, "cu_seqlens_k") : nullptr;
  const int64_t width = page_table.size(1), row = page_table.stride(0);
  const int64_t most = std::min(width, (slots.columns + page_size - 1) / page_size);
  if (ends != nullptr) ends[0] = 0;
  for (int64_t i = 0; i < bs; i++) {
    const int64_t keys = len[i] + uncounted;
    total[i] = static_cast<int32_t>(keys);
    if (ends != nullptr) ends[i + 1] = ends[i] + total[i];
    const int64_t pages = std::clamp<int64_t>(floor_div(keys + page_size - 1, page_size), 0, most);
    const int32_t* of = slots.of(request[i]);
    int32_t* out = table + i * row;
    for (int64_t page = 0; page < pages; page++)
      out[page] = static_cast<int32_t>(floor_div(of[page * page_size * slots.column], page_size));
    std::fill(out + pages, out + width, 0);
  }
}

void schedule_attention(const Tensor& cu_seqlens_q, const Tensor& cache_seqlens, const Tensor& out) {
  Tensor kept[2];
  const int32_t *at = numbers(cu_seqlens_q, kept[0]), *len = numbers(cache_seqlens, kept[1]);
  const int64_t bs = cache_seqlens.size(0), width = schedule_width(bs), size = out.size(0);
  TORCH_CHECK(cu_seqlens_q.size(0) == bs + 1 && size >= 1 + 4 * width,
              text(bs, " requests: cu_seqlens_q has ", cu_seqlens_q.size(0), " entries, the schedule ", size,
                   "; it needs ", 1 + 4 * width));
  int32_t* schedule = written(out, "the schedule");
  std::fill_n(schedule, size, 0);
  for (int64_t i = 0; i < bs; i++) {
    schedule[1 + i] = static_cast<int32_t>(floor_div(at[i + 1] - at[i] + kScheduleBlock - 1, kScheduleBlock));
    schedule[1 + width + i] = static_cast<int32_t>(floor_div(len[i] + kScheduleBlock - 1, kScheduleBlock));
  }
}

}  // namespace graphpact
