// The turns (turn.h) of the thread that asks.

#ifndef TFSWAP_OPS_CSRC_CORE_THREAD_TURNS_H_
#define TFSWAP_OPS_CSRC_CORE_THREAD_TURNS_H_

#include <optional>
#include <utility>
#include <vector>

#include "turn.h"

namespace tfswap {

// Those that it has asked for and not ended. The first asks for the others too, which are null.
inline thread_local std::vector<Turn::Waiter> turns_of_thread;

// Whose turn it is that the thread works for, where that is not its own.
inline thread_local std::optional<Turn::Token> employer;

inline bool ThreadHasTurn() { return !turns_of_thread.empty(); }

// While it is there, the thread works in the turn of another: what it asks for is that one's.
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
