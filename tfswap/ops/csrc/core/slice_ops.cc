// Kernels that run in slices of rows (kernels/slice_lines.py, passes/tactics/slice_kernels.py):
//
//   StoreRows  copies a slice into a tensor that all slices fill
//   AddRows    adds up the rows of a slice, where BiasAddGrad adds up those of the whole tensor
//
// Both forward the buffer of the slice before where nothing else holds it, and copy it otherwise, so they can be
// repeated as other kernels can. Rows that no slice has filled have no value. On a CPU only.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Sets a kernel's first output to a tensor of this shape with the contents of input 1, if there is one.
absl::Status Continue(OpKernelContext* ctx, const TensorShape& shape, Tensor** output) {
  if (ctx->num_inputs() == 1) return ctx->allocate_output(0, shape, output);
  const TensorShape& before = ctx->input(1).shape();
  if (before != shape) {
    return absl::InvalidArgumentError(absl::StrCat("'", ctx->op_kernel().name(), "' continues a tensor of shape ",
                                                   shape.DebugString(), ", and is given one of shape ",
                                                   before.DebugString(), "."));
  }
  int forwarded = -1;
  TF_RETURN_IF_ERROR(ctx->forward_input_or_allocate_output({1}, 0, shape, output, &forwarded));
  if (forwarded >= 0 || shape.num_elements() == 0) return absl::OkStatus();
  std::memcpy((*output)->data(), ctx->input(1).data(), (*output)->TotalBytes());
  return absl::OkStatus();
}

// The range of rows of a slice: [begin, begin + rows of input 0) of `rows`.
struct Range {
  int64_t begin;
  int64_t rows;

  static absl::Status Get(OpKernelConstruction* ctx, Range* found) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("begin", &found->begin));
    return ctx->GetAttr("rows", &found->rows);
  }

  absl::Status Check(const OpKernelContext* ctx, const Tensor& slice) const {
    const int64_t count = slice.dims() > 0 ? slice.dim_size(0) : -1;
    if (count >= 0 && begin >= 0 && begin <= rows - count) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("'", ctx->op_kernel().name(), "' is given a slice of shape ",
                                                   slice.shape().DebugString(), " for rows from ", begin, " on of ",
                                                   rows, "."));
  }
};

REGISTER_OP("Tfswap>StoreRows")
    .Input("slice: T")
    .Input("before: N * T")
    .Output("output: T")
    .Attr("T: type")
    .Attr("N: int >= 0")
    .Attr("begin: int >= 0")
    .Attr("rows: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      int64_t rows = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("rows", &rows));
      ShapeHandle slice, output;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &slice));
      TF_RETURN_IF_ERROR(c->ReplaceDim(slice, 0, c->MakeDim(rows), &output));
      c->set_output(0, output);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Copies a slice into a tensor of `rows` rows, of which the other rows are those of `before`.

before: What the slices before have filled, in whose buffer the output is; none for the first slice.
begin: The first row that is filled.
)doc");

class StoreRowsOp : public OpKernel {
 public:
  explicit StoreRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) { OP_REQUIRES_OK(ctx, Range::Get(ctx, &range_)); }

  void Compute(OpKernelContext* ctx) override {
    const Tensor slice = ctx->input(0);
    OP_REQUIRES_OK(ctx, range_.Check(ctx, slice));
    TensorShape shape = slice.shape();
    OP_REQUIRES_OK(ctx, shape.SetDimWithStatus(0, range_.rows));
    Tensor* output;
    OP_REQUIRES_OK(ctx, Continue(ctx, shape, &output));
    if (slice.NumElements() == 0) return;
    const size_t row_bytes = slice.TotalBytes() / slice.dim_size(0);
    std::memcpy(static_cast<char*>(output->data()) + range_.begin * row_bytes, slice.data(), slice.TotalBytes());
  }

 private:
  Range range_;
};

