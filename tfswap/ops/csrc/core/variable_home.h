// The home of a variable in host memory, outside of the device's arena.
//
// A tensorflow::Var refers to its value by a tensor, whose buffer may lie anywhere. A variable at home on the host has a
// buffer of the host pool of its device: pinned memory for a GPU, which kernels and copies reach under unified
// addressing. So readers outside of planned steps (checkpoints, `.numpy()`) need no change.

#ifndef TFSWAP_OPS_CSRC_CORE_VARIABLE_HOME_H_
#define TFSWAP_OPS_CSRC_CORE_VARIABLE_HOME_H_

#include <cstddef>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>

#include "absl/status/status.h"
#include "host_pool.h"
#include "op_support.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/refcount.h"

namespace tfswap {

// The buffers of variables at home on the host, by identity: their class is not visible through TensorBuffer.
class HomeBuffers {
 public:
  static HomeBuffers& Get() {
    static HomeBuffers* const all = new HomeBuffers;
    return *all;
  }

  void Add(const tensorflow::TensorBuffer* buffer) {
    std::lock_guard<std::mutex> lock(mu_);
    buffers_.insert(buffer);
  }

  void Remove(const tensorflow::TensorBuffer* buffer) {
    std::lock_guard<std::mutex> lock(mu_);
    buffers_.erase(buffer);
  }

  bool Has(const tensorflow::TensorBuffer* buffer) {
    std::lock_guard<std::mutex> lock(mu_);
    return buffers_.count(buffer) != 0;
  }

 private:
  std::mutex mu_;
  std::unordered_set<const tensorflow::TensorBuffer*> buffers_;
};

class HomeBuffer : public tensorflow::TensorBuffer {
 public:
  HomeBuffer(HostBuffer memory, size_t bytes)
      : TensorBuffer(memory.data()), memory_(std::move(memory)), bytes_(bytes) {
    HomeBuffers::Get().Add(this);
  }
  ~HomeBuffer() override { HomeBuffers::Get().Remove(this); }

  size_t size() const override { return bytes_; }
  tensorflow::TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(tensorflow::AllocationDescription* description) const override {
    description->set_requested_bytes(static_cast<int64_t>(bytes_));
    description->set_allocator_name("tfswap");
  }

 private:
  const HostBuffer memory_;
  const size_t bytes_;
};

// Whether the tensor's buffer is that of a variable at home on the host. A slice of it is not.
inline bool IsAtHome(const tensorflow::Tensor& tensor) {
  const tensorflow::TensorBuffer* const buffer = tensorflow::DMAHelper::buffer(&tensor);
  return buffer != nullptr && HomeBuffers::Get().Has(buffer);
}

// Makes a tensor like `like`, without a value, whose buffer is a home. `node` names the caller in the error.
inline absl::Status MakeHome(HostPool* pool, const tensorflow::Tensor& like, const std::string& node,
                             tensorflow::Tensor* made) {
  HostPool::Failure failure = HostPool::Failure::kNone;
  void* const memory = pool->Allocate(like.TotalBytes(), &failure);
  if (memory == nullptr) return NoHostMemory(failure, node, like.TotalBytes(), like);
  *made = tensorflow::Tensor(like.dtype(), like.shape(),
                             tensorflow::core::RefCountPtr<tensorflow::TensorBuffer>(
                                 new HomeBuffer(HostBuffer(pool, memory), like.TotalBytes())));
  return absl::OkStatus();
}

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_VARIABLE_HOME_H_
