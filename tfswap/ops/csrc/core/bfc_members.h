// Private members of TensorFlow's allocator. An explicit instantiation may name them.

#ifndef TFSWAP_OPS_CSRC_CORE_BFC_MEMBERS_H_
#define TFSWAP_OPS_CSRC_CORE_BFC_MEMBERS_H_

#include "tensorflow/core/common_runtime/bfc_allocator.h"

namespace tfswap {

struct MutexMember {
  friend constexpr auto MemberOf(MutexMember);
};
struct ChunksMember {
  friend constexpr auto MemberOf(ChunksMember);
};
struct OptionsMember {
  friend constexpr auto MemberOf(OptionsMember);
};
struct MemoryLimitMember {
  friend constexpr auto MemberOf(MemoryLimitMember);
};
template <typename Name, auto kMember>
struct Named {
  friend constexpr auto MemberOf(Name) { return kMember; }
};
template struct Named<MutexMember, &tensorflow::BFCAllocator::mutex_>;
template struct Named<ChunksMember, &tensorflow::BFCAllocator::chunks_>;
template struct Named<OptionsMember, &tensorflow::BFCAllocator::opts_>;
template struct Named<MemoryLimitMember, &tensorflow::BFCAllocator::memory_limit_>;

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_BFC_MEMBERS_H_
