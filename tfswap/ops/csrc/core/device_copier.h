// Copies between a device's arena and host memory, by one class per device type. The kernels in swap_kernels.cc are the
// same for all device types.

#ifndef TFSWAP_OPS_CSRC_CORE_DEVICE_COPIER_H_
#define TFSWAP_OPS_CSRC_CORE_DEVICE_COPIER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "copy_engine.h"
#include "host_pool.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfswap {

// The result of a copy.
struct Copied {
  absl::Status status;
  double busy_s = 0;     // from its start to its end
  bool is_inline = false;  // made by the caller's own thread
  size_t carried_bytes = 0;  // on the link; fewer than the tensor's if compressed
};

Copied AsCopied(const CopyLane::Ended& ended);

class DeviceCopier {
 public:
  using Done = std::function<void(const Copied&)>;

  virtual ~DeviceCopier() = default;

  // The pool of host memory for this device. It is never destroyed.
  virtual HostPool* pool() = 0;

  // Both start a copy of the whole tensor and return. `done` runs once, on any thread, and may not block. It owns the
  // tensor object and `host`. The copier takes no reference of its own: one that outlives `done` would sometimes
  // prevent buffer forwarding in a later kernel, and so change the peak. Never called for empty tensors.
  virtual void CopyOut(const tensorflow::Tensor* from, void* host, Done done) = 0;
  virtual void CopyIn(const void* host, tensorflow::Tensor* to, Done done) = 0;

  // The same with memory of another device, which neither device's kernels use. They wait for kernels of this device
  // only.
  virtual void CopyToDevice(const tensorflow::Tensor* from, void* other, Done done) = 0;
  virtual void CopyFromDevice(const void* other, tensorflow::Tensor* to, Done done) = 0;

  // Both copy a part of the tensor on the calling thread. Return an error message, "" for none.
  virtual std::string ReadPiece(const tensorflow::Tensor& from, size_t begin, size_t bytes,
                                void* to) = 0;
  virtual std::string WritePiece(const void* from, size_t begin, size_t bytes,
                                 tensorflow::Tensor* to) = 0;
};

// Copies on tfswap's own threads.
struct CpuCopierFactory {
  static std::shared_ptr<DeviceCopier> Make(tensorflow::OpKernelContext* ctx);
  // As DeviceCopier::pool().
  static HostPool* Pool(tensorflow::DeviceBase* device);
};

// Copies on the streams that TensorFlow keeps for the purpose.
struct GpuCopierFactory {
  static std::shared_ptr<DeviceCopier> Make(tensorflow::OpKernelContext* ctx);
  static HostPool* Pool(tensorflow::DeviceBase* device);
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_DEVICE_COPIER_H_
