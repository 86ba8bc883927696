// What tests ask of the devices and set, by ctypes (__init__.py).

#include <cstdint>
#include <string>

#include "counters.h"
#include "memory.h"
#include "race_detector.h"
#include "settings.h"

#define EMULATED_GPU_C_API extern "C" __attribute__((visibility("default")))

EMULATED_GPU_C_API const char* tfswap_built_for() { return TFSWAP_BUILT_FOR; }

// Of kernels; copies and bytes to devices, to the host, between devices; pinned bytes now: in that order.
EMULATED_GPU_C_API void emulated_gpu_counts(int64_t* to) {
  const emulated_gpu::Counters& counters = emulated_gpu::Counters::Get();
  *to++ = counters.kernels;
  for (const auto* const copies : {&counters.in, &counters.out, &counters.between}) {
    *to++ = copies->number;
    *to++ = copies->bytes;
  }
  *to++ = static_cast<int64_t>(emulated_gpu::PinnedBytes());
}

EMULATED_GPU_C_API int64_t emulated_gpu_races() { return emulated_gpu::RaceDetector::Get().races(); }

// A line each. Valid until this thread asks again.
EMULATED_GPU_C_API const char* emulated_gpu_report() {
  thread_local std::string report;
  report = emulated_gpu::RaceDetector::Get().report();
  return report.c_str();
}

EMULATED_GPU_C_API void emulated_gpu_clear_races() { emulated_gpu::RaceDetector::Get().ClearReports(); }

EMULATED_GPU_C_API void emulated_gpu_set_links(double in_bytes_per_s, double out_bytes_per_s, double latency_us) {
  emulated_gpu::Settings& settings = emulated_gpu::Settings::Get();
  settings.in.bytes_per_s = in_bytes_per_s;
  settings.out.bytes_per_s = out_bytes_per_s;
  settings.in.latency_us = latency_us;
  settings.out.latency_us = latency_us;
}

EMULATED_GPU_C_API void emulated_gpu_set_kernel_us(double microseconds) {
  emulated_gpu::Settings::Get().kernel_us = microseconds;
}

EMULATED_GPU_C_API void emulated_gpu_set_check(bool check) { emulated_gpu::Settings::Get().checks = check; }

// What another process has of each device from now on. Nothing is taken away that TensorFlow has.
EMULATED_GPU_C_API void emulated_gpu_set_others(uint64_t bytes) { emulated_gpu::Settings::Get().others_bytes = bytes; }

// Faults, as masks of roles (settings.h).
EMULATED_GPU_C_API void emulated_gpu_set_faults(unsigned ignored_waits, unsigned early_events) {
  emulated_gpu::Settings::Get().ignored_waits = ignored_waits;
  emulated_gpu::Settings::Get().early_events = early_events;
}
