// AddN that adds its inputs in their order, or in that of the iteration that it runs in, whatever else holds them.
//
// TensorFlow's kernel looks for the first input whose buffer nothing else holds, and begins with it
// (aggregate_ops.h). The last bits of a sum of three or more then depend on what else has run already. Here that
// kernel runs while inputs from the third on are held: it begins with one of the first two then, and a + b is b + a.
// Planned steps ask for this kernel by its label (KERNEL in ir/custom_ops.py; passes/prepare/ordered_sums.py).
//
// In loops an attribute may say which input takes the first one's place, and that one its own, by iteration of all loops
// around; the last holds for all that follow (FIRST in ir/custom_ops.py). Not on a GPU.
//
// Where nothing else holds a later input, and something both of the first two, the sum takes that input's buffer over
// all the same: a block of it is written when that block of all inputs has been added. Not on a GPU, and not for
// numbers of 16 bits, which this would take too long for: these ask for a new buffer (add_n in
// kernels/memory_rules.py).

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "iteration.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

constexpr int kFree = 2;  // inputs that TensorFlow's kernel may begin with

class OrderedSumOp : public OpKernel {
 public:
  explicit OrderedSumOp(OpKernelConstruction* ctx) : OpKernel(ctx), sum_(MakeUnlabelled(ctx)) {}

  void Compute(OpKernelContext* ctx) override {
    std::vector<Tensor> held;
    for (int i = kFree; i < ctx->num_inputs(); ++i) held.push_back(ctx->input(i));
    sum_->Compute(ctx);
  }

 private:
  std::unique_ptr<OpKernel> sum_;
};

// On a CPU.
template <typename T>
class InPlaceOrderedSumOp : public OrderedSumOp {
 public:
  explicit InPlaceOrderedSumOp(OpKernelConstruction* ctx) : OrderedSumOp(ctx) {
    if (!ctx->HasAttr(kFirstAttribute)) return;
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kFirstAttribute, &first_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kFirstShapeAttribute, &shape_));
    size_t entries = 1;
    for (const int32_t size : shape_) entries *= static_cast<size_t>(std::max(size, 0));
    OP_REQUIRES(ctx, entries == first_.size() && entries > 0,
                absl::InvalidArgumentError(absl::StrCat("A sum has ", first_.size(), " entries for ", entries, " iterations.")));
    for (const int32_t first : first_) {
      OP_REQUIRES(ctx, first >= 0 && first < ctx->num_inputs(),
                  absl::InvalidArgumentError(absl::StrCat("A sum of ", ctx->num_inputs(), " has no input ", first, ".")));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    const int first = First(ctx);
    const int own = FirstOwn(ctx);
    if (first < kFree && own < kFree) return OrderedSumOp::Compute(ctx);
    if (!ctx->ValidateInputsAreSameShape(this)) return;
    Tensor* output = nullptr;
    std::vector<const T*> inputs;
    for (int i = 0; i < ctx->num_inputs(); ++i) inputs.push_back(ctx->input(i).flat<T>().data());
    std::swap(inputs[0], inputs[first]);
    if (own < 0 || !ctx->forward_input_to_output_with_shape(own, 0, ctx->input(0).shape(), &output)) {
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
  static constexpr int64_t kBlock = 4096 / sizeof(T);  // two such stay in the fastest cache
  static constexpr size_t kWidth = 8;                  // inputs that are added at a time
  static constexpr bool kHalf = sizeof(T) == 2;
  using Block = Eigen::Array<T, Eigen::Dynamic, 1, 0, kBlock, 1>;
  using Input = Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, 1>>;

  // What this iteration's sum begins with.
  int First(OpKernelContext* ctx) const {
    if (first_.empty()) return 0;
    const std::vector<int64_t>& iterations = IterationsOf(ctx);
    int64_t at = 0;
    for (size_t loop = 0; loop < shape_.size(); ++loop) {
      const int64_t iteration = loop < iterations.size() ? iterations[loop] : 0;
      at = at * shape_[loop] + std::min<int64_t>(iteration, shape_[loop] - 1);
    }
    return first_[at];
  }

  // The first input that nothing else holds; -1 where there is none.
  static int FirstOwn(OpKernelContext* ctx) {
    for (int i = 0; i < (kHalf ? kFree : ctx->num_inputs()); ++i) {
      if (ctx->forward_input(i, 0, ctx->expected_output_dtype(0), ctx->input(0).shape(), ctx->output_memory_type(0),
                             ctx->output_alloc_attr(0))) {
        return i;
      }
    }
    return -1;
  }

  // The first two to nine inputs from the left, and to these the sum of each further eight, as TensorFlow's kernel.
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

  std::vector<int32_t> first_;
  std::vector<int32_t> shape_;  // of first_, by loop
};

REGISTER_KERNEL_BUILDER(Name("AddN").Device(tensorflow::DEVICE_GPU).Label(kOwnKernel), OrderedSumOp);

#define REGISTER(type, kernel)                                                                            \
  REGISTER_KERNEL_BUILDER(                                                                                \
      Name("AddN").Device(tensorflow::DEVICE_CPU).TypeConstraint<type>("T").Label(kOwnKernel), kernel)
REGISTER(Eigen::half, InPlaceOrderedSumOp<Eigen::half>);
REGISTER(tensorflow::bfloat16, InPlaceOrderedSumOp<tensorflow::bfloat16>);
REGISTER(float, InPlaceOrderedSumOp<float>);
REGISTER(double, InPlaceOrderedSumOp<double>);
REGISTER(tensorflow::complex64, InPlaceOrderedSumOp<tensorflow::complex64>);
REGISTER(tensorflow::complex128, InPlaceOrderedSumOp<tensorflow::complex128>);
#undef REGISTER

}  // namespace
}  // namespace tfswap
