// What the codecs' kernels share: element types, shapes given as tensors, and running
// the pieces of codec_elements.h over the device's threads.

#ifndef TFSWAP_OPS_CSRC_CODEC_KERNEL_H_
#define TFSWAP_OPS_CSRC_CODEC_KERNEL_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "codec_elements.h"
#include "gpu_pieces.h"
#include "tensorflow/core/framework/bfloat16.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tfswap {

// TensorFlow's element types as codec_elements.h sees them.
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

// Runs piece(0) ... piece(count - 1), on TensorFlow's worker threads where that pays, and
// returns when all have run. `cycles` is what one piece takes.
template <typename Piece>
void RunOnThreads(tensorflow::OpKernelContext* ctx, int64_t count, int64_t cycles,
                  const Piece& piece) {
  const auto* const threads = ctx->device()->tensorflow_cpu_worker_threads();
  tensorflow::Shard(threads->num_threads, threads->workers, count, cycles,
                    [&piece](int64_t begin, int64_t end) {
                      // A copy that nothing points at: its fields stay in registers,
                      // though stores of bytes might reach `piece` itself.
                      const Piece own = piece;
                      for (int64_t i = begin; i < end; ++i) own(i);
                    });
}

// Kernels are templates of the device that they run on: how it runs pieces, and how much of
// the work one piece should be. On a CPU enough for vector code and little enough for the
// stack, on a GPU as little as can be written by itself.
struct Cpu {
  static constexpr int kDepthBlock = 64;
  static constexpr int kFloatsBlock = 192;

  template <typename Piece>
  static void Run(tensorflow::OpKernelContext* ctx, int64_t count, int64_t cycles,
                  const Piece& piece) {
    RunOnThreads(ctx, count, cycles, piece);
  }
};

struct Gpu {
  static constexpr int kDepthBlock = 2;
  static constexpr int kFloatsBlock = 3;

  template <typename Piece>
  static void Run(tensorflow::OpKernelContext* ctx, int64_t count, int64_t /*cycles*/,
                  const Piece& piece) {
    OP_REQUIRES_OK(ctx, LaunchPieces(ctx, GpuPiece<Piece>::type, &piece, count));
  }
};

// The shape that a vector of int32 or int64 (in host memory) spells out.
absl::Status ShapeFromInput(tensorflow::OpKernelContext* ctx, int index,
                            tensorflow::TensorShape* shape);

// Whether an encoded tensor has exactly `bytes`, and if not, what that means.
absl::Status CheckEncodedBytes(tensorflow::OpKernelContext* ctx, int index, int64_t bytes);

// Shape functions.

// One dimension, of the input's number of values divided by `values_per_byte`, rounded
// up.
absl::Status PackedShape(tensorflow::shape_inference::InferenceContext* c,
                         int64_t values_per_byte);
// Output 0 has the shape that input `index` spells out.
absl::Status ShapeFromTensor(tensorflow::shape_inference::InferenceContext* c, int index);

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CODEC_KERNEL_H_
