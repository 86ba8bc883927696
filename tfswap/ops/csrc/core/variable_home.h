// The home of a variable on the host, outside of the device's arena: in host memory or on disk.
//
// A tensorflow::Var refers to its value by a tensor, whose buffer may lie anywhere. A variable at home in host memory has
// a buffer of the host pool of its device: pinned memory for a GPU, which kernels and copies reach under unified
// addressing. One at home on disk has the mapping of a range of a file, on a CPU only: a GPU reaches no such memory. So
// readers outside of planned steps (checkpoints, `.numpy()`) need no change.

#ifndef TFSWAP_OPS_CSRC_CORE_VARIABLE_HOME_H_
#define TFSWAP_OPS_CSRC_CORE_VARIABLE_HOME_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "disk_home.h"
#include "host_pool.h"
#include "pooled_tensor.h"
#include "spill_file.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfswap {

// The buffers of variables at home on the host, by identity: their class is not visible through TensorBuffer.
class HomeBuffers {
 public:
  static HomeBuffers& Get() {
    static HomeBuffers* const all = new HomeBuffers;
    return *all;
  }

  // `disk` is null for a home in host memory.
  void Add(const tensorflow::TensorBuffer* buffer, size_t bytes, DiskHome* disk) {
    std::lock_guard<std::mutex> lock(mu_);
    buffers_.emplace(buffer, disk);
    bytes_of(disk) += HostPool::RoundUp(bytes);
  }

  void Remove(const tensorflow::TensorBuffer* buffer, size_t bytes) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = buffers_.find(buffer);
    bytes_of(found->second) -= HostPool::RoundUp(bytes);
    buffers_.erase(found);
  }

  // Whether there is such a home, and its place on disk; null where that is in host memory.
  bool Find(const tensorflow::TensorBuffer* buffer, DiskHome** disk) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = buffers_.find(buffer);
    *disk = found == buffers_.end() ? nullptr : found->second;
    return found != buffers_.end();
  }

  // Of all homes in host memory, in pieces of the host pools; and of those on disk.
  uint64_t bytes() {
    std::lock_guard<std::mutex> lock(mu_);
    return bytes_;
  }
  uint64_t disk_bytes() {
    std::lock_guard<std::mutex> lock(mu_);
    return disk_bytes_;
  }

 private:
  uint64_t& bytes_of(const DiskHome* disk) { return disk == nullptr ? bytes_ : disk_bytes_; }

  std::mutex mu_;
  std::unordered_map<const tensorflow::TensorBuffer*, DiskHome*> buffers_;
  uint64_t bytes_ = 0;
  uint64_t disk_bytes_ = 0;
};

class HomeBuffer : public PooledBuffer {
 public:
  HomeBuffer(HostBuffer memory, size_t bytes) : PooledBuffer(std::move(memory), bytes) {
    HomeBuffers::Get().Add(this, bytes, nullptr);
  }
  ~HomeBuffer() override { HomeBuffers::Get().Remove(this, size()); }
};

class DiskHomeBuffer : public OwnedBuffer<std::unique_ptr<DiskHome>> {
 public:
  DiskHomeBuffer(std::unique_ptr<DiskHome> home, size_t bytes) : OwnedBuffer(home->data(), std::move(home), bytes) {
    HomeBuffers::Get().Add(this, bytes, owner().get());
  }
  ~DiskHomeBuffer() override { HomeBuffers::Get().Remove(this, size()); }
};

// Whether the tensor's buffer is that of a variable at home on the host. A slice of it is not. `disk` gets its place on
// disk, if it is there.
inline bool IsAtHome(const tensorflow::Tensor& tensor, DiskHome** disk = nullptr) {
  DiskHome* place = nullptr;
  const tensorflow::TensorBuffer* const buffer = tensorflow::DMAHelper::buffer(&tensor);
  const bool found = buffer != nullptr && HomeBuffers::Get().Find(buffer, &place);
  if (disk != nullptr) *disk = place;
  return found;
}

