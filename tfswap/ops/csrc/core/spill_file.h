// Swapped tensors in a file: the tier below host memory.
//
// A folder has one file, without a name: it is unlinked before the first write (by O_TMPFILE where the file system has
// it). So the system deletes it when the process ends, for whatever cause. It grows in large blocks, whose space the
// file system reserves. Pieces of the blocks are allocated as in a host pool, and reused from step to step.
//
// Tensors are copied through staging buffers, one for each copy thread, in pieces of kChunkBytes. Reads and writes
// bypass the page cache (O_DIRECT) where the file system allows it: the cache would use the host memory that the limit
// saves, and the file is not read soon. Each piece has a checksum, so changed bytes are reported.
//
// Compression is opt-in (byte_planes.h), and saves time of the disk. A compressed piece keeps the space of a whole one:
// its size depends on the values, and a limit must hold for all values. A piece that compression does not make smaller
// is written uncompressed.
//
// Invariant: a slot's bytes are written and read by its own copies only.
//
// Not handled: a file system on which a buffered write may block for ever.
//
// This file and spill_file.cc do not depend on TensorFlow.

#ifndef TFSWAP_OPS_CSRC_CORE_SPILL_FILE_H_
#define TFSWAP_OPS_CSRC_CORE_SPILL_FILE_H_

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "copy_engine.h"
#include "export.h"
#include "host_pool.h"
#include "byte_planes.h"
#include "copy_stats.h"

namespace tfswap {

// The system calls, which a test can replace by failing ones.
struct FileCalls {
  ssize_t (*write)(int file, const void* from, size_t bytes, off_t offset);
  ssize_t (*read)(int file, void* to, size_t bytes, off_t offset);
  int (*reserve)(int file, off_t offset, off_t bytes);  // 0, or -1 and errno

  static const FileCalls& System();
};

// Ranges of a file as a pool's blocks. Their "addresses" are offsets, and are never dereferenced.
class FileBlocks : public BlockSource {
 public:
  FileBlocks(int file, const FileCalls& calls) : file_(file), calls_(calls) {}

  void* Allocate(size_t bytes) override;
  void Free(void* block, size_t bytes) override;
  bool Populate(void*, size_t) override { return true; }

  // errno of the last Allocate that failed.
  int failure() const { return failure_; }

  static off_t Offset(const void* piece);

 private:
  const int file_;
  const FileCalls& calls_;
  off_t end_ = 0;
  std::atomic<int> failure_{0};
};

// The buffers of copies, aligned for direct I/O. Each has a second buffer of its size, and memory for the codec. They
// count as host memory.
class Staging {
 public:
  static constexpr int kThreads = 2;  // per direction: the disk works on one piece while the other is copied
  static constexpr size_t kChunkBytes = size_t{256} << 10;
  static constexpr size_t kAlignment = 4096;
  static constexpr size_t kOutBytes = 2 * kChunkBytes + planes::kCompressBytes;
  static constexpr size_t kInBytes = 2 * kChunkBytes + planes::kDecompressBytes;
  static constexpr size_t kBytes = kThreads * (kOutBytes + kInBytes) + kAlignment;

  // `memory` has kBytes.
  explicit Staging(HostBuffer memory);

  // The buffers of one thread.
  struct Buffers {
    char* piece;
    char* other;
    void* codec;
  };
  Buffers of(Direction direction, int thread) const;

 private:
  const HostBuffer memory_;
  char* first_;
};

class SpillFile;

// A swapped tensor's place in a file. Its copies must have ended before it is destroyed.
class SpillSlot {
 public:
  // Copies bytes of a tensor, from byte `begin` on, into staging or back. Returns an error, or "".
  using Piece = std::function<std::string(size_t begin, size_t bytes, char* staging)>;

  // Start a copy. `piece` reads or writes the tensor on a thread of the file, and is destroyed before `done` runs.
  // `width` is the number of bytes of one value.
  void Write(size_t width, Piece piece, CopyLane::Done done);
  void Read(Piece piece, CopyLane::Done done);

 private:
  friend class SpillFile;
  SpillSlot(SpillFile* file, HostBuffer place, size_t bytes, std::shared_ptr<Staging> staging);

