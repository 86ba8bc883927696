// MaxPoolGrad from the position of each maximum in its window, instead of from the pooled tensor and its input (Gist's
// "Pool-to-index map", Jain et al., ISCA 2018). It also saves the temporaries of TensorFlow's kernel, an int64 and a
// copy per pooled value (maxpooling_op.cc).
//
// Bit-identical to TensorFlow's CPU kernel, for equal values and NaNs too. Of equal values oneDNN's and cuDNN's kernels
// may choose another one.
//
// Not handled: NCHW (TensorFlow's CPU kernel refuses it too), windows of more than 256
// elements, windows over batch or depth, MaxPool3D.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "codec_elements.h"
#include "codec_kernel.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/kernel_shape_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/util/padding.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Padding;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Positions in windows of up to 16 elements take four bits.
constexpr int64_t kSmallWindow = 16;
constexpr int64_t kLargestWindow = 256;

// MaxPool's attributes, checked.
struct Window {
  int64_t rows = 0, cols = 0, row_stride = 0, col_stride = 0;
  Padding padding = Padding::VALID;
  int64_t top = 0, bottom = 0, left = 0, right = 0;  // of explicit padding

  int64_t size() const { return rows * cols; }
};

// `source` is an OpKernelConstruction or an InferenceContext.
template <typename Source>
absl::Status ReadWindow(Source* source, Window* window) {
  std::vector<int32_t> ksize, strides;
  std::vector<int64_t> paddings;
  TF_RETURN_IF_ERROR(source->GetAttr("ksize", &ksize));
  TF_RETURN_IF_ERROR(source->GetAttr("strides", &strides));
  std::string padding;
  TF_RETURN_IF_ERROR(source->GetAttr("padding", &padding));
  TF_RETURN_IF_ERROR(tensorflow::GetPaddingFromString(padding, &window->padding));
  TF_RETURN_IF_ERROR(source->GetAttr("explicit_paddings", &paddings));
  for (const auto* dims : {&ksize, &strides}) {
    if (dims->size() != 4 || (*dims)[0] != 1 || (*dims)[3] != 1 || (*dims)[1] < 1 ||
        (*dims)[2] < 1) {
      return absl::InvalidArgumentError(
          "ksize and strides must be [1, rows, cols, 1] of positive numbers.");
    }
  }
  window->rows = ksize[1];
  window->cols = ksize[2];
  window->row_stride = strides[1];
  window->col_stride = strides[2];
  if (window->size() > kLargestWindow) {
    return absl::InvalidArgumentError(absl::StrCat(
        "A window of ", window->rows, " x ", window->cols, " has more than ",
        kLargestWindow, " positions, which do not fit into a byte."));
  }
  if (window->padding != Padding::EXPLICIT) return absl::OkStatus();
  TF_RETURN_IF_ERROR(tensorflow::CheckValidPadding(window->padding, paddings, /*num_dims=*/4,
                                                   tensorflow::FORMAT_NHWC));
  window->top = paddings[2];
  window->bottom = paddings[3];
  window->left = paddings[4];
  window->right = paddings[5];
  // Otherwise a window could be in the padding alone and have no maximum.
  if (std::max(window->top, window->bottom) >= window->rows ||
      std::max(window->left, window->right) >= window->cols) {
    return absl::InvalidArgumentError("explicit_paddings must be less than the window.");
  }
  return absl::OkStatus();
}

absl::Status PoolingOf(const Window& window, const TensorShape& image,
                       codec::Pooling* pooling) {
  if (image.dims() != 4) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Max pooling takes images of [number, rows, cols, depth], got shape ",
        image.DebugString(), "."));
  }
  codec::Pooling& p = *pooling;
  p.rows = image.dim_size(1);
  p.cols = image.dim_size(2);
  p.depth = image.dim_size(3);
  p.window_rows = window.rows;
  p.window_cols = window.cols;
  p.row_stride = window.row_stride;
  p.col_stride = window.col_stride;
  p.pad_top = window.top;
  p.pad_left = window.left;
  int64_t bottom = window.bottom, right = window.right;
  TF_RETURN_IF_ERROR(tensorflow::GetWindowedOutputSizeVerbose(
      p.rows, p.window_rows, /*dilation_rate=*/1, p.row_stride, window.padding,
      &p.out_rows, &p.pad_top, &bottom));
  return tensorflow::GetWindowedOutputSizeVerbose(
      p.cols, p.window_cols, /*dilation_rate=*/1, p.col_stride, window.padding,
      &p.out_cols, &p.pad_left, &right);
}

int64_t PositionBytes(const Window& window, const codec::Pooling& pooling, int64_t images) {
  const int64_t pixel_bytes = window.size() <= kSmallWindow
                                  ? codec::PositionBytesPerPixel<4>(pooling.depth)
                                  : codec::PositionBytesPerPixel<8>(pooling.depth);
  return images * pooling.out_rows * pooling.out_cols * pixel_bytes;
}

