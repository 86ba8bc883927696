#ifndef EIGEN_USE_THREADS
#define EIGEN_USE_THREADS
#endif

#include "kernel_run.h"

#include <cstring>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "counters.h"
#include "halves.h"
#include "memory.h"
#include "race_detector.h"
#include "settings.h"
#include "streams.h"
#include "temporaries.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/kernels/tensor_list.h"
#include "tensorflow/core/platform/env.h"
#include "unsupported/Eigen/CXX11/Tensor"

namespace emulated_gpu {
namespace {

using tensorflow::AllocatorAttributes;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorList;
using tensorflow::TensorValue;

// Among the bits of an allocator's attributes that are the device's: a result, which goes into its arena.
constexpr uint32_t kIsResult = 1u << 30;

AllocatorAttributes Marked(AllocatorAttributes attributes) {
  if (!attributes.on_host()) attributes.value |= kIsResult;
  return attributes;
}

// The device as the CPU's kernels see it.
class InnerDevice : public tensorflow::DeviceBase {
 public:
  InnerDevice(tensorflow::DeviceBase* device, bool temporaries_in_arena)
      : DeviceBase(tensorflow::Env::Default()), device_(device), temporaries_in_arena_(temporaries_in_arena) {}

  tensorflow::Allocator* GetAllocator(AllocatorAttributes attributes) override {
    if (attributes.on_host()) return device_->GetAllocator(attributes);
    if ((attributes.value & kIsResult) != 0 || temporaries_in_arena_) return device_->GetAllocator({});
    return tensorflow::cpu_allocator();
  }
  const CpuWorkerThreads* tensorflow_cpu_worker_threads() const override {
    return device_->tensorflow_cpu_worker_threads();
  }
  bool has_eigen_cpu_device() const override { return device_->has_eigen_cpu_device(); }
  const Eigen::ThreadPoolDevice* eigen_cpu_device() override { return device_->eigen_cpu_device(); }
  const tensorflow::DeviceAttributes& attributes() const override { return device_->attributes(); }
  const std::string& name() const override { return device_->name(); }
  const tensorflow::DeviceNameUtils::ParsedName& parsed_name() const override { return device_->parsed_name(); }

 private:
  tensorflow::DeviceBase* const device_;
  const bool temporaries_in_arena_;
};

bool IsPlain(const Tensor& tensor) {
  return tensorflow::DataTypeCanUseMemcpy(tensor.dtype()) && tensor.IsInitialized() && tensor.TotalBytes() > 0;
}

// Calls `visit` with each tensor list in a variant tensor.
template <typename Visit>
void ForLists(Tensor* tensor, Visit visit) {
  if (tensor->dtype() != tensorflow::DT_VARIANT || IsOnDevice(tensor->data())) return;
  for (int64_t i = 0; i < tensor->NumElements(); ++i) {
    if (auto* const list = tensor->flat<tensorflow::Variant>()(i).get<TensorList>()) visit(list);
  }
}

// What a kernel may read or write of memory that copies touch as well: the device's, and variables in pinned memory. What
// it has in the host's memory by its registration is read and written by the host, before it returns.
class Touched {
 public:
  void Add(const Tensor& tensor) {
    ForLists(const_cast<Tensor*>(&tensor), [this](TensorList* list) {
      for (const Tensor& each : list->tensors()) Add(each);
    });
    if (!IsPlain(tensor) || (!IsOnDevice(tensor.data()) && !IsPinned(tensor.data()))) return;
    if (seen_.insert({tensor.data(), tensor.TotalBytes()}).second) {
      ranges.push_back(RangeOf(tensor.data(), tensor.TotalBytes()));
    }
  }

  void AddVariable(OpKernelContext* ctx, const Tensor& handle) {
    if (handle.NumElements() != 1) return;
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    const auto& its = handle.flat<tensorflow::ResourceHandle>()(0);
    if (!tensorflow::LookupResource(ctx, its, &variable).ok()) return;
    tensorflow::tf_shared_lock lock(*variable->mu());
    Add(*variable->tensor());
  }

  bool Has(const Tensor& tensor) const { return seen_.count({tensor.data(), tensor.TotalBytes()}) != 0; }