REGISTER_OP("Tfswap>AddRows")
    .Input("slice: T")
    .Input("before: N * T")
    .Output("sums: T")
    .Attr("T: {float}")
    .Attr("N: int >= 0")
    .Attr("begin: int >= 0")
    .Attr("rows: int >= 1")
    .Attr("blocks: int >= 1")
    .Attr("unrolled: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      int64_t blocks = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("blocks", &blocks));
      ShapeHandle slice;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &slice));
      c->set_output(0, c->Matrix(c->MakeDim(blocks), c->Dim(slice, -1)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Adds the rows of a slice to sums of rows, one row after the other: all dimensions but the last are one of rows.

before: The sums of the slices before; none for the first slice.
begin: The first row of the slice among all `rows`.
blocks: The number of sums. Each is of equally many rows in sequence, but for the last.
unrolled: Rows of each four are added to four sums in turn, and each of the rows that are left over is a sum of its own,
  in packets of columns. All rows of the columns that are left over are in the first sum. So does Eigen's reduction.
)doc");

REGISTER_OP("Tfswap>AddBlocks")
    .Input("sums: T")
    .Output("sum: T")
    .Attr("T: {float}")
    .Attr("divisor: int >= 1 = 1")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle sums;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &sums));
      c->set_output(0, c->Vector(c->Dim(sums, 1)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Adds up the sums of AddRows, one after the other, and divides the result.
)doc");

// Adds `count` numbers to sums.
void Add(const float* numbers, int64_t count, float* sums) {
  for (int64_t i = 0; i < count; ++i) sums[i] += numbers[i];
}

class AddRowsOp : public OpKernel {
 public:
  explicit AddRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, Range::Get(ctx, &range_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("blocks", &blocks_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("unrolled", &unrolled_));
    OP_REQUIRES(ctx, !unrolled_ || blocks_ == kUnroll + range_.rows % kUnroll,
                absl::InvalidArgumentError(absl::StrCat("'", name(), "' adds up ", range_.rows, " rows, unrolled, in ",
                                                        blocks_, " sums.")));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor slice = ctx->input(0);
    OP_REQUIRES(ctx, slice.dims() > 0 && slice.NumElements() > 0,
                absl::InvalidArgumentError(absl::StrCat("'", name(), "' is given a slice without elements.")));
    const int64_t width = slice.dim_size(slice.dims() - 1), count = slice.NumElements() / width;
    OP_REQUIRES(ctx, range_.begin <= range_.rows - count,
                absl::InvalidArgumentError(absl::StrCat("'", name(), "' is given ", count, " rows from ", range_.begin,
                                                        " on of ", range_.rows, ".")));
    Tensor* sums;
    OP_REQUIRES_OK(ctx, Continue(ctx, TensorShape({blocks_, width}), &sums));
    float* const to = sums->flat<float>().data();
    if (ctx->num_inputs() == 1) std::fill_n(to, blocks_ * width, 0.0f);
    const float* const from = slice.flat<float>().data();
    const int64_t block_rows = (range_.rows + blocks_ - 1) / blocks_;
    const int64_t unrolled_rows = range_.rows - range_.rows % kUnroll, packets = width - width % kPacket;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = range_.begin + i;
      const float* const numbers = from + i * width;
      if (unrolled_) {
        const int64_t block = row < unrolled_rows ? row % kUnroll : kUnroll + row - unrolled_rows;
        Add(numbers, packets, to + block * width);
        Add(numbers + packets, width - packets, to + packets);
      } else {
        Add(numbers, width, to + row / block_rows * width);
      }
    }
  }

 private:
  // TensorReduction.h, InnerMostDimPreserver, in a TensorFlow for AVX.
  static constexpr int64_t kUnroll = 4, kPacket = 8;

  Range range_;
  int64_t blocks_;
  bool unrolled_;
};

class AddBlocksOp : public OpKernel {
 public:
  explicit AddBlocksOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("divisor", &divisor_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& sums = ctx->input(0);
    OP_REQUIRES(ctx, sums.dims() == 2 && sums.dim_size(0) > 0,
                absl::InvalidArgumentError(absl::StrCat("'", name(), "' is given sums of shape ",
                                                        sums.shape().DebugString(), ".")));
    const int64_t width = sums.dim_size(1);
    Tensor* sum;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({width}), &sum));
    const float* const from = sums.flat<float>().data();
    float* const to = sum->flat<float>().data();
    std::copy_n(from, width, to);
    for (int64_t block = 1; block < sums.dim_size(0); ++block) Add(from + block * width, width, to);
    for (int64_t i = 0; divisor_ > 1 && i < width; ++i) to[i] /= static_cast<float>(divisor_);
  }

 private:
  int64_t divisor_;
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>StoreRows").Device(tensorflow::DEVICE_CPU), StoreRowsOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>AddRows").Device(tensorflow::DEVICE_CPU), AddRowsOp);
REGISTER_KERNEL_BUILDER(Name("Tfswap>AddBlocks").Device(tensorflow::DEVICE_CPU), AddBlocksOp);

}  // namespace
}  // namespace tfswap
