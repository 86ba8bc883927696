// Zeros like a list, one tensor for all elements of a size.
//
// A gradient begins with zeros for each list that a loop was given, and TensorFlow makes as many tensors of
// them as the list, and the lists in it, have elements. Nothing writes to a tensor that several hold, so one
// does for all of them.
// Planned steps ask for this kernel by its label (KERNEL in oplib/names.py; passes/likes.py).
//
// Follows TensorFlow 2.21's tensor_list_util.h (TensorListZerosLike) in all else, and leaves what is no list
// of plain tensors, or of such lists, to TensorFlow's own kernel.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>

#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/kernels/tensor_list.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorList;
using tensorflow::Variant;

// The list in a variant, or null.
const TensorList* ListIn(const Tensor& tensor) {
  const bool one = tensor.dtype() == tensorflow::DT_VARIANT && tensor.dims() == 0;
  return one ? tensor.scalar<Variant>()().get<TensorList>() : nullptr;
}

bool IsPlain(const Tensor& element) {
  if (const TensorList* const list = ListIn(element)) {
    return std::all_of(list->tensors().begin(), list->tensors().end(), IsPlain);
  }
  return element.dtype() == tensorflow::DT_INVALID || tensorflow::DataTypeCanUseMemcpy(element.dtype());
}

using Zeros = std::map<int64_t, Tensor>;  // by bytes: all zeros are the same

absl::Status MakeZeros(OpKernelContext* ctx, const TensorList& like, Zeros& made, Tensor& output);

absl::Status MakeZero(OpKernelContext* ctx, const Tensor& like, Zeros& made, Tensor& zero) {
  if (like.dtype() == tensorflow::DT_INVALID) {
    zero = Tensor(tensorflow::DT_INVALID);
    return absl::OkStatus();
  }
  if (const TensorList* const list = ListIn(like)) {
    TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_VARIANT, {}, &zero));
    return MakeZeros(ctx, *list, made, zero);
  }
  const int64_t bytes = like.NumElements() * tensorflow::DataTypeSize(like.dtype());
  const auto [found, is_new] = made.try_emplace(bytes);
  if (is_new) {
    TF_RETURN_IF_ERROR(ctx->allocate_temp(like.dtype(), like.shape(), &found->second));
    std::memset(found->second.data(), 0, bytes);
  }
  return zero.BitcastFrom(found->second, like.dtype(), like.shape());
}

absl::Status MakeZeros(OpKernelContext* ctx, const TensorList& like, Zeros& made, Tensor& output) {
  TensorList zeros;
  zeros.element_dtype = like.element_dtype;
  zeros.element_shape = like.element_shape;
  zeros.tensors().reserve(like.tensors().size());
  for (const Tensor& element : like.tensors()) {
    TF_RETURN_IF_ERROR(MakeZero(ctx, element, made, zeros.tensors().emplace_back()));
  }
  output.scalar<Variant>()() = zeros;
  return absl::OkStatus();
}

class ZerosOfListOp : public OpKernel {
 public:
  explicit ZerosOfListOp(OpKernelConstruction* ctx) : OpKernel(ctx), others_(MakeUnlabelled(ctx)) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& input = ctx->input(0);
    const TensorList* const list = ListIn(input);
    if (list == nullptr || !IsPlain(input)) {
      others_->Compute(ctx);
      return;
    }
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &output));
    Zeros made;
    OP_REQUIRES_OK(ctx, MakeZeros(ctx, *list, made, *output));
  }

 private:
  std::unique_ptr<OpKernel> others_;
};

// On a GPU TensorFlow's own kernel makes them.
REGISTER_KERNEL_BUILDER(Name("ZerosLike")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<Variant>("T")
                            .Label(kOwnKernel),
                        ZerosOfListOp);

}  // namespace
}  // namespace tfswap
