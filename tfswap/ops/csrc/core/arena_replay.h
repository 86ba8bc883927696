// Replays a planned step's requests in an arena with given chunks: the step's peak, before it runs.
//
// This simulates TensorFlow's BFC allocator. simulator/bfc_allocator.py has the same simulation, and says what it does
// not model. simulator/requests.py records the requests, and passes/tactics/limit_check.py encodes them. This file does
// not depend on TensorFlow.

#ifndef TFSWAP_OPS_CSRC_CORE_ARENA_REPLAY_H_
#define TFSWAP_OPS_CSRC_CORE_ARENA_REPLAY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tfswap {

struct ArenaChunk {
  uint64_t address;
  uint64_t bytes;
  bool in_use;
};

// Rows of an address, bytes, and whether it is in use, in order of address.
std::vector<ArenaChunk> ChunksOfRows(const int64_t* rows, uint64_t count);

// The bytes of the smallest chunk for a request.
uint64_t ChunkBytes(uint64_t requested_bytes);

class SimulatedArena {
 public:
  // chunks: in order of address.
  // limit_bytes: the largest total size of all regions.
  // collects: whether unused regions are freed when no other can be added.
  SimulatedArena(const std::vector<ArenaChunk>& chunks, uint64_t limit_bytes, bool collects);
  // An arena of one endless region, and these chunks.
  explicit SimulatedArena(const std::vector<ArenaChunk>& chunks);

  // The interface of ChunkSplitter. A request without room gets memory beyond the arena, which is unlimited and never
  // split, and raises the peak over the arena's limit.
  uint64_t Allocate(size_t nbytes);
  // Each later request gets a chunk of its own size.
  void SplitAll() { splits_all_ = true; }
  void Free(uint64_t address);
  std::vector<size_t> FreeBytes() const;

  // Adds a region for a request of `nbytes`, a multiple of 256, as the allocator does. False if the limit forbids it.
  bool Extend(uint64_t rounded);

  uint64_t in_use_bytes() const { return in_use_bytes_; }
  uint64_t peak_bytes() const { return peak_bytes_; }
  void RestartPeak() { peak_bytes_ = in_use_bytes_; }

 private:
  struct Chunk {
    uint64_t bytes;
    bool in_use;
    bool begins_region;
  };

  using Chunks = std::map<uint64_t, Chunk>;

  void Grow(uint64_t rounded);
  void AddEndlessRegion();
  bool Collect(uint64_t rounded);
  void AddRegion(uint64_t bytes);
  uint64_t End() const;
  void SetFree(Chunks::iterator chunk);

  Chunks chunks_;
  std::set<std::pair<uint64_t, uint64_t>> free_;  // by size, then by address
  uint64_t limit_bytes_;
  uint64_t pool_bytes_ = 0;
  uint64_t next_region_bytes_;
  bool collects_;
  bool splits_all_ = false;
  uint64_t in_use_bytes_ = 0;
  uint64_t peak_bytes_ = 0;
};

// A step's requests and releases, in order.
class RecordedRequests {
 public:
  // Decodes the output of `encode` in passes/tactics/limit_check.py. Returns false for other bytes.
  bool Decode(const std::string& encoded);

  // The step's peak in an arena with this content.
  uint64_t PeakBytes(SimulatedArena arena) const;

 private:
  // A varint: the kind in the lowest two bits, and a number above them.
  enum Kind : uint64_t { kRequest = 0, kRelease = 1, kControl = 2, kSplit = 3 };
  enum Control : uint64_t { kFreeRest = 0, kEndOfSplit = 1, kRepeat = 2, kSplitAll = 3 };

  static constexpr uint64_t kUnit = 256;  // BFCAllocator::kMinAllocationSize
  static constexpr size_t kMostEvents = size_t{1} << 24;
  static constexpr uint64_t kMostUnits = uint64_t{1} << 32;  // of one request

  std::vector<uint64_t> events_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_ARENA_REPLAY_H_
