// Arenas that split each free chunk which is larger than the request.
//
// An arena does not split a free chunk of less than twice the requested bytes (bfc_allocator.cc, FindChunkPtr). For GPUs
// the session option internal_fragmentation_fraction changes that. Here the allocator's own value of it is replaced
// while a step requests that, or between planned steps. A batch that eager code makes there would otherwise hold up to
// twice its bytes during the next step, depending on the layout that the step before has left.

#ifndef TFSWAP_OPS_CSRC_CORE_EXACT_CHUNKS_H_
#define TFSWAP_OPS_CSRC_CORE_EXACT_CHUNKS_H_

#include <map>
#include <mutex>
#include <new>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "bfc_members.h"
#include "tensorflow/core/common_runtime/bfc_allocator.h"
#include "turn.h"

namespace tfswap {

class ExactArenas {
 public:
  static ExactArenas& Get() {
    static auto* const arenas = new ExactArenas;
    return *arenas;
  }

  // `more` requests begin, or, if negative, end.
  void Request(tensorflow::BFCAllocator* arena, int more) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Arena& its = arenas_[arena];
    its.requests += more;
    Update(arena, its);
  }

  // From now on, whenever no planned step has the turn.
  void RequestBetweenSteps(tensorflow::BFCAllocator* arena) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Arena& its = arenas_[arena];
    its.is_exact_between = true;
    Update(arena, its);
  }

 private:
  struct Arena {
    int requests = 0;
    bool is_exact_between = false;
    bool is_exact = false;
    double before = 0;  // the allocator's own value
  };

  ExactArenas() {
    Turn::Get().Watch([this](bool is_taken) {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_taken_ = is_taken;
      for (auto& [arena, its] : arenas_) Update(arena, its);
    });
  }

  // The allocator reads the value at each request, under its mutex.
  void Update(tensorflow::BFCAllocator* arena, Arena& its) {
    const bool is_exact = its.requests > 0 || (its.is_exact_between && !is_taken_);
    if (is_exact == std::exchange(its.is_exact, is_exact)) return;
    absl::MutexLock lock(&(arena->*MemberOf(MutexMember())));
    const double& fraction = (arena->*MemberOf(OptionsMember())).fragmentation_fraction;
    if (is_exact) its.before = fraction;
    Replace(fraction, is_exact ? kGranularity / static_cast<double>(arena->*MemberOf(MemoryLimitMember())) : its.before);
  }

  // To write to a const member is undefined behaviour. To create a new object in its place is not, since the allocator
  // itself is not const ([basic.life] in C++20).
  static void Replace(const double& member, double value) {
    ::new (const_cast<double*>(&member)) const double(value);
  }

  static constexpr double kGranularity = 256;  // BFCAllocator::kMinAllocationSize

  std::mutex mutex_;
  std::map<tensorflow::BFCAllocator*, Arena> arenas_;
  bool is_taken_ = false;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_EXACT_CHUNKS_H_
