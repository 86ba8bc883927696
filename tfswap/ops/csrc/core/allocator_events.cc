// The events of TensorFlow's BFC allocators, for device/allocator_events.py.
//
// Each request and release is a TraceMe of level kInfo, written under the allocator's lock (AddTraceMe in
// tsl/framework/bfc_allocator.cc). They are taken from the recorder itself: a profiler session logs, writes files, and
// is one for the process. The recorder is one too, and a program's own profiler has it first.

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "export.h"
#include "tsl/profiler/lib/traceme.h"
#if __has_include("xla/tsl/profiler/backends/cpu/traceme_recorder.h")
#include "xla/tsl/profiler/backends/cpu/traceme_recorder.h"
#else
#include "tsl/profiler/backends/cpu/traceme_recorder.h"
#endif

namespace tfswap {
namespace {

// What was taken, until Python has copied it. Python calls from one thread at a time.
std::string* TakenEvents() {
  static std::string* const taken = new std::string;
  return taken;
}

bool IsAllocatorEvent(const std::string& name) {
  return name.rfind("MemoryAllocation#", 0) == 0 || name.rfind("MemoryDeallocation#", 0) == 0;
}

}  // namespace
}  // namespace tfswap

// Begins to record. Returns whether it does: no other profiler records.
TFSWAP_C_API bool tfswap_record_allocator_events() {
  return tsl::profiler::TraceMeRecorder::Start(static_cast<int>(tsl::profiler::TraceMeLevel::kInfo));
}

// Ends recording. Keeps the events in order of time, one a line, for tfswap_copy_allocator_events, at most `most` of
// them, the first. Returns their size in bytes.
TFSWAP_C_API uint64_t tfswap_stop_allocator_events(uint64_t most) {
  std::vector<std::pair<int64_t, std::string>> events;
  for (auto& thread : tsl::profiler::TraceMeRecorder::Stop()) {
    for (auto& event : thread.events) {
      if (tfswap::IsAllocatorEvent(event.name)) events.emplace_back(event.start_time, std::move(event.name));
    }
  }
  std::stable_sort(events.begin(), events.end(),
                   [](const auto& one, const auto& other) { return one.first < other.first; });
  if (events.size() > most) events.resize(most);
  std::string* const taken = tfswap::TakenEvents();
  taken->clear();
  for (const auto& event : events) taken->append(event.second).push_back('\n');
  return taken->size();
}

// Copies what the latest tfswap_stop_allocator_events kept, and discards it. `to` has room for its size.
TFSWAP_C_API void tfswap_copy_allocator_events(char* to) {
  std::string* const taken = tfswap::TakenEvents();
  taken->copy(to, taken->size());
  std::string().swap(*taken);
}
