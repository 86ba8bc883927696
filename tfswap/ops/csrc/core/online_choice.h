// Measures, while work repeats, which of two ways of doing it is faster.

#ifndef TFSWAP_OPS_CSRC_CORE_ONLINE_CHOICE_H_
#define TFSWAP_OPS_CSRC_CORE_ONLINE_CHOICE_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>

namespace tfswap {

// The ways are 0 and 1. Each is tried a few times. Then the faster one is used, and the other one is tried again now
// and then, since the machine's load changes which is faster. Medians are compared, so that one delayed try does not
// count. Tries follow one another, and are most of the times kept for a way, so that times of a busy machine are soon
// replaced.
class FasterWay {
 public:
  // The way to use now.
  int Next() {
    std::lock_guard<std::mutex> lock(mu_);
    const int64_t turn = turns_++;
    if (tried_[0] < kRemembered || tried_[1] < kRemembered) return tried_[1] < tried_[0];
    if (turn % kTurnsBetweenTries == 0) other_ = median_[1] < median_[0] ? 0 : 1;
    return turn % kTurnsBetweenTries < kTries ? other_ : median_[1] < median_[0];
  }

  // Records the seconds that a way took.
  void Took(int way, double seconds) {
    std::lock_guard<std::mutex> lock(mu_);
    seconds_[way][tried_[way]++ % kRemembered] = seconds;
    std::array<double, kRemembered> late = seconds_[way];
    const int64_t known = std::min<int64_t>(tried_[way], kRemembered);
    const auto middle = late.begin() + known / 2;
    std::nth_element(late.begin(), middle, late.begin() + known);
    median_[way] = *middle;
  }

 private:
  static constexpr int kRemembered = 5, kTries = 3, kTurnsBetweenTries = 64;

  std::mutex mu_;
  int64_t turns_ = 0;
  int other_ = 0;  // the way that is tried now and then
  int64_t tried_[2] = {};
  std::array<double, kRemembered> seconds_[2] = {};  // the latest of each way
  double median_[2] = {};
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_ONLINE_CHOICE_H_
