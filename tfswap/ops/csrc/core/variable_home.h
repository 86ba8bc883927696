// The home of a variable in host memory, outside of the device's arena.
//
// A tensorflow::Var refers to its value by a tensor, whose buffer may lie anywhere. A variable at home on the host has a
// buffer of the host pool of its device: pinned memory for a GPU, which kernels and copies reach under unified
// addressing. So readers outside of planned steps (checkpoints, `.numpy()`) need no change.

#ifndef TFSWAP_OPS_CSRC_CORE_VARIABLE_HOME_H_
#define TFSWAP_OPS_CSRC_CORE_VARIABLE_HOME_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>

#include "absl/status/status.h"
#include "host_pool.h"
#include "pooled_tensor.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfswap {

// The buffers of variables at home on the host, by identity: their class is not visible through TensorBuffer.
class HomeBuffers {
 public:
  static HomeBuffers& Get() {
    static HomeBuffers* const all = new HomeBuffers;
    return *all;
  }

  void Add(const tensorflow::TensorBuffer* buffer, size_t bytes) {
    std::lock_guard<std::mutex> lock(mu_);
    buffers_.insert(buffer);
    bytes_ += HostPool::RoundUp(bytes);
  }

  void Remove(const tensorflow::TensorBuffer* buffer, size_t bytes) {
    std::lock_guard<std::mutex> lock(mu_);
    buffers_.erase(buffer);
    bytes_ -= HostPool::RoundUp(bytes);
  }

  bool Has(const tensorflow::TensorBuffer* buffer) {
    std::lock_guard<std::mutex> lock(mu_);
    return buffers_.count(buffer) != 0;
  }

  // Of all homes, in pieces of the host pools.
  uint64_t bytes() {
    std::lock_guard<std::mutex> lock(mu_);
    return bytes_;
  }

 private:
  std::mutex mu_;
  std::unordered_set<const tensorflow::TensorBuffer*> buffers_;
  uint64_t bytes_ = 0;
};

class HomeBuffer : public PooledBuffer {
 public:
  HomeBuffer(HostBuffer memory, size_t bytes) : PooledBuffer(std::move(memory), bytes) {
    HomeBuffers::Get().Add(this, bytes);
  }
  ~HomeBuffer() override { HomeBuffers::Get().Remove(this, size()); }
};

// Whether the tensor's buffer is that of a variable at home on the host. A slice of it is not.
inline bool IsAtHome(const tensorflow::Tensor& tensor) {
  const tensorflow::TensorBuffer* const buffer = tensorflow::DMAHelper::buffer(&tensor);
  return buffer != nullptr && HomeBuffers::Get().Has(buffer);
}

// Makes a tensor of the type of `like`, without a value, whose buffer is a home. `node` names the caller in the error.
inline absl::Status MakeHome(HostPool* pool, const tensorflow::Tensor& like, const tensorflow::TensorShape& shape,
                             const std::string& node, tensorflow::Tensor* made) {
  return MakePooled<HomeBuffer>(pool, like, shape, node, made);
}

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_VARIABLE_HOME_H_
