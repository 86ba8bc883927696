// Host memory for swapped tensors, outside TensorFlow's arena.
//
// A pool takes large blocks from a block source: mmap for the CPU, the device's pinned allocator for a GPU. It serves
// requests with 256-byte-aligned pieces of these blocks, by best fit, and merges free neighbours. Blocks are kept from
// step to step, so a step in its steady state maps no memory. All pools of a process share one budget. It bounds the
// bytes of blocks, since these are what the process takes from the machine. The budget is the sum of the steps'
// `host_memory_limit`, and at most the limit set for the process.
//
// Invariant: every byte of every block is in exactly one piece, free or in use, and no two neighbouring pieces of a
// block are both free.
//
// Not handled: moving pieces in use to undo fragmentation (a copy may be running).
//
// This file and host_pool.cc do not depend on TensorFlow.

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

// The source of a pool's blocks. Must outlive the pool. Called with the pool locked, so it may not call the pool.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // Returns null if the system has too little memory. `bytes` is a multiple of 256.
  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* block, size_t bytes) = 0;
  // Backs the whole block with memory now instead of at first touch, where the system can. Returns false if the system
  // has too little memory.
  virtual bool Populate(void* block, size_t bytes) = 0;
};

// Anonymous memory, in huge pages where the system grants them.
class MmapBlockSource : public BlockSource {
 public:
  void* Allocate(size_t bytes) override;
  void Free(void* block, size_t bytes) override;
  bool Populate(void* block, size_t bytes) override;
};

class HostPool;

// The bytes that all pools of the process may take together.
//
// Invariant: a reservation never exceeds the limit at its time. If the limit is lowered later, or the last registration
// ends, unused blocks are released.
class HostBudget {
 public:
  static constexpr uint64_t kUnlimited = UINT64_MAX;

  struct Usage {
    uint64_t limit_bytes = kUnlimited;
    uint64_t reserved_bytes = 0;  // in blocks
    uint64_t in_use_bytes = 0;    // in pieces that are in use
    uint64_t peak_bytes = 0;      // of in_use_bytes, since the last ResetPeak
  };

  // Sets the limit of the whole process.
  void SetLimit(uint64_t bytes);
  uint64_t set_limit() const;

  // Adds a user of the pools with its limit; the limit in force is the sum over all owners. An owner may register
  // several times. The largest of its limits counts, until Unregister was called as often.
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

  // Releases unused blocks of the other pools, for a pool that has reached the limit. Called without that pool's lock.
  void TrimOthers(const HostPool* pool);
  void Join(HostPool* pool);
  void Leave(HostPool* pool);
  uint64_t LimitLocked() const;
  // Releases unused blocks if more is reserved than the limit, which may have been lowered, or always if `all`. Called
  // without mu_, since pools call this object.
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
  // All pieces must be free.
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  // Returns null, and the cause in `failure`, if there is no room. `bytes` > 0.
  TFSWAP_EXPORT void* Allocate(size_t bytes, Failure* failure);
  // The same, in a block of its own where the limit has room for that. So it keeps no other block from being released.
  TFSWAP_EXPORT void* AllocateAlone(size_t bytes, Failure* failure);
  TFSWAP_EXPORT void Free(void* piece);

  // Makes sure that the pool has a block of at least `bytes`, so that a plan's pieces pack into it. If blocks in use
  // leave no room for it, adds the missing bytes as one block. The block is populated: page faults would slow the first
  // step's copies.
  TFSWAP_EXPORT Failure Reserve(size_t bytes);

  // The same in addition to the pieces in use, for a plan next to whose pieces others stay: there is a free piece of
  // that size then, or, where there is no room for one, there are some of a fair size.
  TFSWAP_EXPORT Failure ReserveMore(size_t bytes);

  // Returns blocks without pieces in use to the source.
  void ReleaseUnusedBlocks();

  uint64_t reserved_bytes() const;

  // The bytes of the piece that a request of `bytes` gets.
  static size_t RoundUp(size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Empty if the invariant above holds, otherwise a description of the fault. For tests.
  std::string CheckInvariant() const;

 private:
  struct Piece {
    size_t bytes;
    bool free;
    uintptr_t block;  // the address of the block; pieces merge only within a block
  };
  using Pieces = std::map<uintptr_t, Piece>;

  void* TryAllocate(size_t bytes, Failure* failure);
  Failure TryReserve(size_t bytes);
  Failure TryReserveMore(size_t bytes);
  uint64_t FreeBytesLocked(size_t least_bytes) const;
  // `exactly`: do not round up to huge pages.
  Failure AddBlockLocked(size_t bytes, bool populate, bool exactly = false);
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
