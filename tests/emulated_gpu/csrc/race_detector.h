// Conflicts between accesses to memory that nothing orders.
//
// Each stream has a vector clock: its own count of what was enqueued, and of each other stream the count up to which
// that has ended before what the stream does next. Waits, events and the host carry clocks from one stream to another.
// An access is stamped with its stream's count on the bytes that it touches, region by region, and is compared with the
// stamps that are there: a write with the last write and all reads since, a read with the last write. Of two accesses of
// which neither's clock covers the other, one is a race, whatever the times at which they ran.
//
// The host is one thread to the detector: what any of its threads has seen the end of has ended for all. TensorFlow's
// threads hand work to each other in ways that cannot be seen from outside, so a wait that one of them forgot is missed
// where another happens to have seen the end; settings.h's `ends_late` keeps ends from being seen before they must be.
//
// Freeing device memory counts as a write on the compute stream, where TensorFlow's allocator lets it be used next: so
// a buffer that is freed too early is reported whether or not it is used again.
//
// Does not depend on TensorFlow. Not detected: what the host reads and writes itself.

#ifndef TESTS_EMULATED_GPU_CSRC_RACE_DETECTOR_H_
#define TESTS_EMULATED_GPU_CSRC_RACE_DETECTOR_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace emulated_gpu {

using Clock = std::vector<uint64_t>;  // by number of stream; 0 is the host

void Join(Clock* to, const Clock& from);

// Bytes from `begin` to before `end`.
struct Range {
  uintptr_t begin, end;
};

class RaceDetector {
 public:
  static RaceDetector& Get();

  // A stream of that name begins, after all that the host has seen. Its number.
  int AddStream(const std::string& name);

  // `stream` does nothing more before what `other` has been given so far.
  void StreamWaits(int stream, int other);
  void StreamWaits(int stream, const Clock& clock);
  // All that `stream` has been given so far.
  Clock ClockOf(int stream);
  // The host has seen the end of that.
  void HostSees(const Clock& clock);

  // `stream` is given work that touches these bytes; `what` names it in reports.
  void Enqueue(int stream, const std::string& what, const std::vector<Range>& reads, const std::vector<Range>& writes);
  // The host itself does, and waits for it.
  void OnHost(const std::string& what, const std::vector<Range>& reads, const std::vector<Range>& writes);
  // The host frees device memory, which the work that `stream` is given next may use.
  void Free(int stream, const std::string& what, Range freed);
  // The memory has no past any more.
  void Forget(Range range);

  void Report(const std::string& race);
  int64_t races();
  std::string report();
  void ClearReports();

 private:
  struct Access {
    int stream;
    uint64_t count;
    std::shared_ptr<const std::string> what;
  };
  struct Cell {
    uintptr_t end;
    Access written{0, 0, nullptr};
    std::vector<Access> reads;  // since, the last one of each stream
  };

  void TouchLocked(const Clock& clock, const Access& by, Range range, bool writes);
  void SplitLocked(uintptr_t at);
  void CheckLocked(const Clock& clock, const Access& by, bool writes, const Access& before, bool wrote, Range range);
  std::string NameLocked(const Access& access, const char* verb) const;

  std::mutex mu_;
  std::vector<std::string> names_{"the host"};
  std::vector<Clock> clocks_{Clock(1, 0)};  // the host's is what it has seen
  std::map<uintptr_t, Cell> cells_;         // by first byte
  int64_t races_ = 0;
  std::set<std::string> reports_;
};

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_RACE_DETECTOR_H_
