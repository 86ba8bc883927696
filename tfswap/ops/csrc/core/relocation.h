// The addresses of values after a loop or a conditional.
//
// The number of a loop's iterations, and the branch that a conditional takes, decide the addresses of their results,
// and so the chunks that later requests get. So the results of an iteration or a branch are copied to host memory,
// freed, and copied back into buffers that are requested in the order of the values. The arena is then the same for
// each number of iterations and each branch, and one plan holds for all. `BodyReplay._relocate` in
// analysis/control_flow.py has the same. Values that are at these addresses already, as values updated in place are,
// are not copied.

#ifndef TFSWAP_OPS_CSRC_CORE_RELOCATION_H_
#define TFSWAP_OPS_CSRC_CORE_RELOCATION_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfswap {

// RELOCATED in ir/custom_ops.py: the relocated values of a loop or conditional, by number.
inline constexpr char kRelocated[] = "_tfswap_relocated";

class Relocation {
 public:
  // The values that a node relocates; empty if it has no such attribute.
  static absl::Status Read(tensorflow::OpKernelConstruction* ctx, std::vector<int32_t>* places) {
    return ctx->HasAttr(kRelocated) ? ctx->GetAttr(kRelocated, places) : absl::OkStatus();
  }

  Relocation(tensorflow::OpKernelContext* ctx, std::vector<int32_t> places)
      : ctx_(ctx), places_(std::move(places)) {}

  absl::Status Run(std::vector<tensorflow::Tensor>* values) {
    if (places_.empty() || (!homes_.empty() && homes_ == Homes(*values))) return absl::OkStatus();
    TF_RETURN_IF_ERROR(CopyOut(values));
    TF_RETURN_IF_ERROR(CopyIn(values));
    homes_ = Homes(*values);
    return absl::OkStatus();
  }

 private:
  using Tensor = tensorflow::Tensor;
  using Home = std::pair<const void*, size_t>;  // a buffer and the bytes of its chunk

  bool OnCpu() const { return ctx_->device()->tensorflow_accelerator_device_info() == nullptr; }

  // Whether the value is in the device's memory: functions on a GPU take and return integers in host memory.
  bool Moves(const Tensor& value) const {
    const bool on_host = value.dtype() == tensorflow::DT_INT32 || value.dtype() == tensorflow::DT_INT64;
    return tensorflow::DataTypeCanUseMemcpy(value.dtype()) && value.TotalBytes() > 0 && (OnCpu() || !on_host);
  }

  // The addresses of the values; empty if another holder of a value exists, so that its chunk would not be freed.
  std::vector<Home> Homes(const std::vector<Tensor>& values) const {
    std::vector<Home> homes;
    const auto* const arena = ctx_->get_allocator({});
    if (!arena->TracksAllocationSizes()) return {};
    for (const int place : places_) {
      const Tensor& value = values[place];
      if (!Moves(value)) continue;
      if (!value.RefCountIsOne()) return {};
      homes.emplace_back(value.data(), arena->AllocatedSize(value.data()));
    }
    return homes;
  }

  absl::Status CopyOut(std::vector<Tensor>* values) {
    size_t count = 0;
    for (const int place : places_) {
      Tensor& value = (*values)[place];
      if (!Moves(value)) continue;
      if (copies_.size() == count) copies_.emplace_back();
      auto& [copied, copy] = copies_[count++];
      copied = place;
      if (copy.dtype() != value.dtype() || copy.shape() != value.shape()) {
        copy = Tensor(tensorflow::cpu_allocator_base(), value.dtype(), value.shape());
      }
      if (OnCpu()) {
        std::memcpy(copy.data(), value.data(), value.TotalBytes());
      } else {
        TF_RETURN_IF_ERROR(ctx_->op_device_context()->CopyDeviceTensorToCPUSync(&value, "tfswap", Device(), &copy));
      }
      value = Tensor();
    }
    copies_.resize(count);
    return absl::OkStatus();
  }

  absl::Status CopyIn(std::vector<Tensor>* values) {
    for (const auto& [place, copy] : copies_) {
      Tensor value(ctx_->get_allocator({}), copy.dtype(), copy.shape());
      if (!value.IsInitialized()) {
        return absl::ResourceExhaustedError(
            absl::StrCat("There is no room for value ", place, " of ", ctx_->op_kernel().name(), "."));
      }
      if (OnCpu()) {
        std::memcpy(value.data(), copy.data(), copy.TotalBytes());
      } else {
        TF_RETURN_IF_ERROR(ctx_->op_device_context()->CopyCPUTensorToDeviceSync(&copy, Device(), &value));
      }
      (*values)[place] = std::move(value);
    }
    return absl::OkStatus();
  }

  tensorflow::Device* Device() const { return static_cast<tensorflow::Device*>(ctx_->device()); }

  tensorflow::OpKernelContext* const ctx_;
  const std::vector<int32_t> places_;
  std::vector<Home> homes_;
  std::vector<std::pair<int32_t, Tensor>> copies_;  // kept: to allocate memory takes longer than a copy
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_RELOCATION_H_
