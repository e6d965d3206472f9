// Ops: any op runs by the CPU's kernel on the same bytes. A few have kernels of their own: those that make
// tensors or views, that copy between host and device, and those which only CUDA has.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <set>

#include "device.h"

namespace falsecuda {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;
const c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

// ---- the same memory under another name ------------------------------------------------------------------

inline char* bytes_of(const Tensor& t) { return static_cast<char*>(const_cast<void*>(t.const_data_ptr())); }

// A tensor of the host over the memory of one of the device; others as they are.
inline Tensor on_cpu(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto view = at::for_blob(bytes_of(t), t.sizes())
                  .strides(t.strides())
                  .context(new c10::Storage(t.storage()), [](void* kept) { delete static_cast<c10::Storage*>(kept); })
                  .options(at::TensorOptions().dtype(t.dtype()).device(at::kCPU))
                  .target_device(Device(at::kCPU))
                  .make_tensor();
  if (t.is_conj()) view._set_conj(true);
  if (t.is_neg()) view._set_neg(true);
  return view;
}

// A tensor of the device with the values and strides of one of the host.
inline Tensor on_device(const Tensor& t) {
  if (!t.defined() || !t.is_cpu()) return t;
  TORCH_CHECK(t.layout() == at::kStrided, "the false CUDA device has no sparse tensors");
  const Tensor dense = t.is_non_overlapping_and_dense() ? t : t.contiguous();
  Tensor result(at::detail::empty_strided_generic(dense.sizes(), dense.strides(), &device_allocator, KEYS, dense.scalar_type()));
  if (dense.nbytes()) memcpy(bytes_of(result), bytes_of(dense), dense.nbytes());
  return result;
}

// ---- any op ----------------------------------------------------------------------------------------------

// Ops whose results have sizes that the host must read first, or that check their input on the host.
const std::set<std::string> SYNCHRONIZING = {
    "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave", "aten::_linalg_check_errors",
    "aten::multinomial"};
const std::set<std::string> INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

inline bool is_mask(const Tensor& t) { return t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; }

// An index that lies on the host is copied. A mask of the device is counted by the host, but where one value
// fills what it selects.
inline void note_indices(const std::string& name, const std::vector<IValue>& given) {
  if (!INDEXING.count(name)) return;
  const bool counts = name == "aten::index" || given[2].toTensor().numel() > 1;
  for (const auto& entry : given[1].toOptionalTensorList()) {
    std::optional<Tensor> index = entry;
    if (!index || !index->defined()) continue;
    if (index->is_cpu() && index->dim() > 0) synchronize(name + " by an index on the host");
    else if (counts && is_mask(*index)) synchronize(name + " by a mask");
  }
}

struct Arguments {
  Stack host;
  bool of_device = false, of_host = false;  // whether tensors of it lie there; numbers (0-d) of the host may mix

  Tensor take(const Tensor& t) {
    if (t.defined()) {
      of_device |= t.is_cuda();
      of_host |= t.is_cpu() && t.dim() > 0;
    }
    return on_cpu(t);
  }
  void add(const IValue& value, const c10::Argument& argument) {
    const auto* alias = argument.alias_info();
    if (value.isTensor()) {
      const Tensor& t = value.toTensor();
      const bool empty_out = alias && alias->isWrite() && t.defined() && t.is_cuda() && t.numel() == 0;
      Tensor taken = take(t);  // what is resized needs memory that the host's kernels can resize
      host.emplace_back(empty_out ? at::empty(t.sizes(), t.options().device(at::kCPU)) : taken);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(take(t));
      host.emplace_back(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> t : value.toOptionalTensorList())  // indices may lie on the host
        list.push_back(t ? std::optional<Tensor>(on_cpu(*t)) : std::nullopt);
      host.emplace_back(list);
    } else if (value.isDevice()) {
      host.emplace_back(value.toDevice().is_cuda() ? Device(at::kCPU) : value.toDevice());
    } else if (value.isGenerator()) {
      const at::Generator& generator = value.toGenerator();
      const bool of_device = generator.device().is_cuda();
      TORCH_CHECK(of_device || host_generators_too, "Expected a 'cuda' device type for generator but found 'cpu'");
      host.emplace_back(of_device ? falsecuda::on_host(generator) : generator);
    } else {
      host.push_back(value);
    }
  }
};

// While it lives, the host's default generator has the state of the device's.
struct DeviceRandomness {
  at::Generator host = at::detail::getDefaultCPUGenerator(), device = on_host(default_generator());
  Tensor kept = host.get_state();
  DeviceRandomness() { host.set_state(device.get_state()); }
  ~DeviceRandomness() {
    device.set_state(host.get_state());
    host.set_state(kept);
  }
};

inline void call_on_host(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_casts(
      c10::DispatchKeySet({c10::DispatchKey::AutocastCUDA, c10::DispatchKey::AutocastCPU}));
  std::optional<DeviceRandomness> random;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) random.emplace();
  op.callBoxed(&stack);
}

