// Tensors whose buffers are pieces of a host pool.

#ifndef TFSWAP_OPS_CSRC_CORE_POOLED_TENSOR_H_
#define TFSWAP_OPS_CSRC_CORE_POOLED_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "host_pool.h"
#include "op_support.h"
#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/refcount.h"

namespace tfswap {

// A tensor's buffer in memory that belongs to an `Owner`, which lives as long.
template <typename Owner>
class OwnedBuffer : public tensorflow::TensorBuffer {
 public:
  OwnedBuffer(void* data, Owner&& owner, size_t bytes) : TensorBuffer(data), owner_(std::move(owner)), bytes_(bytes) {}

  size_t size() const override { return bytes_; }
  tensorflow::TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(tensorflow::AllocationDescription* description) const override {
    description->set_requested_bytes(static_cast<int64_t>(bytes_));
    description->set_allocator_name("tfswap");
  }

 protected:
  const Owner& owner() const { return owner_; }

 private:
  const Owner owner_;
  const size_t bytes_;
};

class PooledBuffer : public OwnedBuffer<HostBuffer> {
 public:
  PooledBuffer(HostBuffer memory, size_t bytes) : OwnedBuffer(memory.data(), std::move(memory), bytes) {}
};

// Makes a tensor like `like`, without a value, in a buffer of that class. `node` names the caller in the error.
template <typename Buffer>
absl::Status MakePooled(HostPool* pool, const tensorflow::Tensor& like, const tensorflow::TensorShape& shape,
                        const std::string& node, tensorflow::Tensor* made) {
  const size_t elements = static_cast<size_t>(shape.num_elements());
  const size_t element_bytes = static_cast<size_t>(tensorflow::DataTypeSize(like.dtype()));
  if (elements == 0) {
    *made = tensorflow::Tensor(tensorflow::cpu_allocator_base(), like.dtype(), shape);
    return absl::OkStatus();
  }
  if (elements > (SIZE_MAX - HostPool::kAlignment) / element_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("No memory has the ", elements, " elements of '", node, "'."));
  }
  const size_t bytes = elements * element_bytes;
  HostPool::Failure failure = HostPool::Failure::kNone;
  void* const memory = pool->Allocate(bytes, &failure);
  if (memory == nullptr) return NoHostMemory(failure, node, bytes, like);
  *made = tensorflow::Tensor(like.dtype(), shape,
                             tensorflow::core::RefCountPtr<tensorflow::TensorBuffer>(
                                 new Buffer(HostBuffer(pool, memory), bytes)));
  return absl::OkStatus();
}

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_POOLED_TENSOR_H_
