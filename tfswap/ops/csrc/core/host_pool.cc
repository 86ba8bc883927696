#include "host_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <iterator>

#include "system_memory.h"

namespace tfswap {

void* MmapBlockSource::Allocate(size_t bytes) {
  if (bytes > AvailableMemory()) return nullptr;
  // mmap aligns to 4 KiB, and a huge page must start at a multiple of its own size. So one huge page more is mapped,
  // and both ends are unmapped.
  const size_t align = HostPool::kBlockMultiple;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  void* raw = mmap(nullptr, bytes + align, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto start = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t block = (start + align - 1) / align * align;
  if (block > start) munmap(raw, block - start);
  const uintptr_t end = block + bytes;
  const uintptr_t raw_end = start + bytes + align;
  if (raw_end > end) munmap(reinterpret_cast<void*>(end), raw_end - end);
#ifdef MADV_HUGEPAGE
  // If this fails, the first use has more page faults.
  (void)madvise(reinterpret_cast<void*>(block), bytes, MADV_HUGEPAGE);
#endif
  return reinterpret_cast<void*>(block);
}

void MmapBlockSource::Free(void* block, size_t bytes) { munmap(block, bytes); }

bool MmapBlockSource::Populate(void* block, size_t bytes) {
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // missing from the C library's headers before 2.35
#endif
  // Takes 0.1 s per GiB in huge pages. Linux before 5.14 returns EINVAL; there, pages are backed at first touch.
  return madvise(block, bytes, MADV_POPULATE_WRITE) == 0 || errno == EINVAL;
}

void HostBudget::SetLimit(uint64_t bytes) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    set_limit_ = bytes;
  }
  Trim();
}

uint64_t HostBudget::set_limit() const {
  std::lock_guard<std::mutex> lock(mu_);
  return set_limit_;
}

void HostBudget::Register(int64_t owner, uint64_t bytes) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    Owner& registered = owners_[owner];
    registered.bytes = std::max(registered.bytes, bytes);
    ++registered.registrations;
  }
  Trim();
}

void HostBudget::Unregister(int64_t owner) {
  bool unowned;
  {
    std::lock_guard<std::mutex> lock(mu_);
    const auto registered = owners_.find(owner);
    if (registered == owners_.end() || --registered->second.registrations > 0) return;
    owners_.erase(registered);
    unowned = owners_.empty();
  }
  Trim(/*all=*/unowned);
}

uint64_t HostBudget::LimitLocked() const {
  if (owners_.empty()) return set_limit_;
  uint64_t sum = 0;
  for (const auto& owner : owners_) {
    if (owner.second.bytes >= set_limit_ || sum >= set_limit_ - owner.second.bytes) return set_limit_;
    sum += owner.second.bytes;
  }
  return sum;
}

void HostBudget::Trim(bool all) {
  const Usage now = usage();
  if (!all && now.reserved_bytes <= now.limit_bytes) return;
  std::lock_guard<std::mutex> lock(pools_mu_);
  for (HostPool* pool : pools_) pool->ReleaseUnusedBlocks();
}

void HostBudget::TrimOthers(const HostPool* pool) {
  std::lock_guard<std::mutex> lock(pools_mu_);
  for (HostPool* const other : pools_) {
    if (other != pool) other->ReleaseUnusedBlocks();
  }
}

void HostBudget::Join(HostPool* pool) {
  std::lock_guard<std::mutex> lock(pools_mu_);
  pools_.push_back(pool);
}

void HostBudget::Leave(HostPool* pool) {
  std::lock_guard<std::mutex> lock(pools_mu_);
  pools_.erase(std::remove(pools_.begin(), pools_.end(), pool), pools_.end());
}

bool HostBudget::TryReserve(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mu_);
  const uint64_t limit = LimitLocked();
  if (usage_.reserved_bytes > limit || bytes > limit - usage_.reserved_bytes) return false;
  usage_.reserved_bytes += bytes;
  return true;
}

void HostBudget::Unreserve(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mu_);
  usage_.reserved_bytes -= bytes;
}

void HostBudget::AddInUse(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mu_);
  usage_.in_use_bytes += bytes;
  usage_.peak_bytes = std::max(usage_.peak_bytes, usage_.in_use_bytes);
}

void HostBudget::ResetPeak() {
  std::lock_guard<std::mutex> lock(mu_);
  usage_.peak_bytes = usage_.in_use_bytes;
}

HostBudget::Usage HostBudget::usage() const {
  std::lock_guard<std::mutex> lock(mu_);
  Usage now = usage_;
  now.limit_bytes = LimitLocked();
  return now;
}

