// Zeros like a list, one tensor for all elements of a size.
//
// A gradient begins with zeros for each list that a loop was given, and TensorFlow makes as many tensors of
// them as the list has elements. Nothing writes to a tensor that several hold, so one does for all of them.
// Planned steps ask for this kernel by its label (KERNEL in oplib/names.py; passes/likes.py).
//
// Follows TensorFlow 2.21's tensor_list_util.h (TensorListZerosLike) in all else, and leaves what is no list
// of plain tensors to TensorFlow's own kernel.

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

bool IsPlain(const Tensor& element) {
  return element.dtype() == tensorflow::DT_INVALID || tensorflow::DataTypeCanUseMemcpy(element.dtype());
}

class ZerosOfListOp : public OpKernel {
 public:
  explicit ZerosOfListOp(OpKernelConstruction* ctx) : OpKernel(ctx), others_(MakeUnlabelled(ctx)) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& input = ctx->input(0);
    const auto* const list =
        input.dims() == 0 ? input.scalar<Variant>()().get<TensorList>() : nullptr;
    if (list == nullptr || !std::all_of(list->tensors().begin(), list->tensors().end(), IsPlain)) {
      others_->Compute(ctx);
      return;
    }
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &output));
    TensorList zeros;
    zeros.element_dtype = list->element_dtype;
    zeros.element_shape = list->element_shape;
    zeros.tensors().reserve(list->tensors().size());
    std::map<int64_t, Tensor> made;  // by bytes: all zeros are the same
    for (const Tensor& like : list->tensors()) {
      if (like.dtype() == tensorflow::DT_INVALID) {
        zeros.tensors().emplace_back(tensorflow::DT_INVALID);
        continue;
      }
      const int64_t bytes = like.NumElements() * tensorflow::DataTypeSize(like.dtype());
      const auto [found, is_new] = made.try_emplace(bytes);
      if (is_new) {
        OP_REQUIRES_OK(ctx, ctx->allocate_temp(like.dtype(), like.shape(), &found->second));
        std::memset(found->second.data(), 0, bytes);
      }
      Tensor zero;
      OP_REQUIRES_OK(ctx, zero.BitcastFrom(found->second, like.dtype(), like.shape()));
      zeros.tensors().push_back(zero);
    }
    output->scalar<Variant>()() = zeros;
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
