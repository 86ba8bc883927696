// Masks of one bit per value, and gradient kernels that read a mask in place of the feature map (Gist's "Binarize",
// Jain et al., ISCA 2018).
//
// Encoding and decoding are stateful, like the swap ops, so that TensorFlow does not merge two of them at different
// places of a step's order. The gradients are stateless: each replaces one of TensorFlow's.

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "codec_elements.h"
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
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;

// The approximate cost of eight values, which is limited by the memory's bandwidth.
constexpr int64_t kCyclesPerByte = 16;

// Runs pieces of kMaskBytes bytes of a mask.
template <typename Device, typename Piece>
void RunByBytes(OpKernelContext* ctx, int64_t bytes, const Piece& piece) {
  Device::Run(ctx, codec::CeilDiv(bytes, Device::kMaskBytes), Device::kMaskBytes * kCyclesPerByte,
              piece);
}

REGISTER_OP("Tfswap>EncodeMask")
    .Input("tensor: T")
    .Output("mask: uint8")
    .Attr("T: {bool, half, bfloat16, float, double}")
    .Attr("predicate: {'positive', 'relu6', 'true'}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return PackedShape(c, 8); })
    .Doc(R"doc(
One bit for each value of `tensor`: whether the predicate holds for it.

mask: Value i is bit i % 8 of byte i / 8; the bits after the last value are 0.
predicate: positive: x > 0. relu6: 0 < x < 6. true: the value itself; for bool alone, and
  the only one for bool.
)doc");

REGISTER_OP("Tfswap>DecodeMask")
    .Input("mask: uint8")
    .Input("shape: Tshape")
    .Output("tensor: T")
    .Attr("T: {bool, half, bfloat16, float, double} = DT_BOOL")
    .Attr("Tshape: {int32, int64} = DT_INT32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ShapeFromTensor(c, 1); })
    .Doc(R"doc(
The bits of a mask as a tensor of the given shape: true and false, or 1 and 0.
)doc");

REGISTER_OP("Tfswap>MultiplyByMask")
    .Input("gradients: T")
    .Input("mask: uint8")
    .Output("products: T")
    .Attr("T: {half, bfloat16, float, double}")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
`gradients` times 1 where the mask's bit is set, times 0 elsewhere.

Bit-identical to ReluGrad for a mask of "positive", and to Relu6Grad for one of "relu6". The
output may have the buffer of `gradients`.
)doc");

REGISTER_OP("Tfswap>LeakyReluGradFromMask")
    .Input("gradients: T")
    .Input("mask: uint8")
    .Output("backprops: T")
    .Attr("alpha: float = 0.2")
    .Attr("T: {half, bfloat16, float, double}")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc(R"doc(
Bit-identical to LeakyReluGrad of the features whose mask of "positive" is given. The output
may have the buffer of `gradients`.
)doc");

REGISTER_OP("Tfswap>SelectByMask")
    .Input("mask: uint8")
    .Input("then: T")
    .Input("else: T")
    .Input("shape: Tshape")
    .Output("output: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("Tshape: {int32, int64} = DT_INT32")
    .SetShapeFn([](InferenceContext* c) { return ShapeFromTensor(c, 3); })
    .Doc(R"doc(
SelectV2 of a condition given as a mask.

then, else: Of the given shape, or of one value, which is repeated. The output may have the
  buffer of one of them.
)doc");

template <typename Device, typename T>
class EncodeMaskOp : public OpKernel {
 public:
  explicit EncodeMaskOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("predicate", &predicate_));
    OP_REQUIRES(ctx, (predicate_ == "true") == (std::is_same_v<T, bool>),
                absl::InvalidArgumentError(absl::StrCat(
                    "EncodeMask node '", name(), "' has predicate='", predicate_,
                    "' for a tensor of type ",
                    tensorflow::DataTypeString(ctx->input_type(0)),
                    ": bool needs 'true', other types another predicate.")));
  }

  void Compute(OpKernelContext* ctx) override {
    const int64_t count = ctx->input(0).NumElements();
    Tensor* mask = nullptr;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({codec::CeilDiv(count, 8)}), &mask));
    if constexpr (std::is_same_v<T, bool>) {
      Encode<codec::IsTrue>(ctx, mask);
    } else if (predicate_ == "relu6") {
      Encode<codec::IsInRelu6Range>(ctx, mask);
    } else {
      Encode<codec::IsPositive>(ctx, mask);
    }
  }

 private:
  template <typename Predicate>
  static void Encode(OpKernelContext* ctx, Tensor* mask) {
    const Tensor& tensor = ctx->input(0);
    RunByBytes<Device>(ctx, mask->NumElements(),
                       codec::EncodeMask<Predicate, Element<T>, Device::kMaskBytes>{
                           Elements<T>(tensor), tensor.NumElements(),
                           MutableElements<uint8_t>(mask)});
  }

  std::string predicate_;
};

