// ZerosLike of a list or an optional, with one tensor for all elements of a size.
//
// The gradient of a loop begins with zeros for each list among the loop's inputs. TensorFlow creates a tensor for each
// element of the list, and of the lists in it. No kernel writes to a tensor that several hold, so one tensor is enough
// for all of them. Planned steps use this kernel by its label (KERNEL in ir/custom_ops.py;
// passes/prepare/zeros_like.py).
//
// Otherwise it follows TensorFlow 2.21's tensor_list_util.h (TensorListZerosLike) and optional_ops_util.h
// (OptionalZerosLike). TensorFlow's kernel runs for elements that are not plain tensors.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/kernels/data/optional_ops_util.h"
#include "tensorflow/core/kernels/tensor_list.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorList;
using tensorflow::Variant;
using tensorflow::data::OptionalVariant;

// The T in a variant; null if it holds another type.
template <typename T>
const T* In(const Tensor& tensor) {
  const bool one = tensor.dtype() == tensorflow::DT_VARIANT && tensor.dims() == 0;
  return one ? tensor.scalar<Variant>()().get<T>() : nullptr;
}

bool IsPlain(const Tensor& element) {
  if (const auto* const list = In<TensorList>(element)) {
    return std::all_of(list->tensors().begin(), list->tensors().end(), IsPlain);
  }
  if (const auto* const optional = In<OptionalVariant>(element)) {
    return !optional->has_value() ||
           std::all_of(optional->get_values().begin(), optional->get_values().end(), IsPlain);
  }
  return element.dtype() == tensorflow::DT_INVALID || tensorflow::DataTypeCanUseMemcpy(element.dtype());
}

// Creates zeros, one tensor for each number of bytes.
class Zeros {
 public:
  explicit Zeros(OpKernelContext* ctx) : ctx_(ctx) {}

  // Writes zeros like the list or the optional in `like` to `output`, an allocated variant.
  absl::Status Fill(const Tensor& like, Tensor& output) {
    Variant& filled = output.scalar<Variant>()();
    if (const auto* const list = In<TensorList>(like)) {
      TensorList zeros;
      zeros.element_dtype = list->element_dtype;
      zeros.element_shape = list->element_shape;
      TF_RETURN_IF_ERROR(MakeAll(list->tensors(), zeros.tensors()));
      filled = zeros;
      return absl::OkStatus();
    }
    const auto& optional = *In<OptionalVariant>(like);
    std::vector<Tensor> zeros;
    if (optional.has_value()) TF_RETURN_IF_ERROR(MakeAll(optional.get_values(), zeros));
    filled = optional.has_value() ? OptionalVariant(std::move(zeros)) : OptionalVariant();
    return absl::OkStatus();
  }

 private:
  absl::Status MakeAll(const std::vector<Tensor>& like, std::vector<Tensor>& zeros) {
    zeros.reserve(like.size());
    for (const Tensor& element : like) TF_RETURN_IF_ERROR(Make(element, zeros.emplace_back()));
    return absl::OkStatus();
  }

  absl::Status Make(const Tensor& like, Tensor& zero) {
    if (like.dtype() == tensorflow::DT_INVALID) {
      zero = Tensor(tensorflow::DT_INVALID);
      return absl::OkStatus();
    }
    if (like.dtype() == tensorflow::DT_VARIANT) {
      TF_RETURN_IF_ERROR(ctx_->allocate_temp(tensorflow::DT_VARIANT, {}, &zero));
      return Fill(like, zero);
    }
    const int64_t bytes = like.NumElements() * tensorflow::DataTypeSize(like.dtype());
    const auto [found, is_new] = made_.try_emplace(bytes);
    if (is_new) {
      TF_RETURN_IF_ERROR(ctx_->allocate_temp(like.dtype(), like.shape(), &found->second));
      std::memset(found->second.data(), 0, bytes);
    }
    return zero.BitcastFrom(found->second, like.dtype(), like.shape());
  }

  OpKernelContext* const ctx_;
  std::map<int64_t, Tensor> made_;  // by number of bytes: zeros of all types have the same bits
};

class ZerosOfListOp : public OpKernel {
 public:
  explicit ZerosOfListOp(OpKernelConstruction* ctx) : OpKernel(ctx), others_(MakeUnlabelled(ctx)) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& input = ctx->input(0);
    if (input.dtype() != tensorflow::DT_VARIANT || !IsPlain(input)) {
      others_->Compute(ctx);
      return;
    }
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &output));
    OP_REQUIRES_OK(ctx, Zeros(ctx).Fill(input, *output));
  }

 private:
  std::unique_ptr<OpKernel> others_;
};

// On a GPU TensorFlow's kernel runs.
REGISTER_KERNEL_BUILDER(Name("ZerosLike")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<Variant>("T")
                            .Label(kOwnKernel),
                        ZerosOfListOp);

}  // namespace
}  // namespace tfswap
