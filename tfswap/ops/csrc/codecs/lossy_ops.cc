// Floats in fewer bits: smaller formats (Gist's "Delayed Precision Reduction", Jain et al., ISCA 2018) and integers
// with a scale per group (ActNN, Chen et al., ICML 2021). These change the values of a step, so tfswap uses them only
// where the user opts in.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "codec_elements.h"
#include "codec_kernel.h"
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
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;

constexpr int64_t kCyclesPerFloat = 4;
constexpr int64_t kCyclesPerQuantized = 16;

// ---------------------------------------------------------------------------
// Smaller floats

// Calls use(format, word) with values that only carry the types. This is the one table of formats; the op's attribute
// lists the same names.
template <typename Use>
void WithFormat(const std::string& name, Use use) {
  if (name == "float16") use(codec::Float16(), uint16_t());
  if (name == "bfloat16") use(codec::BrainFloat16(), uint16_t());
  if (name == "float8_e4m3fn") use(codec::Float8E4M3Fn(), uint8_t());
  if (name == "float8_e5m2") use(codec::Float8E5M2(), uint8_t());
  if (name == "gist_float8") use(codec::GistFloat8(), uint8_t());
  if (name == "gist_float10") use(codec::GistFloat10(), uint32_t());
}

struct Packing {
  int64_t values_per_word = 1;
  int64_t word_bytes = 1;

  int64_t bytes(int64_t count) const {
    return codec::CeilDiv(count, values_per_word) * word_bytes;
  }
};

Packing PackingOf(const std::string& format) {
  Packing packing;
  WithFormat(format, [&packing](auto kind, auto word) {
    packing.word_bytes = sizeof(word);
    packing.values_per_word = 8 * sizeof(word) / decltype(kind)::kBits;
  });
  return packing;
}

absl::Status EncodeFloatsShape(InferenceContext* c) {
  std::string format;
  TF_RETURN_IF_ERROR(c->GetAttr("format", &format));
  const DimensionHandle count = c->NumElements(c->input(0));
  c->set_output(0, c->Vector(c->ValueKnown(count) ? PackingOf(format).bytes(c->Value(count))
                                                  : InferenceContext::kUnknownDim));
  return absl::OkStatus();
}

REGISTER_OP("Tfswap>EncodeFloats")
    .Input("tensor: T")
    .Output("encoded: uint8")
    .Attr("T: {half, bfloat16, float}")
    .Attr("format: {'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'gist_float8', "
          "'gist_float10'}")
    .SetIsStateful()
    .SetShapeFn(EncodeFloatsShape)
    .Doc(R"doc(
`tensor` in a smaller float format, rounded to nearest even. Lossy.

Values beyond the format's largest become the largest. Infinities and NaNs stay, except that
infinities become NaN in a format that has none (float8_e4m3fn).
format: gist_float8 has 1 + 4 + 3 bits, gist_float10 1 + 5 + 4, of which three go into
  four bytes.
)doc");

REGISTER_OP("Tfswap>DecodeFloats")
    .Input("encoded: uint8")
    .Input("shape: Tshape")
    .Output("tensor: T")
    .Attr("T: {half, bfloat16, float}")
    .Attr("Tshape: {int32, int64} = DT_INT32")
    .Attr("format: {'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'gist_float8', "
          "'gist_float10'}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ShapeFromTensor(c, 1); })
    .Doc(R"doc(
The values of EncodeFloats' output.
)doc");

// The attributes of both kernels.
class FloatsOp : public OpKernel {
 public:
  explicit FloatsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("format", &format_));
  }

 protected:
  std::string format_;
};

template <typename Device, typename T>
class EncodeFloatsOp : public FloatsOp {
 public:
  using FloatsOp::FloatsOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& tensor = ctx->input(0);
    const int64_t count = tensor.NumElements();
    const Packing packing = PackingOf(format_);
    Tensor* encoded = nullptr;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({packing.bytes(count)}), &encoded));
    WithFormat(format_, [&](auto kind, auto word) {
      constexpr int kBlock = Device::kFloatsBlock;
      Device::Run(ctx, codec::CeilDiv(count, kBlock), kCyclesPerFloat * kBlock,
                  codec::EncodeFloats<decltype(kind), decltype(word), Element<T>, kBlock>{
                    Elements<T>(tensor), count,
                    reinterpret_cast<decltype(word)*>(encoded->data())});
    });
  }
};

