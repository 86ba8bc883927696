// Bytes and times of copies: for the process since it started, and for each client in its latest step.

#ifndef TFSWAP_OPS_CSRC_CORE_COPY_STATS_H_
#define TFSWAP_OPS_CSRC_CORE_COPY_STATS_H_

#include <algorithm>
#include <cstdint>
#include <mutex>

namespace tfswap {

enum class Direction { kOut, kIn };

// The place of a swapped tensor.
enum class Tier { kHost, kDisk, kLent };
inline constexpr int kTiers = 3;

// Time that a step lost: a wait in Release or Await, or a small copy made by the step's own thread.
enum class Stall { kRelease, kAwait, kInlineCopy };

struct Figures {
  struct Copies {
    uint64_t bytes = 0;
    uint64_t copies = 0;
    double busy_s = 0;  // from a copy's start to its end, summed over copies
  };
  struct Held {
    uint64_t bytes = 0;
    uint64_t peak_bytes = 0;
  };

  Copies& of(Direction d, Tier t) { return copies[static_cast<int>(d)][static_cast<int>(t)]; }
  const Copies& of(Direction d, Tier t) const {
    return copies[static_cast<int>(d)][static_cast<int>(t)];
  }
  Held& of(Tier t) { return held[static_cast<int>(t)]; }
  const Held& of(Tier t) const { return held[static_cast<int>(t)]; }
  double& of(Stall s) { return stalled_s[static_cast<int>(s)]; }
  double of(Stall s) const { return stalled_s[static_cast<int>(s)]; }

  // Bytes written to files (kOut) and read from them (kIn). They differ from the tensors' bytes, since files may be
  // compressed.
  uint64_t& in_files(Direction d) { return in_files_[static_cast<int>(d)]; }
  uint64_t in_files(Direction d) const { return in_files_[static_cast<int>(d)]; }

  Copies copies[2][kTiers];
  uint64_t in_files_[2] = {0, 0};
  Held held[kTiers];
  double stalled_s[3] = {0, 0, 0};
};

// Sums the figures. Takes one short lock per copy and wait.
//
// Invariant: figures are of one step. Copies of a failed step that end after the next step has begun count for neither.
class CopyStats {
 public:
  // Begins a step and returns its number. All figures except the held bytes become 0.
  uint64_t Begin() {
    std::lock_guard<std::mutex> lock(mu_);
    Figures fresh;
    for (const Tier tier : {Tier::kHost, Tier::kDisk, Tier::kLent}) {
      fresh.of(tier).bytes = fresh.of(tier).peak_bytes = figures_.of(tier).bytes;
    }
    figures_ = fresh;
    return ++step_;
  }

  uint64_t step() const {
    std::lock_guard<std::mutex> lock(mu_);
    return step_;
  }

  // `carried` is the number of bytes in the file, for tensors on disk.
  void Copied(uint64_t step, Direction direction, Tier tier, uint64_t bytes, uint64_t carried, double busy_s) {
    std::lock_guard<std::mutex> lock(mu_);
    if (step != step_) return;
    Figures::Copies& copies = figures_.of(direction, tier);
    copies.bytes += bytes;
    copies.copies += 1;
    copies.busy_s += busy_s;
    if (tier == Tier::kDisk) figures_.in_files(direction) += carried;
  }

  void Stalled(uint64_t step, Stall stall, double seconds) {
    std::lock_guard<std::mutex> lock(mu_);
    if (step == step_) figures_.of(stall) += seconds;
  }

  // Adds to the bytes held in a tier; negative where they are released.
  void Hold(Tier tier, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mu_);
    Figures::Held& held = figures_.of(tier);
    held.bytes += bytes;
    held.peak_bytes = std::max(held.peak_bytes, held.bytes);
  }

  Figures figures() const {
    std::lock_guard<std::mutex> lock(mu_);
    return figures_;
  }

 private:
  mutable std::mutex mu_;
  uint64_t step_ = 0;
  Figures figures_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_COPY_STATS_H_
