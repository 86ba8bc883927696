// The home of a variable on disk: a range of a spill file, mapped into memory.
//
// Readers and kernels that access the variable at its address get the bytes of the file, by way of the page cache.
// Copies of planned steps go through staging buffers instead, and bypass the cache where the file does (spill_file.h): it
// would take the host memory that a limit saves. The system keeps the two coherent, block by block: what is written
// through the mapping is written to the file before a range is read from it, and pages are dropped when a range is
// written. The ends of a copy that are no whole blocks go through the mapping.
//
// There are no checksums, since others write through the mapping.
//
// Invariant: the file system has reserved all of the range. So no access to the mapping fails for lack of space.
//
// Not handled: a disk that fails, or a file that is truncated by another process, under an access to the mapping. The
// system ends a process for that (SIGBUS).
//
// This file and disk_home.cc do not depend on TensorFlow.

#ifndef TFSWAP_OPS_CSRC_CORE_DISK_HOME_H_
#define TFSWAP_OPS_CSRC_CORE_DISK_HOME_H_

#include <cstddef>
#include <memory>
#include <string>

#include "copy_engine.h"
#include "export.h"
#include "host_pool.h"
#include "spill_file.h"

namespace tfswap {

class DiskHome {
 public:
  // A home in a file, without a value. Null, and the error in `why`, if there is no room. `node` names who asks. The
  // staging buffers are in `memory`.
  TFSWAP_EXPORT static std::unique_ptr<DiskHome> Make(SpillFile* file, size_t bytes, HostPool* memory,
                                                      const std::string& node, std::string* why);
  ~DiskHome();
  DiskHome(const DiskHome&) = delete;
  DiskHome& operator=(const DiskHome&) = delete;

  char* data() const { return data_; }
  SpillFile* file() const { return file_; }

  // Start a copy of `bytes` > 0 bytes of the home, from its byte `begin` on. `piece` and `done` are as of SpillSlot.
  // The home must live until `done` has been called.
  void Write(size_t begin, size_t bytes, SpillSlot::Piece piece, CopyLane::Done done);
  void Read(size_t begin, size_t bytes, SpillSlot::Piece piece, CopyLane::Done done);

  // Copies from memory, or to it, and returns when the copy has ended. Returns an error, or "".
  std::string WriteNow(size_t begin, size_t bytes, const void* from);
  std::string ReadNow(size_t begin, size_t bytes, void* to);

 private:
  DiskHome(SpillFile* file, HostBuffer place, size_t bytes, std::shared_ptr<Staging> staging);

  // A piece of a copy, which begins at byte `begin` of the home and passes byte `from` on of the copy's bytes.
  CopyLane::Moved WritePiece(const SpillSlot::Piece& piece, size_t from, size_t begin, size_t bytes, char* staging);
  CopyLane::Moved ReadPiece(const SpillSlot::Piece& piece, size_t from, size_t begin, size_t bytes, char* staging);

  using CopyPiece = CopyLane::Moved (DiskHome::*)(const SpillSlot::Piece&, size_t, size_t, size_t, char*);
  void Submit(Direction direction, CopyPiece copy, size_t begin, size_t bytes, SpillSlot::Piece piece,
              CopyLane::Done done);

  SpillFile* const file_;
  HostBuffer place_;
  const size_t bytes_;
  const std::shared_ptr<Staging> staging_;
  void* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
  char* data_ = nullptr;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_DISK_HOME_H_
