// For kernels whose outputs are variants that own objects in host memory.

#ifndef TFSWAP_OPS_CSRC_CORE_OP_SUPPORT_H_
#define TFSWAP_OPS_CSRC_CORE_OP_SUPPORT_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "host_pool.h"
#include "runtime.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace tfswap {

// The label of tfswap's kernels for TensorFlow's ops: OWN_KERNEL in ir/custom_ops.py.
inline constexpr char kOwnKernel[] = "tfswap";
inline constexpr char kLabelAttribute[] = "_kernel";  // KERNEL
inline constexpr char kFirstAttribute[] = "_tfswap_first";  // FIRST
inline constexpr char kFirstShapeAttribute[] = "_tfswap_first_shape";  // FIRST_SHAPE

// TensorFlow's kernel for a node that is labelled with tfswap's.
inline std::unique_ptr<tensorflow::OpKernel> MakeUnlabelled(tensorflow::OpKernelConstruction* ctx) {
  tensorflow::NodeDef def = ctx->def();
  def.mutable_attr()->erase(kLabelAttribute);
  absl::Status status;
  auto made =
      tensorflow::CreateOpKernel(ctx->device_type(), ctx->device(), ctx->device()->GetAllocator({}), def,
                                 ctx->graph_def_version(), &status);
  if (!status.ok()) ctx->CtxFailure(status);
  return made;
}

// The base class of the values in tfswap's variants. They cannot be sent to another process.
struct ProcessLocal {
  void Encode(tensorflow::VariantTensorData*) const {}
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

// Sets an output that is allocated outside of the arena, since small, long-lived chunks would fragment it.
template <typename Value>
void SetVariantOutput(tensorflow::OpKernelContext* ctx, int index, Value value) {
  tensorflow::Tensor output(tensorflow::cpu_allocator_base(), tensorflow::DT_VARIANT,
                            tensorflow::TensorShape({}));
  output.scalar<tensorflow::Variant>()() = std::move(value);
  ctx->set_output(index, output);
}

// The Value in an input. Value::kMaker is the name of the op that returns it, for the message.
template <typename Value>
absl::Status GetVariantInput(tensorflow::OpKernelContext* ctx, int index,
                             const Value** value) {
  const tensorflow::Tensor& input = ctx->input(index);
  *value = input.NumElements() == 1
               ? input.flat<tensorflow::Variant>()(0).get<Value>()
               : nullptr;
  if (*value != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "Input ", index, " of ", ctx->op_kernel().type_string(), " node '",
      ctx->op_kernel().name(), "' must be the scalar that ", Value::kMaker, " returned."));
}

// A tensor's type and shape, for messages.
inline std::string Described(const tensorflow::Tensor& tensor) {
  return absl::StrCat(tensorflow::DataTypeString(tensor.dtype()), " ", tensor.shape().DebugString());
}

// The error for a node whose `tensor` has no room in host memory, with the cause and a remedy.
inline absl::Status NoHostMemory(HostPool::Failure failure, const std::string& node, size_t bytes,
                                 const tensorflow::Tensor& tensor) {
  return absl::ResourceExhaustedError(
      Runtime::Get().WhyNoRoom(failure, node, bytes, Described(tensor)));
}

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_OP_SUPPORT_H_