HostPool::HostPool(BlockSource* source, HostBudget* budget) : source_(source), budget_(budget) {
  budget_->Join(this);
}

HostPool::~HostPool() {
  budget_->Leave(this);
  std::lock_guard<std::mutex> lock(mu_);
  ReleaseUnusedBlocksLocked();
  assert(blocks_.empty());
}

void* HostPool::Allocate(size_t bytes, Failure* failure) {
  void* const piece = TryAllocate(bytes, failure);
  if (*failure != Failure::kLimit) return piece;
  budget_->TrimOthers(this);
  return TryAllocate(bytes, failure);
}

void* HostPool::AllocateAlone(size_t bytes, Failure* failure) {
  const size_t rounded = RoundUp(bytes);
  {
    std::lock_guard<std::mutex> lock(mu_);
    *failure = AddBlockLocked(rounded, /*populate=*/true, /*exactly=*/true);
    // Best fit: a free piece of exactly this size, the new block or another one.
    if (*failure == Failure::kNone) return TakeLocked(rounded);
  }
  return Allocate(bytes, failure);
}

void* HostPool::TryAllocate(size_t bytes, Failure* failure) {
  const size_t rounded = RoundUp(bytes);
  std::lock_guard<std::mutex> lock(mu_);
  *failure = Failure::kNone;
  void* piece = TakeLocked(rounded);
  if (piece != nullptr) return piece;
  *failure = AddBlockLocked(std::max(rounded, kDefaultBlockBytes), /*populate=*/false);
  if (*failure != Failure::kNone) {
    // The limit has no room for a block of default size: release unused blocks, and add one of the exact size.
    ReleaseUnusedBlocksLocked();
    *failure = AddBlockLocked(rounded, /*populate=*/false);
  }
  return *failure == Failure::kNone ? TakeLocked(rounded) : nullptr;
}

void HostPool::Free(void* data) {
  std::lock_guard<std::mutex> lock(mu_);
  auto piece = pieces_.find(reinterpret_cast<uintptr_t>(data));
  assert(piece != pieces_.end() && !piece->second.free);
  budget_->AddInUse(-static_cast<int64_t>(piece->second.bytes));
  piece->second.free = true;

  auto next = std::next(piece);
  if (next != pieces_.end() && next->second.free &&
      next->second.block == piece->second.block) {
    free_by_size_.erase({next->second.bytes, next->first});
    piece->second.bytes += next->second.bytes;
    pieces_.erase(next);
  }
  if (piece != pieces_.begin()) {
    auto previous = std::prev(piece);
    if (previous->second.free && previous->second.block == piece->second.block) {
      free_by_size_.erase({previous->second.bytes, previous->first});
      previous->second.bytes += piece->second.bytes;
      pieces_.erase(piece);
      piece = previous;
    }
  }
  free_by_size_.insert({piece->second.bytes, piece->first});
}

HostPool::Failure HostPool::Reserve(size_t bytes) {
  const Failure failure = TryReserve(bytes);
  if (failure != Failure::kLimit) return failure;
  budget_->TrimOthers(this);
  return TryReserve(bytes);
}

HostPool::Failure HostPool::ReserveMore(size_t bytes) {
  const Failure failure = TryReserveMore(bytes);
  if (failure != Failure::kLimit) return failure;
  budget_->TrimOthers(this);
  return TryReserveMore(bytes);
}

HostPool::Failure HostPool::TryReserveMore(size_t bytes) {
  std::lock_guard<std::mutex> lock(mu_);
  bytes = RoundUp(bytes);
  if (FreeBytesLocked(bytes) > 0) return Failure::kNone;
  const Failure failure = AddBlockLocked(bytes, /*populate=*/true);
  if (failure == Failure::kNone) return failure;
  // Where there is no room for one block, several pieces have to do. A piece of a plan is seldom smaller than this
  // share of its bytes, and the ends of blocks are.
  constexpr size_t kLeastShare = 16;
  ReleaseUnusedBlocksLocked();
  const uint64_t free_bytes = FreeBytesLocked(bytes / kLeastShare);
  return free_bytes >= bytes ? Failure::kNone : AddBlockLocked(bytes - free_bytes, /*populate=*/true);
}

HostPool::Failure HostPool::TryReserve(size_t bytes) {
  std::lock_guard<std::mutex> lock(mu_);
  bytes = RoundUp(bytes);
  const auto holds = [bytes](const auto& block) { return block.second >= bytes; };
  if (std::any_of(blocks_.begin(), blocks_.end(), holds)) return Failure::kNone;
  // Unused blocks may leave no room under the limit for one large block.
  ReleaseUnusedBlocksLocked();
  Failure failure = AddBlockLocked(bytes, /*populate=*/true);
  const uint64_t reserved = ReservedBytesLocked();
  if (failure == Failure::kNone || reserved == 0) return failure;
  return reserved >= bytes ? Failure::kNone : AddBlockLocked(bytes - reserved, /*populate=*/true);
}