  // A piece in the file.
  struct Stored {
    uint64_t checksum = 0;
    size_t compressed_bytes = 0;  // 0: not compressed
  };

  CopyLane::Moved WritePiece(const Piece& piece, size_t begin, size_t bytes, const Staging::Buffers& buffers);
  CopyLane::Moved ReadPiece(const Piece& piece, size_t begin, size_t bytes, const Staging::Buffers& buffers);

  SpillFile* const file_;
  const HostBuffer place_;
  const size_t bytes_;
  const std::shared_ptr<Staging> staging_;
  size_t width_ = 1;
  std::vector<Stored> stored_;  // by piece
};

class SpillFile {
 public:
  // The file of this folder. It is created at first use and never destroyed. Null, and the error in `why`, if the
  // folder allows no file.
  TFSWAP_EXPORT static SpillFile* Of(const std::string& folder, std::string* why,
                                     const FileCalls& calls = FileCalls::System());

  // Sets the bandwidth and latency of both directions of all files, later ones included.
  static void SetThrottle(const CopyLane::Throttle& throttle);
  static CopyLane::Throttle throttle();
  // Sets whether later writes to any file are compressed.
  static void SetCompression(bool wanted);
  static bool compression();
  // Whether a file exists. Takes no lock.
  static bool any();
  // The sums over all files of bytes reserved, bytes in use, and their peaks.
  static HostBudget::Usage usage();
  static void ResetPeaks();

  // As HostBudget::Register and Unregister, for space in this file. While registrations exist, the staging buffers are
  // in the pool `memory`. Register returns an error, or "" if it has registered the owner.
  std::string Register(int64_t owner, uint64_t limit_bytes, HostPool* memory);
  void Unregister(int64_t owner);

  // Both report the cause if there is no room, otherwise kNone. `bytes` > 0. What variables' homes take is not counted
  // in what is reserved for a step.
  HostPool::Failure Reserve(size_t bytes);
  std::unique_ptr<SpillSlot> Allocate(size_t bytes, HostPool::Failure* failure);
  // The error message for a node whose `tensor` has no room, with the cause and a remedy.
  std::string WhyNoRoom(HostPool::Failure failure, const std::string& node, size_t bytes,
                        const std::string& tensor) const;

  // For variables' homes (disk_home.h). The staging buffers exist as long as a home does, too; where there are none
  // yet, they are made in `memory`. Null, and the error in `why`, if that has no room.
  std::shared_ptr<Staging> StagingIn(HostPool* memory, std::string* why);
  // The place of a home. Holds nothing, with the cause in `failure`, if there is no room.
  HostBuffer AllocateHome(size_t bytes, HostPool::Failure* failure);
  // Frees the place of a home of `bytes` bytes, and all space where nothing else uses it.
  void FreeHome(HostBuffer place, size_t bytes);
  // Whether the file system reserves space, so that later writes can't fail for lack of it.
  bool reserves_space() const { return reserves_space_; }

  const std::string& folder() const { return folder_; }
  bool direct() const { return direct_; }
  static size_t RoundUp(size_t bytes);

 private:
  friend class DiskHome;
  friend class SpillSlot;
  SpillFile(std::string folder, int file, bool direct, const FileCalls& calls);

  CopyLane& lane(Direction d) { return d == Direction::kOut ? *out_ : *in_; }
  // Uses the page cache for all later reads and writes. Returns 0, or errno.
  int GoBuffered();
  // Reads or writes all bytes, by several calls if the system does a part, and leaves none of them in the page cache.
  // Returns an error, or "".
  std::string Transfer(Direction direction, char* staging, size_t bytes, off_t offset);

  const std::string folder_;
  const int file_;
  std::atomic<bool> direct_;
  const FileCalls& calls_;
  HostBudget budget_;
  FileBlocks blocks_;
  HostPool slots_;
  CopyLane* const out_;
  CopyLane* const in_;
  const bool reserves_space_;
  std::atomic<uint64_t> home_bytes_{0};
  std::mutex mu_;
  int registrations_ = 0;
  std::shared_ptr<Staging> staging_;  // null without registrations
  std::weak_ptr<Staging> latest_staging_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_SPILL_FILE_H_
