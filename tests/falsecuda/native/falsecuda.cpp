// A device that torch calls "cuda" and that is CPU memory: registration, and what Python calls.
#include "ops.h"

namespace at {
using falsecuda::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::CUDA, falsecuda::NoTimer)
}

namespace falsecuda {

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
const bool allocator_set = (c10::SetAllocator(CUDA, &device_allocator), true);

torch::CppFunction on_host_kernel() { return torch::CppFunction::makeFromBoxedFunction<&run_on_host>(); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(on_host_kernel()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_.source_Storage", TORCH_FN(set_whole));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_foreach_copy_", TORCH_FN(foreach_copy_));
  m.impl("sqrt", TORCH_FN(falsecuda::sqrt));
  m.impl("sqrt_", TORCH_FN(falsecuda::sqrt_));
  m.impl("mm.dtype", TORCH_FN(mm_dtype));
  m.impl("mm.dtype_out", TORCH_FN(mm_dtype_out));
  m.impl("bmm.dtype", TORCH_FN(bmm_dtype));
  m.impl("bmm.dtype_out", TORCH_FN(bmm_dtype_out));
  m.impl("addmm.dtype", TORCH_FN(addmm_dtype));
  m.impl("addmm.dtype_out", TORCH_FN(addmm_dtype_out));
  m.impl("_softmax", TORCH_FN(softmax));
  m.impl("_log_softmax", TORCH_FN(log_softmax));
  m.impl("_softmax_backward_data", TORCH_FN(softmax_backward));
  m.impl("_log_softmax_backward_data", TORCH_FN(log_softmax_backward));
  for (const char* name : {"_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"}) {
    m.impl(name, TORCH_FN(no_library));
    m.impl((name + std::string(".Tensor")).c_str(), TORCH_FN(no_library_of_tensors));
  }
  for (const char* name : {"convolution", "convolution_backward"}) m.impl(name, on_host_kernel());  // composite on a CPU
}

// Where a CPU has a kernel of its own, CUDA has one too: without it the op would be made of others.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    const bool foreach = name.name.rfind("aten::_foreach_", 0) == 0;
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || gives_view(op->schema())) continue;
    if (!foreach && !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    m.impl((name.name.substr(6) + overload).c_str(), on_host_kernel());
  }
}

TORCH_LIBRARY(falsecuda, m) {
  m.def("on_cpu(Tensor t) -> Tensor", [](const Tensor& t) { return on_cpu(t); });
  m.def("default_generator() -> Generator?", []() -> std::optional<at::Generator> { return default_generator(); });
  m.def("resize_storage(Storage storage, int size) -> ()", [](c10::Storage storage, int64_t size) { resize_storage(storage, size); });
}

}  // namespace falsecuda

// ---- called from Python by ctypes --------------------------------------------------------------------------

using namespace falsecuda;

extern "C" {
void falsecuda_arrival(int arrival, long lag) {
  {
    std::lock_guard<std::mutex> guard(queue().lock);
    queue().arrival = static_cast<Arrival>(arrival);
    queue().lag = lag;
  }
  if (arrival == AT_ONCE) reach_end();
}
void falsecuda_debug_mode(int mode) { queue().debug_mode = mode; }
void falsecuda_capturing(int on) { queue().capturing = on; }
int falsecuda_is_capturing() { return queue().capturing; }
void falsecuda_host_generators_too(int on) { host_generators_too = on; }
void falsecuda_uncounted(int change) { uncounted += change; }
void falsecuda_log_ops(int on) {
  std::lock_guard<std::mutex> guard(queue().lock);
  queue().log_ops = on;
}
long falsecuda_stream(long id) {  // makes it the current one, where not negative; the current one
  if (id >= 0) current_stream = id;
  return current_stream;
}
long falsecuda_submit(const char* name) { return submit(name); }

// Wait for all work; whether no copy met a pinned source that was written meanwhile.
int falsecuda_drain() {
  Queue& q = queue();
  std::deque<Copy> over;
  std::lock_guard<std::mutex> guard(q.lock);
  q.done = q.submitted;
  return arrive(q, over).empty();
}

// The names in a log, one a line, into `room`; the bytes that they need. A log that fitted is emptied.
size_t falsecuda_log(int which, char* room, size_t size) {
  Queue& q = queue();
  std::lock_guard<std::mutex> guard(q.lock);
  Log& log = which == 0 ? q.syncs : which == 1 ? q.event_waits : which == 2 ? q.ops : q.faults;
  std::string text;
  for (const auto& name : log.names) text += name + "\n";
  if (text.size() < size) {
    memcpy(room, text.c_str(), text.size() + 1);
    log.names.clear();
  }
  return text.size();
}

// Current, peak, allocated and freed bytes, then the same of blocks; of the device or of pinned memory.
void falsecuda_memory(int pinned, long* into) {
  Blocks& blocks = pinned ? pinned_blocks() : device_blocks();
  std::lock_guard<std::mutex> guard(blocks.lock);
  for (const Tally* tally : {&blocks.bytes, &blocks.count}) {
    *into++ = tally->current, *into++ = tally->peak, *into++ = tally->allocated, *into++ = tally->freed;
  }
}
void falsecuda_reset_memory(int pinned, int peaks) {
  Blocks& blocks = pinned ? pinned_blocks() : device_blocks();
  std::lock_guard<std::mutex> guard(blocks.lock);
  for (Tally* tally : {&blocks.bytes, &blocks.count}) {
    if (peaks) tally->peak = tally->current;
    else tally->allocated = tally->freed = 0;
  }
}
}
