// A kernel of While that releases the loop's values before it ends.
//
// TensorFlow's kernel calls `done` before it releases the loop's values (functional_ops.cc, WhileOp::State::Finish:
// `done_(); delete this`; TensorFlow 2.21). If the cores are busy, its thread can be suspended between the two, and
// then holds all lists of the loop while the rest of the step allocates. So the loops of a planned step use this
// kernel, by its label (OWN_KERNEL in ir/custom_ops.py). TensorFlow's If and Case release their values first.
//
// The node's inputs are held until it ends. A body is the only owner of the values of the iteration before, so that
// their buffers can be forwarded. Values that it does not read are freed before it runs, whereas TensorFlow's kernel
// keeps them until the iteration ends.
//
// Bodies have an order, so only kernels within one node run concurrently (paired_kernels.cc). To pass a kernel to
// another thread takes longer than most kernels run. So all kernels of a loop run on one thread at a time. A kernel of
// more than some 100,000 cycles is divided among Eigen's threads. In a loop these threads sleep between two kernels,
// and to wake them can take longer than the kernel runs: in a decoder's loop on a virtual machine of two cores it
// doubled the time. So the loop measures which is faster while it runs, with these threads or without. The parts are
// the same, so sums have the same bits.

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "decision.h"
#include "online_choice.h"
#include "inline_threads.h"
#include "iteration.h"
#include "serial_executor.h"
#include "loop_condition.h"
#include "op_support.h"
#include "relocation.h"
#include "tensorflow/core/common_runtime/function_body.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/graph/graph.h"

namespace tfswap {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::DataTypeString;
using tensorflow::DeviceBase;
using tensorflow::FunctionBody;
using tensorflow::FunctionLibraryRuntime;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using Values = std::vector<Tensor>;

// A body's arguments, whose buffers may be forwarded, and its results.
class Frame : public tensorflow::CallFrameInterface, public InIterations {
 public:
  Frame(Values* arguments, Values* results, const std::vector<int64_t>* iterations)
      : arguments_(*arguments), results_(*results), iterations_(*iterations) {}

  const std::vector<int64_t>& iterations() const override { return iterations_; }

  size_t num_args() const override { return arguments_.size(); }
  size_t num_retvals() const override { return results_.size(); }

  absl::Status GetArg(int index, const Tensor** value) override {
    if (!CanConsumeArg(index)) return NoSuch("argument", index);
    *value = &arguments_[index];
    return absl::OkStatus();
  }
  bool CanConsumeArg(int index) const override {
    return index >= 0 && static_cast<size_t>(index) < arguments_.size();
  }
  void ConsumeArg(int index, Tensor* value) override { *value = std::move(arguments_[index]); }

  absl::Status SetRetval(int index, const Tensor& value) override {
    if (index < 0 || static_cast<size_t>(index) >= results_.size()) return NoSuch("result", index);
    results_[index] = value;
    return absl::OkStatus();
  }

 private:
  absl::Status NoSuch(const char* what, int index) const {
    return absl::InvalidArgumentError(absl::StrCat("A loop of ", results_.size(), " values has no ",
                                                   what, " ", index, "."));
  }

  Values& arguments_;
  Values& results_;
  const std::vector<int64_t>& iterations_;
};

// The functions of a loop.
struct Functions {
  FunctionLibraryRuntime* library = nullptr;
  FunctionLibraryRuntime::Handle condition = 0;
  FunctionLibraryRuntime::Handle body = 0;
  std::optional<LoopCondition> simple_condition;
  std::vector<int> unread;  // values that the body does not read
  std::vector<int32_t> relocated;
};

// The arguments of a function that none of its nodes reads. Their nodes do not run, so they free nothing.
std::vector<int> UnreadArguments(const FunctionBody* function) {
  std::vector<int> unread;
  if (function == nullptr) return unread;
  for (size_t i = 0; i < function->arg_nodes.size(); ++i) {
    const auto& edges = function->arg_nodes[i]->out_edges();
    const bool is_read = std::any_of(edges.begin(), edges.end(), [](const auto* e) { return !e->dst()->IsSink(); });
    if (!is_read) unread.push_back(static_cast<int>(i));
  }
  return unread;
}

// Chooses whether the kernels of a loop's body are divided among threads, by measured time.
class Sharing {
 public:
  explicit Sharing(const DeviceBase& device)
      : parts_(device.tensorflow_accelerator_device_info() == nullptr
                   ? device.tensorflow_cpu_worker_threads()->num_threads
                   : 1),
        one_thread_(parts_) {}

  // The thread pool of the next iterations; null for the device's own.
  tensorflow::thread::ThreadPoolInterface* Next() {
    return parts_ > 1 && faster_.Next() == kAlone ? &one_thread_ : nullptr;
  }

  // Records the seconds of some iterations with these threads.
  void Took(const tensorflow::thread::ThreadPoolInterface* threads, double seconds) {
    faster_.Took(threads == nullptr ? kShared : kAlone, seconds);
  }

