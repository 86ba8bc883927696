// Splits chunks of an arena, so that requests get chunks of their own size. The arena is the allocator's
// (chunk_split_ops.cc) or a simulated one (arena_replay.h). `Arena.split` in simulator/bfc_allocator.py has the same
// steps, with reasons.

#ifndef TFSWAP_OPS_CSRC_CORE_CHUNK_SPLITTER_H_
#define TFSWAP_OPS_CSRC_CORE_CHUNK_SPLITTER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tfswap {

// Arena has
//   uint64_t Allocate(size_t nbytes)        the address of a chunk; 0 where there is none
//   void Free(uint64_t address)
//   std::vector<size_t> FreeBytes() const   the free chunks' sizes, the smallest first
template <typename Arena>
class ChunkSplitter {
 public:
  explicit ChunkSplitter(Arena* arena) : arena_(arena) {}

  // Splits the chunks that requests of `sizes` would get. Returns the separators, which stay in use.
  std::vector<uint64_t> Split(const std::vector<int64_t>& sizes) {
    between_.clear();
    if (sizes.size() == 1 && sizes[0] < 0) {
      PartEnd(Rounded(static_cast<size_t>(-sizes[0])));
      return between_;
    }
    std::vector<uint64_t> pieces;
    std::vector<size_t> free = arena_->FreeBytes();
    size_t later_bytes = 0;
    for (const int64_t size : sizes) later_bytes += Rounded(size);
    for (const int64_t size : sizes) {
      later_bytes -= Rounded(size);
      Part(static_cast<size_t>(size), later_bytes, &free);
      if (later_bytes > 0) pieces.push_back(arena_->Allocate(static_cast<size_t>(size)));
    }
    Free(pieces);
    return between_;
  }

 private:
  static constexpr size_t kGranularity = 256;       // BFCAllocator::kMinAllocationSize
  static constexpr size_t kMostWasted = 128 << 20;  // SPLIT_SLACK_BYTES in simulator/bfc_allocator.py
  static constexpr size_t kEndless = size_t{1} << 49;  // a simulated region without an end
  static constexpr size_t kMostMissed = 8;          // MOST_MISSED there
  static constexpr size_t kMostBetween = 64;        // MOST_BETWEEN there

  // Splits the chunk that a request of `nbytes` would get, if it is too large, so that one part fits. The bytes in use
  // meanwhile never exceed those with the whole chunk in use.
  //
  // Args:
  //   later_bytes: the sizes of the requests after this one.
  //   free: the free chunks' sizes, in ascending order. Updated for this request, since to list the arena's chunks for
  //     each request would take too long.
  void Part(size_t nbytes, size_t later_bytes, std::vector<size_t>* free) {
    const size_t needed = Rounded(nbytes);
    auto whole = std::lower_bound(free->begin(), free->end(), needed);
    if (whole == free->end()) {  // the arena grows
      const uint64_t chunk = arena_->Allocate(nbytes);
      if (chunk == 0) return;
      arena_->Free(chunk);
      *free = arena_->FreeBytes();
      whole = std::lower_bound(free->begin(), free->end(), needed);
      if (whole == free->end()) return;
    }
    const size_t rest_bytes = *whole - needed;
    const bool splits_itself = rest_bytes >= std::min(needed, kMostWasted);
    std::vector<size_t> missed;
    size_t between_bytes = 0;
    if (rest_bytes > 0 && (!splits_itself || later_bytes > 0)) {
      const size_t first_bytes = splits_itself ? needed : rest_bytes;
      size_t missed_bytes = 0;
      auto smaller = whole;
      const auto largest = [&] { return smaller == free->begin() ? 0 : *(smaller - 1); };
      while (largest() > 0 && missed.size() < kMostMissed &&
             missed_bytes + largest() + first_bytes <=
                 later_bytes + needed + std::min(largest(), rest_bytes)) {
        missed.push_back(largest());
        missed_bytes += largest();
        --smaller;
      }
      between_bytes = largest() + kGranularity;
      const bool too_large = splits_itself && between_bytes * kMostBetween > needed;
      if (largest() >= rest_bytes || too_large) {
        between_bytes = 0;
      } else if (2 * between_bytes > rest_bytes) {
        between_bytes = rest_bytes;
      }
    }
    if (between_bytes > 0) {
      std::vector<uint64_t> held;
      for (const size_t size : missed) held.push_back(arena_->Allocate(size));
      if (splits_itself) {
        held.push_back(arena_->Allocate(needed));
      } else if (rest_bytes > between_bytes) {
        held.push_back(arena_->Allocate(rest_bytes - between_bytes));
      }
      between_.push_back(arena_->Allocate(between_bytes));
      Free(held);
    }
    free->erase(whole);
    if (splits_itself || between_bytes > 0) {
      const size_t left_bytes = rest_bytes - between_bytes;
      const auto place = std::lower_bound(free->begin(), free->end(), left_bytes);
      if (left_bytes > 0) free->insert(place, left_bytes);
    }
  }

  // Splits off the end of the largest free chunk, for a request of `needed` bytes.
  void PartEnd(size_t needed) {
    std::vector<size_t> free = arena_->FreeBytes();
    while (!free.empty() && free.back() >= kEndless) free.pop_back();
    if (free.empty() || free.back() < needed) return;
    size_t before = free.back() - needed;
    free.pop_back();
    const size_t count = std::min(free.size(), kMostMissed);
    const size_t between_bytes =
        kGranularity + (free.size() > count ? free[free.size() - count - 1] : 0);
    if (before < between_bytes || 2 * between_bytes > needed) return;
    std::vector<uint64_t> held;
    for (size_t i = 0; i < count; ++i) held.push_back(arena_->Allocate(free[free.size() - 1 - i]));
    while (true) {
      const size_t half = (before + needed) / 2 / kGranularity * kGranularity;
      const size_t piece = std::min(half, before - between_bytes);
      if (piece < between_bytes) break;
      held.push_back(arena_->Allocate(piece));
      before -= piece;
    }
    between_.push_back(arena_->Allocate(before));
    Free(held);
  }

  static size_t Rounded(size_t nbytes) {
    return (nbytes + kGranularity - 1) / kGranularity * kGranularity;
  }

  void Free(const std::vector<uint64_t>& chunks) {
    for (const uint64_t chunk : chunks) {
      if (chunk != 0) arena_->Free(chunk);
    }
  }

  Arena* const arena_;
  std::vector<uint64_t> between_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_CHUNK_SPLITTER_H_
