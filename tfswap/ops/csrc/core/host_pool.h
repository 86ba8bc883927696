// Host memory for swapped tensors, outside TensorFlow's arena.
//
// A pool takes large blocks from a block source (mmap for the CPU, the device's
// pinned allocator for a GPU), hands out 256-byte-aligned pieces by best fit, and
// merges neighbours when they come back. Blocks are kept from step to step, so a
// step in its steady state maps nothing. All pools of a process draw on one
// budget, which bounds the bytes of *blocks*: that is what the process really takes
// from the machine. It is what the steps of this process may take together, each as
// much as its `host_memory_limit`, and no more than the process has been given.
//
// Invariant: every byte of every block is in exactly one piece, free or in use,
// and no two neighbouring pieces of a block are both free.
//
// Not handled: moving live pieces to undo fragmentation (a copy may be running).
//
// This file and host_pool.cc know nothing of TensorFlow.

#ifndef TFSWAP_OPS_CSRC_CORE_HOST_POOL_H_
#define TFSWAP_OPS_CSRC_CORE_HOST_POOL_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "export.h"

namespace tfswap {

// Where a pool's blocks come from. Must outlive the pool. Called with the pool
// locked, so it may not call back into the pool.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // Returns null when the system has no more. `bytes` is a multiple of 256.
  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* block, size_t bytes) = 0;
  // Makes the system back the whole block now instead of at first touch, where
  // that can be done. False: it has too little memory.
  virtual bool Populate(void* block, size_t bytes) = 0;
};

// Anonymous memory in huge pages where the system grants them; none where the system has too little left.
class MmapBlockSource : public BlockSource {
 public:
  void* Allocate(size_t bytes) override;
  void Free(void* block, size_t bytes) override;
  bool Populate(void* block, size_t bytes) override;
};

class HostPool;

// What all pools of the process may take together.
//
// Invariant: never more is reserved than the limit was at that moment. Where the limit has
// come down since, or the last registration has ended, blocks with nothing in use have been given
// back.
class HostBudget {
 public:
  static constexpr uint64_t kUnlimited = UINT64_MAX;

  struct Usage {
    uint64_t limit_bytes = kUnlimited;
    uint64_t reserved_bytes = 0;  // in blocks
    uint64_t in_use_bytes = 0;    // in pieces that are handed out
    uint64_t peak_bytes = 0;      // of in_use_bytes, since the last ResetPeak
  };

  // For the process as a whole.
  void SetLimit(uint64_t bytes);
  uint64_t set_limit() const;

  // One who uses the pools, and what that may take: the limit is the sum over all of them. A registration may be made
  // several times, by its owner's number, and counts once, the largest; it ends when as many were ended.
  TFSWAP_EXPORT void Register(int64_t owner, uint64_t bytes);
  TFSWAP_EXPORT void Unregister(int64_t owner);

  bool TryReserve(uint64_t bytes);
  void Unreserve(uint64_t bytes);
  void AddInUse(int64_t bytes);
  void ResetPeak();
  Usage usage() const;

 private:
  friend class HostPool;

  struct Owner {
    uint64_t bytes = 0;
    int registrations = 0;
  };

  // Returns unused blocks of other pools to their sources: a pool has none left of the limit and needs them. Without
  // that pool's lock.
  void TrimOthers(const HostPool* pool);
  void Join(HostPool* pool);
  void Leave(HostPool* pool);
  uint64_t LimitLocked() const;
  // Gives back what the limit, which may have come down, does not cover, or all that is not in use. Without mu_: pools
  // call in here.
  void Trim(bool all = false);

  mutable std::mutex mu_;
  uint64_t set_limit_ = kUnlimited;
  std::map<int64_t, Owner> owners_;
  Usage usage_;
  std::mutex pools_mu_;  // taken before any pool's
  std::vector<HostPool*> pools_;
};

class HostPool {
 public:
  static constexpr size_t kAlignment = 256;
  static constexpr size_t kBlockMultiple = size_t{2} << 20;     // a huge page
  static constexpr size_t kDefaultBlockBytes = size_t{64} << 20;

  enum class Failure { kNone, kLimit, kSystem };

  HostPool(BlockSource* source, HostBudget* budget);
  // Every piece must have come back.
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  // Returns null and says why in `failure` when there is no room. `bytes` > 0.
  TFSWAP_EXPORT void* Allocate(size_t bytes, Failure* failure);
  TFSWAP_EXPORT void Free(void* piece);

  // Makes sure that the pool has a block of at least `bytes`, so that a plan's pieces
  // pack into it; where blocks in use leave no room for one, the missing part as one
  // block. It is populated: page faults would slow the first step's copies.
  TFSWAP_EXPORT Failure Reserve(size_t bytes);

  // Gives blocks with nothing in use back to the source.
  void ReleaseUnusedBlocks();

  uint64_t reserved_bytes() const;

  // Bytes that a request of `bytes` really takes.
  static size_t RoundUp(size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Empty when the invariant above holds, else what is wrong. For tests.
  std::string CheckInvariant() const;

 private:
  struct Piece {
    size_t bytes;
    bool free;
    // Start of the block; a piece merges only within its block.
    uintptr_t block;
  };
  using Pieces = std::map<uintptr_t, Piece>;

  void* TryAllocate(size_t bytes, Failure* failure);
  Failure TryReserve(size_t bytes);
  Failure AddBlockLocked(size_t bytes, bool populate);
  uint64_t ReservedBytesLocked() const;
  void* TakeLocked(size_t bytes);
  void ReleaseUnusedBlocksLocked();

  BlockSource* const source_;
  HostBudget* const budget_;
  mutable std::mutex mu_;
  Pieces pieces_;
  std::set<std::pair<size_t, uintptr_t>> free_by_size_;
  std::map<uintptr_t, size_t> blocks_;
};

// Owns one piece and returns it to its pool.
class HostBuffer {
 public:
  HostBuffer() = default;
  HostBuffer(HostPool* pool, void* data) : pool_(pool), data_(data) {}
  HostBuffer(HostBuffer&& other) noexcept { *this = std::move(other); }
  HostBuffer& operator=(HostBuffer&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~HostBuffer() {
    if (data_ != nullptr) pool_->Free(data_);
  }
  void* data() const { return data_; }

 private:
  HostPool* pool_ = nullptr;
  void* data_ = nullptr;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_HOST_POOL_H_
