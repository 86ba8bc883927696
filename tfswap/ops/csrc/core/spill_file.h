// Swapped tensors in a file: the tier below host memory.
//
// A folder has one file, which no name leads to: it is unlinked before anything is in it
// (O_TMPFILE where the file system knows that), so it goes with the process, however that
// ends. It grows in large blocks that the file system has to reserve beforehand, and pieces
// of them are handed out as a pool's are, and reused from step to step.
//
// Bytes go by way of staging buffers, one for each copy thread, in pieces of kChunkBytes. They
// bypass the page cache (O_DIRECT) where the file system allows it: it would take the host
// memory that a limit was set for, and what went out is not read soon. Each piece carries a
// checksum: what comes back is what went out, or an error.
//
// Who asks for it has pieces compressed on their way (byte_planes.h), which then take less of a disk's time. Their
// places are those of whole pieces all the same: how well values compress is known when they are there, and a limit is
// to hold whatever they are. So a piece that gains nothing is written as it is.
//
// Invariant: a slot's bytes are written and read by its own copies alone.
//
// Not handled: a file system on which even a buffered write may block for ever.
//
// This file and spill_file.cc know nothing of TensorFlow.

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

// What is asked of the system, so that a test can be a worse one.
struct FileCalls {
  ssize_t (*write)(int file, const void* from, size_t bytes, off_t offset);
  ssize_t (*read)(int file, void* to, size_t bytes, off_t offset);
  int (*reserve)(int file, off_t offset, off_t bytes);  // 0, or -1 and errno

  static const FileCalls& System();
};

// Stretches of a file as a pool's blocks: their "addresses" are offsets, and are never dereferenced.
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

// Buffers that copies go through, aligned as direct I/O wants it, and next to each as large a one and the codec's own
// memory. Part of host memory.
class Staging {
 public:
  static constexpr int kThreads = 2;  // per direction: one piece is on the disk while the other is copied
  static constexpr size_t kChunkBytes = size_t{256} << 10;
  static constexpr size_t kAlignment = 4096;
  static constexpr size_t kOutBytes = 2 * kChunkBytes + planes::kCompressBytes;
  static constexpr size_t kInBytes = 2 * kChunkBytes + planes::kDecompressBytes;
  static constexpr size_t kBytes = kThreads * (kOutBytes + kInBytes) + kAlignment;

  // `memory` has kBytes.
  explicit Staging(HostBuffer memory);

  // What one thread has.
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

// A swapped tensor's place in a file. Its copies must have ended before it goes.
class SpillSlot {
 public:
  // From a tensor's byte `begin` into staging, or back. Says what went wrong, or "".
  using Piece = std::function<std::string(size_t begin, size_t bytes, char* staging)>;

  // `piece` reads the tensor, or writes it, on a thread of the file's; it is gone when `done` runs. The tensor's values
  // have `width` bytes.
  void Write(size_t width, Piece piece, CopyLane::Done done);
  void Read(Piece piece, CopyLane::Done done);

 private:
  friend class SpillFile;
  SpillSlot(SpillFile* file, HostBuffer place, size_t bytes, std::shared_ptr<Staging> staging);

  // How a piece lies in the file.
  struct Stored {
    uint64_t checksum = 0;
    size_t compressed_bytes = 0;  // 0: as it is
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
  // The one of this folder, made at first use; lives as long as the process. Null where none can be had, and why.
  TFSWAP_EXPORT static SpillFile* Of(const std::string& folder, std::string* why,
                                     const FileCalls& calls = FileCalls::System());

  // Makes every file's directions links of that bandwidth and latency, those of files to come too.
  static void SetThrottle(const CopyLane::Throttle& throttle);
  static CopyLane::Throttle throttle();
  // Whether what is written from now on is compressed, in every file.
  static void SetCompression(bool wanted);
  static bool compression();
  // Whether there is a file. Takes no lock.
  static bool any();
  // Of all files: bytes reserved and in use, and the most in use.
  static HostBudget::Usage usage();
  static void ResetPeaks();

  // As HostBudget::Register and Unregister, of space in this file; `memory` is the pool that staging is taken from
  // while there are registrations. Register says what is wrong, or "", and then counts.
  std::string Register(int64_t owner, uint64_t limit_bytes, HostPool* memory);
  void Unregister(int64_t owner);

  // Both return kNone, or why there is no room. `bytes` > 0.
  HostPool::Failure Reserve(size_t bytes);
  std::unique_ptr<SpillSlot> Allocate(size_t bytes, HostPool::Failure* failure);
  // Why there is no room for `bytes` of `tensor`, for that node, and what to do.
  std::string WhyNoRoom(HostPool::Failure failure, const std::string& node, size_t bytes,
                        const std::string& tensor) const;

  const std::string& folder() const { return folder_; }
  bool direct() const { return direct_; }
  static size_t RoundUp(size_t bytes);

 private:
  friend class SpillSlot;
  SpillFile(std::string folder, int file, bool direct, const FileCalls& calls);

  CopyLane& lane(Direction d) { return d == Direction::kOut ? *out_ : *in_; }
  // By way of the page cache from now on. 0, or errno.
  int GoBuffered();
  // Whole, however often the system does a part only. "" or what is wrong.
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
  std::mutex mu_;
  int registrations_ = 0;
  std::shared_ptr<Staging> staging_;  // while there are registrations
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_SPILL_FILE_H_