void HostPool::ReleaseUnusedBlocks() {
  std::lock_guard<std::mutex> lock(mu_);
  ReleaseUnusedBlocksLocked();
}

uint64_t HostPool::reserved_bytes() const {
  std::lock_guard<std::mutex> lock(mu_);
  return ReservedBytesLocked();
}

uint64_t HostPool::FreeBytesLocked(size_t least_bytes) const {
  uint64_t bytes = 0;
  for (auto piece = free_by_size_.lower_bound({least_bytes, 0}); piece != free_by_size_.end(); ++piece) {
    bytes += piece->first;
  }
  return bytes;
}

uint64_t HostPool::ReservedBytesLocked() const {
  uint64_t bytes = 0;
  for (const auto& block : blocks_) bytes += block.second;
  return bytes;
}

HostPool::Failure HostPool::AddBlockLocked(size_t bytes, bool populate, bool exactly) {
  if (bytes > SIZE_MAX / 2) return Failure::kSystem;
  size_t rounded = (bytes + kBlockMultiple - 1) / kBlockMultiple * kBlockMultiple;
  // Another pool of the process may need the rest of a limit: what a step reserves under one is not rounded up to huge
  // pages. Nor is the limit a multiple of these.
  exactly = exactly || (populate && budget_->usage().limit_bytes != HostBudget::kUnlimited);
  if (exactly || !budget_->TryReserve(rounded)) {
    rounded = RoundUp(bytes);
    if (!budget_->TryReserve(rounded)) return Failure::kLimit;
  }
  void* block = source_->Allocate(rounded);
  if (block != nullptr && populate && !source_->Populate(block, rounded)) {
    source_->Free(block, rounded);
    block = nullptr;
  }
  if (block == nullptr) {
    budget_->Unreserve(rounded);
    return Failure::kSystem;
  }
  const auto start = reinterpret_cast<uintptr_t>(block);
  blocks_[start] = rounded;
  pieces_[start] = Piece{rounded, /*free=*/true, start};
  free_by_size_.insert({rounded, start});
  return Failure::kNone;
}

void* HostPool::TakeLocked(size_t bytes) {
  const auto fit = free_by_size_.lower_bound({bytes, 0});
  if (fit == free_by_size_.end()) return nullptr;
  const uintptr_t start = fit->second;
  free_by_size_.erase(fit);
  Piece& piece = pieces_[start];
  if (piece.bytes > bytes) {
    const size_t rest = piece.bytes - bytes;
    pieces_[start + bytes] = Piece{rest, /*free=*/true, piece.block};
    free_by_size_.insert({rest, start + bytes});
    piece.bytes = bytes;
  }
  piece.free = false;
  budget_->AddInUse(static_cast<int64_t>(bytes));
  return reinterpret_cast<void*>(start);
}

void HostPool::ReleaseUnusedBlocksLocked() {
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    const auto piece = pieces_.find(block->first);
    if (!piece->second.free || piece->second.bytes != block->second) {
      ++block;
      continue;
    }
    free_by_size_.erase({piece->second.bytes, piece->first});
    pieces_.erase(piece);
    source_->Free(reinterpret_cast<void*>(block->first), block->second);
    budget_->Unreserve(block->second);
    block = blocks_.erase(block);
  }
}

std::string HostPool::CheckInvariant() const {
  std::lock_guard<std::mutex> lock(mu_);
  size_t free_pieces = 0;
  size_t pieces_seen = 0;
  for (const auto& block : blocks_) {
    uintptr_t at = block.first;
    bool previous_free = false;
    while (at < block.first + block.second) {
      const auto piece = pieces_.find(at);
      if (piece == pieces_.end()) return "a gap between pieces";
      if (piece->second.block != block.first) return "a piece names another block";
      if (piece->second.free && previous_free) return "two free neighbours";
      if (piece->second.free) {
        ++free_pieces;
        if (free_by_size_.count({piece->second.bytes, at}) == 0) {
          return "a free piece is not in the index";
        }
      }
      previous_free = piece->second.free;
      at += piece->second.bytes;
      ++pieces_seen;
    }
    if (at != block.first + block.second) return "a piece crosses its block's end";
  }
  if (pieces_seen != pieces_.size()) return "a piece outside all blocks";
  return free_pieces == free_by_size_.size() ? "" : "the index holds stale pieces";
}

}  // namespace tfswap
