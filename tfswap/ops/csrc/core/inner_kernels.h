// Kernels of TensorFlow's inside of a kernel of tfswap's: their construction, their context and their device.

#ifndef TFSWAP_OPS_CSRC_CORE_INNER_KERNELS_H_
#define TFSWAP_OPS_CSRC_CORE_INNER_KERNELS_H_

#ifndef EIGEN_USE_THREADS
#define EIGEN_USE_THREADS
#endif

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "inline_threads.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/node_properties.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/threadpool.h"
#include "unsupported/Eigen/CXX11/Tensor"

namespace tfswap {

// A node, from a serialized NodeDef.
inline absl::Status ParseKernel(const std::string& serialized,
                                std::shared_ptr<const tensorflow::NodeProperties>* kernel) {
  tensorflow::NodeDef node;
  if (!node.ParseFromString(serialized)) return absl::InvalidArgumentError("A kernel is not a NodeDef.");
  const tensorflow::OpDef* op = nullptr;
  TF_RETURN_IF_ERROR(tensorflow::OpRegistry::Global()->LookUpOpDef(node.op(), &op));
  tensorflow::AddDefaultsToNodeDef(*op, &node);
  return tensorflow::NodeProperties::CreateFromNodeDef(std::move(node), tensorflow::OpRegistry::Global(), kernel);
}

// Creates the node's kernel. Fails for an asynchronous one.
inline absl::Status MakeKernel(tensorflow::OpKernelConstruction* ctx,
                               const std::shared_ptr<const tensorflow::NodeProperties>& node,
                               std::unique_ptr<tensorflow::OpKernel>* kernel) {
  tensorflow::OpKernel* made = nullptr;
  TF_RETURN_IF_ERROR(tensorflow::CreateOpKernel(ctx->device_type(), ctx->device(), ctx->device()->GetAllocator({}),
                                                ctx->function_library(), node, ctx->graph_def_version(), &made));
  kernel->reset(made);
  if (made->AsAsync() == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(made->type_string(), " '", made->name(),
                                                 "' is an asynchronous kernel, which can't run in a pair or a group."));
}

// The arguments of one run of an inner kernel, to which OpKernelContext keeps pointers.
struct InnerRun {
  std::vector<tensorflow::Tensor> held;  // its inputs
  std::vector<tensorflow::TensorValue> inputs;
  std::vector<tensorflow::AllocatorAttributes> input_attributes, output_attributes;
  tensorflow::OpKernelContext::Params params;
  std::unique_ptr<tensorflow::OpKernelContext> ctx;

  // Creates `ctx`; all other members must be set. What is not of this kernel is taken from `outer`, the op that runs
  // it.
  void MakeContext(tensorflow::OpKernelContext* outer, tensorflow::OpKernel* kernel, tensorflow::DeviceBase* device) {
    params.step_id = outer->step_id();
    params.op_kernel = kernel;
    params.device = device;
    params.output_attr_array = output_attributes.data();
    params.resource_manager = outer->resource_manager();
    params.step_container = outer->step_container();
    params.session_state = outer->session_state();
    params.cancellation_manager = outer->cancellation_manager();
    params.inputs = inputs;
    params.input_alloc_attrs = input_attributes;
    params.op_device_context = outer->op_device_context();
    params.frame_iter = outer->frame_iter();
    params.call_frame = outer->call_frame();
    params.function_library = outer->function_library();
    params.runner = outer->runner();
    ctx = std::make_unique<tensorflow::OpKernelContext>(&params);
  }
};

// The device's threads for a kernel that stays on one core.
class OneCore {
 public:
  explicit OneCore(const tensorflow::DeviceBase& device)
      : inline_(device.tensorflow_cpu_worker_threads()->num_threads),
        pool_(&inline_),
        eigen_(pool_.AsEigenThreadPool(), pool_.NumThreads()) {
    workers_.num_threads = pool_.NumThreads();
    workers_.workers = &pool_;
  }

  const tensorflow::DeviceBase::CpuWorkerThreads* workers() const { return &workers_; }
  const Eigen::ThreadPoolDevice* eigen() const { return &eigen_; }

 private:
  InlineThreads inline_;
  tensorflow::thread::ThreadPool pool_;
  Eigen::ThreadPoolDevice eigen_;
  tensorflow::DeviceBase::CpuWorkerThreads workers_;
};

// A device with another allocator, and with other threads or its own.
class InnerDevice : public tensorflow::DeviceBase {
 public:
  // Args:
  //   threads: null for the device's own.
  InnerDevice(tensorflow::DeviceBase* device, tensorflow::Allocator* allocator, const OneCore* threads = nullptr)
      : DeviceBase(device->env()), device_(device), shared_(device), allocator_(allocator), threads_(threads) {}

  void set_threads(const OneCore* threads) { threads_ = threads; }
  // The device whose threads are used if `threads` is null.
  void set_shared(tensorflow::DeviceBase* device) { shared_ = device; }

  tensorflow::Allocator* GetAllocator(tensorflow::AllocatorAttributes) override { return allocator_; }

  const CpuWorkerThreads* tensorflow_cpu_worker_threads() const override {
    return threads_ == nullptr ? shared_->tensorflow_cpu_worker_threads() : threads_->workers();
  }
  tsl::thread::ThreadPool* tensorflow_device_thread_pool() override {
    return device_->tensorflow_device_thread_pool();
  }
  bool has_eigen_cpu_device() const override { return device_->has_eigen_cpu_device(); }
  const Eigen::ThreadPoolDevice* eigen_cpu_device() override {
    return threads_ == nullptr ? shared_->eigen_cpu_device() : threads_->eigen();
  }
  DeviceBase* UnderlyingDevice() override { return device_->UnderlyingDevice(); }
  const DeviceBase* UnderlyingDevice() const override { return device_->UnderlyingDevice(); }
  const tensorflow::DeviceAttributes& attributes() const override { return device_->attributes(); }
  const std::string& name() const override { return device_->name(); }
  const tensorflow::DeviceNameUtils::ParsedName& parsed_name() const override { return device_->parsed_name(); }
  const std::string& device_type() const override { return device_->device_type(); }

 private:
  tensorflow::DeviceBase* const device_;
  tensorflow::DeviceBase* shared_;
  tensorflow::Allocator* const allocator_;
  const OneCore* threads_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_INNER_KERNELS_H_