absl::Status PositionsShape(InferenceContext* c) {
  Window window;
  TF_RETURN_IF_ERROR(ReadWindow(c, &window));
  ShapeHandle image;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 4, &image));
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  if (!c->FullyDefined(image)) return absl::OkStatus();
  TensorShape shape;
  for (int i = 0; i < 4; ++i) shape.AddDim(c->Value(c->Dim(image, i)));
  codec::Pooling pooling;
  TF_RETURN_IF_ERROR(PoolingOf(window, shape, &pooling));
  c->set_output(0, c->Vector(PositionBytes(window, pooling, shape.dim_size(0))));
  return absl::OkStatus();
}

REGISTER_OP("Tfswap>EncodeMaxPool")
    .Input("image: T")
    .Output("positions: uint8")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("ksize: list(int) >= 4")
    .Attr("strides: list(int) >= 4")
    .Attr("padding: {'SAME', 'VALID', 'EXPLICIT'}")
    .Attr("explicit_paddings: list(int) = []")
    .SetIsStateful()
    .SetShapeFn(PositionsShape)
    .Doc(R"doc(
The position of each pooled value's maximum in its window. Attributes as MaxPool's.

image: The input of MaxPool, [number, rows, cols, depth].
positions: Four bits each for windows of up to 16 elements, else eight. The positions of
  one output pixel begin at a whole byte.
)doc");

REGISTER_OP("Tfswap>MaxPoolGradFromPositions")
    .Input("gradients: T")
    .Input("positions: uint8")
    .Input("shape: Tshape")
    .Output("backprops: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("Tshape: {int32, int64} = DT_INT32")
    .Attr("ksize: list(int) >= 4")
    .Attr("strides: list(int) >= 4")
    .Attr("padding: {'SAME', 'VALID', 'EXPLICIT'}")
    .Attr("explicit_paddings: list(int) = []")
    .SetShapeFn([](InferenceContext* c) { return ShapeFromTensor(c, 2); })
    .Doc(R"doc(
Bit-identical to MaxPoolGrad, from EncodeMaxPool's positions.

shape: The shape of the image that was pooled.
)doc");

// The attributes of both kernels.
class PoolingOp : public OpKernel {
 public:
  explicit PoolingOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadWindow(ctx, &window_));
  }

 protected:
  bool four_bits() const { return window_.size() <= kSmallWindow; }

  // One piece of work is a block of the channels of one pixel.
  template <typename Device, typename Piece>
  static void RunBlocks(OpKernelContext* ctx, int64_t pixels, int64_t steps, const Piece& piece) {
    constexpr int64_t kBlock = Device::kDepthBlock;
    const int64_t depth = piece.pooling.depth;
    Device::Run(ctx, pixels * codec::CeilDiv(depth, kBlock),
                steps * codec::Min(depth, kBlock), piece);
  }

  Window window_;
};

template <typename Device, typename T>
class EncodeMaxPoolOp : public PoolingOp {
 public:
  using PoolingOp::PoolingOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& image = ctx->input(0);
    codec::Pooling pooling;
    OP_REQUIRES_OK(ctx, PoolingOf(window_, image.shape(), &pooling));
    const int64_t images = image.dim_size(0);
    Tensor* positions = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(
                            0, TensorShape({PositionBytes(window_, pooling, images)}),
                            &positions));
    if (positions->NumElements() == 0) return;
    const int64_t pixels = images * pooling.out_rows * pooling.out_cols;
    auto* const to = MutableElements<uint8_t>(positions);
    if (four_bits()) {
      RunBlocks<Device>(ctx, pixels, window_.size(),
                codec::EncodePositions<Element<T>, 4, Device::kDepthBlock>{pooling, Elements<T>(image), to});
    } else {
      RunBlocks<Device>(ctx, pixels, window_.size(),
                codec::EncodePositions<Element<T>, 8, Device::kDepthBlock>{pooling, Elements<T>(image), to});
    }
  }
};

// Whether all positions of output pixel `pixel` are inside the image.
template <int kBits>
bool InWindow(const codec::Pooling& p, const uint8_t* positions, int64_t pixel) {
  const int64_t top = pixel / p.out_cols % p.out_rows * p.row_stride - p.pad_top;
  const int64_t left = pixel % p.out_cols * p.col_stride - p.pad_left;
  const int64_t pixel_bytes = codec::PositionBytesPerPixel<kBits>(p.depth);
  const uint8_t* const packed = positions + pixel * pixel_bytes;
  if (top >= 0 && left >= 0 && top + p.window_rows <= p.rows && left + p.window_cols <= p.cols) {
    const int64_t most = p.window_rows * p.window_cols - 1;
    if (most == (1 << kBits) - 1) return true;
    uint8_t largest = 0;
    for (int64_t i = 0; i < pixel_bytes; ++i) {
      const uint8_t low = kBits == 8 ? packed[i] : packed[i] & 15;
      const uint8_t high = kBits == 8 ? 0 : packed[i] >> 4;
      largest = codec::Max(largest, codec::Max(low, high));
    }
    return largest <= most;
  }
  bool fits = true;
  for (int64_t d = 0; d < p.depth; ++d) {
    const int at = kBits == 8 ? packed[d] : (packed[d / 2] >> (4 * (d % 2))) & 15;
    const int64_t row = top + at / p.window_cols, col = left + at % p.window_cols;
    fits &= at < p.window_rows * p.window_cols && row >= 0 && row < p.rows && col >= 0 && col < p.cols;
  }
  return fits;
}

