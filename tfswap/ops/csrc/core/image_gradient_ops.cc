// Gradients of images with the bits of TensorFlow's kernels, in bounded memory (kernels/bounded_gradients.py):
//
//   ImageGradient  multiplies the gradients at some positions with the filter, and adds the patches to the image
//
// TensorFlow's kernels do so for all positions of an image, or of several (conv_grad_input_ops.h, conv_grad_ops_3d.cc).
// Patches are added to an image in the order of their positions there, and here too. On a CPU only.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "lent_products.h"
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

REGISTER_OP("Tfswap>ImageGradient")
    .Input("filter: T")
    .Input("gradients: T")
    .Output("images: T")
    .Attr("T: {float}")
    .Attr("window: list(int) >= 1")
    .Attr("strides: list(int) >= 1")
    .Attr("dilations: list(int) >= 1")
    .Attr("padding: list(int) >= 1")
    .Attr("sizes: list(int) >= 1")
    .Attr("image: list(int) >= 1")
    .Attr("chunk: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> image;
      TF_RETURN_IF_ERROR(c->GetAttr("image", &image));
      std::vector<DimensionHandle> dims;
      dims.push_back(c->RankKnown(c->input(1)) ? c->Dim(c->input(1), 0) : c->UnknownDim());
      for (int64_t size : image) dims.push_back(c->MakeDim(size));
      dims.push_back(c->RankKnown(c->input(0)) ? c->Dim(c->input(0), -2) : c->UnknownDim());
      c->set_output(0, c->MakeShape(dims));
      return absl::OkStatus();
    })
    .Doc(R"doc(
A convolution's gradient with respect to its images, which have their channels last.

image: The sizes of an image.
chunk: How many positions of the window are multiplied with the filter at a time.
)doc");

class ImageGradientOp : public OpKernel {
 public:
  explicit ImageGradientOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, patches_.Get(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("image", &image_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("chunk", &chunk_));
    OP_REQUIRES_OK(ctx, products_.Make(ctx, /*transpose_a=*/false, /*transpose_b=*/true));
    const bool is_valid = std::all_of(image_.begin(), image_.end(), [](int64_t size) {
      return size > 0 && size <= Patches::kMost;
    });
    OP_REQUIRES(ctx, is_valid && static_cast<int>(image_.size()) == patches_.axes(),
                absl::InvalidArgumentError(absl::StrCat("'", name(), "' has images of ", image_.size(),
                                                        " axes, or of sizes that are none.")));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& filter = ctx->input(0);
    const Tensor& gradients = ctx->input(1);
    const int axes = patches_.axes();
    const bool is_valid = filter.dims() == axes + 2 && gradients.dims() == axes + 2 && filter.NumElements() > 0 &&
                          gradients.NumElements() > 0 &&
                          gradients.dim_size(axes + 1) == filter.dim_size(axes + 1) &&
                          patches_.Positions(gradients.shape()) == gradients.NumElements() / gradients.dim_size(axes + 1) &&
                          patches_.Elements(filter.dim_size(axes)) == filter.NumElements() / filter.dim_size(axes + 1);
    OP_REQUIRES(ctx, is_valid,
                absl::InvalidArgumentError(absl::StrCat("'", name(), "' is given a filter of shape ",
                                                        filter.shape().DebugString(), " and gradients of shape ",
                                                        gradients.shape().DebugString(), ".")));
    TensorShape shape;
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(gradients.dim_size(0)));
    for (int64_t size : image_) OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(size));
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(filter.dim_size(axes)));
    Tensor* images;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &images));
    const int64_t channels = filter.dim_size(axes), made = filter.dim_size(axes + 1);
    const int64_t width = filter.NumElements() / made;
    const int64_t positions = gradients.NumElements() / made / gradients.dim_size(0);
    const int64_t chunk = std::min(chunk_, positions);
    // Kernels need gradients that begin at a multiple of some bytes.
    Tensor columns, gradient, matrix;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_FLOAT, TensorShape({chunk * width}), &columns));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_FLOAT, TensorShape({chunk * made}), &gradient));
    OP_REQUIRES(ctx, matrix.CopyFrom(filter, TensorShape({width, made})), absl::InternalError("The filter changes."));
    std::memset(images->data(), 0, images->TotalBytes());
    const float* const from = gradients.flat<float>().data();
    for (int64_t number = 0; number < gradients.dim_size(0); ++number) {
      float* const image = images->flat<float>().data() + number * (images->NumElements() / gradients.dim_size(0));
      for (int64_t begin = 0; begin < positions; begin += chunk) {
        const int64_t count = std::min(chunk, positions - begin);
        std::memcpy(gradient.data(), from + (number * positions + begin) * made, count * made * sizeof(float));
        OP_REQUIRES_OK(ctx, products_.Multiply(ctx, MatrixIn(gradient, count, made), matrix, &columns));
        AddPatches(ctx, columns.flat<float>().data(), begin, count, channels, image);
      }
    }
  }

 private:
  // Adds the patches at some positions to an image. Each thread has rows of the image.
  void AddPatches(OpKernelContext* ctx, const float* columns, int64_t begin, int64_t count, int64_t channels,
                  float* image) const {
    const int axis = Patches::kMostAxes - patches_.axes();  // of rows
    int64_t number;
    const int64_t first = std::max<int64_t>(0, patches_.StartOf(begin, &number)[axis]);
    const int64_t last = std::min(image_[0], patches_.StartOf(begin + count - 1, &number)[axis] + patches_.Reach(axis));
    if (first >= last) return;
    const auto threads = ctx->device()->tensorflow_cpu_worker_threads();
    const int64_t cost = count * channels * Patches::Product(patches_.window(), 1) / (last - first);
    tensorflow::Shard(threads->num_threads, threads->workers, last - first, cost, [&](int64_t from, int64_t to) {
      Patches::Sizes low{0, 0, 0}, high{1, 1, 1};
      std::copy(image_.begin(), image_.end(), high.begin() + axis);
      const Patches::Sizes sizes = high;
      low[axis] = first + from;
      high[axis] = first + to;
      const int64_t width = Patches::Product(patches_.window(), channels);
      for (int64_t i = 0; i < count; ++i) {
        patches_.AddTo(image, sizes, low, high, channels, begin + i, columns + i * width);
      }
    });
  }

  Patches patches_;
  std::vector<int64_t> image_;
  LentProducts products_;
  int64_t chunk_;
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>ImageGradient").Device(tensorflow::DEVICE_CPU), ImageGradientOp);

}  // namespace
}  // namespace tfswap
