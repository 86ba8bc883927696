// AddN with a fixed order of the terms, for identical bits in each step.
//
// TensorFlow's kernel begins with the first input whose buffer can be forwarded, because nothing else holds it
// (aggregate_ops.h). The last bits of a sum of three or more terms then depend on which other kernels have run. The
// kernel in this file holds the inputs from the third on while it runs TensorFlow's kernel. The sum then begins with
// one of the first two, and a + b is b + a. Planned steps use it by its label (KERNEL in ir/custom_ops.py;
// passes/prepare/ordered_sums.py).
//
// A table in an attribute gives the input that swaps places with the first one, by iteration of each enclosing loop.
// Its last entry holds for all later iterations (FIRST in ir/custom_ops.py). Tfswap>Sum has decisions as further
// inputs, the predicates of conditionals, and its table has an axis for each (SUM there). Not on a GPU.
//
// If only a later input can be forwarded, the sum is written into its buffer too: each block is written after this
// block of all inputs has been added. Not on a GPU, and not for numbers of 16 bits, for which this would be too slow:
// these request a new buffer (add_n in kernels/memory_rules.py).

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "decision.h"
#include "iteration.h"
#include "op_support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

constexpr int kMayBeFirst = 2;  // the number of inputs that TensorFlow's kernel may begin with

REGISTER_OP("Tfswap>Sum")
    .Input("terms: N * T")
    .Input("decisions: Tdecisions")
    .Output("sum: T")
    .Attr("N: int >= 2")
    .Attr("T: {half, bfloat16, float, double, complex64, complex128}")
    .Attr("Tdecisions: list({bool, int32}) >= 1")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      int terms = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &terms));
      tensorflow::shape_inference::ShapeHandle sum = c->input(terms - 1);
      for (int i = terms - 2; i >= 0; --i) TF_RETURN_IF_ERROR(c->Merge(c->input(i), sum, &sum));
      c->set_output(0, sum);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Adds tensors in an order that depends on the branches taken by conditionals.

decisions: The predicates of conditionals.
)doc");

class OrderedSumOp : public OpKernel {
 public:
  explicit OrderedSumOp(OpKernelConstruction* ctx) : OpKernel(ctx), sum_(MakeUnlabelled(ctx)) {}

  void Compute(OpKernelContext* ctx) override {
    std::vector<Tensor> held;
    for (int i = kMayBeFirst; i < ctx->num_inputs(); ++i) held.push_back(ctx->input(i));
    sum_->Compute(ctx);
  }

 private:
  std::unique_ptr<OpKernel> sum_;
};