template <typename Device, typename T>
class DecodeFloatsOp : public FloatsOp {
 public:
  using FloatsOp::FloatsOp;

  void Compute(OpKernelContext* ctx) override {
    const Packing packing = PackingOf(format_);
    Tensor* tensor = nullptr;
    OP_REQUIRES_OK(ctx, AllocateDecoded(
                            ctx, [&](int64_t values) { return packing.bytes(values); }, &tensor));
    const int64_t count = tensor->NumElements();
    WithFormat(format_, [&](auto kind, auto word) {
      constexpr int kBlock = Device::kFloatsBlock;
      Device::Run(ctx, codec::CeilDiv(count, kBlock), kCyclesPerFloat * kBlock,
                  codec::DecodeFloats<decltype(kind), decltype(word), Element<T>, kBlock>{
                    static_cast<const decltype(word)*>(ctx->input(0).data()), count,
                    MutableElements<T>(tensor)});
    });
  }
};

// ---------------------------------------------------------------------------
// Integers with a scale per group

// The checked attributes of both ops, and the layout: first the smallest and the largest value of each group, then the
// codes of all groups. The last group is padded.
struct Grouping {
  static constexpr int64_t kLargest = 1 << 20;

  int64_t bits = 8;
  int64_t size = 256;

  template <typename Source>
  absl::Status Read(Source* source) {
    TF_RETURN_IF_ERROR(source->GetAttr("bits", &bits));
    TF_RETURN_IF_ERROR(source->GetAttr("group_size", &size));
    if (bits != 4 && bits != 8) {
      return absl::InvalidArgumentError(absl::StrCat("bits must be 4 or 8, got ", bits, "."));
    }
    if (size < 4 || size % 4 != 0 || size > kLargest) {
      return absl::InvalidArgumentError(absl::StrCat(
          "group_size must be a multiple of 4, and at most ", kLargest, ", got ", size, "."));
    }
    return absl::OkStatus();
  }

  int64_t groups(int64_t count) const { return codec::CeilDiv(count, size); }
  int64_t ranges_bytes(int64_t count) const { return groups(count) * 2 * sizeof(float); }
  int64_t bytes(int64_t count) const {
    return ranges_bytes(count) + groups(count) * (size * bits / 8);
  }
};

absl::Status EncodeGroupsShape(InferenceContext* c) {
  Grouping grouping;
  TF_RETURN_IF_ERROR(grouping.Read(c));
  const DimensionHandle count = c->NumElements(c->input(0));
  c->set_output(0, c->Vector(c->ValueKnown(count) ? grouping.bytes(c->Value(count))
                                                  : InferenceContext::kUnknownDim));
  return absl::OkStatus();
}

REGISTER_OP("Tfswap>EncodeGroups")
    .Input("tensor: T")
    .Output("encoded: uint8")
    .Attr("T: {half, bfloat16, float}")
    .Attr("seed: int = 0")
    .Attr("bits: int = 8")
    .Attr("group_size: int = 256")
    .SetIsStateful()
    .SetShapeFn(EncodeGroupsShape)
    .Doc(R"doc(
Each value as one of 2^bits levels between the smallest and the largest of its group of
neighbours. Lossy.

Rounds up or down at random, so that the expected value is right. The same seed and the same
values give the same codes. Infinities and NaNs stay; a group that holds some has three
levels less.
bits: 4 or 8.
group_size: A multiple of 4, up to 2^20.
)doc");

REGISTER_OP("Tfswap>DecodeGroups")
    .Input("encoded: uint8")
    .Input("shape: Tshape")
    .Output("tensor: T")
    .Attr("T: {half, bfloat16, float}")
    .Attr("Tshape: {int32, int64} = DT_INT32")
    .Attr("bits: int = 8")
    .Attr("group_size: int = 256")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ShapeFromTensor(c, 1); })
    .Doc(R"doc(
The values of EncodeGroups' output. bits and group_size must be the same.
)doc");

