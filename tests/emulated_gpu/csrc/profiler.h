// What a profile of TensorFlow's holds of the devices: when kernels and copies began and ended, by their streams' clocks.
//
// As of a GPU of CUDA (cupti_collector.cc): a plane for each device, a line for each stream, and an event for each kernel
// and copy, which names the node that enqueued it in the stat "tf_op".

#ifndef TESTS_EMULATED_GPU_CSRC_PROFILER_H_
#define TESTS_EMULATED_GPU_CSRC_PROFILER_H_

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace emulated_gpu {

using Moment = std::chrono::steady_clock::time_point;

// Of something enqueued: what it is, and "node:Op"; empty for what is not traced.
struct Label {
  std::string name, op;
};

// Of what the current op enqueues; empty while nothing is traced.
Label LabelOf(const std::string& name);

class Profiler {
 public:
  static Profiler& Get();

  void Start();
  void Stop() { on_ = false; }
  bool on() const { return on_; }
  void Add(int device, const std::string& stream, const Label& label, Moment begin, Moment end);
  // A serialized XSpace of what was added since the last start.
  std::string Space();

 private:
  struct Event {
    Label label;
    Moment begin, end;
  };

  std::atomic<bool> on_{false};
  std::mutex mu_;
  int64_t clocks_apart_ns_ = 0;  // from the streams' clock to the profiler's, which counts from 1970
  std::map<int, std::map<std::string, std::vector<Event>>> events_;  // by device and stream
};

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_PROFILER_H_