 private:
  enum Way { kShared, kAlone };

  const int parts_;
  InlineThreads one_thread_;
  FasterWay faster_;
};

// One run of a loop.
class Loop {
 public:
  // Runs a loop on a new lane. Calls `done` when the loop has ended and its object is destroyed.
  static void Start(OpKernelContext* ctx, const Functions& functions, Sharing* sharing,
                    AsyncOpKernel::DoneCallback done) {
    auto lane = std::make_shared<Lane>(*ctx->runner());
    auto* const loop = new Loop(ctx, functions, sharing, lane, std::move(done));
    lane->Push([loop] { loop->RunCondition(); });
  }

 private:
  Loop(OpKernelContext* ctx, const Functions& functions, Sharing* sharing, std::shared_ptr<Lane> lane,
       AsyncOpKernel::DoneCallback done)
      : ctx_(ctx),
        library_(ctx->function_library()),
        functions_(functions),
        sharing_(sharing),
        lane_(std::move(lane)),
        runner_(OnLane{lane_}),
        options_(ctx->step_id()),
        iterations_(IterationsOf(ctx)),
        done_(std::move(done)),
        relocation_(ctx, functions.relocated) {
    iterations_.push_back(0);
    options_.rendezvous = ctx->rendezvous();
    options_.cancellation_manager = ctx->cancellation_manager();
    options_.collective_executor = ctx->collective_executor();
    options_.runner = &runner_;
    options_.run_all_kernels_inline = true;
    options_.step_container = ctx->step_container();
    for (int i = 0; i < ctx->num_inputs(); ++i) values_.push_back(ctx->input(i));
  }

  void RunCondition() {
    auto* const cancellation = options_.cancellation_manager;
    if (cancellation != nullptr && cancellation->IsCancelled()) {
      return Continue(absl::CancelledError("The step was cancelled while a loop of it ran."), false);
    }
    const std::optional<bool> goes_on =
        functions_.simple_condition ? functions_.simple_condition->GoesOn(values_) : std::nullopt;
    if (goes_on) return Continue(absl::OkStatus(), *goes_on);
    const auto& condition = *library_->GetFunctionBody(functions_.condition);
    condition_frame_ = std::make_unique<FrameInIterations>(condition, iterations_);
    const absl::Status given = condition_frame_->SetArgs(values_);
    if (!given.ok()) return End(given);
    library_->Run(options_, functions_.condition, condition_frame_.get(), [this](const absl::Status& ended) {
      bool goes_on = false;
      absl::Status status = ended;
      if (status.ok()) status = condition_frame_->ConsumeRetvals(&decision_, false);
      condition_frame_.reset();
      if (status.ok()) status = Decide(&goes_on);
      Continue(status, goes_on);
    });
  }

  // Runs the next iteration if `goes_on`, and ends the loop otherwise.
  void Continue(absl::Status status, bool goes_on) {
    if (goes_on) return Iterate();
    if (status.ok() && iterations_.back() == 0) status = relocation_.Run(&values_);
    if (status.ok()) status = SetOutputs();
    End(status);
  }

  void Iterate() {
    if (iterations_.back() % kTimed == 0) Time();
    library_->Run(options_, functions_.body, NextFrame(), [this](const absl::Status& status) {
      if (!status.ok()) return End(status);
      ++iterations_.back();
      Advance();
      const absl::Status relocated = relocation_.Run(&values_);
      if (!relocated.ok()) return End(relocated);
      RunCondition();
    });
  }

  // Measures kTimed iterations together.
  void Time() {
    const auto now = Clock::now();
    auto*& threads = options_.user_intra_op_threadpool;
    if (iterations_.back() > 0) sharing_->Took(threads, std::chrono::duration<double>(now - began_).count());
    began_ = now;
    threads = sharing_->Next();
    lane_->set_alone(threads != nullptr);
  }

  void End(const absl::Status& status) {
    ctx_->SetStatus(status);
    const std::shared_ptr<Lane> lane = std::move(lane_);
    AsyncOpKernel::DoneCallback done = std::move(done_);
    delete this;
    lane->Push(std::move(done));
  }

  absl::Status Decide(bool* goes_on) {
    const Values decision = std::move(decision_);
    decision_.clear();
    if (decision.size() != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("A loop's condition must return one tensor, not ", decision.size(), "."));
    }
    const Tensor& value = decision[0];
    // Functions on a GPU return these types in host memory.
    const bool on_host = ctx_->device()->tensorflow_accelerator_device_info() == nullptr ||
                         value.dtype() == tensorflow::DT_INT32 ||
                         value.dtype() == tensorflow::DT_INT64;
    if (on_host) return IsTrue(value, goes_on);
    Tensor copy(value.dtype(), value.shape());
    TF_RETURN_IF_ERROR(ctx_->op_device_context()->CopyDeviceTensorToCPUSync(
        &value, "tfswap", static_cast<tensorflow::Device*>(ctx_->device()), &copy));
    return IsTrue(copy, goes_on);
  }

