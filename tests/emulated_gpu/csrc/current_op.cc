#include "current_op.h"

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "async_allocator.h"
#include "device_stream.h"
#include "memory.h"
#include "race_detector.h"
#include "settings.h"
#include "streams.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/device_factory.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "virtual_table.h"

namespace emulated_gpu {
namespace {

using tensorflow::Allocator;
using tensorflow::AllocatorAttributes;
using tensorflow::AsyncOpKernel;
using tensorflow::Device;
using tensorflow::DeviceContext;
using tensorflow::DeviceFactory;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::StatusCallback;
using tensorflow::Tensor;

// A copy: an asynchronous kernel may call back, and be destroyed with its step, before its function returns.
struct RunningOp {
  std::string type, name;
};

thread_local const RunningOp* current_op = nullptr;
thread_local OpKernelContext* current_context = nullptr;
thread_local SP_Stream_st* stream_of_constant = nullptr;

using Compute = void (*)(Device*, OpKernel*, OpKernelContext*);
using ComputeAsync = void (*)(Device*, AsyncOpKernel*, OpKernelContext*, AsyncOpKernel::DoneCallback);
using MakeTensorFromProto = absl::Status (*)(Device*, const tensorflow::TensorProto&, AllocatorAttributes,
                                             tensorflow::Tensor*);
using CopyIn = void (*)(const DeviceContext*, const Tensor*, Device*, Tensor*, StatusCallback, bool);
using CopyOut = void (*)(DeviceContext*, const Tensor*, absl::string_view, Device*, Tensor*, StatusCallback);
using CreateDevices = absl::Status (*)(DeviceFactory*, const tensorflow::SessionOptions&, const std::string&,
                                       std::vector<std::unique_ptr<Device>>*);
using GetAllocator = Allocator* (*)(Device*, AllocatorAttributes);
using DeallocateRaw = void (*)(Allocator*, void*);

Compute compute = nullptr;
ComputeAsync compute_async = nullptr;
MakeTensorFromProto make_tensor_from_proto = nullptr;
CopyIn copy_in = nullptr;
CopyOut copy_out = nullptr;
CreateDevices create_devices = nullptr;
GetAllocator get_allocator = nullptr;
DeallocateRaw deallocate_raw = nullptr;
std::map<Allocator*, int> compute_streams;  // the race detector's; filled before the allocator is watched

class Running {
 public:
  Running(const OpKernel& kernel, OpKernelContext* ctx)
      : op_{kernel.type_string(), kernel.name()},
        outer_(std::exchange(current_op, &op_)),
        outer_context_(std::exchange(current_context, ctx)) {}
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  ~Running() {
    current_op = outer_;
    current_context = outer_context_;
  }

