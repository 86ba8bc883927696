#include "disk_home.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <utility>

namespace tfswap {
namespace {

constexpr size_t kBlock = Staging::kAlignment;

size_t RoundDown(size_t bytes) { return bytes / kBlock * kBlock; }

// Waits for a copy. `start` starts it, with what is to be called at its end.
std::string Awaited(const std::function<void(CopyLane::Done)>& start) {
  std::mutex mu;
  std::condition_variable changed;
  bool has_ended = false;
  std::string error;
  start([&](const CopyLane::Ended& ended) {
    std::lock_guard<std::mutex> lock(mu);
    error = ended.error;
    has_ended = true;
    changed.notify_one();
  });
  std::unique_lock<std::mutex> lock(mu);
  changed.wait(lock, [&] { return has_ended; });
  return error;
}

}  // namespace

std::unique_ptr<DiskHome> DiskHome::Make(SpillFile* file, size_t bytes, HostPool* memory, const std::string& node,
                                         std::string* why) {
  HostPool::Failure failure = HostPool::Failure::kNone;
  if (!file->reserves_space()) {
    *why = "tfswap can't have variables in spill_dir=" + file->folder() +
           ": its file system reserves no space. Give a folder on another one, such as ext4 or XFS.";
    return nullptr;
  }
  std::shared_ptr<Staging> staging = file->StagingIn(memory, why);
  if (staging == nullptr) return nullptr;
  HostBuffer place = file->AllocateHome(bytes, &failure);
  if (place.data() == nullptr) {
    *why = file->WhyNoRoom(failure, node, bytes, "a variable's home");
    return nullptr;
  }
  std::unique_ptr<DiskHome> made(new DiskHome(file, std::move(place), bytes, std::move(staging)));
  if (made->data_ != nullptr) return made;
  *why = "tfswap can't map " + std::to_string(bytes) + " bytes of its file in spill_dir=" + file->folder() + ": " +
         std::strerror(errno) + ". Raise the limit of the process's address space or of its mappings.";
  return nullptr;
}

DiskHome::DiskHome(SpillFile* file, HostBuffer place, size_t bytes, std::shared_ptr<Staging> staging)
    : file_(file), place_(std::move(place)), bytes_(bytes), staging_(std::move(staging)) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto offset = static_cast<size_t>(FileBlocks::Offset(place_.data()));
  const size_t before = offset % page;
  mapped_bytes_ = before + SpillFile::RoundUp(bytes);
  void* const mapping = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file->file_,
                             static_cast<off_t>(offset - before));
  if (mapping == MAP_FAILED) return;
  mapping_ = mapping;
  data_ = static_cast<char*>(mapping) + before;
}

DiskHome::~DiskHome() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_bytes_);
  file_->FreeHome(std::move(place_), bytes_);
}

void DiskHome::Write(size_t begin, size_t bytes, SpillSlot::Piece piece, CopyLane::Done done) {
  Submit(Direction::kOut, &DiskHome::WritePiece, begin, bytes, std::move(piece), std::move(done));
}

void DiskHome::Read(size_t begin, size_t bytes, SpillSlot::Piece piece, CopyLane::Done done) {
  Submit(Direction::kIn, &DiskHome::ReadPiece, begin, bytes, std::move(piece), std::move(done));
}

// A copy begins with the block of its first byte for the lane, so that its pieces are whole blocks but at the ends.
void DiskHome::Submit(Direction direction, CopyPiece copy, size_t begin, size_t bytes, SpillSlot::Piece piece,
                      CopyLane::Done done) {
  const size_t lead = begin % kBlock;
  file_->lane(direction).Submit(
      lead + bytes,
      [this, direction, copy, lead, first = begin - lead, piece = std::move(piece)](size_t at, size_t part,
                                                                                    int thread) {
        const size_t from = std::max(at, lead), end = at + part;
        return (this->*copy)(piece, from - lead, first + from, end - from, staging_->of(direction, thread).piece);
      },
      std::move(done));
}

std::string DiskHome::WriteNow(size_t begin, size_t bytes, const void* from) {
  return Awaited([&](CopyLane::Done done) {
    Write(
        begin, bytes,
        [from](size_t at, size_t part, char* staging) {
          std::memcpy(staging, static_cast<const char*>(from) + at, part);
          return std::string();
        },
        std::move(done));
  });
}

std::string DiskHome::ReadNow(size_t begin, size_t bytes, void* to) {
  return Awaited([&](CopyLane::Done done) {
    Read(
        begin, bytes,
        [to](size_t at, size_t part, char* staging) {
          std::memcpy(static_cast<char*>(to) + at, staging, part);
          return std::string();
        },
        std::move(done));
  });
}

// The staging buffer and the one after it have room for a piece and the rest of the blocks at its ends.
CopyLane::Moved DiskHome::WritePiece(const SpillSlot::Piece& piece, size_t from, size_t begin, size_t bytes,
                                     char* staging) {
  const size_t first = RoundDown(begin), end = begin + bytes;
  char* const given = staging + (begin - first);
  std::string error = piece(from, bytes, given);
  if (!error.empty()) return {0, std::move(error)};
  const size_t whole = SpillFile::RoundUp(begin);
  const size_t last = end == bytes_ ? SpillFile::RoundUp(end) : RoundDown(end);
  if (whole >= last) {
    std::memcpy(data_ + begin, given, bytes);
    return {bytes, ""};
  }
  std::memcpy(data_ + begin, given, whole - begin);
  if (last < end) {
    std::memcpy(data_ + last, staging + (last - first), end - last);
  } else {
    std::memset(staging + (end - first), 0, last - end);
  }
  const off_t offset = FileBlocks::Offset(place_.data()) + static_cast<off_t>(whole);
  return {bytes, file_->Transfer(Direction::kOut, staging + (whole - first), last - whole, offset)};
}

CopyLane::Moved DiskHome::ReadPiece(const SpillSlot::Piece& piece, size_t from, size_t begin, size_t bytes,
                                    char* staging) {
  const size_t first = RoundDown(begin);
  const size_t whole = SpillFile::RoundUp(begin + bytes) - first;
  const off_t offset = FileBlocks::Offset(place_.data()) + static_cast<off_t>(first);
  std::string error = file_->Transfer(Direction::kIn, staging, whole, offset);
  if (!error.empty()) return {whole, std::move(error)};
  return {bytes, piece(from, bytes, staging + (begin - first))};
}

}  // namespace tfswap
