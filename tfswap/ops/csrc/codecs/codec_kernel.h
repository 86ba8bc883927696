// Shared by the codecs' kernels: element types, shapes given as tensors, and running the pieces of codec_elements.h on
// the device.

#ifndef TFSWAP_OPS_CSRC_CODECS_CODEC_KERNEL_H_
#define TFSWAP_OPS_CSRC_CODECS_CODEC_KERNEL_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "codec_elements.h"
#include "gpu_pieces.h"
#include "tensorflow/core/framework/bfloat16.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/util/work_sharder.h"
#include "vectors.h"

namespace tfswap {

// The type in codec_elements.h for each of TensorFlow's element types.
template <typename T>
struct ElementOf {
  using Type = T;
};
template <>
struct ElementOf<Eigen::half> {
  using Type = codec::Half;
};
template <>
struct ElementOf<tensorflow::bfloat16> {
  using Type = codec::BFloat16;
};
template <typename T>
using Element = typename ElementOf<T>::Type;

template <typename T>
const Element<T>* Elements(const tensorflow::Tensor& tensor) {
  return static_cast<const Element<T>*>(tensor.data());
}
template <typename T>
Element<T>* MutableElements(tensorflow::Tensor* tensor) {
  return static_cast<Element<T>*>(tensor->data());
}

// Runs piece(0) ... piece(count - 1), on TensorFlow's worker threads if that is faster, and returns when all have run.
// `cycles` is the cost of one piece.
template <typename Piece>
void RunOnThreads(tensorflow::OpKernelContext* ctx, int64_t count, int64_t cycles,
                  const Piece& piece) {
  static const auto range = RangeForThisProcessor<Piece>();
  const auto* const threads = ctx->device()->tensorflow_cpu_worker_threads();
  tensorflow::Shard(threads->num_threads, threads->workers, count, cycles,
                    [&piece](int64_t begin, int64_t end) { range(piece, begin, end); });
}

// Devices. Kernels are templates of one of these structs, which gives how pieces run, and their size. On a CPU a piece
// is large enough for vector code, and small enough for the stack. On a GPU it is the smallest part that can be written
// independently.
struct Cpu {
  static constexpr int kDepthBlock = 64;
  static constexpr int kFloatsBlock = 192;
  static constexpr int kMaskBytes = 8;

  template <typename Piece>
  static void Run(tensorflow::OpKernelContext* ctx, int64_t count, int64_t cycles,
                  const Piece& piece) {
    RunOnThreads(ctx, count, cycles, piece);
  }
};

struct Gpu {
  static constexpr int kDepthBlock = 2;
  static constexpr int kFloatsBlock = 3;
  static constexpr int kMaskBytes = 1;

  template <typename Piece>
  static void Run(tensorflow::OpKernelContext* ctx, int64_t count, int64_t /*cycles*/,
                  const Piece& piece) {
    OP_REQUIRES_OK(ctx, LaunchPieces(ctx, GpuPiece<Piece>::type, &piece, count));
  }
};

// These functions are inline, since TensorFlow's headers are most of the compile time of a further .cc file.

// More values than any device holds, and so few that the bytes of their encodings do not overflow an int64.
constexpr int64_t kMostValues = int64_t{1} << 48;

// The shape given by a vector of int32 or int64 in host memory.
inline absl::Status ShapeFromInput(tensorflow::OpKernelContext* ctx, int index,
                                   tensorflow::TensorShape* shape) {
  const tensorflow::Tensor& dims = ctx->input(index);
  if (!tensorflow::TensorShapeUtils::IsVector(dims.shape())) {
    return absl::InvalidArgumentError(
        absl::StrCat("Input ", index, " of ", ctx->op_kernel().type_string(), " node '",
                     ctx->op_kernel().name(), "' must be a vector, the dimensions of a shape, "
                     "got shape ", dims.shape().DebugString(), "."));
  }
  TF_RETURN_IF_ERROR(
      dims.dtype() == tensorflow::DT_INT32
          ? tensorflow::TensorShapeUtils::MakeShape(dims.vec<int32_t>(), shape)
          : tensorflow::TensorShapeUtils::MakeShape(dims.vec<int64_t>(), shape));
  if (shape->num_elements() <= kMostValues) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("Input ", index, " of ", ctx->op_kernel().type_string(), " node '",
                   ctx->op_kernel().name(), "' is the shape ", shape->DebugString(),
                   ", which is larger than any tensor."));
}

// The source of an input, for a message: its node is named after the tensor that it encodes.
inline std::string Source(tensorflow::OpKernelContext* ctx, int index) {
  const tensorflow::NodeDef& node = ctx->op_kernel().def();
  return index < node.input_size() ? absl::StrCat(" (", node.input(index), ")") : "";
}

// Fails unless an encoded tensor has exactly `bytes`.
inline absl::Status CheckEncodedBytes(tensorflow::OpKernelContext* ctx, int index, int64_t bytes) {
  const int64_t given = ctx->input(index).TotalBytes();
  if (given == bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "Input ", index, " of ", ctx->op_kernel().type_string(), " node '",
      ctx->op_kernel().name(), "'", Source(ctx, index), " has ", given,
      " bytes; a tensor of its shape is encoded in ", bytes,
      ". Pass the output of the op that encoded this very tensor."));
}

// Allocates output 0, the tensor that input 0 encodes, of the shape given by the last input. Fails unless input 0 has
// `bytes(number of values)` bytes.
template <typename Bytes>
absl::Status AllocateDecoded(tensorflow::OpKernelContext* ctx, const Bytes& bytes,
                             tensorflow::Tensor** tensor) {
  tensorflow::TensorShape shape;
  TF_RETURN_IF_ERROR(ShapeFromInput(ctx, ctx->num_inputs() - 1, &shape));
  TF_RETURN_IF_ERROR(CheckEncodedBytes(ctx, 0, bytes(shape.num_elements())));
  return ctx->allocate_output(0, shape, tensor);
}

// Shape functions.

// Output 0 is a vector of the number of input 0's values divided by `values_per_byte`, rounded up.
inline absl::Status PackedShape(tensorflow::shape_inference::InferenceContext* c,
                                int64_t values_per_byte) {
  tensorflow::shape_inference::DimensionHandle size = c->NumElements(c->input(0));
  TF_RETURN_IF_ERROR(c->Add(size, values_per_byte - 1, &size));
  TF_RETURN_IF_ERROR(
      c->Divide(size, values_per_byte, /*evenly_divisible=*/false, &size));
  c->set_output(0, c->Vector(size));
  return absl::OkStatus();
}

// Output 0 has the shape given by input `index`.
inline absl::Status ShapeFromTensor(tensorflow::shape_inference::InferenceContext* c, int index) {
  tensorflow::shape_inference::ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->MakeShapeFromShapeTensor(index, &shape));
  c->set_output(0, shape);
  return absl::OkStatus();
}

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CODECS_CODEC_KERNEL_H_
