// A copy within the device's memory.

#ifndef TFSWAP_OPS_CSRC_CORE_DEVICE_COPY_H_
#define TFSWAP_OPS_CSRC_CORE_DEVICE_COPY_H_

#include <cstring>

#include "absl/status/status.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfswap {

// Copies `from` into `to`, an allocated tensor of the same type and shape, in order with the device's kernels.
inline void CopyOnDevice(tensorflow::OpKernelContext* ctx, const tensorflow::Tensor& from, tensorflow::Tensor* to) {
  auto* const device = ctx->op_device_context();
  if (device == nullptr) {
    std::memcpy(to->data(), from.data(), from.TotalBytes());
    return;
  }
  device->CopyTensorInSameDevice(&from, static_cast<tensorflow::Device*>(ctx->device()), to,
                                 [](const absl::Status&) {});
}

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_DEVICE_COPY_H_
