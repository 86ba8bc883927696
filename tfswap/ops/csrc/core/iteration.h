// Which iterations of loops a kernel runs in.
//
// A loop's body and its condition are called with a frame of their own (loop_ops.cc), and so is a branch
// (conditional_ops.cc), which passes on what it runs in. Kernels find the frame in their context (CallFrameInterface),
// those of pairs and groups too (inner_kernels.h).

#ifndef TFSWAP_OPS_CSRC_CORE_ITERATION_H_
#define TFSWAP_OPS_CSRC_CORE_ITERATION_H_

#include <cstdint>
#include <vector>

#include "tensorflow/core/common_runtime/function_body.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfswap {

// A frame that knows them.
class InIterations {
 public:
  virtual ~InIterations() = default;
  // Counted from 0, of the outermost loop first.
  virtual const std::vector<int64_t>& iterations() const = 0;
};

// Empty outside of loops.
inline const std::vector<int64_t>& IterationsOf(tensorflow::OpKernelContext* ctx) {
  static const std::vector<int64_t>* const kOutside = new std::vector<int64_t>();
  const auto* const frame = dynamic_cast<const InIterations*>(ctx->call_frame());
  return frame == nullptr ? *kOutside : frame->iterations();
}

// Of a function that runs in these.
class FrameInIterations : public tensorflow::FunctionCallFrame, public InIterations {
 public:
  FrameInIterations(const tensorflow::FunctionBody& function, const std::vector<int64_t>& iterations)
      : FunctionCallFrame(function.arg_types, function.ret_types), iterations_(iterations) {}

  const std::vector<int64_t>& iterations() const override { return iterations_; }

 private:
  const std::vector<int64_t> iterations_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_ITERATION_H_
