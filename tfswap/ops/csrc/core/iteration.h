// The iterations of the loops around a kernel.
//
// The body and the condition of a loop are called with a frame that has the iterations (loop_ops.cc). So is a branch
// (conditional_ops.cc), which passes the enclosing iterations on. Kernels read the frame in their context
// (CallFrameInterface), kernels of pairs and groups too (inner_kernels.h).

#ifndef TFSWAP_OPS_CSRC_CORE_ITERATION_H_
#define TFSWAP_OPS_CSRC_CORE_ITERATION_H_

#include <cstdint>
#include <vector>

#include "tensorflow/core/common_runtime/function_body.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfswap {

// A frame with the iterations of the enclosing loops.
class InIterations {
 public:
  virtual ~InIterations() = default;
  // Counted from 0, the outermost loop first.
  virtual const std::vector<int64_t>& iterations() const = 0;
};

// The iterations of the loops around a kernel; empty outside of loops.
inline const std::vector<int64_t>& IterationsOf(tensorflow::OpKernelContext* ctx) {
  static const std::vector<int64_t>* const kOutside = new std::vector<int64_t>();
  const auto* const frame = dynamic_cast<const InIterations*>(ctx->call_frame());
  return frame == nullptr ? *kOutside : frame->iterations();
}

// The frame of a function that runs in these iterations.
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
