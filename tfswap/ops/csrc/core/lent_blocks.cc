#include "lent_blocks.h"

#include <iterator>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "device_copier.h"
#include "export.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"

namespace tfswap {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

void* LentBlock::Take(int64_t place, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mu_);
  if (place < 0 || bytes <= 0 || bytes > memory_.NumElements() - place) return nullptr;
  const auto after = ends_.lower_bound(place);
  if (after != ends_.end() && after->first < place + bytes) return nullptr;
  if (after != ends_.begin() && std::prev(after)->second > place) return nullptr;
  ends_[place] = place + bytes;
  return static_cast<char*>(memory_.data()) + place;
}

void LentBlock::Release(int64_t place) {
  std::lock_guard<std::mutex> lock(mu_);
  ends_.erase(place);
}

LentBlocks& LentBlocks::Get() {
  static auto* const blocks = new LentBlocks;
  return *blocks;
}

void LentBlocks::Add(int64_t number, Tensor memory) {
  std::lock_guard<std::mutex> lock(mu_);
  blocks_[number] = std::make_shared<LentBlock>(std::move(memory));
}

void LentBlocks::Drop(int64_t number) {
  std::shared_ptr<LentBlock> dropped;  // freed without the lock
  std::lock_guard<std::mutex> lock(mu_);
  const auto found = blocks_.find(number);
  if (found == blocks_.end()) return;
  dropped = std::move(found->second);
  blocks_.erase(found);
}

LentPiece LentBlocks::Take(int64_t number, int64_t place, size_t bytes) {
  std::shared_ptr<LentBlock> block;
  {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = blocks_.find(number);
    if (found == blocks_.end()) return LentPiece();
    block = found->second;
  }
  void* const data = block->Take(place, static_cast<int64_t>(bytes));
  return data == nullptr ? LentPiece() : LentPiece(std::move(block), place, data);
}

namespace {

REGISTER_OP("Tfswap>LendBlock")
    .Attr("number: int")
    .Attr("nbytes: int >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Allocates memory in the device's arena, in which swapped tensors of another device wait.

number: The block's number, which SwapOut has too. It keeps the memory until it is dropped (tfswap_drop_block).
nbytes: Its bytes.
)doc");

template <typename CopierFactory>
class LendBlockOp : public OpKernel {
 public:
  explicit LendBlockOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("number", &number_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nbytes", &nbytes_));
  }

  void Compute(OpKernelContext* ctx) override {
    Tensor block;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_UINT8, {nbytes_}, &block));
    // Kernels enqueued before may still use this memory. The other device's copies do not wait for them, so they are
    // awaited here: a copy to the host follows them.
    char first;
    const std::string error = CopierFactory::Make(ctx)->ReadPiece(block, 0, 1, &first);
    OP_REQUIRES(ctx, error.empty(), absl::InternalError(error));
    LentBlocks::Get().Add(number_, std::move(block));
  }

 private:
  int64_t number_;
  int64_t nbytes_;
};

REGISTER_KERNEL_BUILDER(Name("Tfswap>LendBlock").Device(tensorflow::DEVICE_CPU), LendBlockOp<CpuCopierFactory>);
REGISTER_KERNEL_BUILDER(Name("Tfswap>LendBlock").Device(tensorflow::DEVICE_GPU), LendBlockOp<GpuCopierFactory>);

}  // namespace
}  // namespace tfswap

TFSWAP_C_API void tfswap_drop_block(int64_t number) { tfswap::LentBlocks::Get().Drop(number); }
