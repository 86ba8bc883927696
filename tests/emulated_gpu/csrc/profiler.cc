#include "profiler.h"

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "current_op.h"
#include "tensorflow/c/experimental/pluggable_profiler/pluggable_profiler.h"
#include "tsl/profiler/protobuf/xplane.pb.h"

namespace emulated_gpu {
namespace {

template <typename Clock>
int64_t Nanoseconds(std::chrono::time_point<Clock> at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

// The number by which a plane's metadata has that name.
template <typename Metadata>
int64_t NumberOf(const std::string& name, Metadata* metadata) {
  for (const auto& [number, each] : *metadata) {
    if (each.name() == name) return number;
  }
  const int64_t number = static_cast<int64_t>(metadata->size()) + 1;
  (*metadata)[number].set_id(number);
  (*metadata)[number].set_name(name);
  return number;
}

}  // namespace

Label LabelOf(const std::string& name) { return Profiler::Get().on() ? Label{name, TracedOp()} : Label{}; }

Profiler& Profiler::Get() {
  static auto* const profiler = new Profiler;
  return *profiler;
}

void Profiler::Start() {
  std::lock_guard<std::mutex> lock(mu_);
  events_.clear();
  clocks_apart_ns_ = Nanoseconds(std::chrono::system_clock::now()) - Nanoseconds(std::chrono::steady_clock::now());
  on_ = true;
}

void Profiler::Add(int device, const std::string& stream, const Label& label, Moment begin, Moment end) {
  if (label.name.empty() || !on_) return;
  std::lock_guard<std::mutex> lock(mu_);
  events_[device][stream].push_back({label, begin, end});
}

std::string Profiler::Space() {
  std::lock_guard<std::mutex> lock(mu_);
  tensorflow::profiler::XSpace space;
  for (const auto& [device, streams] : events_) {
    auto* const plane = space.add_planes();
    plane->set_name(absl::StrCat("/device:GPU:", device));
    const int64_t tf_op = NumberOf("tf_op", plane->mutable_stat_metadata());
    for (const auto& [stream, events] : streams) {
      auto* const line = plane->add_lines();
      line->set_id(plane->lines_size());
      line->set_name(stream);
      const int64_t line_ns = Nanoseconds(events.front().begin) + clocks_apart_ns_;
      line->set_timestamp_ns(line_ns);
      for (const Event& event : events) {
        auto* const made = line->add_events();
        made->set_metadata_id(NumberOf(event.label.name, plane->mutable_event_metadata()));
        made->set_offset_ps(1000 * (Nanoseconds(event.begin) + clocks_apart_ns_ - line_ns));
        made->set_duration_ps(1000 * (Nanoseconds(event.end) - Nanoseconds(event.begin)));
        auto* const stat = made->add_stats();
        stat->set_metadata_id(tf_op);
        stat->set_str_value(event.label.op);
      }
    }
  }
  return space.SerializeAsString();
}

}  // namespace emulated_gpu

extern "C" __attribute__((visibility("default"))) void TF_InitProfiler(TF_ProfilerRegistrationParams* params, TF_Status*) {
  using emulated_gpu::Profiler;
  params->profiler->struct_size = TP_PROFILER_STRUCT_SIZE;
  params->profiler->device_type = "GPU";
  params->profiler_fns->struct_size = TP_PROFILER_FNS_STRUCT_SIZE;
  params->profiler_fns->start = [](const TP_Profiler*, TF_Status*) { Profiler::Get().Start(); };
  params->profiler_fns->stop = [](const TP_Profiler*, TF_Status*) { Profiler::Get().Stop(); };
  params->profiler_fns->collect_data_xspace = [](const TP_Profiler*, uint8_t* buffer, size_t* bytes, TF_Status*) {
    const std::string space = Profiler::Get().Space();
    if (buffer != nullptr) std::memcpy(buffer, space.data(), space.size());
    *bytes = space.size();
  };
  params->destroy_profiler = [](TP_Profiler*) {};
  params->destroy_profiler_fns = [](TP_ProfilerFns*) {};
}
