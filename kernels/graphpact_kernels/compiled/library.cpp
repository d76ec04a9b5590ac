// Registers the compiled kernels as operators.
//
// If a kernel refuses its arguments, the portable kernel of the same name is called with them. It raises the error, so
// the text of the error exists only once.
//
// Only this source includes torch/library.h and the dispatcher: g++ needs four seconds for their headers, which is more
// than for any kernel. Other sources include ATen/core/Tensor.h.
//
// Does not: compute.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "kernels.h"

namespace graphpact {
namespace {

constexpr char kPagedAttention[] = "graphpact::paged_attention";
constexpr char kPageTableAttention[] = "graphpact::page_table_attention";
constexpr char kFillPagedIndices[] = "graphpact::fill_paged_indices";

// The compiled `kernel`, followed by the portable kernel `name` if it refuses its arguments.
template <const char* name, auto kernel>
struct Checked;

template <const char* name, typename... Args, bool (*kernel)(Args...)>
struct Checked<name, kernel> {
  static void call(Args... args) {
    if (kernel(args...)) return;
    static const auto portable = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<void(Args...)>();
    portable.call(args...);
    TORCH_CHECK(false, "the compiled kernel refuses arguments that ", name, " accepts");
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(graphpact_compiled, CPU, m) {
  m.impl("paged_attention", &Checked<kPagedAttention, &paged_attention>::call);
  m.impl("page_table_attention", &Checked<kPageTableAttention, &page_table_attention>::call);
  m.impl("fill_paged_indices", &Checked<kFillPagedIndices, &fill_paged_indices>::call);
  m.impl("fill_page_table", &fill_page_table);
  m.impl("schedule_attention", &schedule_attention);
  m.impl("linear", &linear);
  m.impl("write_kv_cache", &write_kv_cache);
}

}  // namespace graphpact