template <typename Device, typename T>
class DecodeMaskOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    Tensor* tensor = nullptr;
    OP_REQUIRES_OK(ctx, AllocateDecoded(
                            ctx, [](int64_t count) { return codec::CeilDiv(count, 8); }, &tensor));
    if constexpr (!std::is_same_v<T, bool>) {
      Device::Run(ctx, ctx->input(0).NumElements(), kCyclesPerByte,
                  codec::MaskAsNumbers<Element<T>>{Elements<uint8_t>(ctx->input(0)),
                                                   tensor->NumElements(),
                                                   codec::Rounded<Element<T>>(1),
                                                   MutableElements<T>(tensor)});
    } else {
      if constexpr (std::is_same_v<Device, Cpu>) {
        if (HasAvx512()) return Decode<true>(ctx, tensor);
      }
      Decode<false>(ctx, tensor);
    }
  }

 private:
  template <bool kWide>
  static void Decode(OpKernelContext* ctx, Tensor* tensor) {
    const Tensor& mask = ctx->input(0);
    RunByBytes<Device>(ctx, mask.NumElements(),
                       codec::DecodeMask<Device::kMaskBytes, kWide>{
                           Elements<uint8_t>(mask), tensor->NumElements(),
                           MutableElements<bool>(tensor)});
  }
};

// A kernel whose inputs are gradients and a mask.
template <typename Device, typename T>
class MaskedGradientOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& gradients = ctx->input(0);
    const int64_t count = gradients.NumElements();
    const int64_t bytes = codec::CeilDiv(count, 8);
    OP_REQUIRES_OK(ctx, CheckEncodedBytes(ctx, 1, bytes));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({0}, 0, gradients.shape(),
                                                              &output));
    Run(ctx, bytes, Elements<T>(gradients), Elements<uint8_t>(ctx->input(1)), count,
        MutableElements<T>(output));
  }

 protected:
  virtual void Run(OpKernelContext* ctx, int64_t bytes, const Element<T>* gradients,
                   const uint8_t* mask, int64_t count, Element<T>* output) const = 0;
};

template <typename Device, typename T>
class MultiplyByMaskOp : public MaskedGradientOp<Device, T> {
 public:
  using MaskedGradientOp<Device, T>::MaskedGradientOp;

 private:
  void Run(OpKernelContext* ctx, int64_t bytes, const Element<T>* gradients,
           const uint8_t* mask, int64_t count, Element<T>* output) const override {
    RunByBytes<Device>(
        ctx, bytes,
        codec::MultiplyByMask<Element<T>, Device::kMaskBytes>{gradients, mask, count, output});
  }
};

template <typename Device, typename T>
class LeakyReluGradFromMaskOp : public MaskedGradientOp<Device, T> {
 public:
  explicit LeakyReluGradFromMaskOp(OpKernelConstruction* ctx) : MaskedGradientOp<Device, T>(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("alpha", &alpha_));
  }

 private:
  void Run(OpKernelContext* ctx, int64_t bytes, const Element<T>* gradients,
           const uint8_t* mask, int64_t count, Element<T>* output) const override {
    const auto alpha = codec::Rounded<Element<T>>(alpha_);
    Device::Run(ctx, bytes, kCyclesPerByte,
              codec::LeakyReluGradient<Element<T>>{gradients, mask, count, alpha, output});
  }

  float alpha_;
};

