// The device's one queue: how far its work is, which copies are under way, and who waited for it.
//
// Every op that is handed to the device is counted: `submitted` is the end of the queue. How far the device is
// (`done`) depends on the speed of arrival. The numbers of an op are computed at once, since no program can see
// a device's memory but by a copy. What a program can see is when a copy arrives: a copy to the host fills its
// target with garbage and puts the numbers there when `done` reaches it; a copy from pinned memory compares its
// source then with what it was, and a source that was written meanwhile is an error.
#pragma once
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace falsecuda {

enum Arrival : int { AT_ONCE = 0, LATE = 1, WHEN_WAITED_FOR = 2 };
enum DebugMode : int { QUIET = 0, WARN = 1, ERROR = 2 };  // as torch numbers its sync debug modes
constexpr unsigned char GARBAGE = 0xA5;

struct Copy {
  long position;  // of the op that copies, in the queue
  bool to_host;   // else from pinned memory
  char* host;     // the target, or the source
  std::string bytes;
  c10::Storage keep;  // keeps the host's memory, as torch's pinned allocator does
};

// Names noted for a reader who asks later; bounded, so that a long run does not fill the memory.
struct Log {
  std::vector<std::string> names;
  void add(const std::string& name) {
    if (names.size() < 100000) names.push_back(name);
  }
};

struct Queue {
  std::mutex lock;
  long submitted = 0, done = 0, lag = 16;
  Arrival arrival = WHEN_WAITED_FOR;
  std::deque<Copy> copies;
  Log syncs, event_waits, ops, faults;
  bool log_ops = false;
  std::atomic<int> debug_mode{QUIET};
  std::atomic<bool> capturing{false};
};
inline Queue& queue() {
  static auto& q = *new Queue();  // never destroyed: its copies hold memory of torch
  return q;
}

// Above 0 nothing is counted and copies arrive at once: for what looks at the device from outside.
inline thread_local int uncounted = 0;

// What has arrived goes to `over`, which is destroyed without the lock: a storage that Python knows waits for the
// interpreter, whose holder may wait for the lock.
inline std::string arrive(Queue& q, std::deque<Copy>& over) {
  std::string fault;
  for (; !q.copies.empty() && q.copies.front().position <= q.done; q.copies.pop_front()) {
    Copy& copy = over.emplace_back(std::move(q.copies.front()));
    if (copy.to_host) {
      memcpy(copy.host, copy.bytes.data(), copy.bytes.size());
    } else if (memcmp(copy.host, copy.bytes.data(), copy.bytes.size()) != 0) {
      fault = "pinned memory of " + std::to_string(copy.bytes.size()) +
          " bytes was written while a copy from it to the device was under way";
      q.faults.add(fault);
    }
  }
  return fault;
}

// The device is at least as far as `position`; raises where a copy on the way met a pinned source written.
inline void reach(long position) {
  std::string fault;
  std::deque<Copy> over;
  {
    std::lock_guard<std::mutex> guard(queue().lock);
    Queue& q = queue();
    q.done = std::max(q.done, std::min(position, q.submitted));
    fault = arrive(q, over);
  }
  TORCH_CHECK(fault.empty(), fault);
}

inline void reach_end() { reach(queue().submitted); }

// One more op is handed to the device; returns its position.
inline long submit(const std::string& name) {
  if (uncounted) return queue().submitted;
  long position, reached;
  {
    std::lock_guard<std::mutex> guard(queue().lock);
    Queue& q = queue();
    position = ++q.submitted;
    if (q.log_ops) q.ops.add(name);
    reached = q.arrival == AT_ONCE ? position : q.arrival == LATE ? position - q.lag : 0;
  }
  reach(reached);
  return position;
}

// The host waits for the device, which torch's sync debug mode notices (or not: `debugged`).
inline void synchronize(const std::string& name, bool debugged = true) {
  if (uncounted) return;
  Queue& q = queue();
  TORCH_CHECK(!q.capturing, "operation not permitted when stream is capturing: ", name);
  {
    std::lock_guard<std::mutex> guard(q.lock);
    q.syncs.add(name);
  }
  TORCH_CHECK(!debugged || q.debug_mode != ERROR, "called a synchronizing CUDA operation: ", name);
  if (debugged && q.debug_mode == WARN) TORCH_WARN("called a synchronizing CUDA operation: ", name);
  reach_end();
}

// ---- events ---------------------------------------------------------------------------------------------

inline bool is_reached(long position) {
  TORCH_CHECK(!queue().capturing, "operation not permitted when stream is capturing: event query");
  std::lock_guard<std::mutex> guard(queue().lock);
  return position <= queue().done;
}

// Waiting for an event is no error in torch's sync debug mode; it is noted with the work that it is behind.
inline void wait_for_event(long position) {
  Queue& q = queue();
  TORCH_CHECK(!q.capturing, "operation not permitted when stream is capturing: event synchronize");
  if (!uncounted) {
    std::lock_guard<std::mutex> guard(q.lock);
    const char* state = position <= q.done ? "arrived" : "not yet arrived";
    q.event_waits.add(std::to_string(q.submitted - position) + " ops since it was recorded, " + state);
  }
  reach(position);
}

// ---- copies ---------------------------------------------------------------------------------------------

inline void send_to_host(long position, char* target, std::string bytes, const c10::Storage& keep) {
  std::lock_guard<std::mutex> guard(queue().lock);
  Queue& q = queue();
  if (position <= q.done) {
    memcpy(target, bytes.data(), bytes.size());
    return;
  }
  memset(target, GARBAGE, bytes.size());
  q.copies.push_back({position, true, target, std::move(bytes), keep});
}

// The bytes that the device reads from pinned memory: with those of copies to it that are still under way,
// which the device has made by then.
inline std::string take_from_pinned(long position, char* source, size_t size, const c10::Storage& keep) {
  std::lock_guard<std::mutex> guard(queue().lock);
  Queue& q = queue();
  std::string bytes(source, size);
  for (const Copy& copy : q.copies) {
    char *first = std::max(source, copy.host), *end = std::min(source + size, copy.host + copy.bytes.size());
    if (copy.to_host && first < end) memcpy(&bytes[first - source], &copy.bytes[first - copy.host], end - first);
  }
  if (position > q.done) q.copies.push_back({position, false, source, bytes, keep});
  return bytes;
}

}  // namespace falsecuda
