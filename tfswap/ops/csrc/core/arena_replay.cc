#include "arena_replay.h"

#include <algorithm>
#include <iterator>

#include "chunk_splitter.h"

namespace tfswap {
namespace {

constexpr uint64_t kGranularity = 256;           // BFCAllocator::kMinAllocationSize
constexpr uint64_t kSplitSlack = 128 << 20;      // SPLIT_SLACK_BYTES in simulator/bfc_allocator.py
constexpr uint64_t kFirstRegion = 2 << 20;       // FIRST_REGION_BYTES there
constexpr uint64_t kUnbounded = uint64_t{1} << 50;  // UNBOUNDED_BYTES there

// The size of the region that is added next, if no larger one is requested.
uint64_t NextRegionBytes(std::vector<uint64_t> sizes, uint64_t limit_bytes) {
  uint64_t following = std::min(kFirstRegion, ChunkBytes(limit_bytes));
  std::sort(sizes.begin(), sizes.end());
  for (const uint64_t size : sizes) following = size > following ? size : following * 2;
  return following;
}

}  // namespace

std::vector<ArenaChunk> ChunksOfRows(const int64_t* rows, uint64_t count) {
  std::vector<ArenaChunk> chunks;
  for (uint64_t i = 0; i < count; ++i, rows += 3) {
    chunks.push_back({static_cast<uint64_t>(rows[0]), static_cast<uint64_t>(rows[1]), rows[2] != 0});
  }
  return chunks;
}

uint64_t ChunkBytes(uint64_t requested_bytes) {
  return (requested_bytes + kGranularity - 1) / kGranularity * kGranularity;
}

SimulatedArena::SimulatedArena(const std::vector<ArenaChunk>& chunks, uint64_t limit_bytes, bool collects)
    : limit_bytes_(limit_bytes), collects_(collects) {
  std::vector<uint64_t> regions;
  uint64_t end = 0;
  bool was_free = false;
  for (const ArenaChunk& chunk : chunks) {
    const bool begins = regions.empty() || chunk.address != end || (was_free && !chunk.in_use);
    if (begins) regions.push_back(0);
    regions.back() += chunk.bytes;
    pool_bytes_ += chunk.bytes;
    const auto placed = chunks_.emplace(chunk.address, Chunk{chunk.bytes, chunk.in_use, begins}).first;
    if (chunk.in_use) {
      in_use_bytes_ += chunk.bytes;
    } else {
      SetFree(placed);
    }
    end = chunk.address + chunk.bytes;
    was_free = !chunk.in_use;
  }
  peak_bytes_ = in_use_bytes_;
  next_region_bytes_ = NextRegionBytes(regions, limit_bytes);
}

SimulatedArena::SimulatedArena(const std::vector<ArenaChunk>& chunks) : SimulatedArena(chunks, kUnbounded, false) {
  AddEndlessRegion();
}

uint64_t SimulatedArena::Allocate(size_t nbytes) {
  if (nbytes == 0) return 0;
  const uint64_t rounded = ChunkBytes(nbytes);
  auto found = free_.lower_bound({rounded, 0});
  while (found == free_.end()) {
    Grow(rounded);
    found = free_.lower_bound({rounded, 0});
  }
  const auto chunk = chunks_.find(found->second);
  free_.erase(found);
  chunk->second.in_use = true;
  const uint64_t rest_bytes = chunk->second.bytes - rounded;
  if (chunk->second.bytes >= rounded * 2 || rest_bytes >= kSplitSlack || (splits_all_ && rest_bytes > 0)) {
    chunk->second.bytes = rounded;
    SetFree(chunks_.emplace_hint(std::next(chunk), chunk->first + rounded, Chunk{rest_bytes, false, false}));
  }
  in_use_bytes_ += chunk->second.bytes;
  peak_bytes_ = std::max(peak_bytes_, in_use_bytes_);
  return chunk->first;
}

void SimulatedArena::Free(uint64_t address) {
  auto chunk = chunks_.find(address);
  if (chunk == chunks_.end() || !chunk->second.in_use) return;
  in_use_bytes_ -= chunk->second.bytes;
  const auto after = std::next(chunk);
  if (after != chunks_.end() && !after->second.in_use && !after->second.begins_region) {
    free_.erase({after->second.bytes, after->first});
    chunk->second.bytes += after->second.bytes;
    chunks_.erase(after);
  }
  if (!chunk->second.begins_region && chunk != chunks_.begin()) {
    const auto before = std::prev(chunk);
    if (!before->second.in_use) {
      free_.erase({before->second.bytes, before->first});
      before->second.bytes += chunk->second.bytes;
      chunks_.erase(chunk);
      chunk = before;
    }
  }
  SetFree(chunk);
}

std::vector<size_t> SimulatedArena::FreeBytes() const {
  std::vector<size_t> found;
  found.reserve(free_.size());
  for (const auto& [bytes, address] : free_) found.push_back(bytes);
  return found;
}

void SimulatedArena::Grow(uint64_t rounded) {
  if (Extend(rounded) || (collects_ && Collect(rounded) && Extend(rounded))) return;
  peak_bytes_ = std::max(peak_bytes_, limit_bytes_ + kGranularity);
  AddEndlessRegion();
}

void SimulatedArena::AddEndlessRegion() { SetFree(chunks_.emplace(End(), Chunk{kUnbounded, false, true}).first); }

bool SimulatedArena::Extend(uint64_t rounded) {
  const uint64_t left = limit_bytes_ > pool_bytes_ ? limit_bytes_ - pool_bytes_ : 0;
  const uint64_t available = left / kGranularity * kGranularity;
  if (rounded > available) return false;
  const bool enough = rounded <= next_region_bytes_;
  while (rounded > next_region_bytes_) next_region_bytes_ *= 2;
  const uint64_t bytes = std::min(next_region_bytes_, available);
  if (enough) next_region_bytes_ *= 2;
  pool_bytes_ += bytes;
  AddRegion(bytes);
  return true;
}

// Gives up the regions that are one free chunk, if that can be enough.
bool SimulatedArena::Collect(uint64_t rounded) {
  std::vector<Chunks::iterator> unused;
  uint64_t freed = 0;
  for (auto chunk = chunks_.begin(); chunk != chunks_.end(); ++chunk) {
    const auto after = std::next(chunk);
    const bool alone = chunk->second.begins_region && (after == chunks_.end() || after->second.begins_region);
    if (alone && !chunk->second.in_use) {
      unused.push_back(chunk);
      freed += chunk->second.bytes;
    }
  }
  if (freed == 0 || rounded + pool_bytes_ > limit_bytes_ + freed) return false;
  for (const auto chunk : unused) {
    free_.erase({chunk->second.bytes, chunk->first});
    chunks_.erase(chunk);
  }
  pool_bytes_ -= freed;
  return true;
}

void SimulatedArena::AddRegion(uint64_t bytes) {
  // Below all others, where Linux maps new memory. It decides between free chunks of one size, no more.
  const uint64_t lowest = chunks_.empty() ? kUnbounded : std::min(chunks_.begin()->first, kUnbounded);
  const uint64_t address = lowest > bytes + kGranularity ? lowest - bytes - kGranularity : End();
  SetFree(chunks_.emplace(address, Chunk{bytes, false, true}).first);
}

// An address beyond all chunks, and not side by side with any.
uint64_t SimulatedArena::End() const {
  if (chunks_.empty()) return kGranularity;
  const auto& [address, chunk] = *chunks_.rbegin();
  return address + chunk.bytes + kGranularity;
}

void SimulatedArena::SetFree(Chunks::iterator chunk) {
  chunk->second.in_use = false;
  free_.emplace(chunk->second.bytes, chunk->first);
}

bool RecordedRequests::Decode(const std::string& encoded) {
  size_t position = 0, requests = 0;
  const auto next = [&](uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 63 && position < encoded.size(); shift += 7) {
      const uint64_t byte = static_cast<unsigned char>(encoded[position++]);
      *value |= (byte & 0x7f) << shift;
      if (byte < 0x80) return true;
    }
    return false;
  };
  // Whether the event makes sense where it stands.
  const auto append = [&](uint64_t event) {
    if (events_.size() >= kMostEvents) return false;
    const uint64_t number = event >> 2;
    if ((event & 3) == kRequest) {
      if (number == 0 || number > kMostUnits) return false;
      ++requests;
    } else if ((event & 3) == kRelease && number >= requests) {
      return false;
    } else if ((event & 3) == kSplit && (number >> 1 == 0 || number >> 1 > kMostUnits)) {
      return false;
    }
    events_.push_back(event);
    return true;
  };
  uint64_t event;
  while (position < encoded.size()) {
    if (!next(&event)) return false;
    if (event != (kRepeat << 2 | kControl)) {
      if ((event & 3) == kControl && event >> 2 > kSplitAll) return false;
      if (!append(event)) return false;
      continue;
    }
    uint64_t period, times;
    if (!next(&period) || !next(&times)) return false;
    if (period == 0 || period > events_.size() || times > kMostEvents / period) return false;
    for (uint64_t i = 0; i < period * times; ++i) {
      if (!append(events_[events_.size() - period])) return false;
    }
  }
  return true;
}