template <typename Device, typename T>
class SelectByMaskOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    TensorShape shape;
    OP_REQUIRES_OK(ctx, ShapeFromInput(ctx, 3, &shape));
    const int64_t count = shape.num_elements();
    const int64_t bytes = codec::CeilDiv(count, 8);
    OP_REQUIRES_OK(ctx, CheckEncodedBytes(ctx, 0, bytes));
    int strides[2];
    for (const int k : {0, 1}) {
      const TensorShape& given = ctx->input(1 + k).shape();
      OP_REQUIRES(ctx, given == shape || given.num_elements() == 1,
                  absl::InvalidArgumentError(absl::StrCat(
                      "Input ", 1 + k, " of SelectByMask node '", name(), "' has shape ",
                      given.DebugString(), ": it must be ", shape.DebugString(),
                      ", or one value.")));
      strides[k] = given == shape ? 1 : 0;
    }
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx,
                   ctx->forward_input_or_allocate_output({1, 2}, 0, shape, &output));
    Device::Run(ctx, bytes, kCyclesPerByte,
              codec::SelectByMask<Element<T>>{
                  Elements<uint8_t>(ctx->input(0)), Elements<T>(ctx->input(1)), strides[0],
                  Elements<T>(ctx->input(2)), strides[1], count, MutableElements<T>(output)});
  }
};

#define REGISTER(op, device, kind, type, kernel)                                       \
  REGISTER_KERNEL_BUILDER(                                                             \
      Name("Tfswap>" op).Device(tensorflow::DEVICE_##device).TypeConstraint<type>("T"), \
      kernel<kind, type>)
#define REGISTER_DECODE_MASK(type)                              \
  REGISTER("DecodeMask", CPU, Cpu, type, DecodeMaskOp);         \
  REGISTER_KERNEL_BUILDER(Name("Tfswap>DecodeMask")             \
                              .Device(tensorflow::DEVICE_GPU)   \
                              .TypeConstraint<type>("T")        \
                              .HostMemory("shape"),             \
                          DecodeMaskOp<Gpu, type>)
#define REGISTER_FOR_TYPE(type)                                                           \
  REGISTER("EncodeMask", CPU, Cpu, type, EncodeMaskOp);                                   \
  REGISTER("EncodeMask", GPU, Gpu, type, EncodeMaskOp);                                   \
  REGISTER_DECODE_MASK(type);                                                             \
  REGISTER("MultiplyByMask", CPU, Cpu, type, MultiplyByMaskOp);                           \
  REGISTER("MultiplyByMask", GPU, Gpu, type, MultiplyByMaskOp);                           \
  REGISTER("LeakyReluGradFromMask", CPU, Cpu, type, LeakyReluGradFromMaskOp);             \
  REGISTER("LeakyReluGradFromMask", GPU, Gpu, type, LeakyReluGradFromMaskOp);             \
  REGISTER("SelectByMask", CPU, Cpu, type, SelectByMaskOp);                               \
  REGISTER_KERNEL_BUILDER(Name("Tfswap>SelectByMask")                                     \
                              .Device(tensorflow::DEVICE_GPU)                             \
                              .TypeConstraint<type>("T")                                  \
                              .HostMemory("shape"),                                       \
                          SelectByMaskOp<Gpu, type>)

REGISTER("EncodeMask", CPU, Cpu, bool, EncodeMaskOp);
REGISTER("EncodeMask", GPU, Gpu, bool, EncodeMaskOp);
REGISTER_DECODE_MASK(bool);
REGISTER_FOR_TYPE(Eigen::half);
REGISTER_FOR_TYPE(tensorflow::bfloat16);
REGISTER_FOR_TYPE(float);
REGISTER_FOR_TYPE(double);
#undef REGISTER_FOR_TYPE
#undef REGISTER_DECODE_MASK
#undef REGISTER

}  // namespace
}  // namespace tfswap
