#include "cuda_driver.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "counters.h"
#include "current_op.h"
#include "device_stream.h"
#include "memory.h"
#include "race_detector.h"
#include "settings.h"
#include "streams.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace emulated_gpu {
namespace {

// Those of cuda.h that are returned here.
enum CudaResult {
  kCudaSuccess = 0,
  kCudaInvalidValue = 1,
  kCudaInvalidImage = 200,
  kCudaInvalidContext = 201,
  kCudaInvalidHandle = 400,
  kCudaNotFound = 500,
};

struct Module {
  int device;
  void* library;
};

struct Function {
  int device;
  EmulatedKernel* run;
};

// The device whose op this thread runs; -1 for none.
int CurrentDevice() {
  tensorflow::OpKernelContext* const ctx = CurrentContext();
  return ctx == nullptr ? -1 : ComputeStream(*ctx->device())->device();
}

std::vector<Range> InputsOnDevice(tensorflow::OpKernelContext* ctx) {
  std::vector<Range> ranges;
  for (int i = 0; i < ctx->num_inputs(); ++i) {
    if (!ctx->has_input(i) || ctx->input_is_ref(i) || !IsOnDevice(ctx->input(i).data())) continue;
    ranges.push_back(RangeOf(ctx->input(i).data(), ctx->input(i).TotalBytes()));
  }
  return ranges;
}

std::vector<Range> OutputsOnDevice(tensorflow::OpKernelContext* ctx) {
  std::vector<Range> ranges;
  for (int i = 0; i < ctx->num_outputs(); ++i) {
    const tensorflow::Tensor* const output = ctx->mutable_output(i);
    if (output == nullptr || !IsOnDevice(output->data())) continue;
    ranges.push_back(RangeOf(output->data(), output->TotalBytes()));
  }
  return ranges;
}

int Launch(const Function& function, unsigned blocks, unsigned threads, SP_Stream_st* stream, void* const* parameters) {
  tensorflow::OpKernelContext* const ctx = CurrentContext();
  ++Counters::Get().kernels;
  if (Settings::Get().checks) {
    RaceDetector::Get().Enqueue(stream->id(), CurrentOp(), InputsOnDevice(ctx), OutputsOnDevice(ctx));
  }
  {
    const Access access;
    function.run(parameters, blocks, threads);
  }
  const double microseconds = Settings::Get().kernel_us;
  const Label label = LabelOf(ctx->op_kernel().type_string());
  if (!stream->EndsNow(microseconds, label)) stream->Push(microseconds, nullptr, label);
  return kCudaSuccess;
}

}  // namespace

}  // namespace emulated_gpu

#define EMULATED_CUDA extern "C" __attribute__((visibility("default")))

EMULATED_CUDA int cuCtxGetCurrent(void** context) {
  static char contexts[64];  // their addresses distinguish them
  const int device = emulated_gpu::CurrentDevice();
  *context = device < 0 ? nullptr : &contexts[device];
  return emulated_gpu::kCudaSuccess;
}

EMULATED_CUDA int cuCtxGetDevice(int* device) {
  *device = emulated_gpu::CurrentDevice();
  return *device < 0 ? emulated_gpu::kCudaInvalidContext : emulated_gpu::kCudaSuccess;
}

EMULATED_CUDA int cuDeviceGetAttribute(int* value, int attribute, int device) {
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...
  if (device < 0 || device >= emulated_gpu::Settings::Get().devices) return emulated_gpu::kCudaInvalidValue;
  if (attribute != kMajor && attribute != kMinor) return emulated_gpu::kCudaInvalidValue;
  *value = attribute == kMajor ? 9 : 0;
  return emulated_gpu::kCudaSuccess;
}

// An image here is a shared library's, whose length is in its text (nvrtc.cc).
EMULATED_CUDA int cuModuleLoadData(void** module, const void* image) {
  size_t bytes = 0;
  std::memcpy(&bytes, image, sizeof(bytes));
  const int device = emulated_gpu::CurrentDevice();
  if (device < 0) return emulated_gpu::kCudaInvalidContext;
  const int file = memfd_create("module", MFD_CLOEXEC);
  const char* const library = static_cast<const char*>(image) + sizeof(bytes);
  const bool written = write(file, library, bytes) == static_cast<ssize_t>(bytes);
  void* const opened =
      written ? dlopen(absl::StrCat("/proc/self/fd/", file).c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
  // The file stays open: another one of its number and name would be taken for it.
  if (opened == nullptr) return emulated_gpu::kCudaInvalidImage;
  *module = new emulated_gpu::Module{device, opened};
  return emulated_gpu::kCudaSuccess;
}

EMULATED_CUDA int cuModuleGetFunction(void** function, void* module, const char* name) {
  const auto& its = *static_cast<const emulated_gpu::Module*>(module);
  void* const found = dlsym(its.library, name);
  if (found == nullptr) return emulated_gpu::kCudaNotFound;
  *function = new emulated_gpu::Function{its.device, reinterpret_cast<EmulatedKernel*>(found)};
  return emulated_gpu::kCudaSuccess;
}

// Grids of one dimension, without shared memory.
EMULATED_CUDA int cuLaunchKernel(void* function, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                                 unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void* stream,
                                 void** parameters, void** extra) {
  using namespace emulated_gpu;
  constexpr unsigned kMostThreads = 1024;
  const auto& its = *static_cast<const Function*>(function);
  if (blocks == 0 || threads == 0 || threads > kMostThreads) return kCudaInvalidValue;
  if (shared_bytes != 0 || extra != nullptr) return kCudaInvalidValue;
  if (blocks_y * blocks_z * threads_y * threads_z != 1) return kCudaInvalidValue;
  if (its.device != CurrentDevice()) return kCudaInvalidContext;
  auto* const own = static_cast<SP_Stream_st*>(stream);
  if (!IsStreamOf(its.device, own)) return kCudaInvalidHandle;
  return Launch(its, blocks, threads, own, parameters);
}
