// The compiled attention kernels: over FlashInfer's index tensors and over FlashAttention's page table.
//
// Each makes the checks of the portable kernel of the same name, and returns false if one fails.
//
// Does not: multiply anything itself, see attend.h; raise what the portable kernels raise, see library.cpp.
#include "attend.h"
#include "index.h"
#include "kernels.h"
#include "text.h"

namespace graphpact {
namespace {

// Return a tensor whose last dimension is dense.
Tensor dense(const Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

// Whether the tensors of a call agree: a kernel must not read or write outside them, whatever it is given.
bool fits(const Tensor& q, const Tensor& k, const Tensor& v, const OptTensor& sinks, const Tensor& out,
          const OptTensor& lse) {
  const auto wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const bool has_sinks = !sinks.has_value() || (sinks->dim() == 1 && sinks->size(0) == q.size(1));
  const bool has_lse = !lse.has_value() || (lse->dim() == 2 && lse->size(0) == q.size(0) && lse->size(1) == q.size(1) &&
                                            lse->scalar_type() == wide);
  return has_sinks && has_lse && q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && k.size(1) > 0 &&
         q.size(1) % k.size(1) == 0 && k.size(1) == v.size(1) && q.size(2) == k.size(2) && out.dim() == 3 &&
         out.size(0) == q.size(0) && out.size(1) == q.size(1) && out.size(2) == v.size(2) &&
         k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type() &&
         out.scalar_type() == q.scalar_type() && out.stride(2) == 1;
}

// Raise an IndexError if a page of a request is outside the caches. Pages that no request owns may hold any number.
void require_pages(const Request& request, int64_t page_size, const Tensor& k, const Tensor& v) {
  const int64_t slots = std::min(k.size(0), v.size(0)), pages = (request.num_keys + page_size - 1) / page_size;
  for (int64_t i = 0; i < pages; i++) {
    const int64_t page = request.pages[i], keys = std::min(page_size, request.num_keys - i * page_size);
    TORCH_CHECK_INDEX(page >= 0 && page * page_size + keys <= slots,
                      text("index out of range: page ", page, " of a request, of ", page_size,
                           " keys each; the KV cache has ", slots, " slots"));
  }
}

void attend(const std::vector<Request>& requests, const Tensor& q, const Tensor& k, const Tensor& v,
            const OptTensor& sinks, const Options& options, const Tensor& out, const OptTensor& lse) {
  const Tensor rows = dense(q);
  Tensor into = out;
  OptTensor its_sinks;
  if (sinks.has_value()) its_sinks = sinks->to(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).contiguous();
  const auto run = [&](auto zero) { attend_all<decltype(zero)>(requests, rows, k, v, its_sinks, options, into, lse); };
  switch (q.scalar_type()) {
    case at::kFloat: run(float()); break;
    case at::kBFloat16: run(at::BFloat16()); break;
    case at::kHalf: run(at::Half()); break;
    case at::kDouble: run(double()); break;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, text("\"compiled attention\" not implemented for '", q.scalar_type(), "'"));
  }
}

// -- over FlashInfer's index tensors --------------------------------------------------------------------------------

bool find_paged(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& qo_indptr, const Tensor& kv_indptr,
                const Tensor& kv_indices, const Tensor& kv_last_page_len, int64_t page_size, int64_t max_q_len,
                int64_t max_kv_len, const OptTensor& mask, const OptTensor& mask_indptr, const OptTensor& o_indptr,
                const OptTensor& kv_chunk_size, Tensor (&kept)[7], std::vector<Request>& requests) {
  const int64_t bs = kv_last_page_len.size(0);
  if (page_size < 1 || qo_indptr.size(0) != bs + 1 || kv_indptr.size(0) != bs + 1) return false;
  if (o_indptr.has_value() && o_indptr->size(0) < bs + 1) return false;
  if (mask_indptr.has_value() && mask_indptr->size(0) < bs + 1) return false;
  const int32_t* q_at = numbers(qo_indptr, kept[0]);
  const int32_t* kv_at = numbers(kv_indptr, kept[1]);
  const int32_t* last = numbers(kv_last_page_len, kept[2]);
  const int32_t* pages = numbers(kv_indices, kept[3]);
  if (kv_chunk_size.has_value() && kv_chunk_size->numel() == 0) return false;
  const bool planned = o_indptr.has_value() && kv_chunk_size.has_value();
  const int32_t* chunks = planned ? numbers(*o_indptr, kept[4]) : nullptr;
  const int64_t chunk = planned ? numbers(*kv_chunk_size, kept[5])[0] : 0;
  const bool masked = mask.has_value() && mask_indptr.has_value();
  Tensor mask_at_kept;
  const int32_t* mask_at = masked ? numbers(*mask_indptr, mask_at_kept) : nullptr;
  if (masked) kept[6] = mask->contiguous();
  if (q_at[0] != 0 || q_at[bs] != q.size(0) || kv_at[0] != 0 || kv_at[bs] > kv_indices.size(0)) return false;
  requests.reserve(bs);
  for (int64_t i = 0; i < bs; i++) {
    const int64_t num_q = q_at[i + 1] - q_at[i], num_pages = kv_at[i + 1] - kv_at[i];
    if (num_q < 0 || num_pages < 0) return false;
    const int64_t keys = num_pages > 0 ? (num_pages - 1) * page_size + last[i] : 0;
    if (num_pages > 0 && (last[i] < 1 || last[i] > page_size)) return false;
    if (num_q > keys || num_q > max_q_len || keys > max_kv_len) return false;
    const int64_t seen = planned ? std::min(keys, (chunks[i + 1] - chunks[i]) * chunk) : keys;
    const uint8_t* bits = nullptr;
    if (masked) {
      if (mask_at[i] < 0 || mask_at[i] + (num_q * keys + 7) / 8 > mask->size(0)) return false;
      bits = kept[6].const_data_ptr<uint8_t>() + mask_at[i];
    }
    requests.push_back({q_at[i], num_q, pages + kv_at[i], keys, seen, bits});
    require_pages(requests.back(), page_size, k, v);
  }
  return true;
}

}  // namespace

bool paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& qo_indptr,
                     const Tensor& kv_indptr, const Tensor& kv_indices, const Tensor& kv_last_page_len,
                     int64_t page_size, int64_t max_q_len, int64_t max_kv_len, double scaling, int64_t sliding_window,
                     double softcap, const OptTensor& sinks, const OptTensor& mask, const OptTensor& mask_indptr,
                     const OptTensor& o_indptr, const OptTensor& kv_chunk_size, Tensor& out) {
  Tensor kept[7];
  static thread_local std::vector<Request> requests;  // its memory is kept, so that a step allocates nothing
  requests.clear();
  const bool is_right = fits(q, k_cache, v_cache, sinks, out, std::nullopt) &&
                        find_paged(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, page_size,
                                   max_q_len, max_kv_len, mask, mask_indptr, o_indptr, kv_chunk_size, kept, requests);
  if (!is_right) return false;
  attend(requests, q, k_cache, v_cache, sinks, {page_size, scaling, sliding_window, softcap, true}, out, std::nullopt);
  return true;
}

