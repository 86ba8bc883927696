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
#include "traffic.h"

namespace tfswap {

// What is asked of the system, so that a test can be a worse one.
struct FileCalls {
  ssize_t (*write)(int file, const void* from, size_t bytes, off_t offset);
  ssize_t (*read)(int file, void* to, size_t bytes, off_t offset);
  int (*reserve)(int file, off_t offset, off_t bytes);  // 0, or -1 and errno

  static const FileCalls& System();
};

// Stretches of a file as a pool's blocks: their "addresses" are offsets, and nobody follows them.
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

// Buffers that copies go through, aligned as direct I/O wants it. Part of host memory.
class Staging {
 public:
  static constexpr int kThreads = 2;  // per direction: one piece is on the disk while the other is copied
  static constexpr size_t kChunkBytes = size_t{256} << 10;
  static constexpr size_t kAlignment = 4096;
  static constexpr size_t kBytes = 2 * kThreads * kChunkBytes + kAlignment;

  // `memory` has kBytes.
  explicit Staging(HostBuffer memory);
  char* of(Direction direction, int thread) const;

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

  // `piece` reads the tensor, or writes it, on a thread of the file's; it is gone when `done` runs.
  void Write(Piece piece, CopyLane::Done done);
  void Read(Piece piece, CopyLane::Done done);

 private:
  friend class SpillFile;
  SpillSlot(SpillFile* file, HostBuffer place, size_t bytes, std::shared_ptr<Staging> staging);

  std::string WritePiece(const Piece& piece, size_t begin, size_t bytes, char* staging);
  std::string ReadPiece(const Piece& piece, size_t begin, size_t bytes, char* staging);

  SpillFile* const file_;
  const HostBuffer place_;
  const size_t bytes_;
  const std::shared_ptr<Staging> staging_;
  std::vector<uint64_t> checksums_;  // by piece
};

class SpillFile {
 public:
  // The one of this folder, made at first use; lives as long as the process. Null where none can be had, and why.
  TFSWAP_EXPORT static SpillFile* Of(const std::string& folder, std::string* why,
                                     const FileCalls& calls = FileCalls::System());

  // Makes every file's directions links of that bandwidth and latency, those of files to come too.
  static void SetThrottle(const CopyLane::Throttle& throttle);
  static CopyLane::Throttle throttle();
  // Whether there is a file. Takes no lock.
  static bool any();
  // Of all files: bytes reserved and in use, and the most in use.
  static HostBudget::Usage usage();
  static void ResetPeaks();

  // As HostBudget::Claim and Drop, of space in this file; `memory` is the pool that staging is taken from while there
  // are claims. Claim says what is wrong, or "", and then counts.
  std::string Claim(int64_t owner, uint64_t limit_bytes, HostPool* memory);
  void Drop(int64_t owner);

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
  int claims_ = 0;
  std::shared_ptr<Staging> staging_;  // while there are claims
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_SPILL_FILE_H_
