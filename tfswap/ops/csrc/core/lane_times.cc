// How long a schedule takes, on lanes of kernels and copies. simulator/timing.py has the same lanes and their reasons,
// and tests compare the two, bit for bit. This file does not depend on TensorFlow.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "export.h"
#include "schedule_replay.h"

namespace tfswap {

// What a kernel does besides computing: `Role` in simulator/native_timing.py.
enum KernelRole : int8_t { kComputes, kLoads, kStores, kSends, kReceives };

// A step and its costs, field for field as the ctypes structure in simulator/native_timing.py.
struct LaneFacts {
  int64_t node_count;
  int64_t value_count;
  const double* seconds;     // of nodes
  const int8_t* roles;       // of nodes
  const int32_t* copied;     // of nodes that load or store: the value
  const int8_t* home_tiers;  // of nodes that load or store
  const int32_t* stored_by;  // of nodes: the one whose copy to a home this one waits for; -1: none
  Lists reads;               // of nodes: values
  const int64_t* value_bytes;
  double out_bytes_per_s[3];  // by tier
  double in_bytes_per_s[3];
  double copy_latency_s;
  double copy_share;
  double split_s;
  int64_t waits_for_loads;  // whether there are any
};

namespace {

constexpr double kNotStarted = -1;  // of a copy that has not started

class Lanes {
 public:
  Lanes(const LaneFacts& facts, const int8_t* tiers)
      : facts_(facts), tiers_(tiers), out_end_(facts.value_count, kNotStarted), in_end_(facts.value_count, kNotStarted),
        store_end_(facts.node_count, kNotStarted) {}

  // Returns false for a schedule that waits for a copy that has not started.
  bool Run(const Schedule& steps, const double* pair_seconds) {
    bool leads = false;
    for (int64_t n = 0; n < steps.count; ++n) {
      const int32_t kind = steps.kinds[n];
      const int64_t subject = steps.subjects[n];
      const bool is_kernel = kind == kRun || kind == kRerun || kind == kLead;
      if (is_kernel && facts_.waits_for_loads) WaitForReads(subject);
      if (is_kernel && kind != kLead && (facts_.roles[subject] == kLoads || facts_.roles[subject] == kStores)) {
        facts_.roles[subject] == kLoads ? Load(subject) : Store(subject);
        continue;
      }
      switch (kind) {
        case kRun:
          if (!Compute(subject, leads ? *pair_seconds++ : facts_.seconds[subject])) return false;
          leads = false;
          break;
        case kLead:
          leads = true;
          break;
        case kRerun:
          now_ += facts_.seconds[subject];
          rerun_ += facts_.seconds[subject];
          break;
        case kSplitChunk:
          if (n + 1 == steps.count || steps.kinds[n + 1] != kSplitChunk) now_ += facts_.split_s;
          break;
        case kCopyOut:
          out_end_[subject] = CopyOut(subject, tiers_[subject], std::max(now_, in_end_[subject]));
          break;
        case kCopyIn:
          if (out_end_[subject] == kNotStarted) return false;
          in_end_[subject] = CopyIn(subject, tiers_[subject], std::max(now_, out_end_[subject]));
          break;
        case kRelease:
        case kAwait: {
          const double end = (kind == kRelease ? out_end_ : in_end_)[subject];
          if (end == kNotStarted) return false;
          host_ = std::max(host_, end);
          now_ = std::max(now_, host_);
          break;
        }
        default:
          break;
      }
    }
    return true;
  }

  // Of all kernels and copies.
  void Get(double* total_s, double* compute_s, double* rerun_s, double* lost_s) const {
    *total_s = now_;
    *compute_s = compute_;
    *rerun_s = rerun_;
    *lost_s = lost_;
  }

 private:
  void WaitForReads(int64_t node) {
    for (int32_t i = facts_.reads.begins[node]; i < facts_.reads.begins[node + 1]; ++i) {
      now_ = std::max(now_, in_end_[facts_.reads.elements[i]]);
    }
  }

  void Load(int64_t node) {
    const int32_t value = facts_.copied[node];
    in_end_[value] = CopyIn(value, facts_.home_tiers[node], now_);
  }

  void Store(int64_t node) {
    const int32_t value = facts_.copied[node];
    store_end_[node] = CopyOut(value, facts_.home_tiers[node], std::max(now_, in_end_[value]));
  }

  bool Compute(int64_t node, double seconds) {
    if (const int32_t store = facts_.stored_by[node]; store >= 0) {
      if (store_end_[store] == kNotStarted) return false;
      host_ = std::max(host_, store_end_[store]);
    }
    now_ = std::max(now_, host_);
    if (facts_.roles[node] == kSends) {
      host_ = now_ = Occupy(&out_free_[0], now_, seconds);
    } else if (facts_.roles[node] == kReceives) {
      now_ = Occupy(&in_free_[0], now_, seconds);
    } else {
      now_ += seconds;
    }
    compute_ += seconds;
    return true;
  }

  double CopyOut(int64_t value, int8_t tier, double now) {
    return Copy(value, facts_.out_bytes_per_s, tier, tier == kLent ? &lent_free_ : &out_free_[tier], now);
  }

  double CopyIn(int64_t value, int8_t tier, double now) {
    return Copy(value, facts_.in_bytes_per_s, tier, tier == kLent ? &lent_free_ : &in_free_[tier], now);
  }

  double Copy(int64_t value, const double* bytes_per_s, int8_t tier, double* free, double now) {
    const auto nbytes = static_cast<double>(facts_.value_bytes[value]);
    lost_ += nbytes / bytes_per_s[0] * facts_.copy_share;
    return Occupy(free, now, facts_.copy_latency_s + nbytes / bytes_per_s[tier]);
  }

  static double Occupy(double* free, double now, double seconds) { return *free = std::max(*free, now) + seconds; }

  static constexpr int8_t kLent = 2;  // LENT in kernels/hardware.py: one lane for both directions

  const LaneFacts& facts_;
  const int8_t* const tiers_;  // of values
  std::vector<double> out_end_, in_end_, store_end_;
  double out_free_[2] = {0, 0}, in_free_[2] = {0, 0}, lent_free_ = 0;
  double now_ = 0, host_ = 0, compute_ = 0, rerun_ = 0, lost_ = 0;
};

}  // namespace
}  // namespace tfswap

// Returns whether the schedule waits only for copies that have started.
//
// Args:
//   tiers: of values, for those that are swapped.
//   pair_seconds: of each two concurrent kernels, in the order of the schedule.
//   seconds: gets the end of the last kernel, the time of the kernels, that of reruns, and that lost to copies.
TFSWAP_C_API bool tfswap_lane_times(const tfswap::LaneFacts* facts, const int32_t* kinds, const int64_t* subjects,
                                    int64_t count, const int8_t* tiers, const double* pair_seconds, double* seconds) {
  tfswap::Lanes lanes(*facts, tiers);
  if (!lanes.Run({kinds, subjects, count}, pair_seconds)) return false;
  lanes.Get(&seconds[0], &seconds[1], &seconds[2], &seconds[3]);
  return true;
}