uint64_t RecordedRequests::PeakBytes(SimulatedArena arena) const {
  std::vector<uint64_t> addresses;
  std::vector<std::vector<uint64_t>> rests;  // a loop that has splits has some in it too
  std::vector<int64_t> parted;
  for (const uint64_t event : events_) {
    if (arena.peak_bytes() >= kUnbounded) break;  // no machine has as much
    const uint64_t number = event >> 2;
    switch (event & 3) {
      case kRequest:
        addresses.push_back(arena.Allocate(number * kUnit));
        break;
      case kRelease:
        arena.Free(addresses[addresses.size() - 1 - number]);
        break;
      case kSplit: {
        const auto bytes = static_cast<int64_t>((number >> 1) * kUnit);
        parted.push_back((number & 1) != 0 && parted.empty() ? -bytes : bytes);
        break;
      }
      default:
        if (number == kSplitAll) {
          arena.SplitAll();
        } else if (number == kEndOfSplit) {
          rests.push_back(ChunkSplitter<SimulatedArena>(&arena).Split(parted));
          parted.clear();
        } else if (!rests.empty()) {
          for (const uint64_t rest : rests.back()) arena.Free(rest);
          rests.pop_back();
        }
    }
  }
  return arena.peak_bytes();
}

}  // namespace tfswap
