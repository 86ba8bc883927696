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

constexpr uint64_t kAlignment = 256;  // BFCAllocator::kMinAllocationSize

// Off while a caller needs the values only, whatever the peak.
std::atomic<bool> limits_count{true};

std::string Mebibytes(uint64_t bytes) {
  return absl::StrFormat("%d bytes (%.1f MiB)", bytes, static_cast<double>(bytes) / (1 << 20));
}

// As GPUBFCAllocator::GetGarbageCollectionValue has it.
bool CollectsGarbage() {
  const char* const given = std::getenv("TF_ENABLE_GPU_GARBAGE_COLLECTION");
  return given == nullptr || std::string_view(given) != "false";
}

std::vector<ArenaChunk> ChunksOf(const tensorflow::MemoryDump& map) {
  std::vector<ArenaChunk> chunks;
  chunks.reserve(map.chunk_size());
  for (const auto& chunk : map.chunk()) {
    chunks.push_back({chunk.address(), static_cast<uint64_t>(chunk.size()), chunk.in_use()});
  }
  std::sort(chunks.begin(), chunks.end(),
            [](const ArenaChunk& a, const ArenaChunk& b) { return a.address < b.address; });
  return chunks;
}

void* Request(tensorflow::BFCAllocator* arena, uint64_t bytes) {
  tensorflow::AllocationAttributes immediately;
  immediately.retry_on_failure = false;
  return arena->AllocateRaw(tensorflow::Allocator::kAllocatorAlignment, bytes, immediately);
}

// Brings the arena's peak back to what it has been, as _raise_peak in device/live.py does: each request is for
// half of what is missing, since its chunk can be almost twice as large.
void RaisePeak(tensorflow::BFCAllocator* arena, uint64_t peak_bytes) {
  std::vector<void*> held;
  for (auto stats = arena->GetStats(); static_cast<uint64_t>(stats->peak_bytes_in_use) < peak_bytes;
       stats = arena->GetStats()) {
    void* const half = Request(arena, (peak_bytes - static_cast<uint64_t>(stats->bytes_in_use)) / 2);
    if (half == nullptr) break;
    held.push_back(half);
  }
  for (void* const each : held) arena->DeallocateRaw(each);
}

// Adds a region of as much at least. The arena's peak, the user's own statistics, stays what it was.
bool AddRegion(tensorflow::BFCAllocator* arena, uint64_t bytes, uint64_t peak_bytes) {
  void* const region = Request(arena, bytes);
  if (region == nullptr) return false;
  arena->DeallocateRaw(region);
  arena->ClearStats();
  RaisePeak(arena, peak_bytes);
  return true;
}