  std::vector<Range> ranges;

 private:
  std::set<std::pair<const void*, size_t>> seen_;
};

bool OnlyReadsVariables(const std::string& op) { return op == "ResourceGather" || op == "ResourceGatherNd"; }

// Kernels that share their input's buffer where shapes and alignment allow it. None writes its result over an input.
bool MayShare(const std::string& op) {
  static const auto* const ops = new std::set<std::string>{
      "Bitcast", "BroadcastTo", "Cast",         "ConjugateTranspose", "Pack", "Pad",       "PadV2",
      "Slice",   "Split",       "SplitV",       "StridedSlice",       "Tile", "Transpose", "Unpack",
  };
  return ops->count(op) != 0;
}

// Kernels whose last result is an element of a list itself, or, where that was never set, zeros (list_kernels.h).
bool TakesElement(const std::string& op) { return op == "TensorListGetItem" || op == "TensorListPopBack"; }

class Run {
 public:
  Run(OpKernel* outer, OpKernel* inner, const Adapted& adapted, OpKernelContext* ctx)
      : outer_(outer),
        inner_(inner),
        images_(adapted.images),
        in_floats_(adapted.in_floats),
        ctx_(ctx),
        device_(ctx->device(), /*temporaries_in_arena=*/UsesVariables() || SharesTemporaries(outer->type_string())) {}

  void Compute(SP_Stream_st* stream) {
    if (HasReferences()) return ComputeOnReferences(stream);
    Touched reads, writes;
    for (int i = 0; i < ctx_->num_inputs(); ++i) {
      if (!ctx_->has_input(i)) continue;
      if (ctx_->input_memory_type(i) != tensorflow::HOST_MEMORY) reads.Add(ctx_->input(i));
      if (ctx_->input_dtype(i) == tensorflow::DT_RESOURCE) reads.AddVariable(ctx_, ctx_->input(i));
    }
    MakeInputs();
    MakeContext();
    {
      const Access access;
      inner_->Compute(inner_ctx_.get());
      if (!inner_ctx_->status().ok()) return ctx_->SetStatus(inner_ctx_->status());
      for (int i = 0; i < ctx_->num_outputs() && ctx_->status().ok(); ++i) HandOver(i, &writes);
    }
    if (!ctx_->status().ok()) return;
    const std::vector<Tensor> temporaries = AllocateTemporaries(outer_, ctx_);
    for (const Tensor& each : temporaries) writes.Add(each);
    for (int i = 0; i < ctx_->num_inputs() && !OnlyReadsVariables(outer_->type_string()); ++i) {
      if (ctx_->input_dtype(i) == tensorflow::DT_RESOURCE) writes.AddVariable(ctx_, ctx_->input(i));
    }
    // The value's buffer has become the variable's, and nothing ran (resource_variable_ops.cc).
    if (outer_->type_string() == "AssignVariableOp" && writes.Has(ctx_->input(1))) return;
    if (TakesElement(outer_->type_string()) && reads.Has(*ctx_->mutable_output(ctx_->num_outputs() - 1))) return;
    if (reads.ranges.empty() && writes.ranges.empty()) return;
    Launch(stream, reads.ranges, writes.ranges);
  }

 private:
  // TensorFlow 1's variables, and temporary ones, which Grappler makes of an AccumulateNV2.
  bool HasReferences() const {
    for (int i = 0; i < ctx_->num_inputs(); ++i) {
      if (ctx_->input_is_ref(i)) return true;
    }
    for (int i = 0; i < ctx_->num_outputs(); ++i) {
      if (tensorflow::IsRefType(ctx_->expected_output_dtype(i))) return true;
    }
    return false;
  }

