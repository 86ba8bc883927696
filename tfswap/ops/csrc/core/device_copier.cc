#include "device_copier.h"

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "absl/synchronization/notification.h"
#include "runtime.h"
#include "tensorflow/core/common_runtime/copy_tensor.h"
#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/device.h"

namespace tfswap {
namespace {

using tensorflow::Allocator;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorBuffer;

class CpuCopier : public DeviceCopier {
 public:
  explicit CpuCopier(int device) : device_(device) {}

  HostPool* pool() override { return &Runtime::Get().pool(); }

  void CopyOut(const Tensor* from, void* host, Done done) override {
    Submit(Direction::kOut, host, from->data(), from->TotalBytes(), std::move(done));
  }

  void CopyIn(const void* host, Tensor* to, Done done) override {
    Submit(Direction::kIn, to->data(), host, to->TotalBytes(), std::move(done));
  }

  void CopyToDevice(const Tensor* from, void* other, Done done) override { CopyOut(from, other, std::move(done)); }

  void CopyFromDevice(const void* other, Tensor* to, Done done) override { CopyIn(other, to, std::move(done)); }

  std::string ReadPiece(const Tensor& from, size_t begin, size_t bytes, void* to) override {
    std::memcpy(to, static_cast<const char*>(from.data()) + begin, bytes);
    return "";
  }

  std::string WritePiece(const void* from, size_t begin, size_t bytes, Tensor* to) override {
    std::memcpy(static_cast<char*>(to->data()) + begin, from, bytes);
    return "";
  }

 private:
  void Submit(Direction direction, void* to, const void* from, size_t bytes, Done done) {
    Runtime::Get().lane(direction, device_).Submit(
        to, from, bytes, [done = std::move(done)](const CopyLane::Ended& ended) {
          done(AsCopied(ended));
        });
  }

  const int device_;
};

// ---------------------------------------------------------------------------
// GPU. Compiles and loads without CUDA, since it only uses TensorFlow's device interface.
//
// CopyDeviceTensorToCPU makes TensorFlow's device-to-host stream wait for the compute stream, which computes the
// tensor. CopyCPUTensorToDevice makes the host-to-device stream wait for the compute stream, since kernels enqueued
// before the call may still read the memory that the arena gave. Both run the callback when the copy has ended, so the
// arena may then reuse the memory.

// Blocks of pinned memory from TensorFlow's allocator.
class PinnedBlockSource : public BlockSource {
 public:
  explicit PinnedBlockSource(Allocator* allocator) : allocator_(allocator) {}

  void* Allocate(size_t bytes) override {
    // With a retry, a full allocator would wait until memory is freed.
    tensorflow::AllocationAttributes attributes(
        /*retry_on_failure=*/false, /*allocation_will_be_logged=*/false,
        /*freed_by_func=*/nullptr);
    return allocator_->AllocateRaw(HostPool::kAlignment, bytes, attributes);
  }

  void Free(void* block, size_t) override { allocator_->DeallocateRaw(block); }

  // Pinned memory is always backed.
  bool Populate(void*, size_t) override { return true; }

 private:
  Allocator* const allocator_;
};

HostPool* PinnedPool(tensorflow::DeviceBase* device) {
  tensorflow::AllocatorAttributes attributes;
  attributes.set_on_host(true);
  attributes.set_gpu_compatible(true);
  Allocator* const allocator = device->GetAllocator(attributes);
  static std::mutex* const mu = new std::mutex;
  static auto* const pools = new std::map<Allocator*, HostPool*>;
  std::lock_guard<std::mutex> lock(*mu);
  HostPool*& pool = (*pools)[allocator];
  if (pool == nullptr) {
    pool = new HostPool(new PinnedBlockSource(allocator), &Runtime::Get().budget());
  }
  return pool;
}

// A tensor buffer over a piece of a pool, which it does not own.
class BorrowedBuffer : public TensorBuffer {
 public:
  BorrowedBuffer(void* data, size_t bytes) : TensorBuffer(data), bytes_(bytes) {}
  size_t size() const override { return bytes_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(
      tensorflow::AllocationDescription* description) const override {
    description->set_requested_bytes(bytes_);
  }
  bool OwnsMemory() const override { return false; }

 private:
  const size_t bytes_;
};

Tensor Borrow(void* host, const Tensor& like) {
  return Tensor(like.dtype(), like.shape(),
                tensorflow::core::RefCountPtr<TensorBuffer>(
                    new BorrowedBuffer(host, like.TotalBytes())));
}

class GpuCopier : public DeviceCopier {
 public:
  explicit GpuCopier(OpKernelContext* ctx)
      : device_(static_cast<tensorflow::Device*>(ctx->device())),
        context_(ctx->op_device_context()) {
    context_->Ref();
  }
  ~GpuCopier() override { context_->Unref(); }

  HostPool* pool() override { return PinnedPool(device_); }