 private:
  const RunningOp op_;
  const RunningOp* const outer_;
  OpKernelContext* const outer_context_;
};

void WatchedCompute(Device* device, OpKernel* kernel, OpKernelContext* ctx) {
  const Running running(*kernel, ctx);
  compute(device, kernel, ctx);
}

void WatchedComputeAsync(Device* device, AsyncOpKernel* kernel, OpKernelContext* ctx, AsyncOpKernel::DoneCallback done) {
  const Running running(*kernel, ctx);
  compute_async(device, kernel, ctx, [ctx, done = std::move(done)] {
    if (current_context == ctx) current_context = nullptr;
    done();
  });
}

absl::Status WatchedMakeTensorFromProto(Device* device, const tensorflow::TensorProto& proto,
                                        AllocatorAttributes attributes, tensorflow::Tensor* tensor) {
  SP_Stream_st* const outer = std::exchange(stream_of_constant, ComputeStream(*device));
  absl::Status status = make_tensor_from_proto(device, proto, attributes, tensor);
  stream_of_constant = outer;
  return status;
}

// TensorFlow may copy a callback, and keep the copy for an unlimited time. This one keeps those of some ops
// until many more copies have been made.
void KeepCopy(const StatusCallback& done) {
  constexpr size_t kKept = 1000;
  const std::string& ops = Settings::Get().copied_callbacks;
  if (ops.empty() || current_op == nullptr || !absl::StartsWith(current_op->type, ops)) return;
  static std::mutex mu;
  static auto* const kept = new std::deque<StatusCallback>;
  std::lock_guard<std::mutex> lock(mu);
  kept->push_back(done);
  if (kept->size() > kKept) kept->pop_front();
}

void WatchedCopyIn(const DeviceContext* context, const Tensor* from, Device* device, Tensor* to, StatusCallback done,
                   bool sync) {
  KeepCopy(done);
  copy_in(context, from, device, to, std::move(done), sync);
}

void WatchedCopyOut(DeviceContext* context, const Tensor* from, absl::string_view name, Device* device, Tensor* to,
                    StatusCallback done) {
  KeepCopy(done);
  copy_out(context, from, name, device, to, std::move(done));
}

void WatchedDeallocateRaw(Allocator* allocator, void* memory) {
  if (memory != nullptr && IsOnDevice(memory)) {
    const size_t bytes = allocator->AllocatedSize(memory);
    if (Settings::Get().checks) {
      RaceDetector::Get().Free(compute_streams.at(allocator), ByCurrentOp(absl::StrCat("a free of ", bytes, " bytes")),
                               RangeOf(memory, bytes));
    }
    if (Settings::Get().poisons) {
      const Access access;
      std::memset(memory, kPoison, bytes);
    }
  }
  deallocate_raw(allocator, memory);
}

// The arena that TensorFlow has made for the device stays empty.
Allocator* WatchedGetAllocator(Device* device, AllocatorAttributes attributes) {
  Allocator* const arena = get_allocator(device, attributes);
  if (attributes.on_host()) return arena;
  static std::mutex mu;
  static auto* const made = new std::map<Allocator*, Allocator*>;
  std::lock_guard<std::mutex> lock(mu);
  Allocator*& its = (*made)[arena];
  if (its == nullptr) its = MakeAsyncAllocator(ComputeStream(*device)->device());
  return its;
}

// A device's allocator and context may be another's as well, made for another session.
void Watch(Device* device) {
  static std::mutex mu;
  static std::set<void*> watched;
  std::lock_guard<std::mutex> lock(mu);
  void** const table = CopyTable(device);
  if (UsesAsyncAllocator()) Replace(table, PlaceOf(&Device::GetAllocator), &get_allocator, &WatchedGetAllocator);
  Replace(table, PlaceOf(&Device::Compute), &compute, &WatchedCompute);
  Replace(table, PlaceOf(&Device::ComputeAsync), &compute_async, &WatchedComputeAsync);
  Replace(table, PlaceOf(&Device::MakeTensorFromProto), &make_tensor_from_proto, &WatchedMakeTensorFromProto);
  SetTable(device, table);
  Allocator* const allocator = device->GetAllocator({});
  if (watched.insert(allocator).second) {
    compute_streams[allocator] = ComputeStream(*device)->id();
    void** const table = CopyTable(allocator);
    Replace(table, PlaceOf(static_cast<void (Allocator::*)(void*)>(&Allocator::DeallocateRaw)), &deallocate_raw,
            &WatchedDeallocateRaw);
    SetTable(allocator, table);
  }
  DeviceContext* const context = device->tensorflow_accelerator_device_info()->default_context;
  if (watched.insert(context).second) {
    void** const table = CopyTable(context);
    Replace(table, PlaceOf(&DeviceContext::CopyCPUTensorToDevice), &copy_in, &WatchedCopyIn);
    Replace(table, PlaceOf(&DeviceContext::CopyDeviceTensorToCPU), &copy_out, &WatchedCopyOut);
    SetTable(context, table);
    GiveHandle(*context);
  }
}

absl::Status WatchedCreateDevices(DeviceFactory* factory, const tensorflow::SessionOptions& options,
                                  const std::string& prefix, std::vector<std::unique_ptr<Device>>* devices) {
  const size_t before = devices->size();
  absl::Status status = create_devices(factory, options, prefix, devices);
  for (size_t i = before; i < devices->size(); ++i) Watch((*devices)[i].get());
  return status;
}

}  // namespace

std::string CurrentOp() {
  return current_op == nullptr ? "" : absl::StrCat(current_op->type, " '", current_op->name, "'");
}

std::string TracedOp() {
  return current_op == nullptr ? "" : absl::StrCat(current_op->name, ":", current_op->type);
}

OpKernelContext* CurrentContext() { return current_context; }

SP_Stream_st* StreamOfConstant() { return stream_of_constant; }

std::string ByCurrentOp(const std::string& what) {
  return current_op == nullptr ? what : absl::StrCat(what, " by ", CurrentOp());
}

void WatchDevices() {
  DeviceFactory* const factory = DeviceFactory::GetFactory("GPU");
  void** const table = CopyTable(factory);
  Replace(table, PlaceOf(&DeviceFactory::CreateDevices), &create_devices, &WatchedCreateDevices);
  SetTable(factory, table);
}

}  // namespace emulated_gpu
