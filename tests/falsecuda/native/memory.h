// Memory: the device's, aligned as CUDA's and counted, and the host's pinned memory. Both come full of garbage.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <map>

#include "queue.h"

namespace falsecuda {

using c10::Device;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr size_t TOTAL = size_t{80} << 30;  // as torch_cuda.py says
constexpr size_t ALIGNMENT = 512;  // torch's allocator rounds sizes up to it

struct Tally {
  long current = 0, peak = 0, allocated = 0, freed = 0;
  void add(long n) { current += n, allocated += n, peak = std::max(peak, current); }
  void take(long n) { current -= n, freed += n; }
};

// Blocks by address, with their sizes and how many bytes and blocks there are and were.
struct Blocks {
  std::mutex lock;
  std::map<char*, size_t> sizes;
  Tally bytes, count;

  void* allocate(size_t size) {
    const size_t whole = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void* block = nullptr;
    TORCH_CHECK(posix_memalign(&block, ALIGNMENT, whole) == 0, "out of memory: ", size, " bytes");
    memset(block, GARBAGE, whole);
    std::lock_guard<std::mutex> guard(lock);
    sizes[static_cast<char*>(block)] = whole;
    bytes.add(whole), count.add(1);
    return block;
  }
  void release(void* block) {
    if (block == nullptr) return;
    {
      std::lock_guard<std::mutex> guard(lock);
      auto found = sizes.find(static_cast<char*>(block));
      bytes.take(found->second), count.take(1);
      sizes.erase(found);
    }
    free(block);
  }
  bool holds(const void* address) {
    std::lock_guard<std::mutex> guard(lock);
    auto after = sizes.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
    if (after == sizes.begin()) return false;
    --after;
    return static_cast<const char*>(address) < after->first + after->second;
  }
};
inline Blocks& device_blocks() {
  static auto& blocks = *new Blocks();
  return blocks;
}
inline Blocks& pinned_blocks() {
  static auto& blocks = *new Blocks();
  return blocks;
}

inline void release_device(void* block) { device_blocks().release(block); }
inline void release_pinned(void* block) { pinned_blocks().release(block); }

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* block = size ? device_blocks().allocate(size) : nullptr;
    return {block, block, &release_device, Device(CUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_device; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> guard(device_blocks().lock);
    return {TOTAL - device_blocks().bytes.current, TOTAL};
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto fill = [](c10::CachingAllocator::StatArray& row, const Tally& tally) {
      row[0].current = tally.current, row[0].peak = tally.peak;
      row[0].allocated = tally.allocated, row[0].freed = tally.freed;
    };
    std::lock_guard<std::mutex> guard(device_blocks().lock);
    for (auto* row : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
      fill(*row, device_blocks().bytes);
    for (auto* row : {&stats.allocation, &stats.active, &stats.segment}) fill(*row, device_blocks().count);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> guard(device_blocks().lock);
    for (Tally* tally : {&device_blocks().bytes, &device_blocks().count}) tally->allocated = tally->freed = 0;
  }
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> guard(device_blocks().lock);
    for (Tally* tally : {&device_blocks().bytes, &device_blocks().count}) tally->peak = tally->current;
  }
};
inline DeviceAllocator device_allocator;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* block = pinned_blocks().allocate(std::max<size_t>(size, 1));
    return {block, block, &release_pinned, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
inline PinnedAllocator pinned_allocator;

}  // namespace falsecuda
