// If and Case whose results have the same addresses for each branch (relocation.h).
//
// They follow TensorFlow's kernels (functional_ops.cc). The branch runs on a lane, as a loop's body does (loop_ops.cc),
// and its results are relocated before they become the outputs.

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "decision.h"
#include "iteration.h"
#include "serial_executor.h"
#include "op_support.h"
#include "relocation.h"
#include "tensorflow/core/common_runtime/function_body.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfswap {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::FunctionLibraryRuntime;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// One run of a branch.
class Branch {
 public:
  // Runs a branch on a new lane. Calls `done` when the branch has ended and its object is destroyed.
  static void Start(OpKernelContext* ctx, FunctionLibraryRuntime::Handle branch, const std::vector<int32_t>& relocated,
                    AsyncOpKernel::DoneCallback done) {
    auto lane = std::make_shared<Lane>(*ctx->runner());
    auto* const run = new Branch(ctx, relocated, lane, std::move(done));
    lane->Push([run, branch] { run->Run(branch); });
  }

 private:
  Branch(OpKernelContext* ctx, const std::vector<int32_t>& relocated, std::shared_ptr<Lane> lane,
         AsyncOpKernel::DoneCallback done)
      : ctx_(ctx),
        lane_(std::move(lane)),
        runner_(OnLane{lane_}),
        options_(ctx->step_id()),
        done_(std::move(done)),
        relocation_(ctx, relocated) {
    options_.rendezvous = ctx->rendezvous();
    options_.cancellation_manager = ctx->cancellation_manager();
    options_.collective_executor = ctx->collective_executor();
    options_.runner = &runner_;
    options_.run_all_kernels_inline = true;
    options_.step_container = ctx->step_container();
  }

  void Run(FunctionLibraryRuntime::Handle branch) {
    auto* const library = ctx_->function_library();
    std::vector<Tensor> arguments;
    for (int i = 1; i < ctx_->num_inputs(); ++i) arguments.push_back(ctx_->input(i));
    frame_ = std::make_unique<FrameInIterations>(*library->GetFunctionBody(branch), IterationsOf(ctx_));
    const absl::Status given = frame_->SetArgs(arguments);
    if (!given.ok()) return End(given);
    arguments.clear();
    library->Run(options_, branch, frame_.get(), [this](const absl::Status& ran) {
      absl::Status status = ran;
      if (status.ok()) status = frame_->ConsumeRetvals(&results_, false);
      frame_.reset();
      if (status.ok()) status = relocation_.Run(&results_);
      if (status.ok()) status = SetOutputs();
      End(status);
    });
  }

  absl::Status SetOutputs() {
    if (static_cast<int>(results_.size()) != ctx_->num_outputs()) {
      return absl::InvalidArgumentError(
          absl::StrCat("A branch must return ", ctx_->num_outputs(), " tensors, not ", results_.size(), "."));
    }
    for (size_t i = 0; i < results_.size(); ++i) ctx_->set_output(static_cast<int>(i), std::move(results_[i]));
    return absl::OkStatus();
  }

  void End(const absl::Status& status) {
    ctx_->SetStatus(status);
    const std::shared_ptr<Lane> lane = std::move(lane_);
    AsyncOpKernel::DoneCallback done = std::move(done_);
    delete this;
    lane->Push(std::move(done));
  }

  OpKernelContext* const ctx_;
  std::shared_ptr<Lane> lane_;
  Runner runner_;
  FunctionLibraryRuntime::Options options_;
  AsyncOpKernel::DoneCallback done_;
  std::unique_ptr<FrameInIterations> frame_;
  std::vector<Tensor> results_;
  Relocation relocation_;
};