// Makes a tensor of the type of `like`, without a value, whose buffer is a home in host memory. `node` names the caller
// in the error.
inline absl::Status MakeHome(HostPool* pool, const tensorflow::Tensor& like, const tensorflow::TensorShape& shape,
                             const std::string& node, tensorflow::Tensor* made) {
  return MakePooled<HomeBuffer>(pool, like, shape, node, made);
}

// The same on disk. The buffers of its copies are in `pool`.
inline absl::Status MakeHomeOnDisk(SpillFile* file, HostPool* pool, const tensorflow::Tensor& like,
                                   const tensorflow::TensorShape& shape, const std::string& node,
                                   tensorflow::Tensor* made) {
  const auto elements = static_cast<size_t>(shape.num_elements());
  const auto element_bytes = static_cast<size_t>(tensorflow::DataTypeSize(like.dtype()));
  if (elements == 0) return MakeHome(pool, like, shape, node, made);
  if (elements > (SIZE_MAX / 2) / element_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("No disk has the ", elements, " elements of '", node, "'."));
  }
  const size_t bytes = elements * element_bytes;
  std::string why;
  std::unique_ptr<DiskHome> home = DiskHome::Make(file, bytes, pool, node, &why);
  if (home == nullptr) return absl::ResourceExhaustedError(why);
  *made = tensorflow::Tensor(
      like.dtype(), shape,
      tensorflow::core::RefCountPtr<tensorflow::TensorBuffer>(new DiskHomeBuffer(std::move(home), bytes)));
  return absl::OkStatus();
}

// Copies memory of the host to a part of a home on disk, or such a part to memory, and returns when that has ended.
inline absl::Status WriteToDisk(DiskHome* disk, const char* part, const void* from, size_t bytes) {
  const std::string error = disk->WriteNow(static_cast<size_t>(part - disk->data()), bytes, from);
  return error.empty() ? absl::OkStatus() : absl::InternalError(error);
}

inline absl::Status ReadFromDisk(DiskHome* disk, const char* part, void* to, size_t bytes) {
  const std::string error = disk->ReadNow(static_cast<size_t>(part - disk->data()), bytes, to);
  return error.empty() ? absl::OkStatus() : absl::InternalError(error);
}

// Where an op makes homes: by its attributes `disk` and `spill_dir`.
class HomeTier {
 public:
  absl::Status Init(tensorflow::OpKernelConstruction* ctx) {
    std::string folder, why;
    TF_RETURN_IF_ERROR(ctx->GetAttr("disk", &disk_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("spill_dir", &folder));
    // A GPU reaches no mapped file: its variables stay in pinned memory.
    if (folder.empty() || ctx->device_type() != tensorflow::DeviceType(tensorflow::DEVICE_CPU)) return absl::OkStatus();
    file_ = SpillFile::Of(folder, &why);
    return file_ == nullptr ? absl::ResourceExhaustedError(why) : absl::OkStatus();
  }

  // Whether homes are made on disk as long as there is room.
  bool is_disk() const { return disk_ && file_ != nullptr; }

  // As MakeHome. What has no room in host memory goes to disk. What has none on disk goes to host memory, unless
  // `strict`: where a limit of host memory is not in force yet, it would be passed.
  absl::Status Make(HostPool* pool, const tensorflow::Tensor& like, const tensorflow::TensorShape& shape,
                    const std::string& node, tensorflow::Tensor* made, bool strict = false) const {
    absl::Status first = MakeIn(disk_, pool, like, shape, node, made);
    if (first.ok() || file_ == nullptr || (disk_ && strict)) return first;
    const absl::Status other = MakeIn(!disk_, pool, like, shape, node, made);
    if (other.ok()) return other;
    return absl::ResourceExhaustedError(absl::StrCat(first.message(), " ", other.message()));
  }

 private:
  absl::Status MakeIn(bool disk, HostPool* pool, const tensorflow::Tensor& like, const tensorflow::TensorShape& shape,
                      const std::string& node, tensorflow::Tensor* made) const {
    if (disk && file_ != nullptr) return MakeHomeOnDisk(file_, pool, like, shape, node, made);
    return MakeHome(pool, like, shape, node, made);
  }

  bool disk_ = false;
  SpillFile* file_ = nullptr;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_VARIABLE_HOME_H_
