// The allocator whose peak a plan bounds.

#ifndef TFSWAP_OPS_CSRC_CORE_ARENA_H_
#define TFSWAP_OPS_CSRC_CORE_ARENA_H_

#include <cstdint>

#include "tensorflow/core/common_runtime/bfc_allocator.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/protobuf/bfc_memory_map.pb.h"

namespace tfswap {

// The allocator of the device that a kernel runs on, which lives as long as the process. Asked of the device: where
// allocations are traced, a context has another one in front of it.
inline tensorflow::Allocator* DeviceAllocator(tensorflow::OpKernelContext* ctx) {
  return ctx->device()->GetAllocator(tensorflow::AllocatorAttributes());
}

// The same where it is a BFC allocator; else nullptr.
inline tensorflow::BFCAllocator* FindArena(tensorflow::OpKernelContext* ctx) {
  return dynamic_cast<tensorflow::BFCAllocator*>(DeviceAllocator(ctx));
}

// A hash (FNV-1a) over an arena's chunks.
inline uint64_t LayoutOf(const tensorflow::MemoryDump& map) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
  for (const auto& chunk : map.chunk()) {
    mix(chunk.address());
    mix(static_cast<uint64_t>(chunk.size()) << 1 | (chunk.in_use() ? 1 : 0));
  }
  return hash;
}

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_ARENA_H_