  // The frame of the next iteration. Frees the values that the body does not read.
  Frame* NextFrame() {
    for (const int i : functions_.unread) values_[i] = Tensor(values_[i].dtype());
    next_.resize(values_.size());
    return &frame_;
  }

  // Frees the arguments of the body that it has not consumed, before the condition runs.
  void Advance() {
    values_.clear();
    values_.swap(next_);
  }

  absl::Status SetOutputs() {
    for (size_t i = 0; i < values_.size(); ++i) {
      const auto type = ctx_->expected_output_dtype(static_cast<int>(i));
      if (values_[i].dtype() != type) {
        return absl::InvalidArgumentError(
            absl::StrCat("Value ", i, " of a loop must be ", DataTypeString(type), ", and its body returned ",
                         DataTypeString(values_[i].dtype()), "."));
      }
      ctx_->set_output(static_cast<int>(i), std::move(values_[i]));
    }
    return absl::OkStatus();
  }

  using Clock = std::chrono::steady_clock;
  static constexpr int64_t kTimed = 4;

  OpKernelContext* const ctx_;
  FunctionLibraryRuntime* const library_;
  const Functions functions_;
  Sharing* const sharing_;
  Clock::time_point began_;
  std::shared_ptr<Lane> lane_;
  Runner runner_;
  FunctionLibraryRuntime::Options options_;
  std::vector<int64_t> iterations_;  // those of the enclosing loops, then the number of this loop that have ended
  Values values_;
  Values next_;
  Values decision_;
  std::unique_ptr<FrameInIterations> condition_frame_;
  Frame frame_{&values_, &next_, &iterations_};
  AsyncOpKernel::DoneCallback done_;
  Relocation relocation_;
};

class WhileOp : public AsyncOpKernel {
 public:
  explicit WhileOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx), sharing_(*ctx->device()) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("cond", &condition_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("body", &body_));
    OP_REQUIRES_OK(ctx, Relocation::Read(ctx, &relocated_));
    // Their constants are in the arena before the step that runs them for the first time.
    Functions functions;
    if (auto* const library = ctx->function_library()) {
      OP_REQUIRES_OK(ctx, GetFunctions(library, *ctx->device(), &functions));
    }
  }

  ~WhileOp() override {
    for (const auto& [library, functions] : functions_) {
      library->ReleaseHandle(functions.condition).IgnoreError();
      library->ReleaseHandle(functions.body).IgnoreError();
    }
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto* const library = ctx->function_library();
    OP_REQUIRES_ASYNC(ctx, library != nullptr, absl::InternalError("A loop has no library of functions."), done);
    Functions functions;
    OP_REQUIRES_OK_ASYNC(ctx, GetFunctions(library, *ctx->device(), &functions), done);
    Loop::Start(ctx, functions, &sharing_, std::move(done));
  }

 private:
  // The functions, which are instantiated once for each library: a session may run one kernel with several.
  absl::Status GetFunctions(FunctionLibraryRuntime* library, const tensorflow::DeviceBase& device,
                            Functions* functions) {
    std::lock_guard<std::mutex> lock(mu_);
    auto found = functions_.find(library);
    if (found == functions_.end()) {
      Functions made;
      made.library = library;
      TF_RETURN_IF_ERROR(Make(condition_, library, &made.condition));
      TF_RETURN_IF_ERROR(Make(body_, library, &made.body));
      const bool on_host = device.tensorflow_accelerator_device_info() == nullptr;
      if (on_host) made.simple_condition = LoopCondition::Of(library->GetFunctionBody(made.condition));
      made.relocated = relocated_;
      made.unread = UnreadArguments(library->GetFunctionBody(made.body));
      found = functions_.emplace(library, std::move(made)).first;
    }
    *functions = found->second;
    return absl::OkStatus();
  }

  static absl::Status Make(const tensorflow::NameAttrList& function, FunctionLibraryRuntime* library,
                           FunctionLibraryRuntime::Handle* handle) {
    FunctionLibraryRuntime::InstantiateOptions options;
    options.create_kernels_eagerly = true;
    return library->Instantiate(function.name(), tensorflow::AttrSlice(&function.attr()), options, handle);
  }

  tensorflow::NameAttrList condition_;
  tensorflow::NameAttrList body_;
  std::vector<int32_t> relocated_;
  std::mutex mu_;
  std::unordered_map<FunctionLibraryRuntime*, Functions> functions_;
  Sharing sharing_;
};

REGISTER_KERNEL_BUILDER(Name("While").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), WhileOp);
REGISTER_KERNEL_BUILDER(Name("While").Device(tensorflow::DEVICE_GPU).Label(kOwnKernel), WhileOp);
REGISTER_KERNEL_BUILDER(Name("StatelessWhile").Device(tensorflow::DEVICE_CPU).Label(kOwnKernel), WhileOp);
REGISTER_KERNEL_BUILDER(Name("StatelessWhile").Device(tensorflow::DEVICE_GPU).Label(kOwnKernel), WhileOp);

}  // namespace
}  // namespace tfswap
