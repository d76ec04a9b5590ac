// Shared by the kernels that read index tensors and the kernels that fill them.
#pragma once

#include <ATen/core/Tensor.h>

namespace graphpact {

constexpr int64_t kScheduleBlock = 16;  // BLOCK of graphpact_kernels.schedule

// The length of a vector of the schedule, which has one number for each of `bs` requests.
inline int64_t schedule_width(int64_t bs) { return (bs + 3) / 4 * 4; }

// Return int32 numbers of an index tensor, one after another; `kept` keeps a copy alive where one is needed.
inline const int32_t* numbers(const at::Tensor& tensor, at::Tensor& kept) {
  kept = tensor.to(at::kInt).contiguous();  // the tensor itself if it is int32 and contiguous
  return kept.const_data_ptr<int32_t>();
}

}  // namespace graphpact
