// What torch asks of a device: streams and events (the guard), random numbers, and CUDA's hooks.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <chrono>

#include "memory.h"

namespace falsecuda {

// ---- random numbers: a generator of the device's own, which is a CPU's inside -----------------------------

struct FalseGenerator final : c10::GeneratorImpl {
  at::Generator host;
  explicit FalseGenerator(at::Generator inner)
      : GeneratorImpl(Device(CUDA, 0), c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(host).seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new FalseGenerator(host.clone()); }
};

// Whether the host's generators serve the device too, as no GPU does: for tests that were written for a CPU.
inline std::atomic<bool> host_generators_too{false};

inline const at::Generator& default_generator() {
  static auto& generator = *new at::Generator(c10::make_intrusive<FalseGenerator>(at::detail::createCPUGenerator()));
  return generator;
}

inline at::Generator on_host(const at::Generator& generator) {
  return static_cast<FalseGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

// ---- streams and events: streams have names, and all of them are one queue -------------------------------

inline thread_local int64_t current_stream = 0;
inline std::atomic<int64_t> streams_made{0};

struct Event {
  long position = 0;
  std::chrono::steady_clock::time_point when;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream_of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, Device(CUDA, 0), id); }
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device) const override { return Device(CUDA, 0); }
  Device getDevice() const override { return Device(CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(Device, bool) const override { return stream_of(++streams_made); }
  c10::Stream getNewStream(Device, int) const override { return stream_of(++streams_made); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int64_t old = current_stream;
    current_stream = stream.id();
    return stream_of(old);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id() << 8);
  }
  bool isStreamCapturing(const c10::Stream&) const override { return queue().capturing; }
  bool queryStream(const c10::Stream&) const override { return is_reached(queue().submitted); }
  void synchronizeStream(const c10::Stream&) const override { synchronize("stream.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize("torch.cuda.synchronize", false); }

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    *static_cast<Event*>(*event) = {queue().submitted, std::chrono::steady_clock::now()};
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override { return !event || is_reached(static_cast<Event*>(event)->position); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for_event(static_cast<Event*>(event)->position);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    std::chrono::duration<double, std::milli> passed = static_cast<Event*>(second)->when - static_cast<Event*>(first)->when;
    return passed.count();
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// ---- hooks -----------------------------------------------------------------------------------------------

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* address) const override { return pinned_blocks().holds(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
  Device getDeviceFromPtr(void*) const override { return Device(CUDA, 0); }
  void deviceSynchronize(c10::DeviceIndex) const override { synchronize("torch.cuda.synchronize", false); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::Generator(c10::make_intrusive<FalseGenerator>(at::detail::createCPUGenerator()));
  }
};

// DDP ends the process where a device has no timer.
struct NoTimer final : c10d::Timer {
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

}  // namespace falsecuda