class ConditionalOp : public AsyncOpKernel {
 public:
  explicit ConditionalOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx), is_case_(ctx->HasAttr("branches")) {
    if (is_case_) {
      OP_REQUIRES_OK(ctx, ctx->GetAttr("branches", &branches_));
    } else {
      branches_.resize(2);
      OP_REQUIRES_OK(ctx, ctx->GetAttr("then_branch", &branches_[0]));
      OP_REQUIRES_OK(ctx, ctx->GetAttr("else_branch", &branches_[1]));
    }
    OP_REQUIRES_OK(ctx, Relocation::Read(ctx, &relocated_));
    // Their constants are in the arena before the step that runs them for the first time.
    if (auto* const library = ctx->function_library()) OP_REQUIRES_OK(ctx, Make(library));
  }

  ~ConditionalOp() override {
    for (const auto& [library, branches] : made_) {
      for (const auto branch : branches) library->ReleaseHandle(branch).IgnoreError();
    }
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    size_t chosen = 0;
    OP_REQUIRES_OK_ASYNC(ctx, Choose(ctx, &chosen), done);
    FunctionLibraryRuntime::Handle branch = 0;
    OP_REQUIRES_OK_ASYNC(ctx, GetBranch(ctx, chosen, &branch), done);
    Branch::Start(ctx, branch, relocated_, std::move(done));
  }

 private:
  absl::Status Choose(OpKernelContext* ctx, size_t* chosen) const {
    if (is_case_) {
      const int32_t index = ctx->input(0).scalar<int32_t>()();
      const auto last = static_cast<int32_t>(branches_.size()) - 1;
      *chosen = static_cast<size_t>(index < 0 || index > last ? last : index);
      return absl::OkStatus();
    }
    bool is_true = false;
    TF_RETURN_IF_ERROR(IsTrue(ctx->input(0), &is_true));
    *chosen = is_true ? 0 : 1;
    return absl::OkStatus();
  }

  // Instantiates the branches, once for each library.
  absl::Status Make(FunctionLibraryRuntime* library) {
    FunctionLibraryRuntime::InstantiateOptions options;
    options.create_kernels_eagerly = true;
    std::lock_guard<std::mutex> lock(mu_);
    std::vector<FunctionLibraryRuntime::Handle>& made = made_[library];
    while (made.size() < branches_.size()) {
      const auto& function = branches_[made.size()];
      FunctionLibraryRuntime::Handle handle;
      TF_RETURN_IF_ERROR(
          library->Instantiate(function.name(), tensorflow::AttrSlice(&function.attr()), options, &handle));
      made.push_back(handle);
    }
    return absl::OkStatus();
  }

  absl::Status GetBranch(OpKernelContext* ctx, size_t chosen, FunctionLibraryRuntime::Handle* branch) {
    auto* const library = ctx->function_library();
    if (library == nullptr) return absl::InternalError("A conditional has no library of functions.");
    TF_RETURN_IF_ERROR(Make(library));
    std::lock_guard<std::mutex> lock(mu_);
    *branch = made_[library][chosen];
    return absl::OkStatus();
  }

  const bool is_case_;
  std::vector<tensorflow::NameAttrList> branches_;
  std::vector<int32_t> relocated_;
  std::mutex mu_;
  std::unordered_map<FunctionLibraryRuntime*, std::vector<FunctionLibraryRuntime::Handle>> made_;
};

#define TFSWAP_CONDITIONAL(OP, DECIDES)                                                                   \
  REGISTER_KERNEL_BUILDER(Name(OP).Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), ConditionalOp); \
  REGISTER_KERNEL_BUILDER(Name(OP).Device(tensorflow::DEVICE_GPU).HostMemory(DECIDES).Label(kOwnKernel), ConditionalOp)
TFSWAP_CONDITIONAL("If", "cond");
TFSWAP_CONDITIONAL("StatelessIf", "cond");
TFSWAP_CONDITIONAL("Case", "branch_index");
TFSWAP_CONDITIONAL("StatelessCase", "branch_index");
#undef TFSWAP_CONDITIONAL

}  // namespace
}  // namespace tfswap