uint64_t LargestFree(const std::vector<ArenaChunk>& chunks) {
  uint64_t largest_bytes = 0;
  for (const ArenaChunk& chunk : chunks) {
    if (!chunk.in_use) largest_bytes = std::max(largest_bytes, chunk.bytes);
  }
  return largest_bytes;
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

absl::Status LimitCheck::Check(tensorflow::OpKernelContext* ctx, bool fails, bool strictly,
                               uint64_t* peak_bytes) {
  *peak_bytes = 0;
  if (limit_bytes_ == 0 || !limits_count) return absl::OkStatus();
  auto* const arena = FindArena(ctx);
  if (arena == nullptr) return absl::OkStatus();
  if (const int larger = LargerArgument(ctx); larger >= 0) {
    const std::string message = absl::StrCat(
        "tfswap: this step was planned for a limit of ", Mebibytes(limit_bytes_), " and for smaller arguments: of ",
        sizes_[larger].DebugString(), ", and is given ", ctx->input(larger).shape().DebugString(),
        ". What it takes with these is not known. Load the model with tfswap.load, which plans for each size, or rewrite "
        "it for the largest (batch_size=, input_shapes=).");
    std::lock_guard<std::mutex> lock(mu_);
    return Say(message, fails);
  }
  const tensorflow::MemoryDump map = arena->RecordMemoryMap();
  const uint64_t arena_bytes = arena->GetStats()->bytes_limit.value_or(0);
  const uint64_t limit_bytes = arena_bytes == 0 ? limit_bytes_ : std::min(limit_bytes_, arena_bytes);
  const uint64_t in_use_bytes = map.stats().bytes_in_use();
  const uint64_t as_planned = exact_ && AsPlanned(ctx) ? 1 : 0;
  std::lock_guard<std::mutex> lock(mu_);
  auto known = found_.find(LayoutOf(map) + as_planned);
  if (known == found_.end()) {
    if (found_.size() >= kMostLayouts) found_.clear();
    Found found = Judge(map, limit_bytes, arena_bytes, as_planned, 0);
    uint64_t layout = LayoutOf(map);
    if (found.verdict != Verdict::kKept && MakeOneRegion(arena, map, limit_bytes, arena_bytes)) {
      const tensorflow::MemoryDump grown = arena->RecordMemoryMap();
      found = Judge(grown, limit_bytes, arena_bytes, as_planned, 0);
      layout = LayoutOf(grown);
    }
    known = found_.emplace(layout + as_planned, found).first;
  }
  const Found& found = known->second;
  if (found.verdict == Verdict::kKept) {
    if (found.certain) *peak_bytes = found.peak_bytes;
    return absl::OkStatus();
  }
  const std::string message = absl::StrCat(
      "tfswap: this step was planned for a limit of ", Mebibytes(limit_bytes_), ", and ", found.certain ? "needs " : "may need ",
      Mebibytes(found.peak_bytes), " in the arena that it finds, of which ", Mebibytes(in_use_bytes),
      " are in use before it begins. ",
      arena_bytes != 0 && arena_bytes < limit_bytes_
          ? absl::StrCat("The arena may have ", Mebibytes(arena_bytes), " in all. ")
          : "",
      fails ? "The plan in the file counts the model's own variables and arguments alone, side by side. Load a model that "
              "optimize_graph has written with tfswap.load, which plans for the present arena, or free what else this "
              "process keeps on the device."
            : "It was planned before, for the arena as it was then, since it runs inside of another function or was taken "
              "by get_concrete_function. Free what this process keeps on the device besides, or call the decorated "
              "function itself, which reads the arena before each step.");
  return Say(message, (found.verdict == Verdict::kPassed || strictly) && fails);
}

// mu_ is held.
absl::Status LimitCheck::Say(const std::string& message, bool fails) {
  if (fails) return absl::ResourceExhaustedError(message);
  if (!std::exchange(warned_, true)) LOG(WARNING) << message;
  return absl::OkStatus();
}

LimitCheck::Found LimitCheck::Judge(const tensorflow::MemoryDump& map, uint64_t limit_bytes, uint64_t arena_bytes,
                                    bool as_planned, uint64_t region_bytes) const {
  const uint64_t in_use_bytes = map.stats().bytes_in_use();
  uint64_t least = in_use_bytes, most = in_use_bytes;
  if (!extremes_.empty()) {
    SimulatedArena arena(ChunksOf(map), arena_bytes, collects_);
    if (region_bytes != 0) arena.Extend(region_bytes);
    least = UINT64_MAX;
    for (const RecordedRequests& requests : extremes_) {
      const uint64_t peak = requests.PeakBytes(arena);
      least = std::min(least, peak);
      most = std::max(most, peak);
    }
  }
  if (most <= limit_bytes) return {Verdict::kKept, most, as_planned && least == most && !extremes_.empty()};
  const bool passed = in_use_bytes > limit_bytes || as_planned;
  return {passed ? Verdict::kPassed : Verdict::kUncertain, most, passed && (least == most || in_use_bytes > limit_bytes)};
}

// Where one more region lets the step keep its limit, adds it: device/regions.py where Python is.
//
// The allocator cuts a request's chunk off a free one only where that has twice the request's bytes. So in a region of
// what the limit leaves a large request can be given all of it; in one of twice as much each gets its own size.
bool LimitCheck::MakeOneRegion(tensorflow::BFCAllocator* arena, const tensorflow::MemoryDump& map, uint64_t limit_bytes,
                               uint64_t arena_bytes) const {
  const uint64_t in_use_bytes = map.stats().bytes_in_use();
  if (arena_bytes == 0 || in_use_bytes >= limit_bytes) return false;
  const std::vector<ArenaChunk> chunks = ChunksOf(map);
  uint64_t all_bytes = 0;
  for (const ArenaChunk& chunk : chunks) all_bytes += chunk.bytes;
  const uint64_t largest_bytes = LargestFree(chunks), room_bytes = arena_bytes - std::min(arena_bytes, all_bytes);
  const uint64_t left_bytes = (limit_bytes - in_use_bytes) / kAlignment * kAlignment;
  for (const uint64_t wanted_bytes : {left_bytes, 2 * left_bytes}) {
    if (wanted_bytes <= largest_bytes || wanted_bytes > room_bytes) continue;
    const Found found = Judge(map, limit_bytes, arena_bytes, /*as_planned=*/true, wanted_bytes);
    if (found.verdict == Verdict::kKept) {
      return AddRegion(arena, wanted_bytes, static_cast<uint64_t>(map.stats().peak_bytes_in_use()));
    }
  }
  return false;
}

int LimitCheck::LargerArgument(tensorflow::OpKernelContext* ctx) const {
  for (size_t i = 0; i < sizes_.size(); ++i) {
    const tensorflow::TensorShape& given = ctx->input(i).shape();
    if (given.dims() != sizes_[i].dims()) return i;
    for (int d = 0; d < given.dims(); ++d) {
      if (given.dim_size(d) > sizes_[i].dim_size(d)) return i;
    }
  }
  return -1;
}

bool LimitCheck::AsPlanned(tensorflow::OpKernelContext* ctx) const {
  for (size_t i = 0; i < sizes_.size(); ++i) {
    if (!sizes_[i].IsIdenticalTo(tensorflow::PartialTensorShape(ctx->input(i).shape().dim_sizes()))) return false;
  }
  return true;
}

}  // namespace tfswap

// Sets whether saved steps check their limits, for the whole process.
TFSWAP_C_API void tfswap_check_limits(bool check) { tfswap::limits_count = check; }

// The peak of requests as a gate has them, in an arena of these chunks: rows of an address, bytes, and whether it is in
// use, in order of address. -1 where they are damaged.
TFSWAP_C_API int64_t tfswap_replay(const char* requests, uint64_t bytes, const int64_t* chunks, uint64_t count,
                                   uint64_t limit_bytes, bool collects) {
  tfswap::RecordedRequests recorded;
  if (!recorded.Decode(std::string(requests, bytes))) return -1;
  const tfswap::SimulatedArena arena(tfswap::ChunksOfRows(chunks, count), limit_bytes, collects);
  return static_cast<int64_t>(recorded.PeakBytes(arena));
}
