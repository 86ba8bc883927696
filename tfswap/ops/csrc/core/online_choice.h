// Which of two ways to do the same again and again is faster: found out while it is done.

#ifndef TFSWAP_OPS_CSRC_CORE_ONLINE_CHOICE_H_
#define TFSWAP_OPS_CSRC_CORE_ONLINE_CHOICE_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>

namespace tfswap {

// Of ways 0 and 1. Each is tried a few times, then the faster one is taken, and the other one tried again now and then:
// what else a machine does changes which it is. Medians are compared: one try that was held up says nothing. Tries come
// together, and are most of what is remembered of a way, so that what was found on a busy machine is soon forgotten.
class FasterWay {
 public:
  // How to do it this time.
  int Next() {
    std::lock_guard<std::mutex> lock(mu_);
    const int64_t turn = turns_++;
    if (tried_[0] < kRemembered || tried_[1] < kRemembered) return tried_[1] < tried_[0];
    if (turn % kTurnsBetweenTries == 0) other_ = median_[1] < median_[0] ? 0 : 1;
    return turn % kTurnsBetweenTries < kTries ? other_ : median_[1] < median_[0];
  }

  // The seconds that it took.
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
  int other_ = 0;  // that is tried now and then
  int64_t tried_[2] = {};
  std::array<double, kRemembered> seconds_[2] = {};  // of each, the last
  double median_[2] = {};
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_ONLINE_CHOICE_H_
