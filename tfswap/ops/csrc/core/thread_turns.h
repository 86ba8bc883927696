// The turns (turn.h) of the calling thread.

#ifndef TFSWAP_OPS_CSRC_CORE_THREAD_TURNS_H_
#define TFSWAP_OPS_CSRC_CORE_THREAD_TURNS_H_

#include <optional>
#include <utility>
#include <vector>

#include "turn.h"

namespace tfswap {

// The turns that the thread has requested and not ended. Those after the first are null, since the first covers them.
inline thread_local std::vector<Turn::Waiter> turns_of_thread;

// The owner of the turn that the thread works in, if that is another thread or a step.
inline thread_local std::optional<Turn::Token> employer;

inline bool ThreadHasTurn() { return !turns_of_thread.empty(); }

// While an object of this class exists, the thread works in the turn of `token`, and its requests are those of that
// owner.
class Employed {
 public:
  explicit Employed(Turn::Token token) : before_(std::exchange(employer, token)) {}
  ~Employed() { employer = before_; }

  Employed(const Employed&) = delete;
  Employed& operator=(const Employed&) = delete;

 private:
  const std::optional<Turn::Token> before_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_THREAD_TURNS_H_
