// What the devices have done so far, for tests.

#ifndef TESTS_EMULATED_GPU_CSRC_COUNTERS_H_
#define TESTS_EMULATED_GPU_CSRC_COUNTERS_H_

#include <atomic>
#include <cstdint>

namespace emulated_gpu {

struct Counters {
  struct Copies {
    std::atomic<int64_t> number{0}, bytes{0};
  };

  static Counters& Get() {
    static auto* const counters = new Counters;
    return *counters;
  }

  void Add(Copies* copies, uint64_t bytes) {
    ++copies->number;
    copies->bytes += static_cast<int64_t>(bytes);
  }

  std::atomic<int64_t> kernels{0};
  Copies in, out, between;
};

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_COUNTERS_H_
