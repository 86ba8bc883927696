// Random ops that keep their generator when a step is planned again.
//
// The kernel of an op such as RandomUniform holds its generator's state, and TensorFlow creates new kernels for each
// function. A step that is planned again is a new function, so its random numbers would start from the seed. So these
// nodes of planned steps use the kernel in this file, by its label (KERNEL in ir/custom_ops.py). It forwards each call
// to a kernel of TensorFlow's. All nodes with the same owner and place share this kernel, until the owner is dropped
// (tfswap_keep_states, tfswap_drop_states).

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "export.h"
#include "op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfswap {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

constexpr char kOwner[] = "_tfswap_owner";     // STATE_OWNER
constexpr char kPlace[] = "_tfswap_place";     // STATE_PLACE

class SharedKernels {
 public:
  using Places = std::map<std::string, std::shared_ptr<OpKernel>>;

  static SharedKernels& Get() {
    static SharedKernels* const kernels = new SharedKernels;
    return *kernels;
  }

  void Keep(int64_t owner) {
    std::lock_guard<std::mutex> lock(mu_);
    owners_.try_emplace(owner);
  }

  void Drop(int64_t owner) {
    Places dropped;  // destroyed after the lock is released
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = owners_.find(owner);
    if (found == owners_.end()) return;
    dropped.swap(found->second);
    owners_.erase(found);
  }

  // The kernel of this owner and place, which is `made` if there was none. If the owner is unknown, as in a process
  // that loaded the function from a file, `made`, which is not shared.
  std::shared_ptr<OpKernel> Share(int64_t owner, const std::string& place, std::shared_ptr<OpKernel> made) {
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = owners_.find(owner);
    if (found == owners_.end()) return made;
    return found->second.try_emplace(place, std::move(made)).first->second;
  }

 private:
  std::mutex mu_;
  std::unordered_map<int64_t, Places> owners_;
};

class SharedStateOp : public OpKernel {
 public:
  explicit SharedStateOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::shared_ptr<OpKernel> made = MakeUnlabelled(ctx);
    if (!ctx->status().ok()) return;
    int64_t owner;
    std::string place;
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kOwner, &owner));
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kPlace, &place));
    kernel_ = SharedKernels::Get().Share(owner, place, std::move(made));
  }

  void Compute(OpKernelContext* ctx) override { kernel_->Compute(ctx); }

  bool IsExpensive() override { return kernel_->IsExpensive(); }

 private:
  std::shared_ptr<OpKernel> kernel_;
};

// DRAWS in ir/custom_ops.py. Not on a GPU: there, random numbers start from the seed in each new function.
#define TFSWAP_SHARED_STATE(op) \
  REGISTER_KERNEL_BUILDER(Name(op).Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), SharedStateOp)
TFSWAP_SHARED_STATE("AllCandidateSampler");
TFSWAP_SHARED_STATE("FixedUnigramCandidateSampler");
TFSWAP_SHARED_STATE("LearnedUnigramCandidateSampler");
TFSWAP_SHARED_STATE("LogUniformCandidateSampler");
TFSWAP_SHARED_STATE("Multinomial");
TFSWAP_SHARED_STATE("ParameterizedTruncatedNormal");
TFSWAP_SHARED_STATE("RandomCrop");
TFSWAP_SHARED_STATE("RandomGamma");
TFSWAP_SHARED_STATE("RandomPoisson");
TFSWAP_SHARED_STATE("RandomPoissonV2");
TFSWAP_SHARED_STATE("RandomShuffle");
TFSWAP_SHARED_STATE("RandomStandardNormal");
TFSWAP_SHARED_STATE("RandomUniform");
TFSWAP_SHARED_STATE("RandomUniformInt");
TFSWAP_SHARED_STATE("SampleDistortedBoundingBox");
TFSWAP_SHARED_STATE("SampleDistortedBoundingBoxV2");
TFSWAP_SHARED_STATE("ThreadUnsafeUnigramCandidateSampler");
TFSWAP_SHARED_STATE("TruncatedNormal");
TFSWAP_SHARED_STATE("UniformCandidateSampler");
#undef TFSWAP_SHARED_STATE

}  // namespace
}  // namespace tfswap

// Registers an owner: the nodes of its steps share one kernel per place.
TFSWAP_C_API void tfswap_keep_states(int64_t owner) { tfswap::SharedKernels::Get().Keep(owner); }

TFSWAP_C_API void tfswap_drop_states(int64_t owner) { tfswap::SharedKernels::Get().Drop(owner); }