  void CopyOut(const Tensor* from, void* host, Done done) override {
    auto pinned = std::make_shared<Tensor>(Borrow(host, *from));
    Tensor* const to = pinned.get();
    context_->CopyDeviceTensorToCPU(
        from, "tfswap", device_, to,
        Timed(std::move(pinned), std::move(done)));
  }

  void CopyIn(const void* host, Tensor* to, Done done) override {
    auto pinned = std::make_shared<Tensor>(Borrow(const_cast<void*>(host), *to));
    const Tensor* const from = pinned.get();
    context_->CopyCPUTensorToDevice(from, device_, to,
                                    Timed(std::move(pinned), std::move(done)));
  }

  void CopyToDevice(const Tensor* from, void* other, Done done) override {
    auto borrowed = std::make_shared<Tensor>(Borrow(other, *from));
    Tensor* const to = borrowed.get();
    CopyBetween(from, to, Timed(std::move(borrowed), std::move(done)));
  }

  void CopyFromDevice(const void* other, Tensor* to, Done done) override {
    auto borrowed = std::make_shared<Tensor>(Borrow(const_cast<void*>(other), *to));
    const Tensor* const from = borrowed.get();
    CopyBetween(from, to, Timed(std::move(borrowed), std::move(done)));
  }

  std::string ReadPiece(const Tensor& from, size_t begin, size_t bytes, void* to) override {
    const Tensor piece = Piece(from, begin, bytes);
    Tensor staged = Borrow(to, piece);
    return Waited([&](tensorflow::StatusCallback ended) {
      context_->CopyDeviceTensorToCPU(&piece, "tfswap", device_, &staged, std::move(ended));
    });
  }

  std::string WritePiece(const void* from, size_t begin, size_t bytes, Tensor* to) override {
    Tensor piece = Piece(*to, begin, bytes);
    const Tensor staged = Borrow(const_cast<void*>(from), piece);
    return Waited([&](tensorflow::StatusCallback ended) {
      context_->CopyCPUTensorToDevice(&staged, device_, &piece, std::move(ended));
    });
  }

 private:
  // On this device's stream for copies between devices. With this device at both ends the copy waits for its kernels
  // only (GPUUtil::DeviceToDeviceCopy): nothing that the other device computes has to end before.
  void CopyBetween(const Tensor* from, Tensor* to, tensorflow::StatusCallback done) {
    tensorflow::CopyTensor::ViaDMA("tfswap", context_, context_, device_, device_, {}, {}, from, to,
                                   /*dev_to_dev_stream_index=*/0, std::move(done));
  }

  // A part of a tensor's buffer. It references the buffer, and is destroyed before the copy's `done` runs.
  static Tensor Piece(const Tensor& whole, size_t begin, size_t bytes) {
    Tensor flat;
    TF_CHECK_OK(flat.BitcastFrom(whole, tensorflow::DT_UINT8,
                                 {static_cast<int64_t>(whole.TotalBytes())}));
    return flat.Slice(static_cast<int64_t>(begin), static_cast<int64_t>(begin + bytes));
  }

  static std::string Waited(const std::function<void(tensorflow::StatusCallback)>& copy) {
    absl::Notification ended;
    absl::Status status;
    copy([&](const absl::Status& copied) {
      status = copied;
      ended.Notify();
    });
    ended.WaitForNotification();
    return std::string(status.message());
  }

  // A callback that owns `pinned`, which TensorFlow takes by pointer. TensorFlow may copy the callback and keep the
  // copy after the call. So all copies share one owner, and the call frees what it owns. The time includes the wait for
  // the compute stream.
  static tensorflow::StatusCallback Timed(std::shared_ptr<Tensor> pinned, Done done) {
    struct Owned {
      std::shared_ptr<Tensor> pinned;
      Done done;
    };
    const auto start = std::chrono::steady_clock::now();
    auto owned = std::make_shared<Owned>(Owned{std::move(pinned), std::move(done)});
    return [start, owned = std::move(owned)](const absl::Status& status) {
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      owned->pinned.reset();
      const Done done = std::exchange(owned->done, nullptr);
      done(Copied{status, taken.count()});
    };
  }

  tensorflow::Device* const device_;
  tensorflow::DeviceContext* const context_;
};

}  // namespace

Copied AsCopied(const CopyLane::Ended& ended) {
  return {ended.error.empty() ? absl::OkStatus() : absl::InternalError(ended.error), ended.busy_s,
          ended.is_inline, ended.carried_bytes};
}

std::shared_ptr<DeviceCopier> CpuCopierFactory::Make(OpKernelContext* ctx) {
  return std::make_shared<CpuCopier>(static_cast<tensorflow::Device*>(ctx->device())->parsed_name().id);
}

HostPool* CpuCopierFactory::Pool(tensorflow::DeviceBase*) { return &Runtime::Get().pool(); }

std::shared_ptr<DeviceCopier> GpuCopierFactory::Make(OpKernelContext* ctx) {
  return std::make_shared<GpuCopier>(ctx);
}

HostPool* GpuCopierFactory::Pool(tensorflow::DeviceBase* device) { return PinnedPool(device); }

}  // namespace tfswap
