// What the emulated devices are like: read once from the environment, which settings.py writes and checks.

#ifndef TESTS_EMULATED_GPU_CSRC_SETTINGS_H_
#define TESTS_EMULATED_GPU_CSRC_SETTINGS_H_

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace emulated_gpu {

// How long a copy takes in one direction: bytes per second, and microseconds for each copy. 0 takes no time.
struct Link {
  std::atomic<double> bytes_per_s{0}, latency_us{0};

  double Microseconds(uint64_t bytes) const {
    const double rate = bytes_per_s;
    return latency_us + (rate > 0 ? 1e6 * static_cast<double>(bytes) / rate : 0);
  }
};

// What a device's streams are for. In masks, bit by role.
enum Role { kCompute, kIn, kOut, kBetween };

struct Settings {
  static Settings& Get() {
    static auto* const settings = new Settings;
    return *settings;
  }

  const int devices = static_cast<int>(Number("COUNT", 1));
  const uint64_t memory_bytes = static_cast<uint64_t>(Number("MEMORY", 1 << 30));
  std::atomic<double> kernel_us{Number("KERNEL_US", 0)};
  Link in, out, between, pageable;
  // Times are drawn from nothing to twice as long, by this seed; 0 for no draws.
  const uint64_t jitter = static_cast<uint64_t>(Number("JITTER", 0));
  const bool protects = Number("PROTECT", 1) != 0;
  const bool poisons = Number("POISON", 1) != 0;
  // Kernels take what TensorFlow's GPU kernels take besides their results; of it, cuDNN's workspace:
  const bool temporaries = Number("TEMPORARIES", 1) != 0;
  // of one algorithm, or of several that TensorFlow tries, the fastest first.
  const std::vector<int64_t> workspaces_bytes = Numbers("WORKSPACE");
  const int64_t product_workspace_bytes = static_cast<int64_t>(Number("PRODUCT_WORKSPACE", 0));
  // Of each device, what another process has.
  std::atomic<uint64_t> others_bytes{static_cast<uint64_t>(Number("OTHERS", 0))};
  std::atomic<bool> checks{Number("CHECK", 1) != 0};
  // Work on streams ends as late as it can: when no thread of the process has anything else to do.
  const bool ends_late = Number("LATE", 0) != 0;

  // Faults, to see that they are reported. Streams of these roles wait for no other,
  std::atomic<unsigned> ignored_waits{static_cast<unsigned>(Number("IGNORED_WAITS", 0))};
  // and events on these have ended before the work has.
  std::atomic<unsigned> early_events{static_cast<unsigned>(Number("EARLY_EVENTS", 0))};
  // Callbacks of copies by ops whose types begin so are copied, and the copies outlive the callbacks.
  const std::string copied_callbacks = Text("COPIED_CALLBACKS");

 private:
  Settings() {
    Read("IN", &in), Read("OUT", &out), Read("BETWEEN", &between), Read("PAGEABLE", &pageable);
  }

  static std::string Text(const std::string& name) {
    const char* const text = std::getenv(("EMULATED_GPU_" + name).c_str());
    return text == nullptr ? "" : text;
  }

  static double Number(const std::string& name, double otherwise) {
    const std::string text = Text(name);
    return text.empty() ? otherwise : std::atof(text.c_str());
  }

  static std::vector<int64_t> Numbers(const std::string& name) {
    std::istringstream text(Text(name));
    std::vector<int64_t> numbers;
    for (std::string each; std::getline(text, each, ',');) numbers.push_back(std::atoll(each.c_str()));
    return numbers;
  }

  static void Read(const std::string& name, Link* link) {
    link->bytes_per_s = Number(name + "_BANDWIDTH", 0);
    link->latency_us = Number(name + "_LATENCY_US", 0);
  }
};

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_SETTINGS_H_