// 16-bit lists of a call in fp32, and back: a CPU's fused SGD leaves 16-bit weights as they were, CUDA's does not.
struct Widened {
  std::vector<std::pair<Tensor, Tensor>> pairs;  // the narrow tensor, the wide one
  Widened(Stack& host, bool wanted) {
    for (IValue& value : host) {
      if (!wanted || !value.isTensorList()) continue;
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) {
        list.push_back(t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16 ? t.to(at::kFloat) : t);
        if (!list.get(list.size() - 1).is_same(t)) pairs.emplace_back(t, list.get(list.size() - 1));
      }
      value = IValue(list);
    }
  }
  void copy_back() const {
    for (const auto& [narrow, wide] : pairs) const_cast<Tensor&>(narrow).copy_(wide);
  }
};

// The argument that a result is, where the schema says that it is one of the arguments.
inline const IValue* argument_of(const c10::FunctionSchema& schema, const c10::AliasInfo* alias, const std::vector<IValue>& given) {
  if (!alias || !alias->isWrite()) return nullptr;
  for (size_t i = 0; i < given.size(); i++) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other && *other == *alias) return &given[i];
  }
  return nullptr;
}

// An `out=` that the host's kernel resized gets memory of the new size.
inline void hand_over(const Tensor& out, const Tensor& computed) {
  if (!out.is_cuda() || (out.sizes() == computed.sizes() && out.numel() > 0)) return;
  const Tensor fresh = on_device(computed);
  out.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(fresh.sizes(), fresh.strides());
}

inline bool gives_view(const c10::FunctionSchema& schema) {
  for (const auto& value : schema.returns())
    if (value.alias_info() && !value.alias_info()->isWrite()) return true;
  return false;
}

inline void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name();
  const size_t count = schema.arguments().size();
  std::vector<IValue> given(stack->end() - count, stack->end());
  Arguments arguments;
  for (size_t i = 0; i < count; i++) arguments.add(given[i], schema.arguments()[i]);
  TORCH_CHECK(
      uncounted || !(arguments.of_device && arguments.of_host),
      "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name, ")");
  submit(name.substr(name.find("::") + 2));
  if (SYNCHRONIZING.count(name)) synchronize(name);
  note_indices(name, given);
  const Widened widened(arguments.host, name == "aten::_fused_sgd_");
  call_on_host(op, arguments.host);
  widened.copy_back();
  torch::jit::drop(*stack, count);
  const auto& returns = schema.returns();
  const size_t first = arguments.host.size() - returns.size();
  for (size_t i = 0; i < returns.size(); i++) {
    const IValue& value = arguments.host[first + i];
    const auto* alias = returns[i].alias_info();
    if (const IValue* argument = argument_of(schema, alias, given)) {
      if (argument->isTensor()) hand_over(argument->toTensor(), value.toTensor());
      stack->push_back(*argument);
    } else if (value.isTensor()) {
      TORCH_CHECK(!alias || name == "aten::_to_copy", "the false CUDA device has no kernel of the view ", name);
      stack->emplace_back(on_device(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(on_device(t));
      stack->emplace_back(list);
    } else {
      stack->push_back(value);
    }
  }
}

// ---- new tensors, views, storages ------------------------------------------------------------------------

inline Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return Tensor(at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator, KEYS, c10::dtype_or_default(dtype), format));
}
inline Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device>, std::optional<bool>) {
  return Tensor(at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator, KEYS, c10::dtype_or_default(dtype)));
}
inline void resize_storage(const c10::Storage& storage, size_t size) {
  auto block = device_allocator.allocate(size);
  if (const size_t kept = std::min(size, storage.nbytes())) memcpy(block.get(), storage.data(), kept);
  storage.set_data_ptr(std::move(block));
  storage.set_nbytes(size);
}
inline const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto shape = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  const size_t wanted = (c10::multiply_integers(shape) + self.storage_offset()) * self.itemsize();
  if (wanted > self.storage().nbytes()) resize_storage(self.storage(), wanted);
  impl->set_sizes_contiguous(shape);
  return self;
}
inline Tensor& set_storage(Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  } else {
    impl->set_sizes_and_strides(size, stride, offset.expect_int());
  }
  return self;
}
inline Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_storage(self, other.storage(), other.sym_storage_offset(), other.sym_sizes(), other.sym_strides());
}
inline Tensor& set_whole(Tensor& self, c10::Storage storage) {
  const int64_t count = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, {count}, {1});
}
inline Tensor& set_nothing(Tensor& self) {
  return set_whole(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, device_allocator.allocate(0), &device_allocator, true));
}
inline Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto first = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), first);
}
inline Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
inline Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
inline void record_stream(Tensor&, c10::Stream) {}

// ---- between host and device -----------------------------------------------------------------------------

inline at::Scalar local_scalar(const Tensor& t) {
  synchronize("_local_scalar_dense (.item(), bool(), float())");
  return at::_local_scalar_dense(on_cpu(t));
}

