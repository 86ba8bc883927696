// The columns of a convolution: Columns lays out the patches of images under a filter, one a row, so that a product
// with them is the filter's gradient (kernels/windows.py, passes/tactics/slice_kernels.py). TensorFlow's own kernel of
// that gradient has a buffer of columns that is sized by a cache, however small the images are
// (conv_grad_filter_ops.cc, Conv2DCustomBackpropFilterOp); here they are those of some positions. On a CPU only.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "patches.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
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

class ColumnsOp : public OpKernel {
 public:
  explicit ColumnsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, patches_.Get(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("begin", &begin_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rows", &rows_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& images = ctx->input(0);
    const int64_t positions = patches_.Positions(images.shape());
    OP_REQUIRES(ctx, positions >= rows_ && begin_ <= positions - rows_,
                absl::InvalidArgumentError(absl::StrCat("'", name(), "' is given images of shape ",
                                                        images.shape().DebugString(), " for ", rows_,
                                                        " positions from ", begin_, " on.")));
    const Patches::Sizes image = patches_.ImageOf(images.shape());
    const int64_t channels = images.dim_size(images.dims() - 1);
    TensorShape shape;
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(rows_));
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(patches_.Elements(channels)));
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
        patches_.Copy(from, image, pixel_bytes, begin_ + row, 0, row_bytes, to + row * row_bytes);
      }
    });
  }

 private:
  Patches patches_;
  int64_t begin_, rows_;
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>Columns").Device(tensorflow::DEVICE_CPU), ColumnsOp);

}  // namespace
}  // namespace tfswap