namespace {

// -- over FlashAttention's page table -------------------------------------------------------------------------------

bool find_table(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                const Tensor& cache_seqlens, const Tensor& page_table, int64_t page_size, int64_t max_seqlen_q,
                const OptTensor& schedule, Tensor (&kept)[4], std::vector<Request>& requests) {
  if (page_size < 1 || page_table.dim() != 2) return false;
  const int64_t bs = page_table.size(0), num_pages = page_table.size(1), width = schedule_width(bs);
  if (cu_seqlens_q.size(0) != bs + 1 || cache_seqlens.size(0) != bs) return false;
  const int32_t* q_at = numbers(cu_seqlens_q, kept[0]);
  const int32_t* lens = numbers(cache_seqlens, kept[1]);
  const bool is_narrow = page_table.scalar_type() == at::kInt && (num_pages < 2 || page_table.stride(1) == 1);
  kept[2] = is_narrow ? page_table : page_table.to(at::kInt).contiguous();
  const int32_t* table = kept[2].const_data_ptr<int32_t>();
  const int64_t row = kept[2].stride(0);
  if (q_at[0] != 0 || q_at[bs] > q.size(0)) return false;
  const int32_t* blocks = nullptr;
  if (schedule.has_value()) {
    const int64_t size = schedule->size(0);
    const int32_t* numbers_of = numbers(*schedule, kept[3]);
    if (size < 1 + 4 * width || numbers_of[0] != 0) return false;
    for (int64_t i = 1 + 2 * width; i < size; i++)
      if (numbers_of[i] != 0) return false;
    blocks = numbers_of + 1 + width;
  }
  requests.reserve(bs);
  for (int64_t i = 0; i < bs; i++) {
    const int64_t num_q = q_at[i + 1] - q_at[i], keys = lens[i];
    if (num_q < 0 || num_q > max_seqlen_q || keys < 0 || keys > num_pages * page_size) return false;
    const int64_t seen = blocks == nullptr ? keys : std::min(keys, blocks[i] * kScheduleBlock);
    requests.push_back({q_at[i], num_q, table + i * row, keys, seen, nullptr});
    require_pages(requests.back(), page_size, k, v);
  }
  return true;
}

}  // namespace

bool page_table_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& cu_seqlens_q,
                          const Tensor& cache_seqlens, const Tensor& page_table, int64_t page_size,
                          int64_t max_seqlen_q, double scaling, bool causal, int64_t sliding_window, double softcap,
                          const OptTensor& sinks, const OptTensor& scheduler_metadata, Tensor& out,
                          const OptTensor& lse) {
  Tensor kept[4];
  static thread_local std::vector<Request> requests;  // its memory is kept, so that a step allocates nothing
  requests.clear();
  const bool is_right = fits(q, k_cache, v_cache, sinks, out, lse) &&
                        find_table(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, page_size,
                                   max_seqlen_q, scheduler_metadata, kept, requests);
  if (!is_right) return false;
  const int64_t end = requests.empty() ? 0 : requests.back().begin + requests.back().num_q;
  if (end < q.size(0)) {  // rows that belong to no request
    out.slice(0, end).zero_();
    if (lse.has_value()) lse->slice(0, end).fill_(kNone<double>);
  }
  attend(requests, q, k_cache, v_cache, sinks, {page_size, scaling, sliding_window, softcap, causal}, out, lse);
  return true;
}

}  // namespace graphpact
