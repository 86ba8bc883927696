// Random ops whose kernels go on where others have stopped.
//
// An op such as RandomUniform has its generator's state in its kernel, and TensorFlow makes the kernels of
// each function anew. A step that is planned again is another function: its random numbers would begin
// anew. So in a live process these nodes of planned steps ask for the kernel here, by its label (KERNEL in
// ir/custom_ops.py), which hands everything on to one of TensorFlow's own. That is shared by all nodes with
// the same owner and place, for as long as the owner is there (tfswap_keep_states).

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

class States {
 public:
  using Places = std::map<std::string, std::shared_ptr<OpKernel>>;

  static States& Get() {
    static States* const states = new States;
    return *states;
  }

  void Keep(int64_t owner) {
    std::lock_guard<std::mutex> lock(mu_);
    owners_.try_emplace(owner);
  }

  void Drop(int64_t owner) {
    Places dropped;  // after the lock
    std::lock_guard<std::mutex> lock(mu_);
    const auto found = owners_.find(owner);
    if (found == owners_.end()) return;
    dropped.swap(found->second);
    owners_.erase(found);
  }

  // The kernel that is there already; else `made`, which is from then on. Of an owner that is not here, as
  // in a process that has loaded a function from a file, `made`.
  std::shared_ptr<OpKernel> Settle(int64_t owner, const std::string& place, std::shared_ptr<OpKernel> made) {
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
    kernel_ = States::Get().Settle(owner, place, std::move(made));
  }

  void Compute(OpKernelContext* ctx) override { kernel_->Compute(ctx); }

  bool IsExpensive() override { return kernel_->IsExpensive(); }

 private:
  std::shared_ptr<OpKernel> kernel_;
};

// DRAWS in ir/custom_ops.py. On a GPU a step's random numbers begin anew.
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

// From now on the kernels of this owner's steps share their states, place by place.
TFSWAP_C_API void tfswap_keep_states(int64_t owner) { tfswap::States::Get().Keep(owner); }

TFSWAP_C_API void tfswap_drop_states(int64_t owner) { tfswap::States::Get().Drop(owner); }
