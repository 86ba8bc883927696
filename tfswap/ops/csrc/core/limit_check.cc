#include "limit_check.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "absl/log/log.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "arena.h"
#include "export.h"
#include "tensorflow/core/protobuf/bfc_memory_map.pb.h"

namespace tfswap {
namespace {

// Off while somebody asks for values alone.
std::atomic<bool> limits_count{true};

std::string Mebibytes(uint64_t bytes) {
  return absl::StrFormat("%d bytes (%.1f MiB)", bytes, static_cast<double>(bytes) / (1 << 20));
}

// As GPUBFCAllocator::GetGarbageCollectionValue has it.
bool CollectsGarbage() {
  const char* const given = std::getenv("TF_ENABLE_GPU_GARBAGE_COLLECTION");
  return given == nullptr || std::string_view(given) != "false";
}

}  // namespace

absl::Status LimitCheck::Read(tensorflow::OpKernelConstruction* ctx) {
  int64_t limit_bytes;
  TF_RETURN_IF_ERROR(ctx->GetAttr("limit", &limit_bytes));
  if (limit_bytes <= 0) return absl::OkStatus();
  limit_bytes_ = static_cast<uint64_t>(limit_bytes);
  TF_RETURN_IF_ERROR(ctx->GetAttr("exact", &exact_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("sizes", &sizes_));
  if (static_cast<int>(sizes_.size()) != ctx->num_inputs()) {
    return absl::InvalidArgumentError(absl::StrCat("'", ctx->def().name(), "' has ", ctx->num_inputs(),
                                                   " arguments, and sizes of ", sizes_.size(), "."));
  }
  std::vector<std::string> encoded;
  TF_RETURN_IF_ERROR(ctx->GetAttr("requests", &encoded));
  extremes_.resize(encoded.size());
  for (size_t i = 0; i < encoded.size(); ++i) {
    if (!extremes_[i].Decode(encoded[i])) {
      return absl::InvalidArgumentError(
          absl::StrCat("The requests of '", ctx->def().name(), "' are damaged: write the model anew."));
    }
  }
  collects_ = ctx->device_type() == tensorflow::DEVICE_GPU && CollectsGarbage();
  return absl::OkStatus();
}

absl::Status LimitCheck::Check(tensorflow::OpKernelContext* ctx) {
  if (limit_bytes_ == 0 || !limits_count) return absl::OkStatus();
  auto* const arena = FindArena(ctx);
  if (arena == nullptr) return absl::OkStatus();
  const tensorflow::MemoryDump map = arena->RecordMemoryMap();
  const uint64_t arena_bytes = arena->GetStats()->bytes_limit.value_or(0);
  const uint64_t limit_bytes = arena_bytes == 0 ? limit_bytes_ : std::min(limit_bytes_, arena_bytes);
  const uint64_t in_use_bytes = map.stats().bytes_in_use();
  const bool as_planned = exact_ && AsPlanned(ctx);
  const uint64_t layout = LayoutOf(map) + (as_planned ? 1 : 0);
  std::lock_guard<std::mutex> lock(mu_);
  auto known = found_.find(layout);
  if (known == found_.end()) {
    std::vector<ArenaChunk> chunks;
    chunks.reserve(map.chunk_size());
    for (const auto& chunk : map.chunk()) {
      chunks.push_back({chunk.address(), static_cast<uint64_t>(chunk.size()), chunk.in_use()});
    }
    std::sort(chunks.begin(), chunks.end(),
              [](const ArenaChunk& a, const ArenaChunk& b) { return a.address < b.address; });
    if (found_.size() >= kMostLayouts) found_.clear();
    known = found_.emplace(layout, Judge(chunks, in_use_bytes, limit_bytes, arena_bytes, as_planned)).first;
  }
  const Found& found = known->second;
  if (found.verdict == Verdict::kKept) return absl::OkStatus();
  const bool passed = found.verdict == Verdict::kPassed;
  const std::string message = absl::StrCat(
      "tfswap: this step was planned for a limit of ", Mebibytes(limit_bytes_), ", and ", passed ? "needs " : "may need ",
      Mebibytes(found.peak_bytes), " in the arena that it finds, of which ", Mebibytes(in_use_bytes),
      " are in use before it begins. ",
      arena_bytes != 0 && arena_bytes < limit_bytes_
          ? absl::StrCat("The arena may have ", Mebibytes(arena_bytes), " in all. ")
          : "",
      "The plan in the file counts the model's own variables and arguments alone, side by side. Load the model with "
      "tfswap.load, which plans for what is there, or free what else this process keeps on the device.");
  if (passed) return absl::ResourceExhaustedError(message);
  if (!std::exchange(warned_, true)) LOG(WARNING) << message;
  return absl::OkStatus();
}

LimitCheck::Found LimitCheck::Judge(const std::vector<ArenaChunk>& chunks, uint64_t in_use_bytes, uint64_t limit_bytes,
                                    uint64_t arena_bytes, bool as_planned) const {
  // Between the extremes of what is known by bounds only the step's own peak lies.
  uint64_t least = in_use_bytes, most = in_use_bytes;
  if (!extremes_.empty()) {
    const SimulatedArena arena(chunks, arena_bytes, collects_);
    least = UINT64_MAX;
    for (const RecordedRequests& requests : extremes_) {
      const uint64_t peak = requests.PeakBytes(arena);
      least = std::min(least, peak);
      most = std::max(most, peak);
    }
  }
  if (most <= limit_bytes) return {Verdict::kKept, most};
  if (in_use_bytes > limit_bytes || (as_planned && least > limit_bytes)) {
    return {Verdict::kPassed, std::max(least, in_use_bytes)};
  }
  return {Verdict::kUncertain, most};
}

bool LimitCheck::AsPlanned(tensorflow::OpKernelContext* ctx) const {
  for (size_t i = 0; i < sizes_.size(); ++i) {
    if (!sizes_[i].IsIdenticalTo(tensorflow::PartialTensorShape(ctx->input(i).shape().dim_sizes()))) return false;
  }
  return true;
}

}  // namespace tfswap

// Whether saved steps look for their limit, all those of the process.
TFSWAP_C_API void tfswap_check_limits(bool check) { tfswap::limits_count = check; }

// The peak of requests as a gate has them, in an arena of these chunks: rows of an address, bytes, and whether it is in
// use, in order of address. -1 where they are damaged.
TFSWAP_C_API int64_t tfswap_replay(const char* requests, uint64_t bytes, const int64_t* chunks, uint64_t count,
                                   uint64_t limit_bytes, bool collects) {
  std::vector<tfswap::ArenaChunk> arena;
  for (uint64_t i = 0; i < count; ++i) {
    const int64_t* const row = chunks + 3 * i;
    arena.push_back({static_cast<uint64_t>(row[0]), static_cast<uint64_t>(row[1]), row[2] != 0});
  }
  tfswap::RecordedRequests recorded;
  if (!recorded.Decode(std::string(requests, bytes))) return -1;
  return static_cast<int64_t>(recorded.PeakBytes(tfswap::SimulatedArena(arena, limit_bytes, collects)));
}
