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

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_ARENA_H_
