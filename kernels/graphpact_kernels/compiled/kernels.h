// The compiled kernels, as library.cpp registers them. Their sources do not include torch/library.h: its headers take
// longer to compile than the kernels.
//
// A kernel that returns a bool returns false, before it writes anything that matters, if the portable kernel of the
// same name must be called: it raises the error.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace graphpact {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

bool paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& qo_indptr,
                     const Tensor& kv_indptr, const Tensor& kv_indices, const Tensor& kv_last_page_len,
                     int64_t page_size, int64_t max_q_len, int64_t max_kv_len, double scaling, int64_t sliding_window,
                     double softcap, const OptTensor& sinks, const OptTensor& mask, const OptTensor& mask_indptr,
                     const OptTensor& o_indptr, const OptTensor& kv_chunk_size, Tensor& out);

bool page_table_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& cu_seqlens_q,
                          const Tensor& cache_seqlens, const Tensor& page_table, int64_t page_size,
                          int64_t max_seqlen_q, double scaling, bool causal, int64_t sliding_window, double softcap,
                          const OptTensor& sinks, const OptTensor& scheduler_metadata, Tensor& out,
                          const OptTensor& lse);

bool fill_paged_indices(const Tensor& req_to_token, const Tensor& req_pool_indices, const Tensor& kv_lens,
                        const OptTensor& num_q, int64_t width, int64_t sliding_window, int64_t page_size,
                        const Tensor& kv_indptr, const Tensor& kv_indices, const Tensor& kv_last_page_len);

void fill_page_table(const Tensor& req_to_token, const Tensor& req_pool_indices, const Tensor& seq_lens,
                     int64_t uncounted, int64_t page_size, const Tensor& cache_seqlens, const OptTensor& cu_seqlens_k,
                     const Tensor& page_table);

void schedule_attention(const Tensor& cu_seqlens_q, const Tensor& cache_seqlens, const Tensor& out);

void linear(const Tensor& x, const Tensor& weight, const OptTensor& bias, Tensor& out);

void write_kv_cache(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                    const Tensor& out_cache_loc);

}  // namespace graphpact
