#include "spill_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

namespace tfswap {
namespace {

// So that no offset is a null pointer.
constexpr uintptr_t kFirstAddress = HostPool::kBlockMultiple;

// The files of this process, by folder.
struct Files {
  static Files& Get() {
    static Files* const files = new Files;
    return *files;
  }

  std::mutex mu;
  std::map<std::string, SpillFile*> by_folder;
  CopyLane::Throttle throttle;
  std::atomic<bool> compression{false};
};

// Opens a file without a name in `folder`. Returns -1, and errno, on failure.
int OpenNameless(const std::string& folder, int flags) {
#ifdef O_TMPFILE
  const int file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  // Without O_TMPFILE, Linux or the file system tries to open the folder for writing.
  if (file >= 0 || (errno != EISDIR && errno != EOPNOTSUPP && errno != ENOENT)) return file;
#endif
  std::string name = folder + "/tfswap-XXXXXX";
  const int named = mkostemp(&name[0], O_CLOEXEC | flags);  // 0600
  if (named >= 0) unlink(name.c_str());
  return named;
}

// A checksum. Four independent sums, so that a core is as fast as memory. A change of one word always changes it.
// `bytes` is a multiple of 32.
uint64_t Checksum(const char* from, size_t bytes) {
  constexpr uint64_t kPrime = 0x9e3779b97f4a7c15;
  uint64_t sums[4] = {1, 2, 3, 4};
  for (size_t at = 0; at < bytes; at += 32) {
    for (int lane = 0; lane < 4; ++lane) {
      uint64_t word;
      std::memcpy(&word, from + at + 8 * lane, 8);
      sums[lane] = (sums[lane] ^ word) * kPrime;
      sums[lane] ^= sums[lane] >> 29;
    }
  }
  return ((sums[0] * kPrime ^ sums[1]) * kPrime ^ sums[2]) * kPrime ^ sums[3];
}

int ReserveSpace(int file, off_t offset, off_t bytes) {
  if (fallocate(file, 0, offset, bytes) == 0) return 0;
  // A file system without this call allocates space as bytes are written, and reports a lack of space then.
  return errno == EOPNOTSUPP ? 0 : -1;
}

// Has the page cache keep nothing of a range. A range that was written is written to the disk first.
void DropFromCache(int file, bool was_written, off_t offset, off_t bytes) {
  if (was_written) {
    (void)sync_file_range(file, offset, bytes,
                          SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  }
  (void)posix_fadvise(file, offset, bytes, POSIX_FADV_DONTNEED);
}

// Whether the file system of an empty file has that call.
bool ReservesSpace(int file) {
  if (fallocate(file, FALLOC_FL_KEEP_SIZE, 0, Staging::kAlignment) != 0) return errno != EOPNOTSUPP;
  (void)!ftruncate(file, 0);
  return true;
}

}  // namespace

const FileCalls& FileCalls::System() {
  static const FileCalls calls{pwrite, pread, ReserveSpace};
  return calls;
}

void* FileBlocks::Allocate(size_t bytes) {
  bytes = SpillFile::RoundUp(bytes);
  if (calls_.reserve(file_, end_, static_cast<off_t>(bytes)) != 0) {
    failure_ = errno;
    // The file system may have reserved a part before it failed.
    (void)!ftruncate(file_, end_);
    return nullptr;
  }
  void* const block = reinterpret_cast<void*>(kFirstAddress + static_cast<uintptr_t>(end_));
  end_ += static_cast<off_t>(bytes);
  return block;
}

void FileBlocks::Free(void* block, size_t bytes) {
  bytes = SpillFile::RoundUp(bytes);
  const off_t offset = Offset(block);
  if (offset + static_cast<off_t>(bytes) == end_ && ftruncate(file_, offset) == 0) {
    end_ = offset;
    return;
  }
  // A file system without this call frees the space with the file.
  (void)fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(bytes));
}

off_t FileBlocks::Offset(const void* piece) {
  return static_cast<off_t>(reinterpret_cast<uintptr_t>(piece) - kFirstAddress);
}

Staging::Staging(HostBuffer memory) : memory_(std::move(memory)) {
  const auto start = reinterpret_cast<uintptr_t>(memory_.data());
  first_ = reinterpret_cast<char*>((start + kAlignment - 1) / kAlignment * kAlignment);
}

Staging::Buffers Staging::of(Direction direction, int thread) const {
  const bool out = direction == Direction::kOut;
  char* const piece = first_ + (out ? 0 : kThreads * kOutBytes) + thread * (out ? kOutBytes : kInBytes);
  return {piece, piece + kChunkBytes, piece + 2 * kChunkBytes};
}

SpillSlot::SpillSlot(SpillFile* file, HostBuffer place, size_t bytes, std::shared_ptr<Staging> staging)
    : file_(file),
      place_(std::move(place)),
      bytes_(bytes),
      staging_(std::move(staging)),
      stored_((bytes + Staging::kChunkBytes - 1) / Staging::kChunkBytes) {}

void SpillSlot::Write(size_t width, Piece piece, CopyLane::Done done) {
  width_ = width;
  file_->lane(Direction::kOut)
      .Submit(
          bytes_,
          [this, piece = std::move(piece)](size_t begin, size_t bytes, int thread) {
            return WritePiece(piece, begin, bytes, staging_->of(Direction::kOut, thread));
          },
          std::move(done));
}

void SpillSlot::Read(Piece piece, CopyLane::Done done) {
  file_->lane(Direction::kIn)
      .Submit(
          bytes_,
          [this, piece = std::move(piece)](size_t begin, size_t bytes, int thread) {
            return ReadPiece(piece, begin, bytes, staging_->of(Direction::kIn, thread));
          },
          std::move(done));
}

CopyLane::Moved SpillSlot::WritePiece(const Piece& piece, size_t begin, size_t bytes, const Staging::Buffers& buffers) {
  std::string error = piece(begin, bytes, buffers.piece);
  if (!error.empty()) return {0, std::move(error)};
  Stored& stored = stored_[begin / Staging::kChunkBytes];
  stored.compressed_bytes = 0;
  size_t whole = SpillFile::RoundUp(bytes);
  if (SpillFile::compression() && whole > Staging::kAlignment) {
    planes::Cut(buffers.piece, bytes, width_, buffers.other);
    // Compression must save at least one block of the disk.
    stored.compressed_bytes =
        planes::Compress(buffers.other, bytes, buffers.piece, whole - Staging::kAlignment, buffers.codec);
    if (stored.compressed_bytes == 0) planes::Join(buffers.other, bytes, width_, buffers.piece);
  }
  const size_t taken = stored.compressed_bytes == 0 ? bytes : stored.compressed_bytes;
  whole = SpillFile::RoundUp(taken);
  std::memset(buffers.piece + taken, 0, whole - taken);
  stored.checksum = Checksum(buffers.piece, whole);
  const off_t offset = FileBlocks::Offset(place_.data()) + static_cast<off_t>(begin);
  return {whole, file_->Transfer(Direction::kOut, buffers.piece, whole, offset)};
}

CopyLane::Moved SpillSlot::ReadPiece(const Piece& piece, size_t begin, size_t bytes, const Staging::Buffers& buffers) {
  const Stored& stored = stored_[begin / Staging::kChunkBytes];
  const bool compressed = stored.compressed_bytes > 0;
  const size_t whole = SpillFile::RoundUp(compressed ? stored.compressed_bytes : bytes);
  const off_t offset = FileBlocks::Offset(place_.data()) + static_cast<off_t>(begin);
  std::string error = file_->Transfer(Direction::kIn, buffers.piece, whole, offset);
  if (!error.empty()) return {whole, std::move(error)};
  bool intact = Checksum(buffers.piece, whole) == stored.checksum;
  if (intact && compressed) {
    intact = planes::Decompress(buffers.piece, stored.compressed_bytes, buffers.other, bytes, buffers.codec);
    if (intact) planes::Join(buffers.other, bytes, width_, buffers.piece);
  }
  if (!intact) {
    return {whole, "What was read back from the spill file in " + file_->folder() +
                       " is not what was written there: the disk or another process has changed it. Check that disk, "
                       "or give another spill_dir=."};
  }
  return {whole, piece(begin, bytes, buffers.piece)};
}

SpillFile* SpillFile::Of(const std::string& folder, std::string* why, const FileCalls& calls) {
  char resolved[PATH_MAX];
  int problem = realpath(folder.c_str(), resolved) == nullptr ? errno : 0;
  if (problem == 0) {
    Files& files = Files::Get();
    std::lock_guard<std::mutex> lock(files.mu);
    const auto found = files.by_folder.find(resolved);
    if (found != files.by_folder.end()) return found->second;
    bool direct = true;
    int file = OpenNameless(resolved, O_DIRECT);
    if (file < 0 && errno == EINVAL) {
      direct = false;
      file = OpenNameless(resolved, 0);
    }
    if (file >= 0) {
      auto* const made = new SpillFile(resolved, file, direct, calls);
      made->out_->SetThrottle(files.throttle);
      made->in_->SetThrottle(files.throttle);
      return files.by_folder[resolved] = made;
    }
    problem = errno;
  }
  *why = "tfswap can't make a file in spill_dir=" + folder + ": " + std::strerror(problem) +
         ". Give a folder that exists, that this process may write to, and that is on a local disk.";
  return nullptr;
}

void SpillFile::SetThrottle(const CopyLane::Throttle& throttle) {
  Files& files = Files::Get();
  std::lock_guard<std::mutex> lock(files.mu);
  files.throttle = throttle;
  for (const auto& file : files.by_folder) {
    file.second->out_->SetThrottle(throttle);
    file.second->in_->SetThrottle(throttle);
  }
}

CopyLane::Throttle SpillFile::throttle() {
  std::lock_guard<std::mutex> lock(Files::Get().mu);
  return Files::Get().throttle;
}

bool SpillFile::any() { return !Files::Get().by_folder.empty(); }

void SpillFile::SetCompression(bool wanted) { Files::Get().compression = wanted; }

bool SpillFile::compression() { return Files::Get().compression; }

HostBudget::Usage SpillFile::usage() {
  HostBudget::Usage sum;
  sum.limit_bytes = 0;
  std::lock_guard<std::mutex> lock(Files::Get().mu);
  for (const auto& file : Files::Get().by_folder) {
    const HostBudget::Usage one = file.second->budget_.usage();
    sum.reserved_bytes += one.reserved_bytes;
    sum.in_use_bytes += one.in_use_bytes;
    sum.peak_bytes += one.peak_bytes;
  }
  return sum;
}

void SpillFile::ResetPeaks() {
  std::lock_guard<std::mutex> lock(Files::Get().mu);
  for (const auto& file : Files::Get().by_folder) file.second->budget_.ResetPeak();
}

SpillFile::SpillFile(std::string folder, int file, bool direct, const FileCalls& calls)
    : folder_(std::move(folder)),
      file_(file),
      direct_(direct),
      calls_(calls),
      blocks_(file, calls),
      slots_(&blocks_, &budget_),
      out_(new CopyLane(Staging::kChunkBytes, Staging::kThreads)),
      in_(new CopyLane(Staging::kChunkBytes, Staging::kThreads)),
      reserves_space_(ReservesSpace(file)) {}

std::shared_ptr<Staging> SpillFile::StagingIn(HostPool* memory, std::string* why) {
  std::lock_guard<std::mutex> lock(mu_);
  std::shared_ptr<Staging> found = latest_staging_.lock();
  if (found != nullptr) return found;
  HostPool::Failure failure = HostPool::Failure::kNone;
  void* const piece = memory->AllocateAlone(Staging::kBytes, &failure);
  if (piece == nullptr) {
    *why = "tfswap has no host memory for the buffers through which tensors go to spill_dir=" + folder_ + ": " +
           std::to_string(Staging::kBytes) + " bytes. Raise host_memory_limit=.";
    return nullptr;
  }
  found = std::make_shared<Staging>(HostBuffer(memory, piece));
  latest_staging_ = found;
  return found;
}

HostBuffer SpillFile::AllocateHome(size_t bytes, HostPool::Failure* failure) {
  void* const piece = slots_.Allocate(RoundUp(bytes), failure);
  if (piece != nullptr) home_bytes_ += RoundUp(bytes);
  return piece == nullptr ? HostBuffer() : HostBuffer(&slots_, piece);
}

void SpillFile::FreeHome(HostBuffer place, size_t bytes) {
  { const HostBuffer freed = std::move(place); }
  std::lock_guard<std::mutex> lock(mu_);
  if ((home_bytes_ -= RoundUp(bytes)) == 0 && registrations_ == 0) slots_.ReleaseUnusedBlocks();
}

std::string SpillFile::Register(int64_t owner, uint64_t limit_bytes, HostPool* memory) {
  std::string why;
  std::shared_ptr<Staging> staging = StagingIn(memory, &why);
  if (staging == nullptr) return why;
  std::lock_guard<std::mutex> lock(mu_);
  staging_ = std::move(staging);
  ++registrations_;
  budget_.Register(owner, limit_bytes);
  return "";
}

void SpillFile::Unregister(int64_t owner) {
  std::lock_guard<std::mutex> lock(mu_);
  budget_.Unregister(owner);
  if (--registrations_ == 0) staging_ = nullptr;
}

HostPool::Failure SpillFile::Reserve(size_t bytes) {
  return home_bytes_ > 0 ? slots_.ReserveMore(RoundUp(bytes)) : slots_.Reserve(RoundUp(bytes));
}

std::unique_ptr<SpillSlot> SpillFile::Allocate(size_t bytes, HostPool::Failure* failure) {
  std::shared_ptr<Staging> staging;
  {
    std::lock_guard<std::mutex> lock(mu_);
    staging = staging_;
  }
  *failure = HostPool::Failure::kLimit;  // without a registered owner the limit is 0
  if (staging == nullptr) return nullptr;
  void* const piece = slots_.Allocate(RoundUp(bytes), failure);
  if (piece == nullptr) return nullptr;
  return std::unique_ptr<SpillSlot>(new SpillSlot(this, HostBuffer(&slots_, piece), bytes, std::move(staging)));
}

std::string SpillFile::WhyNoRoom(HostPool::Failure failure, const std::string& node, size_t bytes,
                                 const std::string& tensor) const {
  const HostBudget::Usage usage = budget_.usage();
  const std::string message = "tfswap has no room in spill_dir=" + folder_ + " for node '" + node + "': it requests " +
                            std::to_string(RoundUp(bytes)) + " bytes (" + tensor + ") while " +
                            std::to_string(usage.reserved_bytes) + " bytes are taken";
  if (failure == HostPool::Failure::kSystem) {
    return message + ", and the system says: " + std::strerror(blocks_.failure()) +
           ". Make room there, give another spill_dir=, or swap less (a higher memory_limit=, or host_memory_limit=).";
  }
  return message + ", of a limit of " + std::to_string(usage.limit_bytes) +
         ". Raise spill_limit=, or swap less (a higher memory_limit=, or host_memory_limit=).";
}

size_t SpillFile::RoundUp(size_t bytes) {
  return (bytes + Staging::kAlignment - 1) / Staging::kAlignment * Staging::kAlignment;
}

int SpillFile::GoBuffered() {
  std::lock_guard<std::mutex> lock(mu_);
  if (!direct_) return 0;
  direct_ = false;
  return fcntl(file_, F_SETFL, 0) == 0 ? 0 : errno;
}

std::string SpillFile::Transfer(Direction direction, char* staging, size_t bytes, off_t offset) {
  const bool out = direction == Direction::kOut;
  size_t moved = 0;
  int problem = 0;
  bool buffered = false;
  while (moved < bytes && problem == 0) {
    const ssize_t got = out ? calls_.write(file_, staging + moved, bytes - moved, offset + static_cast<off_t>(moved))
                            : calls_.read(file_, staging + moved, bytes - moved, offset + static_cast<off_t>(moved));
    if (got > 0) {
      moved += static_cast<size_t>(got);
    } else if (got == 0) {
      problem = EIO;  // the disk is gone, or the file was truncated
    } else if (errno == EINVAL && !buffered) {
      // Direct I/O is refused, by this file system or because an earlier call ended within a block.
      buffered = true;
      problem = GoBuffered();
    } else if (errno != EINTR) {
      problem = errno;
    }
  }
  if (problem == 0) {
    if (!direct_) DropFromCache(file_, out, offset, static_cast<off_t>(bytes));
    return "";
  }
  return std::string(out ? "Writing to" : "Reading from") + " the spill file in " + folder_ + " failed: " +
         std::strerror(problem) + ". Make room there or check that disk, give another spill_dir=, or swap less " +
         "(a higher memory_limit=, or host_memory_limit=).";
}

}  // namespace tfswap
