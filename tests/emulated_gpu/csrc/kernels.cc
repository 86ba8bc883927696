// Registers the GPU kernels of TensorFlow's GPU wheel, each run by the CPU's kernel, from a KernelList in the file that
// EMULATED_GPU_KERNELS names (tables.py). Left out are those that are registered already, and those of ops without a
// kernel for CPUs.

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "current_op.h"
#include "device_stream.h"
#include "halves.h"
#include "kernel_run.h"
#include "nchw.h"
#include "tensorflow/core/framework/kernel_def.pb.h"
#include "tensorflow/core/framework/node_properties.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace emulated_gpu {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::KernelDef;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

class SyncKernel : public OpKernel {
 public:
  SyncKernel(OpKernelConstruction* ctx, std::unique_ptr<OpKernel> inner, const Adapted& adapted)
      : OpKernel(ctx),
        inner_(std::move(inner)),
        adapted_(adapted),
        stream_(ComputeStream(*ctx->device())),
        is_kernel_(!TouchesNoMemory(type_string())) {}

  void Compute(OpKernelContext* ctx) override {
    if (!is_kernel_) return inner_->Compute(ctx);
    RunOnDevice(this, inner_.get(), adapted_, stream_, ctx);
  }

  const tensorflow::Tensor* const_tensor() const override { return inner_->const_tensor(); }

 private:
  const std::unique_ptr<OpKernel> inner_;
  const Adapted adapted_;
  SP_Stream_st* const stream_;
  const bool is_kernel_;
};

// Of those that wait, for functions, copies or other devices: they run no code on the device.
class AsyncKernel : public AsyncOpKernel {
 public:
  AsyncKernel(OpKernelConstruction* ctx, std::unique_ptr<OpKernel> inner)
      : AsyncOpKernel(ctx), inner_(std::move(inner)) {}
  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    inner_->AsAsync()->ComputeAsync(ctx, std::move(done));
  }

 private:
  const std::unique_ptr<OpKernel> inner_;
};

absl::Status MakeInner(OpKernelConstruction* ctx, const tensorflow::NodeDef& node, std::unique_ptr<OpKernel>* inner) {
  std::shared_ptr<const tensorflow::NodeProperties> properties;
  TF_RETURN_IF_ERROR(
      tensorflow::NodeProperties::CreateFromNodeDef(node, tensorflow::OpRegistry::Global(), &properties));
  OpKernel* made = nullptr;
  absl::Status status;
  for (const char* const type : {"CPU", "DEFAULT"}) {
    const absl::Status tried = tensorflow::CreateOpKernel(
        tensorflow::DeviceType(type), ctx->device(), ctx->device()->GetAllocator({}), ctx->function_library(),
        ctx->resource_manager(), properties, ctx->graph_def_version(), &made);
    status = tried.ok() || status.ok() || absl::IsNotFound(status) ? tried : status;  // what a kernel says counts
    if (tried.ok()) break;
  }
  inner->reset(made);
  return status;
}

// Whether an asynchronous kernel can have anything to wait for, which has state or is a function. Others compute, as those of
// CropAndResize do, and wait for nothing but their own threads.
bool Waits(const tensorflow::NodeDef& node) {
  const tensorflow::OpDef* op = nullptr;
  if (!tensorflow::OpRegistry::Global()->LookUpOpDef(node.op(), &op).ok() || op->is_stateful()) return true;
  const auto is_function = [](const auto& attribute) { return absl::StrContains(attribute.type(), "func"); };
  return std::any_of(op->attr().begin(), op->attr().end(), is_function);
}

class Factory : public tensorflow::kernel_factory::OpKernelFactory {
 public:
  OpKernel* Create(OpKernelConstruction* ctx) override {
    tensorflow::NodeDef node = ctx->def();
    const Images* images = ImagesOf(node.op());
    if (images != nullptr && !ToChannelsLast(&node)) images = nullptr;
    const bool in_floats = ToFloats(&node);
    std::unique_ptr<OpKernel> inner;
    const absl::Status status = MakeInner(ctx, node, &inner);
    if (!status.ok()) {
      ctx->CtxFailure(status);
      return nullptr;
    }
    if (inner->AsAsync() != nullptr && Waits(node)) return new AsyncKernel(ctx, std::move(inner));
    return new SyncKernel(ctx, std::move(inner), {images, in_floats});
  }
};

// What distinguishes two registrations of kernels for one device.
std::string KeyOf(const KernelDef& kernel) {
  std::map<std::string, std::string> constraints;
  for (const auto& constraint : kernel.constraint()) {
    constraints[constraint.name()] = constraint.allowed_values().SerializeAsString();
  }
  std::string key = absl::StrCat(kernel.op(), "\n", kernel.label());
  for (const auto& [name, values] : constraints) absl::StrAppend(&key, "\n", name, "=", values);
  return key;
}

}  // namespace
}  // namespace emulated_gpu

extern "C" __attribute__((visibility("default"))) void TF_InitKernel() {
  using namespace emulated_gpu;
  WatchDevices();
  const char* const path = std::getenv("EMULATED_GPU_KERNELS");
  std::ifstream file(path == nullptr ? "" : path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  tensorflow::KernelList wanted;
  wanted.ParseFromString(content.str());
  std::set<std::string> registered, runnable;
  const tensorflow::KernelList known = tensorflow::GetAllRegisteredKernels();
  for (const KernelDef& kernel : known.kernel()) {
    if (kernel.device_type() == "GPU") registered.insert(KeyOf(kernel));
    if (kernel.device_type() == "CPU" || kernel.device_type() == "DEFAULT") runnable.insert(kernel.op());
  }
  for (const KernelDef& kernel : wanted.kernel()) {
    if (runnable.count(kernel.op()) == 0 || !registered.insert(KeyOf(kernel)).second) continue;
    // The registrar deletes the definition.
    tensorflow::kernel_factory::OpKernelRegistrar(new KernelDef(kernel), "EmulatedGpu", std::make_unique<Factory>());
  }
}
