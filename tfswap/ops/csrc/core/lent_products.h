// Products of matrices by TensorFlow's own kernel, in a buffer that is given.

#ifndef TFSWAP_OPS_CSRC_CORE_LENT_PRODUCTS_H_
#define TFSWAP_OPS_CSRC_CORE_LENT_PRODUCTS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "inner_kernels.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.pb.h"

namespace tfswap {

// Gives the same buffer to each request.
class LentBuffer : public tensorflow::Allocator {
 public:
  explicit LentBuffer(tensorflow::Tensor* buffer) : data_(buffer->data()), bytes_(buffer->TotalBytes()) {}

  std::string Name() override { return "tfswap_lent"; }
  void* AllocateRaw(size_t, size_t num_bytes) override { return num_bytes <= bytes_ ? data_ : nullptr; }
  void DeallocateRaw(void*) override {}

 private:
  void* const data_;
  const size_t bytes_;
};

// The kernel of MatMul for float32.
class LentProducts {
 public:
  absl::Status Make(tensorflow::OpKernelConstruction* ctx, bool transpose_a, bool transpose_b) {
    tensorflow::NodeDef node;
    node.set_name(absl::StrCat(ctx->def().name(), "/product"));
    node.set_op("MatMul");
    for (const char* input : {"a", "b"}) node.add_input(input);
    tensorflow::AddNodeAttr("T", tensorflow::DT_FLOAT, &node);
    tensorflow::AddNodeAttr("transpose_a", transpose_a, &node);
    tensorflow::AddNodeAttr("transpose_b", transpose_b, &node);
    std::shared_ptr<const tensorflow::NodeProperties> properties;
    TF_RETURN_IF_ERROR(ParseKernel(node.SerializeAsString(), &properties));
    return MakeKernel(ctx, properties, &kernel_);
  }

  // Multiplies two matrices; the product is at the beginning of `buffer`.
  absl::Status Multiply(tensorflow::OpKernelContext* ctx, const tensorflow::Tensor& a, const tensorflow::Tensor& b,
                        tensorflow::Tensor* buffer) const {
    LentBuffer lent(buffer);
    InnerDevice device(ctx->device(), &lent);
    InnerRun run;
    run.held = {a, b};
    for (tensorflow::Tensor& held : run.held) run.inputs.emplace_back(&held);
    run.input_attributes.resize(2);
    run.output_attributes.resize(1);
    run.MakeContext(ctx, kernel_.get(), &device);
    kernel_->Compute(run.ctx.get());
    TF_RETURN_IF_ERROR(run.ctx->status());
    const std::unique_ptr<tensorflow::Tensor> made(run.ctx->release_output(0).tensor);
    if (made->data() == buffer->data()) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("'", ctx->op_kernel().name(), "' gets a product in another buffer."));
  }

 private:
  std::unique_ptr<tensorflow::OpKernel> kernel_;
};

// The first `rows` by `columns` elements of a buffer, as a matrix there.
inline tensorflow::Tensor MatrixIn(const tensorflow::Tensor& buffer, int64_t rows, int64_t columns) {
  tensorflow::Tensor matrix;
  const bool is_made = matrix.CopyFrom(buffer.Slice(0, rows * columns), tensorflow::TensorShape({rows, columns}));
  DCHECK(is_made);
  return matrix;
}

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_LENT_PRODUCTS_H_
