// Integers in the narrowest type that holds their range: indices of an embedding, labels, positions of an argmax.
//
// A graph may violate the range, so encoding checks each value. A value out of range makes the step fail.

#include <atomic>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "codec_kernel.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// The values of one piece of work.
constexpr int64_t kBlock = 1024;

REGISTER_OP("Tfswap>EncodeIntegers")
    .Input("tensor: T")
    .Output("encoded: U")
    .Attr("minimum: int")
    .Attr("T: {int16, int32, int64, uint16, uint32, uint64}")
    .Attr("U: {uint8, uint16, uint32}")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
`tensor - minimum` in the type U.

Fails with InvalidArgument if a value minus `minimum` is negative or too large for U.
)doc");

REGISTER_OP("Tfswap>DecodeIntegers")
    .Input("encoded: U")
    .Output("tensor: T")
    .Attr("minimum: int")
    .Attr("T: {int16, int32, int64, uint16, uint32, uint64}")
    .Attr("U: {uint8, uint16, uint32}")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
Undoes EncodeIntegers with the same `minimum`.
)doc");

// The attributes of both kernels.
class IntegersOp : public OpKernel {
 public:
  explicit IntegersOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("minimum", &minimum_));
  }

 protected:
  int64_t minimum_;
};

template <typename T, typename U>
class EncodeIntegersOp : public IntegersOp {
 public:
  using IntegersOp::IntegersOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& tensor = ctx->input(0);
    Tensor* encoded = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, tensor.shape(), &encoded));
    const int64_t count = tensor.NumElements();
    const T* const from = Elements<T>(tensor);
    U* const to = MutableElements<U>(encoded);
    const int64_t minimum = minimum_;
    std::atomic<int64_t> refused{-1};  // the start of a block that has a value out of range
    RunOnThreads(ctx, codec::CeilDiv(count, kBlock), kBlock,
              [from, to, count, minimum, &refused](int64_t block) {
                const int64_t begin = block * kBlock;
                const int64_t end = codec::Min(begin + kBlock, count);
                bool fits = true;
                for (int64_t i = begin; i < end; ++i) {
                  const uint64_t difference =
                      static_cast<uint64_t>(from[i]) - static_cast<uint64_t>(minimum);
                  fits &= difference <= std::numeric_limits<U>::max();
                  to[i] = static_cast<U>(difference);
                }
                if (!fits) refused = begin;
              });
    if (refused >= 0) ctx->SetStatus(OutOfRange(from, refused, count));
  }

 private:
  absl::Status OutOfRange(const T* values, int64_t i, int64_t count) const {
    while (i < count && static_cast<uint64_t>(values[i]) - static_cast<uint64_t>(minimum_) <=
                            std::numeric_limits<U>::max()) {
      ++i;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "EncodeIntegers node '", name(), "': value ", values[i], " (the ", i,
        "-th) is outside of the planned range, ", minimum_, " and up to ",
        std::numeric_limits<U>::max(), " more. Mark the tensor with tfswap.keep."));
  }
};

template <typename T, typename U>
class DecodeIntegersOp : public IntegersOp {
 public:
  using IntegersOp::IntegersOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& encoded = ctx->input(0);
    Tensor* tensor = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, encoded.shape(), &tensor));
    const int64_t count = encoded.NumElements();
    const U* const from = Elements<U>(encoded);
    T* const to = MutableElements<T>(tensor);
    const auto minimum = static_cast<uint64_t>(minimum_);
    RunOnThreads(ctx, codec::CeilDiv(count, kBlock), kBlock,
              [from, to, count, minimum](int64_t block) {
                const int64_t begin = block * kBlock;
                const int64_t end = codec::Min(begin + kBlock, count);
                for (int64_t i = begin; i < end; ++i) {
                  to[i] = static_cast<T>(from[i] + minimum);
                }
              });
  }
};

#define REGISTER_FOR_TYPES(T, U)                                    \
  REGISTER_KERNEL_BUILDER(Name("Tfswap>EncodeIntegers")             \
                              .Device(tensorflow::DEVICE_CPU)       \
                              .TypeConstraint<T>("T")               \
                              .TypeConstraint<U>("U"),              \
                          EncodeIntegersOp<T, U>);                  \
  REGISTER_KERNEL_BUILDER(Name("Tfswap>DecodeIntegers")             \
                              .Device(tensorflow::DEVICE_CPU)       \
                              .TypeConstraint<T>("T")               \
                              .TypeConstraint<U>("U"),              \
                          DecodeIntegersOp<T, U>);
#define REGISTER_FOR_TYPE(T)       \
  REGISTER_FOR_TYPES(T, uint8_t)   \
  REGISTER_FOR_TYPES(T, uint16_t)  \
  REGISTER_FOR_TYPES(T, uint32_t)

REGISTER_FOR_TYPE(int16_t)
REGISTER_FOR_TYPE(int32_t)
REGISTER_FOR_TYPE(int64_t)
REGISTER_FOR_TYPE(uint16_t)
REGISTER_FOR_TYPE(uint32_t)
REGISTER_FOR_TYPE(uint64_t)
#undef REGISTER_FOR_TYPE
#undef REGISTER_FOR_TYPES

}  // namespace
}  // namespace tfswap