template <typename Device, typename T>
class MaxPoolGradFromPositionsOp : public PoolingOp {
 public:
  using PoolingOp::PoolingOp;

  void Compute(OpKernelContext* ctx) override {
    TensorShape shape;
    OP_REQUIRES_OK(ctx, ShapeFromInput(ctx, 2, &shape));
    codec::Pooling pooling;
    OP_REQUIRES_OK(ctx, PoolingOf(window_, shape, &pooling));
    const int64_t images = shape.dim_size(0);
    const Tensor& gradients = ctx->input(0);
    const TensorShape pooled({images, pooling.out_rows, pooling.out_cols, pooling.depth});
    OP_REQUIRES(ctx, gradients.shape() == pooled,
                absl::InvalidArgumentError(absl::StrCat(
                    "The gradients of MaxPoolGradFromPositions node '", name(),
                    "' have shape ", gradients.shape().DebugString(), "; images of shape ",
                    shape.DebugString(), " are pooled to ", pooled.DebugString(), ".")));
    OP_REQUIRES_OK(ctx, CheckEncodedBytes(ctx, 1, PositionBytes(window_, pooling, images)));
    Tensor* backprop = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &backprop));
    if (backprop->NumElements() == 0) return;
    const int64_t pixels = images * pooling.rows * pooling.cols;
    // The number of windows that contain an image pixel.
    const int64_t steps = codec::CeilDiv(pooling.window_rows, pooling.row_stride) *
                          codec::CeilDiv(pooling.window_cols, pooling.col_stride);
    const auto* const from = Elements<T>(gradients);
    const auto* const positions = Elements<uint8_t>(ctx->input(1));
    auto* const to = MutableElements<T>(backprop);
    if constexpr (std::is_same_v<Device, Cpu>) {  // on a GPU the check would have to wait for the stream
      std::atomic<bool> damaged{false};
      RunOnThreads(ctx, images * pooling.out_rows * pooling.out_cols, 1 + pooling.depth / 8,
                   [this, pooling, positions, &damaged](int64_t pixel) {
                     if (!(four_bits() ? InWindow<4> : InWindow<8>)(pooling, positions, pixel)) damaged = true;
                   });
      OP_REQUIRES(ctx, !damaged, absl::InvalidArgumentError(absl::StrCat(
          "Input 1 of MaxPoolGradFromPositions node '", name(), "'", Source(ctx, 1), " has positions outside of "
          "their windows: it is not the output of EncodeMaxPool for images of shape ", shape.DebugString(),
          ", or its bytes have changed since.")));
    }
    if (four_bits()) {
      RunBlocks<Device>(ctx, pixels, steps,
                codec::MaxPoolGradient<Element<T>, 4, Device::kDepthBlock>{pooling, from, positions, to});
    } else {
      RunBlocks<Device>(ctx, pixels, steps,
                codec::MaxPoolGradient<Element<T>, 8, Device::kDepthBlock>{pooling, from, positions, to});
    }
  }
};

#define REGISTER_FOR_TYPE(type)                                                              \
  REGISTER_KERNEL_BUILDER(                                                                   \
      Name("Tfswap>EncodeMaxPool").Device(tensorflow::DEVICE_CPU).TypeConstraint<type>("T"), \
      EncodeMaxPoolOp<Cpu, type>);                                                           \
  REGISTER_KERNEL_BUILDER(                                                                   \
      Name("Tfswap>EncodeMaxPool").Device(tensorflow::DEVICE_GPU).TypeConstraint<type>("T"), \
      EncodeMaxPoolOp<Gpu, type>);                                                           \
  REGISTER_KERNEL_BUILDER(Name("Tfswap>MaxPoolGradFromPositions")                            \
                              .Device(tensorflow::DEVICE_CPU)                                \
                              .TypeConstraint<type>("T"),                                    \
                          MaxPoolGradFromPositionsOp<Cpu, type>);                            \
  REGISTER_KERNEL_BUILDER(Name("Tfswap>MaxPoolGradFromPositions")                            \
                              .Device(tensorflow::DEVICE_GPU)                                \
                              .TypeConstraint<type>("T")                                     \
                              .HostMemory("shape"),                                          \
                          MaxPoolGradFromPositionsOp<Gpu, type>)

REGISTER_FOR_TYPE(Eigen::half);
REGISTER_FOR_TYPE(tensorflow::bfloat16);
REGISTER_FOR_TYPE(float);
REGISTER_FOR_TYPE(double);
#undef REGISTER_FOR_TYPE

}  // namespace
}  // namespace tfswap
