// Which of two ways to do the same again and again is faster: found out while it is done.

#ifndef TFSWAP_OPS_CSRC_CORE_FASTER_WAY_H_
#define TFSWAP_OPS_CSRC_CORE_FASTER_WAY_H_

#include <cstdint>
#include <mutex>

namespace tfswap {

// Of ways 0 and 1. Each is tried a few times, then the faster one is taken, and the other one tried again now and then:
// what else a machine does changes which it is.
class FasterWay {
 public:
  // How to do it this time.
  int Next() {
    std::lock_guard<std::mutex> lock(mu_);
    const int64_t turn = turns_++;
    if (tried_[0] < kFirstTries || tried_[1] < kFirstTries) return tried_[1] < tried_[0];
    const int faster = seconds_[1] < seconds_[0];
    return turn % kTurnsBetweenTries == 0 ? 1 - faster : faster;
  }

  // The seconds that it took.
  void Took(int way, double seconds) {
    std::lock_guard<std::mutex> lock(mu_);
    seconds_[way] += (seconds - seconds_[way]) / (tried_[way] < kRemembered ? ++tried_[way] : kRemembered);
  }

 private:
  static constexpr int kFirstTries = 3, kRemembered = 8, kTurnsBetweenTries = 64;

  std::mutex mu_;
  int64_t turns_ = 0;
  int tried_[2] = {};
  double seconds_[2] = {};  // of each, the mean of late
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_FASTER_WAY_H_
