// Deterministic draws, as of analysis/draws.py: the same in C++ and in Python. This file does not depend on TensorFlow.

#ifndef TFSWAP_OPS_CSRC_CORE_DRAWS_H_
#define TFSWAP_OPS_CSRC_CORE_DRAWS_H_

#include <cstdint>
#include <utility>

namespace tfswap {

// Random numbers: splitmix64 (Steele et al. 2014).
class Draws {
 public:
  explicit Draws(uint64_t seed = 1) : state_(seed) {}

  uint64_t Bits() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    return mixed ^ (mixed >> 31);
  }

  // A number from 0 to below 1.
  double Unit() { return static_cast<double>(Bits() >> 11) * 0x1p-53; }

  // A number below `count`.
  int64_t Below(int64_t count) { return static_cast<int64_t>(Bits() % static_cast<uint64_t>(count)); }

  // A random order of `count` elements (Fisher and Yates).
  template <typename T>
  void Shuffle(T* elements, int64_t count) {
    for (int64_t last = count - 1; last > 0; --last) std::swap(elements[last], elements[Below(last + 1)]);
  }

 private:
  uint64_t state_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_DRAWS_H_
