// The executor of functions that compute sizes before a step: TensorFlow's executor, with kernels that allocate a CPU's
// memory outside of the arena. Their requests are not known before they run, so they must not count in the arena.
//
// Not handled: kernels of other devices; constants, which TensorFlow allocates when it creates the kernels.
//
// Calls name the executor by HOST_MEMORY_EXECUTOR in ir/custom_ops.py.

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "tensorflow/core/common_runtime/executor.h"
#include "tensorflow/core/common_runtime/executor_factory.h"
#include "tensorflow/core/common_runtime/local_executor_params.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/graph/graph.h"

namespace tfswap {
namespace {

using tensorflow::Device;
using tensorflow::Executor;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;

// A CPU whose kernels allocate outside of its arena.
class HostMemoryDevice : public Device {
 public:
  explicit HostMemoryDevice(Device* cpu) : Device(cpu->env(), cpu->attributes()), cpu_(cpu) {}

  tensorflow::Allocator* GetAllocator(tensorflow::AllocatorAttributes) override {
    return tensorflow::cpu_allocator_base();
  }
  const CpuWorkerThreads* tensorflow_cpu_worker_threads() const override {
    return cpu_->tensorflow_cpu_worker_threads();
  }
  tsl::thread::ThreadPool* tensorflow_device_thread_pool() override { return cpu_->tensorflow_device_thread_pool(); }
  bool has_eigen_cpu_device() const override { return cpu_->has_eigen_cpu_device(); }
  const Eigen::ThreadPoolDevice* eigen_cpu_device() override { return cpu_->eigen_cpu_device(); }
  DeviceBase* UnderlyingDevice() override { return cpu_->UnderlyingDevice(); }
  const DeviceBase* UnderlyingDevice() const override { return cpu_->UnderlyingDevice(); }
  tensorflow::ResourceMgr* resource_manager() override { return cpu_->resource_manager(); }
  void Compute(OpKernel* kernel, OpKernelContext* ctx) override { cpu_->Compute(kernel, ctx); }
  absl::Status Sync() override { return cpu_->Sync(); }

 private:
  Device* const cpu_;
};

class HostMemoryExecutor : public Executor {
 public:
  HostMemoryExecutor(std::unique_ptr<HostMemoryDevice> device, std::unique_ptr<Executor> executor)
      : device_(std::move(device)), executor_(std::move(executor)) {}

  absl::Status Run(const Args& args) override { return executor_->Run(args); }

 private:
  void RunAsyncInternal(const Args& args, DoneCallback done) override { executor_->RunAsync(args, std::move(done)); }

  const std::unique_ptr<HostMemoryDevice> device_;
  const std::unique_ptr<Executor> executor_;
};

class HostMemoryExecutorFactory : public tensorflow::ExecutorFactory {
 public:
  absl::Status NewExecutor(const tensorflow::LocalExecutorParams& given, const tensorflow::Graph& graph,
                           std::unique_ptr<Executor>* made) override {
    if (given.device->device_type() != tensorflow::DEVICE_CPU) return tensorflow::NewExecutor("", given, graph, made);
    tensorflow::LocalExecutorParams params = given;
    auto device = std::make_unique<HostMemoryDevice>(given.device);
    params.device = device.get();
    std::unique_ptr<Executor> executor;
    TF_RETURN_IF_ERROR(tensorflow::NewExecutor("", params, graph, &executor));
    *made = std::make_unique<HostMemoryExecutor>(std::move(device), std::move(executor));
    return absl::OkStatus();
  }
};

[[maybe_unused]] const bool host_memory_registered = [] {
  tensorflow::ExecutorFactory::Register("TFSWAP_HOST_MEMORY", new HostMemoryExecutorFactory);
  return true;
}();

}  // namespace
}  // namespace tfswap