  // Their kernels have the outer's context: what they take becomes variables' values.
  void ComputeOnReferences(SP_Stream_st* stream) {
    Touched touched;
    for (int i = 0; i < ctx_->num_inputs(); ++i) {
      if (!ctx_->has_input(i) || ctx_->input_memory_type(i) == tensorflow::HOST_MEMORY) continue;
      touched.Add(ctx_->input_is_ref(i) ? ctx_->mutable_input(i, /*lock_held=*/false) : ctx_->input(i));
    }
    {
      const Access access;
      inner_->Compute(ctx_);
    }
    if (!ctx_->status().ok()) return;
    for (int i = 0; i < ctx_->num_outputs(); ++i) {
      if (Tensor* const output = ctx_->mutable_output(i)) touched.Add(*output);
    }
    if (!touched.ranges.empty()) Launch(stream, {}, touched.ranges);
  }

  bool UsesVariables() const {
    for (int i = 0; i < ctx_->num_inputs(); ++i) {
      if (ctx_->input_dtype(i) == tensorflow::DT_RESOURCE) return true;
    }
    return false;
  }

  // Where none is turned, the inner kernel has the very tensors of the outer, which it may take for its results.
  void MakeInputs() {
    turned_.reserve(static_cast<size_t>(ctx_->num_inputs()));
    const Access access;
    for (int i = 0; i < ctx_->num_inputs(); ++i) {
      if (!ctx_->has_input(i)) {
        inputs_.emplace_back();
        continue;
      }
      auto* const input = const_cast<Tensor*>(&ctx_->input(i));
      const bool is_image = images_ != nullptr && Has(images_->images, i) && IsImage(*input);
      const bool is_size = images_ != nullptr && Has(images_->sizes, i);
      const bool is_half = in_floats_ && IsHalf(*input);
      if (!is_image && !is_size && !is_half) {
        inputs_.emplace_back(input);
        continue;
      }
      turned_.push_back(is_image ? ImageToChannelsLast(*input) : is_size ? SizesToChannelsLast(*input) : *input);
      if (is_half) turned_.back() = HalfToFloat(turned_.back());
      inputs_.emplace_back(&turned_.back());
    }
  }

  void MakeContext() {
    input_attributes_.clear();
    for (int i = 0; i < ctx_->num_inputs(); ++i) input_attributes_.push_back(Marked(ctx_->input_alloc_attr(i)));
    for (int i = 0; i < ctx_->num_outputs(); ++i) {
      const AllocatorAttributes attributes = ctx_->output_alloc_attr(i);
      output_attributes_.push_back(images_ == nullptr && !in_floats_ ? Marked(attributes) : attributes);
    }
    params_.step_id = ctx_->step_id();
    params_.op_kernel = inner_;
    params_.device = &device_;
    params_.resource_manager = ctx_->resource_manager();
    params_.step_container = ctx_->step_container();
    params_.session_state = ctx_->session_state();
    params_.cancellation_manager = ctx_->cancellation_manager();
    params_.collective_executor = ctx_->collective_executor();
    params_.frame_iter = ctx_->frame_iter();
    params_.call_frame = ctx_->call_frame();
    params_.function_library = ctx_->function_library();
    params_.runner = ctx_->runner();
    params_.inputs = inputs_;
    params_.input_alloc_attrs = input_attributes_;
    params_.output_attr_array = output_attributes_.data();
    inner_ctx_ = std::make_unique<OpKernelContext>(&params_, ctx_->num_outputs());
  }

  // The inner kernel's result becomes the outer's, on the device where that has it there.
  void HandOver(int i, Touched* writes) {
    const std::unique_ptr<Tensor> result(inner_ctx_->release_output(i).tensor);
    if (result == nullptr) return;
    if (in_floats_ && result->dtype() == tensorflow::DT_FLOAT) {
      *result = FloatToHalf(*result, ctx_->expected_output_dtype(i));
    }
    const bool is_image = images_ != nullptr && Has(images_->results, i) && IsImage(*result);
    const bool on_host = ctx_->output_alloc_attr(i).on_host() || !IsPlain(*result);
    // The other elements of a list are passed on.
    ForLists(result.get(), [this, writes](TensorList* list) {
      for (Tensor& each : list->tensors()) {
        if (each.dtype() == tensorflow::DT_INT32 || !IsPlain(each) || !MoveToDevice(&each)) continue;
        writes->Add(each);
      }
    });
    if (is_image) {
      std::vector<int> taken;  // what the inner kernel's result took of the turned inputs, the outer's takes too
      for (int j = 0; j < ctx_->num_inputs(); ++j) {
        if (inputs_[j].tensor != nullptr && inputs_[j].tensor->SharesBufferWith(*result)) taken.push_back(j);
      }
      Tensor* output = nullptr;
      const auto shape = ShapeToChannelsFirst(result->shape());
      OP_REQUIRES_OK(ctx_, ctx_->forward_input_or_allocate_output(taken, i, shape, &output));
      ImageToChannelsFirst(*result, output);
    } else {
      if (!on_host) MoveToDevice(result.get());
      ctx_->set_output(i, *result);
    }
    const bool is_list = result->dtype() == tensorflow::DT_VARIANT;
    if (is_list || ctx_->output_memory_type(i) == tensorflow::HOST_MEMORY || IsView(*ctx_->mutable_output(i))) return;
    writes->Add(*ctx_->mutable_output(i));
  }

