// The allocator whose peak a plan bounds.

#ifndef TFSWAP_OPS_CSRC_CORE_ARENA_H_
#define TFSWAP_OPS_CSRC_CORE_ARENA_H_

#include "tensorflow/core/common_runtime/bfc_allocator.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfswap {

// The allocator of the device that a kernel runs on; nullptr where it is no BFC allocator.
inline tensorflow::BFCAllocator* FindArena(tensorflow::OpKernelContext* ctx) {
  return dynamic_cast<tensorflow::BFCAllocator*>(
      ctx->get_allocator(tensorflow::AllocatorAttributes()));
}

// Where callers hold so many results of steps that there is no room for the next ones, more is taken from the
// arenas; and given back when they hold few. To be called between steps only, whose plans are for a known arena.
void MakeRoomForResults();

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_ARENA_H_
