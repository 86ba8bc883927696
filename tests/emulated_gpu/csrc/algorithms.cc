#include "algorithms.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "settings.h"
#include "tensorflow/core/framework/attr_value_util.h"

namespace emulated_gpu {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// On each side of a buffer, by which TensorFlow sees writes past its end (RedzoneAllocator::kDefaultRedzoneSize).
constexpr int64_t kRedzoneBytes = int64_t{8} << 20;

// Read once, as TensorFlow's kernels do (GetDnnWorkspaceLimit).
int64_t AllowedBytes() {
  static const int64_t allowed = [] {
    const char* const mib = std::getenv("TF_CUDNN_WORKSPACE_LIMIT_IN_MB");
    return (mib == nullptr ? int64_t{4096} : std::atoll(mib)) << 20;
  }();
  return allowed;
}

bool ChecksRedzones() {
  const char* const off = std::getenv("TF_DISABLE_RZ_CHECK");
  return off == nullptr || std::strcmp(off, "1") != 0;
}

// Whether there is memory for it now: no one waits for other memory to be freed.
bool Allocate(OpKernelContext* ctx, int64_t bytes, Tensor* tensor) {
  tensorflow::AllocationAttributes once;
  once.retry_on_failure = false;
  return ctx->allocate_temp(tensorflow::DT_INT8, TensorShape({bytes}), tensor, {}, once).ok();
}

// What ConvParameters compares.
std::string Key(const OpKernel& kernel, OpKernelContext* ctx) {
  std::string key = absl::StrCat(ctx->device()->name(), " ", kernel.type_string());
  for (int i = 0; i < ctx->num_inputs(); ++i) {
    absl::StrAppend(&key, " ", ctx->input(i).shape().DebugString(), ctx->input_dtype(i));
  }
  absl::StrAppend(&key, " ", ctx->mutable_output(0)->shape().DebugString());
  for (const char* const name : {"data_format", "dilations", "explicit_paddings", "padding", "strides"}) {
    const auto found = kernel.def().attr().find(name);
    if (found != kernel.def().attr().end()) absl::StrAppend(&key, " ", tensorflow::SummarizeAttrValue(found->second));
  }
  return key;
}

// The first algorithm that works, of those whose workspaces these are, the fastest first. Each is freed before the next.
int64_t Tried(OpKernelContext* ctx, int64_t result_bytes) {
  const int64_t besides = ChecksRedzones() ? 2 * kRedzoneBytes : 0;
  Tensor second_result;  // written to by the tries, where there is memory for it (WrapRedzoneBestEffort)
  if (besides > 0) Allocate(ctx, result_bytes + besides, &second_result);
  int64_t best = -1;
  for (const int64_t bytes : Settings::Get().workspaces_bytes) {
    Tensor scratch;
    const bool works = bytes <= AllowedBytes() && (bytes == 0 || Allocate(ctx, bytes + besides, &scratch));
    if (works && best < 0) best = bytes;
  }
  return best < 0 ? 0 : best;
}

int64_t Chosen(const OpKernel& kernel, OpKernelContext* ctx, int64_t result_bytes) {
  static auto* const chosen = new std::map<std::string, int64_t>;
  static auto* const mutex = new std::mutex;
  const std::lock_guard<std::mutex> lock(*mutex);
  const auto [entry, is_new] = chosen->try_emplace(Key(kernel, ctx), 0);
  if (is_new) entry->second = Tried(ctx, result_bytes);
  return entry->second;
}

}  // namespace

std::vector<Tensor> AllocateWorkspace(const OpKernel& kernel, OpKernelContext* ctx, int64_t result_bytes) {
  const auto& workspaces = Settings::Get().workspaces_bytes;
  int64_t bytes = workspaces.empty() ? 0 : std::min(workspaces[0], AllowedBytes());
  if (workspaces.size() > 1) bytes = Chosen(kernel, ctx, result_bytes);
  std::vector<Tensor> tensors(1);
  if (bytes == 0 || !Allocate(ctx, bytes, &tensors[0])) tensors.clear();
  return tensors;
}

}  // namespace emulated_gpu
