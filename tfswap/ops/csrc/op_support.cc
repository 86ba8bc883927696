#include "op_support.h"

#include "codec_kernel.h"
#include "runtime.h"
#include "tensorflow/core/framework/types.h"

namespace tfswap {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status NoHostMemory(HostPool::Failure failure, const std::string& node, size_t bytes,
                          const Tensor& tensor) {
  const HostBudget::Usage usage = Runtime::Get().budget().usage();
  const std::string asked =
      absl::StrCat("tfswap has no host memory for node '", node, "': it asks for ",
                   HostPool::RoundUp(bytes), " bytes (",
                   tensorflow::DataTypeString(tensor.dtype()), " ",
                   tensor.shape().DebugString(), ") while ", usage.in_use_bytes,
                   " bytes are in use, ", usage.reserved_bytes, " reserved");
  if (failure == HostPool::Failure::kSystem) {
    return absl::ResourceExhaustedError(absl::StrCat(
        asked, ", and the system gave no more. Free memory on this machine, or swap less "
        "(a higher memory_limit=, or tactics= without \"swap\")."));
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(asked, ", of a limit of ", usage.limit_bytes,
                   ". Raise host_memory_limit= (memory is taken in multiples of ",
                   HostPool::kBlockMultiple, " bytes), or swap less (a higher "
                   "memory_limit=)."));
}

absl::Status ShapeFromInput(OpKernelContext* ctx, int index, TensorShape* shape) {
  const Tensor& dims = ctx->input(index);
  if (!TensorShapeUtils::IsVector(dims.shape())) {
    return absl::InvalidArgumentError(
        absl::StrCat("Input ", index, " of ", ctx->op_kernel().type_string(), " node '",
                     ctx->op_kernel().name(), "' must be a vector that spells out a shape, "
                     "got shape ", dims.shape().DebugString(), "."));
  }
  if (dims.dtype() == tensorflow::DT_INT32) {
    return TensorShapeUtils::MakeShape(dims.vec<int32_t>(), shape);
  }
  return TensorShapeUtils::MakeShape(dims.vec<int64_t>(), shape);
}

absl::Status CheckEncodedBytes(OpKernelContext* ctx, int index, int64_t bytes) {
  const int64_t given = ctx->input(index).TotalBytes();
  if (given == bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "Input ", index, " of ", ctx->op_kernel().type_string(), " node '",
      ctx->op_kernel().name(), "' has ", given, " bytes where a tensor of its shape is encoded "
      "in ", bytes, ". It must come from the op that encoded that very tensor."));
}

absl::Status PackedShape(InferenceContext* c, int64_t values_per_byte) {
  DimensionHandle size = c->NumElements(c->input(0));
  TF_RETURN_IF_ERROR(c->Add(size, values_per_byte - 1, &size));
  TF_RETURN_IF_ERROR(
      c->Divide(size, values_per_byte, /*evenly_divisible=*/false, &size));
  c->set_output(0, c->Vector(size));
  return absl::OkStatus();
}

absl::Status ShapeFromTensor(InferenceContext* c, int index) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->MakeShapeFromShapeTensor(index, &shape));
  c->set_output(0, shape);
  return absl::OkStatus();
}

}  // namespace tfswap
