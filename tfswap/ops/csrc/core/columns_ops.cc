// The columns of a convolution: Columns lays out the patches of images under a filter, one a row, so that a product
// with them is the filter's gradient (kernels/windows.py, passes/tactics/slice_kernels.py). TensorFlow's own kernel of
// that gradient has a buffer of columns that is sized by a cache, however small the images are
// (conv_grad_filter_ops.cc, Conv2DCustomBackpropFilterOp); here they are those of some positions. On a CPU only.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/util/overflow.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfswap>Columns")
    .Input("images: T")
    .Output("columns: T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("window: list(int) >= 1")
    .Attr("strides: list(int) >= 1")
    .Attr("dilations: list(int) >= 1")
    .Attr("padding: list(int) >= 1")
    .Attr("sizes: list(int) >= 1")
    .Attr("begin: int >= 0")
    .Attr("rows: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> window;
      int64_t rows = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("window", &window));
      TF_RETURN_IF_ERROR(c->GetAttr("rows", &rows));
      int64_t under = 1;
      for (int64_t size : window) under *= size;
      DimensionHandle width;
      if (!c->RankKnown(c->input(0))) {
        width = c->UnknownDim();
      } else {
        TF_RETURN_IF_ERROR(c->Multiply(c->Dim(c->input(0), -1), under, &width));
      }
      c->set_output(0, c->Matrix(c->MakeDim(rows), width));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The patches of images that a filter's window reads at some positions, each a row. Images have their channels last.

window: The sizes of the filter along the axes of an image.
padding: How many elements of the window are before the image, by axis, at its first position.
sizes: The positions of the window, by axis.
begin: The first position, of those of all images in sequence.
rows: How many positions.
)doc");

constexpr int kMostAxes = 3;
constexpr int64_t kMost = int64_t{1} << 30;  // so that no place overflows

// Sizes along the axes of an image; those of fewer axes have ones before them.
using Sizes = std::array<int64_t, kMostAxes>;

class ColumnsOp : public OpKernel {
 public:
  explicit ColumnsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, Get(ctx, "window", 1, &window_));
    OP_REQUIRES_OK(ctx, Get(ctx, "strides", 1, &strides_));
    OP_REQUIRES_OK(ctx, Get(ctx, "dilations", 1, &dilations_));
    OP_REQUIRES_OK(ctx, Get(ctx, "padding", 0, &padding_));
    OP_REQUIRES_OK(ctx, Get(ctx, "sizes", 1, &sizes_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("begin", &begin_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rows", &rows_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& images = ctx->input(0);
    const int64_t positions = images.dims() == axes_ + 2 ? Product(sizes_, images.dim_size(0)) : -1;
    OP_REQUIRES(ctx, positions >= rows_ && begin_ <= positions - rows_,
                absl::InvalidArgumentError(absl::StrCat("'", name(), "' is given images of shape ",
                                                        images.shape().DebugString(), " for ", rows_,
                                                        " positions from ", begin_, " on.")));
    Sizes image{1, 1, 1};
    for (int axis = 0; axis < axes_; ++axis) image[kMostAxes - axes_ + axis] = images.dim_size(1 + axis);
    const int64_t channels = images.dim_size(axes_ + 1);
    TensorShape shape;
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(rows_));
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(Product(window_, channels)));
    Tensor* columns;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &columns));
    if (columns->NumElements() == 0) return;
    const int64_t element_bytes = columns->TotalBytes() / columns->NumElements();
    const int64_t pixel_bytes = channels * element_bytes, row_bytes = columns->TotalBytes() / rows_;
    const char* const from = static_cast<const char*>(images.data());
    char* const to = static_cast<char*>(columns->data());
    const auto threads = ctx->device()->tensorflow_cpu_worker_threads();
    tensorflow::Shard(threads->num_threads, threads->workers, rows_, row_bytes, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        Copy(from, image, pixel_bytes, begin_ + row, to + row * row_bytes);
      }
    });
  }

 private:
  // The product of sizes and another one; -1 where it is too large.
  static int64_t Product(const Sizes& sizes, int64_t other) {
    int64_t product = other;
    for (int64_t size : sizes) {
      product = product < 0 ? -1 : tensorflow::MultiplyWithoutOverflow(product, size);
    }
    return product;
  }

  absl::Status Get(OpKernelConstruction* ctx, const char* attr, int64_t least, Sizes* sizes) {
    std::vector<int64_t> found;
    TF_RETURN_IF_ERROR(ctx->GetAttr(attr, &found));
    if (axes_ == 0) axes_ = static_cast<int>(found.size());
    const bool is_valid = std::all_of(found.begin(), found.end(), [&](int64_t size) { return size >= least && size <= kMost; });
    if (static_cast<int>(found.size()) != axes_ || axes_ > kMostAxes || !is_valid) {
      return absl::InvalidArgumentError(absl::StrCat("'", name(), "' has an attribute '", attr, "' of ", found.size(),
                                                     " sizes for ", axes_,
                                                     " axes, or one that is too small or too large."));
    }
    sizes->fill(attr == absl::string_view("padding") ? 0 : 1);
    std::copy(found.begin(), found.end(), sizes->end() - axes_);
    return absl::OkStatus();
  }

  // Copies the patch at a position to a row.
  void Copy(const char* from, const Sizes& image, int64_t pixel_bytes, int64_t position, char* to) const {
    Sizes start;
    for (int axis = kMostAxes - 1; axis >= 0; --axis) {
      start[axis] = position % sizes_[axis] * strides_[axis] - padding_[axis];
      position /= sizes_[axis];
    }
    const char* const whole = from + position * Product(image, pixel_bytes);
    const int64_t run_bytes = window_[2] * pixel_bytes;
    for (int64_t i = 0; i < window_[0]; ++i) {
      const int64_t plane = start[0] + i * dilations_[0];
      for (int64_t j = 0; j < window_[1]; ++j, to += run_bytes) {
        const int64_t line = start[1] + j * dilations_[1];
        if (plane < 0 || plane >= image[0] || line < 0 || line >= image[1]) {
          std::memset(to, 0, run_bytes);
        } else {
          CopyLine(whole + (plane * image[1] + line) * image[2] * pixel_bytes, image[2], pixel_bytes, start[2], to);
        }
      }
    }
  }

  // Copies what the window reads of a line of pixels.
  void CopyLine(const char* line, int64_t pixels, int64_t pixel_bytes, int64_t start, char* to) const {
    if (dilations_[2] == 1 && start >= 0 && start + window_[2] <= pixels) {
      std::memcpy(to, line + start * pixel_bytes, window_[2] * pixel_bytes);
      return;
    }
    for (int64_t k = 0; k < window_[2]; ++k, to += pixel_bytes) {
      const int64_t pixel = start + k * dilations_[2];
      if (pixel < 0 || pixel >= pixels) {
        std::memset(to, 0, pixel_bytes);
      } else {
        std::memcpy(to, line + pixel * pixel_bytes, pixel_bytes);
      }
    }
  }

  int axes_ = 0;
  Sizes window_, strides_, dilations_, padding_, sizes_;
  int64_t begin_, rows_;
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>Columns").Device(tensorflow::DEVICE_CPU), ColumnsOp);

}  // namespace
}  // namespace tfswap