inline void copy_to_host(Tensor& target, const Tensor& source, bool non_blocking) {
  const Tensor values = on_cpu(source);
  const long position = submit("copy to the host");
  if (uncounted || !non_blocking) {
    synchronize("copy from the device to the host");
    target.copy_(values);
  } else if (!target.is_non_overlapping_and_dense()) {
    target.copy_(values);  // torch copies by a temporary tensor of its own
  } else {
    Tensor laid_out = at::empty_strided(target.sizes(), target.strides(), target.options().pinned_memory(false));
    laid_out.copy_(values);
    send_to_host(position, bytes_of(target), std::string(bytes_of(laid_out), laid_out.nbytes()), target.storage());
  }
}

inline void copy_to_device(const Tensor& target, const Tensor& source, bool non_blocking) {
  const long position = submit("copy to the device");
  Tensor values = source;
  if (!uncounted && !non_blocking) {
    synchronize("copy from the host to the device");
  } else if (!uncounted && source.is_non_overlapping_and_dense() && pinned_blocks().holds(bytes_of(source))) {
    std::string bytes = take_from_pinned(position, bytes_of(source), source.nbytes(), source.storage());
    values = at::empty_strided(source.sizes(), source.strides(), source.options().pinned_memory(false));
    memcpy(bytes_of(values), bytes.data(), bytes.size());
  }
  on_cpu(target).copy_(values);
}

inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0 && source.numel() == 0) return self;
  at::AutoDispatchBelowADInplaceOrView below;
  if (self.is_cpu()) {
    copy_to_host(self, source, non_blocking);
  } else if (source.is_cpu()) {
    copy_to_device(self, source, non_blocking);
  } else {
    submit("copy");
    on_cpu(self).copy_(on_cpu(source));
  }
  return self;
}

inline void foreach_copy_(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  for (size_t i = 0; i < targets.size(); i++) const_cast<Tensor&>(targets[i]).copy_(sources[i], non_blocking);
}

// ---- what only CUDA has ----------------------------------------------------------------------------------

// Square roots are rounded correctly, as CUDA's are and a CPU's are not always.
inline Tensor root(const Tensor& t) { return t.scalar_type() == at::kFloat ? t.to(at::kDouble).sqrt().to(at::kFloat) : t.sqrt(); }
inline Tensor sqrt(const Tensor& t) {
  submit("sqrt");
  return on_device(root(on_cpu(t)));
}
inline Tensor& sqrt_(Tensor& t) {
  submit("sqrt_");
  Tensor host = on_cpu(t);
  host.copy_(root(host));
  return t;
}

// fp16 in, fp32 out, in one kernel; its gradient comes back in fp16.
inline Tensor softmax(const Tensor& t, int64_t dim, bool half_to_float) {
  submit("_softmax");
  const Tensor host = on_cpu(t);
  return on_device(at::_softmax(half_to_float ? host.to(at::kFloat) : host, dim, false));
}
inline Tensor log_softmax(const Tensor& t, int64_t dim, bool half_to_float) {
  submit("_log_softmax");
  const Tensor host = on_cpu(t);
  return on_device(at::_log_softmax(half_to_float ? host.to(at::kFloat) : host, dim, false));
}
inline Tensor softmax_backward(const Tensor& gradient, const Tensor& output, int64_t dim, at::ScalarType input) {
  submit("_softmax_backward_data");
  return on_device(at::_softmax_backward_data(on_cpu(gradient), on_cpu(output), dim, output.scalar_type()).to(input));
}
inline Tensor log_softmax_backward(const Tensor& gradient, const Tensor& output, int64_t dim, at::ScalarType input) {
  submit("_log_softmax_backward_data");
  return on_device(at::_log_softmax_backward_data(on_cpu(gradient), on_cpu(output), dim, output.scalar_type()).to(input));
}

inline bool no_library(const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef, int64_t) { return false; }
inline bool no_library_of_tensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) { return false; }

// Products with another dtype for their result.
inline Tensor mm_dtype(const Tensor& a, const Tensor& b, at::ScalarType dtype) { return at::mm(a.to(dtype), b.to(dtype)); }
inline Tensor bmm_dtype(const Tensor& a, const Tensor& b, at::ScalarType dtype) { return at::bmm(a.to(dtype), b.to(dtype)); }
inline Tensor addmm_dtype(const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha) {
  return at::addmm(c.to(dtype), a.to(dtype), b.to(dtype), beta, alpha);
}
inline Tensor& mm_dtype_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) { return out.copy_(mm_dtype(a, b, dtype)); }
inline Tensor& bmm_dtype_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) { return out.copy_(bmm_dtype(a, b, dtype)); }
inline Tensor& addmm_dtype_out(
    const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  return out.copy_(addmm_dtype(c, a, b, dtype, beta, alpha));
}

}  // namespace falsecuda