  // Whether the kernel has passed on a buffer, which it does not touch then, where others write a new one.
  bool IsView(const Tensor& output) const {
    if (!MayShare(outer_->type_string())) return false;
    for (int i = 0; i < ctx_->num_inputs(); ++i) {
      if (ctx_->has_input(i) && ctx_->input(i).SharesBufferWith(output)) return true;
    }
    return false;
  }

  // Whether it was moved.
  bool MoveToDevice(Tensor* tensor) {
    if (IsOnDevice(tensor->data()) || IsPinned(tensor->data())) return false;
    Tensor moved(ctx_->device()->GetAllocator({}), tensor->dtype(), tensor->shape());
    if (!moved.IsInitialized()) {
      ctx_->CtxFailure(absl::ResourceExhaustedError(absl::StrCat(
          "OOM when allocating tensor with shape", tensor->shape().DebugString(), " in ", outer_->name())));
      return false;
    }
    std::memcpy(moved.data(), tensor->data(), tensor->TotalBytes());
    *tensor = std::move(moved);
    return true;
  }

  void Launch(SP_Stream_st* stream, const std::vector<Range>& reads, const std::vector<Range>& writes) {
    ++Counters::Get().kernels;
    if (Settings::Get().checks) {
      RaceDetector::Get().Enqueue(stream->id(), absl::StrCat(outer_->type_string(), " '", outer_->name(), "'"), reads,
                                  writes);
    }
    const double microseconds = Settings::Get().kernel_us;
    const Label label = LabelOf(outer_->type_string());
    if (!stream->EndsNow(microseconds, label)) stream->Push(microseconds, nullptr, label);
  }

  OpKernel* const outer_;
  OpKernel* const inner_;
  const Images* const images_;
  const bool in_floats_;
  OpKernelContext* const ctx_;
  InnerDevice device_;
  std::vector<Tensor> turned_;
  std::vector<TensorValue> inputs_;
  std::vector<AllocatorAttributes> input_attributes_, output_attributes_;
  OpKernelContext::Params params_;
  std::unique_ptr<OpKernelContext> inner_ctx_;
};

}  // namespace

void RunOnDevice(OpKernel* outer, OpKernel* inner, const Adapted& adapted, SP_Stream_st* stream, OpKernelContext* ctx) {
  Run(outer, inner, adapted, ctx).Compute(stream);
}

bool TouchesNoMemory(const std::string& op) {
  static const auto* const ops = new std::set<std::string>{
      "Const",
      "DestroyResourceOp",
      "EnsureShape",
      "Enter",
      "Exit",
      "ExpandDims",
      "Identity",
      "IdentityN",
      "LoopCond",
      "Merge",
      "NextIteration",
      "NoOp",
      "PreventGradient",
      "Rank",
      "ReadVariableOp",
      "Reshape",
      "Shape",
      "ShapeN",
      "Size",
      "Squeeze",
      "StopGradient",
      "Switch",
      "TensorListLength",
      "TensorListPushBack",
      "VarHandleOp",
      "VarIsInitializedOp",
      "VariableShape",
      "_Arg",
      "_DeviceArg",
      "_DeviceRetval",
      "_Retval",
  };
  return ops->count(op) != 0;
}

}  // namespace emulated_gpu