// The sum on a CPU, written into the buffer of any input that can be forwarded.
template <typename T>
class InPlaceSum {
 public:
  explicit InPlaceSum(OpKernelConstruction* ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &terms_));
    if (!ctx->HasAttr(kFirstAttribute)) return;
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kFirstAttribute, &first_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kFirstShapeAttribute, &shape_));
    size_t entries = 1;
    for (const int32_t size : shape_) entries *= static_cast<size_t>(std::max(size, 0));
    OP_REQUIRES(ctx, entries == first_.size() && entries > 0,
                absl::InvalidArgumentError(absl::StrCat("A sum has ", first_.size(), " entries for ", entries, " iterations.")));
    for (const int32_t first : first_) {
      OP_REQUIRES(ctx, first >= 0 && first < terms_,
                  absl::InvalidArgumentError(absl::StrCat("A sum of ", terms_, " has no input ", first, ".")));
    }
    const auto decisions = static_cast<size_t>(ctx->num_inputs() - terms_);
    OP_REQUIRES(ctx, decisions <= shape_.size(),
                absl::InvalidArgumentError(absl::StrCat("A sum has ", decisions, " decisions and ", shape_.size(), " sizes.")));
    loops_ = shape_.size() - decisions;
  }

  // The input that the sum begins with in this iteration and for these decisions.
  absl::Status First(OpKernelContext* ctx, int* first) const {
    *first = 0;
    if (first_.empty()) return absl::OkStatus();
    const std::vector<int64_t>& iterations = IterationsOf(ctx);
    int64_t at = 0;
    for (size_t i = 0; i < shape_.size(); ++i) {
      int64_t row = 0;
      if (i >= loops_) {
        TF_RETURN_IF_ERROR(Branch(ctx->input(terms_ + static_cast<int>(i - loops_)), shape_[i], &row));
      } else if (i < iterations.size()) {
        row = iterations[i];
      }
      at = at * shape_[i] + std::min<int64_t>(row, shape_[i] - 1);
    }
    *first = first_[at];
    return absl::OkStatus();
  }

  // The first input whose buffer can be forwarded; -1 if there is none.
  int FirstForwardable(OpKernelContext* ctx) const {
    for (int i = 0; i < (kHalf ? std::min(kMayBeFirst, terms_) : terms_); ++i) {
      if (ctx->forward_input(i, 0, ctx->expected_output_dtype(0), ctx->input(0).shape(), ctx->output_memory_type(0),
                             ctx->output_alloc_attr(0))) {
        return i;
      }
    }
    return -1;
  }

  // Begins with the input `first`, and writes into the buffer of the input `forwarded` unless that is -1.
  void Compute(OpKernelContext* ctx, int first, int forwarded) const {
    Tensor* output = nullptr;
    std::vector<const T*> inputs;
    for (int i = 0; i < terms_; ++i) {
      OP_REQUIRES(ctx, ctx->input(i).shape() == ctx->input(0).shape(),
                  absl::InvalidArgumentError("The terms of a sum must have one shape."));
      inputs.push_back(ctx->input(i).flat<T>().data());
    }
    std::swap(inputs[0], inputs[first]);
    if (forwarded < 0 || !ctx->forward_input_to_output_with_shape(forwarded, 0, ctx->input(0).shape(), &output)) {
      OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(0).shape(), &output));
    }
    T* const sum = output->flat<T>().data();
    const auto* const threads = ctx->device()->tensorflow_cpu_worker_threads();
    const int64_t cycles = static_cast<int64_t>(kCyclesPerByte * sizeof(T) * (inputs.size() + 1)) + 1;
    tensorflow::Shard(threads->num_threads, threads->workers, output->NumElements(), cycles,
                      [&](int64_t begin, int64_t end) { Add(inputs, sum, begin, end); });
  }

 private:
  static constexpr double kCyclesPerByte = 0.25;
  static constexpr int64_t kBlock = 4096 / sizeof(T);  // two blocks fit in the first-level cache
  static constexpr size_t kWidth = 8;                  // inputs that are added together
  static constexpr bool kHalf = sizeof(T) == 2;
  using Block = Eigen::Array<T, Eigen::Dynamic, 1, 0, kBlock, 1>;
  using Input = Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, 1>>;

  // The branch that the conditional takes (conditional_ops.cc).
  static absl::Status Branch(const Tensor& decision, int32_t branches, int64_t* branch) {
    if (decision.dtype() == tensorflow::DT_BOOL) {
      bool is_true = false;
      TF_RETURN_IF_ERROR(IsTrue(decision, &is_true));
      *branch = is_true ? 0 : 1;
      return absl::OkStatus();
    }
    if (decision.dims() > 0) return absl::InvalidArgumentError("The number of a branch must be a scalar.");
    const int32_t index = decision.scalar<int32_t>()();
    *branch = index < 0 ? branches - 1 : index;
    return absl::OkStatus();
  }

  // Adds the first two to nine inputs from the left, then the sum of each further eight, as TensorFlow's kernel does.
  static void Add(const std::vector<const T*>& inputs, T* sum, int64_t begin, int64_t end) {
    const size_t first = (inputs.size() - 2) % kWidth + 2;
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t size = std::min(kBlock, end - at);
      Block total = Sum(inputs, 0, first, at, size);
      for (size_t i = first; i < inputs.size(); i += kWidth) total += Sum(inputs, i, i + kWidth, at, size);
      Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>(sum + at, size) = total;
    }
  }

  static Block Sum(const std::vector<const T*>& inputs, size_t from, size_t to, int64_t at, int64_t size) {
    const auto input = [&](size_t i) { return Input(inputs[i] + at, size); };
    Block sum = input(from) + input(from + 1);
    size_t i = from + 2;
    for (; i + 1 < to; i += 2) sum = sum + input(i) + input(i + 1);
    if (i < to) sum += input(i);
    return sum;
  }

  int terms_ = 0;
  std::vector<int32_t> first_;
  std::vector<int32_t> shape_;  // the shape of the table first_: an axis for each loop, then for each decision
  size_t loops_ = 0;
};

template <typename T>
class InPlaceOrderedSumOp : public OrderedSumOp {
 public:
  explicit InPlaceOrderedSumOp(OpKernelConstruction* ctx) : OrderedSumOp(ctx), in_place_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    int first = 0;
    OP_REQUIRES_OK(ctx, in_place_.First(ctx, &first));
    const int forwarded = in_place_.FirstForwardable(ctx);
    if (first < kMayBeFirst && forwarded < kMayBeFirst) return OrderedSumOp::Compute(ctx);
    in_place_.Compute(ctx, first, forwarded);
  }

 private:
  const InPlaceSum<T> in_place_;
};

template <typename T>
class DecidedSumOp : public OpKernel {
 public:
  explicit DecidedSumOp(OpKernelConstruction* ctx) : OpKernel(ctx), in_place_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    int first = 0;
    OP_REQUIRES_OK(ctx, in_place_.First(ctx, &first));
    in_place_.Compute(ctx, first, in_place_.FirstForwardable(ctx));
  }

 private:
  const InPlaceSum<T> in_place_;
};

REGISTER_KERNEL_BUILDER(Name("AddN").Device(tensorflow::DEVICE_GPU).Label(kOwnKernel), OrderedSumOp);

#define REGISTER(type)                                                                                     \
  REGISTER_KERNEL_BUILDER(                                                                                 \
      Name("AddN").Device(tensorflow::DEVICE_CPU).TypeConstraint<type>("T").Label(kOwnKernel),             \
      InPlaceOrderedSumOp<type>);                                                                          \
  REGISTER_KERNEL_BUILDER(Name("Tfswap>Sum").Device(tensorflow::DEVICE_CPU).TypeConstraint<type>("T"), \
                          DecidedSumOp<type>)
REGISTER(Eigen::half);
REGISTER(tensorflow::bfloat16);
REGISTER(float);
REGISTER(double);
REGISTER(tensorflow::complex64);
REGISTER(tensorflow::complex128);
#undef REGISTER

}  // namespace
}  // namespace tfswap
