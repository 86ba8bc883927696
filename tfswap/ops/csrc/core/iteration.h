// Which iteration of a loop a kernel runs in.
//
// A loop's body is called with a frame of its own (loop_ops.cc), and so is a branch (conditional_ops.cc), which passes on
// what it runs in. Kernels find the frame in their context (CallFrameInterface), those of pairs and groups too
// (inner_kernels.h).

#ifndef TFSWAP_OPS_CSRC_CORE_ITERATION_H_
#define TFSWAP_OPS_CSRC_CORE_ITERATION_H_

#include <cstdint>

#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfswap {

// A frame that knows it.
class InIteration {
 public:
  virtual ~InIteration() = default;
  virtual int64_t iteration() const = 0;
};

// Counted from 0, of the innermost loop; 0 outside of loops.
inline int64_t IterationOf(tensorflow::OpKernelContext* ctx) {
  const auto* const frame = dynamic_cast<const InIteration*>(ctx->call_frame());
  return frame == nullptr ? 0 : frame->iteration();
}

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_ITERATION_H_