// The attributes of both kernels.
class GroupsOp : public OpKernel {
 public:
  explicit GroupsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, grouping_.Read(ctx));
  }

 protected:
  Grouping grouping_;
};

template <typename Device, typename T>
class EncodeGroupsOp : public GroupsOp {
 public:
  explicit EncodeGroupsOp(OpKernelConstruction* ctx) : GroupsOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("seed", &seed_));
  }

  void Compute(OpKernelContext* ctx) override {
    const int64_t count = ctx->input(0).NumElements();
    Tensor* encoded = nullptr;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({grouping_.bytes(count)}), &encoded));
    if (grouping_.bits == 8) {
      Encode<8>(ctx, encoded);
    } else {
      Encode<4>(ctx, encoded);
    }
  }

 private:
  template <int kBits>
  void Encode(OpKernelContext* ctx, Tensor* encoded) const {
    const Tensor& tensor = ctx->input(0);
    const int64_t count = tensor.NumElements();
    auto* const bytes = MutableElements<uint8_t>(encoded);
    Device::Run(ctx, grouping_.groups(count), kCyclesPerQuantized * grouping_.size,
              codec::EncodeGroups<Element<T>, kBits>{
                  Elements<T>(tensor), count, grouping_.size,
                  static_cast<uint64_t>(seed_), reinterpret_cast<float*>(bytes),
                  bytes + grouping_.ranges_bytes(count)});
  }

  int64_t seed_ = 0;
};

template <typename Device, typename T>
class DecodeGroupsOp : public GroupsOp {
 public:
  using GroupsOp::GroupsOp;

  void Compute(OpKernelContext* ctx) override {
    Tensor* tensor = nullptr;
    OP_REQUIRES_OK(ctx, AllocateDecoded(
                            ctx, [&](int64_t values) { return grouping_.bytes(values); },
                            &tensor));
    if (grouping_.bits == 8) {
      Decode<8>(ctx, tensor);
    } else {
      Decode<4>(ctx, tensor);
    }
  }

 private:
  template <int kBits>
  void Decode(OpKernelContext* ctx, Tensor* tensor) const {
    const int64_t count = tensor->NumElements();
    const auto* const bytes = Elements<uint8_t>(ctx->input(0));
    Device::Run(ctx, grouping_.groups(count), kCyclesPerFloat * grouping_.size,
              codec::DecodeGroups<Element<T>, kBits>{
                  reinterpret_cast<const float*>(bytes), bytes + grouping_.ranges_bytes(count),
                  count, grouping_.size, MutableElements<T>(tensor)});
  }
};

#define REGISTER(op, kernel, type, host_input)                                              \
  REGISTER_KERNEL_BUILDER(                                                                  \
      Name("Tfswap>" op).Device(tensorflow::DEVICE_CPU).TypeConstraint<type>("T"),          \
      kernel<Cpu, type>);                                                                   \
  REGISTER_KERNEL_BUILDER(Name("Tfswap>" op)                                                \
                              .Device(tensorflow::DEVICE_GPU)                               \
                              .TypeConstraint<type>("T")                                    \
                                  host_input,                                               \
                          kernel<Gpu, type>)
#define REGISTER_FOR_TYPE(type)                                                             \
  REGISTER("EncodeFloats", EncodeFloatsOp, type, );                                         \
  REGISTER("DecodeFloats", DecodeFloatsOp, type, .HostMemory("shape"));                     \
  REGISTER("EncodeGroups", EncodeGroupsOp, type, );                                         \
  REGISTER("DecodeGroups", DecodeGroupsOp, type, .HostMemory("shape"))

REGISTER_FOR_TYPE(Eigen::half);
REGISTER_FOR_TYPE(tensorflow::bfloat16);
REGISTER_FOR_TYPE(float);
#undef REGISTER_FOR_TYPE
#undef REGISTER

}  // namespace
}  // namespace tfswap
