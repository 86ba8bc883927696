// Split and SplitV that request their outputs in order.
//
// TensorFlow's kernels divide four outputs or more among the threads of the pool, and each thread requests its outputs
// (split_op.cc, split_v_op.cc). So the addresses of the outputs, such as an LSTM's four gates, differ from run to run,
// and so does the fragmentation of the arena. The kernels in this file request all outputs before the first copy, and
// divide the copies among the threads. Planned steps use them by their label (KERNEL in ir/custom_ops.py;
// passes/prepare/ordered_splits.py).
//
// TensorFlow's kernel runs for pieces along the first dimension that share the input's buffer, for types that cannot be
// copied bytewise, and for invalid inputs, which it reports.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Copies `count` rows of `row_bytes` each, `stride_bytes` apart, to contiguous memory.
void CopyRows(const char* from, char* to, int64_t count, int64_t row_bytes, int64_t stride_bytes) {
  const auto copy = [&](auto bytes) {
    for (int64_t row = 0; row < count; ++row) std::memcpy(to + row * bytes, from + row * stride_bytes, bytes);
  };
  // A copy of constant size is one instruction. A split into single numbers makes millions of them.
  if (row_bytes == 4) return copy(std::integral_constant<int64_t, 4>());
  if (row_bytes == 8) return copy(std::integral_constant<int64_t, 8>());
  copy(row_bytes);
}

class PiecesOp : public OpKernel {
 public:
  explicit PiecesOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), others_(MakeUnlabelled(ctx)), has_sizes_(ctx->def().op() == "SplitV") {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& whole = ctx->input(has_sizes_ ? 0 : 1);
    std::vector<int64_t> sizes;
    const int64_t axis = Axis(ctx->input(has_sizes_ ? 2 : 0), whole.dims());
    if (axis < 0 || !tensorflow::DataTypeCanUseMemcpy(whole.dtype()) ||
        !Sizes(ctx, whole.dim_size(static_cast<int>(axis)), sizes) || (axis == 0 && Shares(whole, sizes))) {
      others_->Compute(ctx);
      return;
    }
    std::vector<char*> outputs(sizes.size());
    TensorShape shape = whole.shape();
    for (int i = 0; i < num_outputs(); ++i) {
      shape.set_dim(static_cast<int>(axis), sizes[i]);
      Tensor* output;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, shape, &output));
      outputs[i] = static_cast<char*>(output->data());
    }
    if (whole.NumElements() > 0) Copy(ctx, whole, axis, sizes, outputs);
  }

 private:
  static constexpr double kCyclesPerByte = 0.25;

  // The axis, not negative; -1 if the tensor has no such axis.
  static int64_t Axis(const Tensor& given, int dims) {
    if (given.dims() != 0) return -1;
    const int64_t axis = given.flat<int32_t>()(0);
    return axis < -dims || axis >= dims ? -1 : (axis + dims) % std::max(dims, 1);
  }

  // The sizes of the outputs along the axis. False if their sum is not `whole`, which TensorFlow's kernel reports.
  bool Sizes(OpKernelContext* ctx, int64_t whole, std::vector<int64_t>& sizes) const {
    const int64_t count = num_outputs();
    if (!has_sizes_) {
      sizes.assign(count, whole / count);
      return whole % count == 0;
    }
    const Tensor& given = ctx->input(1);
    if (given.dims() != 1 || given.NumElements() != count) return false;
    int64_t unknown = -1, rest = whole;
    for (int64_t i = 0; i < count; ++i) {
      sizes.push_back(given.dtype() == tensorflow::DT_INT64 ? given.flat<int64_t>()(i) : Narrow(given, i));
      if (sizes[i] < -1 || sizes[i] > rest || (sizes[i] == -1 && unknown >= 0)) return false;
      if (sizes[i] == -1) {
        unknown = i;
      } else {
        rest -= sizes[i];
      }
    }
    if (unknown >= 0) {
      sizes[unknown] = rest;
      return rest >= 0;
    }
    return rest == 0;
  }

  static int64_t Narrow(const Tensor& given, int64_t i) {
    return given.dtype() == tensorflow::DT_INT8 ? given.flat<int8_t>()(i) : given.flat<int32_t>()(i);
  }

  // Whether pieces along the first dimension share the input's buffer in TensorFlow's kernel (is_split_view in
  // kernels/views.py). They do if it finds that each begins at an aligned address.
  bool Shares(const Tensor& whole, const std::vector<int64_t>& sizes) const {
    const int64_t length = whole.dim_size(0), element_bytes = tensorflow::DataTypeSize(whole.dtype());
    if (length == 0) return false;
    const auto aligned = [&](int64_t elements) { return elements * element_bytes % EIGEN_MAX_ALIGN_BYTES == 0; };
    if (has_sizes_ && whole.dims() == 1) return std::all_of(sizes.begin(), sizes.end(), aligned);
    return aligned(whole.NumElements() / length);
  }

  // Divides the rows of all outputs, output by output, among the threads.
  static void Copy(OpKernelContext* ctx, const Tensor& whole, int64_t axis, const std::vector<int64_t>& sizes,
                   const std::vector<char*>& outputs) {
    int64_t rows = 1;
    for (int d = 0; d < axis; ++d) rows *= whole.dim_size(d);
    const int64_t row_bytes = whole.NumElements() / rows * tensorflow::DataTypeSize(whole.dtype());
    const int64_t unit_bytes = row_bytes / whole.dim_size(static_cast<int>(axis));
    const auto* const threads = ctx->device()->tensorflow_cpu_worker_threads();
    const auto share = [&](int64_t total, double bytes, const std::function<void(int64_t, int64_t)>& copy) {
      const int64_t cycles = static_cast<int64_t>(kCyclesPerByte * bytes) + 1;
      tensorflow::Shard(threads->num_threads, threads->workers, total, cycles, copy);
    };
    if (rows == 1) {  // the outputs lie one after the other
      share(row_bytes, 1, [&](int64_t begin, int64_t end) {
        const char* const input = static_cast<const char*>(whole.data());
        int64_t at = 0;
        for (size_t i = 0; i < sizes.size(); at += sizes[i++] * unit_bytes) {
          const int64_t first = std::max(begin, at), last = std::min(end, at + sizes[i] * unit_bytes);
          if (first < last) std::memcpy(outputs[i] + (first - at), input + first, last - first);
        }
      });
      return;
    }
    const auto copy = [&](int64_t begin, int64_t end) {
      const char* from = static_cast<const char*>(whole.data());
      for (size_t i = 0; i < sizes.size(); ++i, begin -= rows, end -= rows) {
        const int64_t first = std::max<int64_t>(begin, 0), last = std::min(end, rows), bytes = sizes[i] * unit_bytes;
        if (first < last && bytes > 0) {
          CopyRows(from + first * row_bytes, outputs[i] + first * bytes, last - first, bytes, row_bytes);
        }
        from += bytes;
      }
    };
    const int64_t count = static_cast<int64_t>(sizes.size());
    share(count * rows, static_cast<double>(row_bytes) / static_cast<double>(count), copy);
  }

  std::unique_ptr<OpKernel> others_;
  const bool has_sizes_;
};

// On a GPU TensorFlow's own kernels request outputs in their order.
REGISTER_KERNEL_BUILDER(Name("Split").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), PiecesOp);
REGISTER_KERNEL_BUILDER(Name("SplitV").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), PiecesOp);

}  // namespace
}  // namespace tfswap
