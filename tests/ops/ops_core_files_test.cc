// The part of the core's stand-alone test that writes to files: spill files, devices and clients that use them.

#include "ops_core_test.h"

namespace {

size_t FilesIn(const std::string& folder) {
  DIR* const open = opendir(folder.c_str());
  size_t count = 0;
  while (readdir(open) != nullptr) ++count;
  closedir(open);
  return count - 2;
}

// Writes what `at` says of each byte, and reads it back. Returns the first error.
std::string ThereAndBack(SpillSlot* slot, size_t bytes, const std::function<char(size_t)>& at, size_t width = 1,
                         size_t* written = nullptr) {
  std::atomic<bool> ended{false};
  std::string error;
  size_t carried = 0;
  const auto end = [&](const CopyLane::Ended& how) {
    error = how.error;
    carried = how.carried_bytes;
    ended = true;
  };
  slot->Write(
      width,
      [&](size_t begin, size_t piece, char* staging) {
        for (size_t i = 0; i < piece; ++i) staging[i] = at(begin + i);
        return std::string();
      },
      end);
  while (!ended) std::this_thread::yield();
  if (!error.empty()) return error;
  if (written != nullptr) *written = carried;
  ended = false;
  std::vector<char> back(bytes);
  slot->Read(
      [&](size_t begin, size_t piece, char* staging) {
        std::memcpy(back.data() + begin, staging, piece);
        return std::string();
      },
      end);
  while (!ended) std::this_thread::yield();
  if (error.empty() && written != nullptr) CHECK(carried == *written);
  for (size_t i = 0; error.empty() && i < bytes; ++i) CHECK(back[i] == at(i));
  return error;
}

std::string ThereAndBack(SpillSlot* slot, size_t bytes, int seed) {
  return ThereAndBack(slot, bytes, [seed](size_t i) { return static_cast<char>(i * 31 + seed); });
}

void FileGivesBackEveryByte() {
  PooledHost host;
  const std::string folder = NewFolder();
  std::string why;
  SpillFile* const file = SpillFile::Of(folder, &why);
  CHECK(file != nullptr);
  CHECK(SpillFile::Of(folder + "/.", &why) == file);
  HostPool::Failure failure;
  CHECK(file->Allocate(1, &failure) == nullptr);  // no owner is registered
  CHECK(file->Register(1, HostBudget::kUnlimited, &host.pool).empty());
  CHECK(host.budget.usage().in_use_bytes >= Staging::kBytes);
  CHECK(file->Reserve(size_t{8} << 20) == HostPool::Failure::kNone);
  const size_t chunk = Staging::kChunkBytes;
  std::vector<std::pair<std::unique_ptr<SpillSlot>, size_t>> slots;
  for (const size_t bytes : {size_t{1}, size_t{4095}, size_t{4096}, chunk - 1, chunk, chunk + 1, 5 * chunk + 4097}) {
    auto slot = file->Allocate(bytes, &failure);
    CHECK(slot != nullptr);
    slots.emplace_back(std::move(slot), bytes);
  }
  CHECK(SpillFile::usage().reserved_bytes == size_t{8} << 20);
  for (int round = 0; round < 2; ++round) {
    for (auto& [slot, bytes] : slots) CHECK(ThereAndBack(slot.get(), bytes, round).empty());
  }
  CHECK(FilesIn(folder) == 0);  // it has no name
  rmdir(folder.c_str());
  CHECK(ThereAndBack(slots[3].first.get(), slots[3].second, 9).empty());  // nor needs the folder
  slots.clear();
  file->Unregister(1);
  CHECK(SpillFile::usage().reserved_bytes == 0);
  CHECK(host.budget.usage().in_use_bytes == 0);
}

void FileKeepsItsLimit() {
  PooledHost host;
  const std::string folder = NewFolder();
  std::string why;
  CHECK(SpillFile::Of(folder + "/none", &why) == nullptr);
  CHECK(why.find(folder + "/none: No such file or directory") != std::string::npos);
  SpillFile* const file = SpillFile::Of(folder, &why);
  host.budget.SetLimit(4096);
  CHECK(file->Register(1, 100000, &host.pool).find("Raise host_memory_limit=") != std::string::npos);
  host.budget.SetLimit(HostBudget::kUnlimited);
  CHECK(file->Register(1, 100000, &host.pool).empty());
  HostPool::Failure failure;
  CHECK(file->Reserve(200000) == HostPool::Failure::kLimit);
  auto first = file->Allocate(90000, &failure);
  CHECK(first != nullptr);
  CHECK(file->Allocate(90000, &failure) == nullptr);
  CHECK(failure == HostPool::Failure::kLimit);
  why = file->WhyNoRoom(failure, "node", 90000, "x");
  CHECK(why.find(folder) != std::string::npos && why.find("Raise spill_limit=") != std::string::npos);
  first.reset();
  file->Unregister(1);
  rmdir(folder.c_str());
}

// A system that does a part, or nothing, or is interrupted; and one that fails.
std::atomic<int> calls{0};
std::atomic<int> fails_with{0};

ssize_t Part(size_t bytes) {
  switch (++calls % 4) {
    case 0:
      errno = EINTR;
      return -1;
    case 1:
      return static_cast<ssize_t>(bytes > 5000 ? 5000 : bytes);  // no whole blocks
    default:
      return static_cast<ssize_t>(bytes > 65536 ? 65536 : bytes);
  }
}

ssize_t WorseWrite(int file, const void* from, size_t bytes, off_t offset) {
  if (fails_with != 0) {
    errno = fails_with;
    return -1;
  }
  const ssize_t part = Part(bytes);
  return part < 0 ? part : pwrite(file, from, static_cast<size_t>(part), offset);
}

ssize_t WorseRead(int file, void* to, size_t bytes, off_t offset) {
  const ssize_t part = Part(bytes);
  return part < 0 ? part : pread(file, to, static_cast<size_t>(part), offset);
}

std::atomic<bool> full{false};
std::atomic<int> reserving{-1};

int WorseReserve(int file, off_t offset, off_t bytes) {
  reserving = file;
  if (ftruncate(file, offset + (full ? bytes / 2 : bytes)) != 0 || !full) return full ? -1 : 0;
  errno = ENOSPC;
  return -1;
}

// One bit is another.
ssize_t LyingRead(int file, void* to, size_t bytes, off_t offset) {
  const ssize_t got = pread(file, to, bytes, offset);
  if (got > 1000) static_cast<char*>(to)[1000] ^= 4;
  return got;
}

void FileSurvivesAWorseSystem() {
  PooledHost host;
  const std::string folder = NewFolder();
  std::string why;
  static const FileCalls worse{WorseWrite, WorseRead, WorseReserve};
  SpillFile* const file = SpillFile::Of(folder, &why, worse);
  CHECK(file->Register(1, HostBudget::kUnlimited, &host.pool).empty());
  HostPool::Failure failure;
  const size_t bytes = 3 * Staging::kChunkBytes + 12345;
  auto slot = file->Allocate(bytes, &failure);
  for (int round = 0; round < 3; ++round) CHECK(ThereAndBack(slot.get(), bytes, round).empty());
  for (const int failing : {ENOSPC, EIO}) {
    fails_with = failing;
    const std::string error = ThereAndBack(slot.get(), bytes, 1);
    CHECK(error.find(std::strerror(failing)) != std::string::npos && error.find(folder) != std::string::npos);
    fails_with = 0;
    CHECK(ThereAndBack(slot.get(), bytes, 2).empty());
  }
  full = true;
  const off_t before = lseek(reserving, 0, SEEK_END);
  CHECK(file->Allocate(size_t{100} << 20, &failure) == nullptr);
  CHECK(failure == HostPool::Failure::kSystem);
  CHECK(before > 0 && lseek(reserving, 0, SEEK_END) == before);
  CHECK(file->WhyNoRoom(failure, "node", 1, "x").find("No space left on device") != std::string::npos);
  slot.reset();
  file->Unregister(1);
  rmdir(folder.c_str());
}

// Where there is a zstd: tests/ops/test_ops_build.py links TensorFlow's.
void FileCompressesWhatGains() {
  PooledHost host;
  const std::string folder = NewFolder();
  std::string why;
  SpillFile* const file = SpillFile::Of(folder, &why);
  CHECK(file->Register(1, HostBudget::kUnlimited, &host.pool).empty());
  HostPool::Failure failure;
  std::vector<char> random(2 * Staging::kChunkBytes + 4104);
  std::mt19937 generator(1);
  for (char& byte : random) byte = static_cast<char>(generator());
  const auto noise = [&](size_t i) { return random[i]; };
  SpillFile::SetCompression(true);
  for (const size_t width : {1, 2, 4, 8}) {
    const auto numbers = [&](size_t i) { return i % width == width - 1 ? static_cast<char>(i % 3) : noise(i); };
    for (const size_t bytes : {size_t{8}, size_t{4096}, size_t{4104}, size_t{65544}, 2 * Staging::kChunkBytes + 4104}) {
      auto slot = file->Allocate(bytes, &failure);
      size_t written;
      CHECK(ThereAndBack(slot.get(), bytes, numbers, width, &written).empty());
      CHECK(bytes < 65536 || (written > bytes * (width - 1) / width && written < bytes * (width - 0.5) / width));
      CHECK(ThereAndBack(slot.get(), bytes, noise, width, &written).empty());  // as it is
      CHECK(written == SpillFile::RoundUp(bytes));
      SpillFile::SetCompression(false);
      CHECK(ThereAndBack(slot.get(), bytes, numbers, width, &written).empty());
      CHECK(written == SpillFile::RoundUp(bytes));
      SpillFile::SetCompression(true);
    }
  }
  SpillFile::SetCompression(false);
  file->Unregister(1);
  rmdir(folder.c_str());
}

void PlanesNoticeWhatTheyDidNotMake() {
  constexpr size_t kBytes = 100'000;
  std::vector<char> from(kBytes), to(kBytes), back(kBytes);
  std::vector<uint64_t> memory(tfswap::planes::kCompressBytes / 8);
  for (size_t i = 0; i < kBytes; ++i) from[i] = static_cast<char>(i * i % 7);
  const size_t stored = tfswap::planes::Compress(from.data(), kBytes, to.data(), kBytes, memory.data());
  CHECK(stored > 0 && stored < kBytes / 2);
  CHECK(tfswap::planes::Compress(from.data(), kBytes, to.data(), stored - 1, memory.data()) == 0);
  CHECK(tfswap::planes::Compress(from.data(), kBytes, to.data(), kBytes, memory.data()) == stored);
  const auto decompress = [&](size_t given, size_t wanted) {
    return tfswap::planes::Decompress(to.data(), given, back.data(), wanted, memory.data());
  };
  CHECK(decompress(stored, kBytes) && back == from);
  CHECK(!decompress(stored - 1, kBytes) && !decompress(2, kBytes) && !decompress(stored, kBytes - 1));
  std::memset(to.data() + stored / 2, 0x55, stored / 4);
  CHECK(!decompress(stored, kBytes) || back != from);
}

void FileNoticesAFlippedBit() {
  PooledHost host;
  const std::string folder = NewFolder();
  std::string why;
  static const FileCalls lying{pwrite, LyingRead, FileCalls::System().reserve};
  SpillFile* const file = SpillFile::Of(folder, &why, lying);
  CHECK(file->Register(1, HostBudget::kUnlimited, &host.pool).empty());
  HostPool::Failure failure;
  auto slot = file->Allocate(5000, &failure);
  CHECK(ThereAndBack(slot.get(), 5000, 1).find("is not what was written there") != std::string::npos);
  slot.reset();
  file->Unregister(1);
  rmdir(folder.c_str());
}

// Ranges of any ends are written and read, also after accesses to the mapping, which sees what was written.
void HomesOnDiskAreReadAndWrittenInParts() {
  PooledHost host;
  const std::string folder = NewFolder();
  std::string why;
  SpillFile* const file = SpillFile::Of(folder, &why);
  const size_t bytes = 2 * Staging::kChunkBytes + 12345;
  std::vector<char> expected(bytes, 0), found(bytes);
  {
    const auto home = DiskHome::Make(file, bytes, &host.pool, "node", &why);
    CHECK(home != nullptr);
    CHECK(host.budget.usage().in_use_bytes >= Staging::kBytes);
    std::mt19937 generator(1);
    for (int round = 0; round < 200; ++round) {
      const size_t begin = round == 0 ? 0 : generator() % bytes;
      const size_t part = round == 0 ? bytes : 1 + generator() % std::min(bytes - begin, size_t{300000});
      std::vector<char> values(part);
      for (char& value : values) value = static_cast<char>(generator());
      std::memcpy(&expected[begin], values.data(), part);
      if (round % 3 == 2) {
        std::memcpy(home->data() + begin, values.data(), part);
      } else {
        CHECK(home->WriteNow(begin, part, values.data()).empty());
      }
      const size_t first = generator() % bytes, rest = 1 + generator() % (bytes - first);
      CHECK(home->ReadNow(first, rest, &found[first]).empty());
      CHECK(std::memcmp(&found[first], &expected[first], rest) == 0);
      CHECK(round % 20 != 0 || std::memcmp(home->data(), expected.data(), bytes) == 0);
    }
    CHECK(file->Register(1, HostBudget::kUnlimited, &host.pool).empty());
    CHECK(file->Reserve(size_t{100} << 20) == HostPool::Failure::kNone);
    CHECK(SpillFile::usage().reserved_bytes >= (size_t{100} << 20) + bytes);  // the home is not room for the step
    CHECK(file->Reserve(size_t{100} << 20) == HostPool::Failure::kNone);
    const uint64_t reserved = SpillFile::usage().reserved_bytes;
    std::vector<std::unique_ptr<DiskHome>> many;  // what is reserved is in pieces that can be used, not in ends of blocks
    for (int i = 0; i < 4; ++i) many.push_back(DiskHome::Make(file, size_t{25} << 20, &host.pool, "node", &why));
    CHECK(SpillFile::usage().reserved_bytes == reserved);
    many.clear();
    const auto other = DiskHome::Make(file, bytes, &host.pool, "node", &why);
    CHECK(other != nullptr && other->data() != home->data());
    file->Unregister(1);
    CHECK(other->WriteNow(0, bytes, expected.data()).empty());  // it keeps the buffers
    CHECK(FilesIn(folder) == 0);
  }
  CHECK(host.budget.usage().in_use_bytes == 0);
  rmdir(folder.c_str());
}

void HomesOnAFullDiskAreRefused() {
  PooledHost host;
  const std::string folder = NewFolder();
  std::string why;
  static const FileCalls worse{WorseWrite, WorseRead, WorseReserve};
  full = true;
  SpillFile* const file = SpillFile::Of(folder, &why, worse);
  CHECK(DiskHome::Make(file, 5000, &host.pool, "node", &why) == nullptr);
  CHECK(why.find("'node'") != std::string::npos && why.find("No space left on device") != std::string::npos);
  CHECK(host.budget.usage().in_use_bytes == 0);
  full = false;
  const auto home = DiskHome::Make(file, 5000, &host.pool, "node", &why);
  std::vector<char> values(5000, 7), found(5000);
  CHECK(home->WriteNow(0, 5000, values.data()).empty() && home->ReadNow(0, 5000, found.data()).empty());
  CHECK(found == values);
  fails_with = EIO;
  CHECK(home->WriteNow(0, 5000, values.data()).find(std::strerror(EIO)) != std::string::npos);
  fails_with = 0;
  rmdir(folder.c_str());
}

// A copy that does not end holds up its own device's queue, and no other's.
void DevicesDoNotWaitForEachOther() {
  Runtime& runtime = Runtime::Get();
  std::atomic<bool> go{false};
  std::atomic<int> ended{0};
  const auto end = [&](const CopyLane::Ended&) { ++ended; };
  runtime.lane(Direction::kOut).Submit(
      1,
      [&](size_t, size_t bytes, int) {
        while (!go) std::this_thread::yield();
        return CopyLane::Moved{bytes, ""};
      },
      end);
  std::vector<char> from(100), to(100);
  runtime.lane(Direction::kOut).Submit(to.data(), from.data(), from.size(), end);
  for (const Direction direction : {Direction::kOut, Direction::kIn}) {
    runtime.lane(direction, 1).Submit(to.data(), from.data(), from.size(), end);
  }
  while (ended < 2) std::this_thread::yield();
  CHECK(ended == 2);
  go = true;
  while (ended < 4) std::this_thread::yield();
  runtime.SetThrottle({5.0, 0});  // of devices to come too
  CHECK(runtime.lane(Direction::kIn, 1).throttle().bandwidth_bytes_per_s == 5.0);
  CHECK(runtime.lane(Direction::kIn, 2).throttle().bandwidth_bytes_per_s == 5.0);
  runtime.SetThrottle({});
}

// Functions come and go, some to disk, while others copy, on devices of their own.
void ClientsFromManyThreads() {
  Runtime& runtime = Runtime::Get();
  const std::string folder = NewFolder();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<char> from(300000, static_cast<char>(t)), to(from.size());
      for (int i = 0; i < 50; ++i) {
        const int64_t owner = 1 + (t + i) % 3;
        CHECK(runtime.Register(owner, size_t{8} << 20, owner == 1 ? "" : folder, HostBudget::kUnlimited, &runtime.pool())
                  .empty());
        const auto client = runtime.client(owner);
        const uint64_t step = client->copy_stats.Begin();
        std::atomic<bool> ended{false};
        runtime.lane(Direction::kOut, t % 2).Submit(to.data(), from.data(), from.size(), [&](const CopyLane::Ended& how) {
          client->copy_stats.Copied(step, Direction::kOut, Tier::kHost, from.size(), how.carried_bytes, how.busy_s);
          ended = true;
        });
        if (i % 10 == 0) runtime.SetThreads(1 + i % 3);
        while (!ended) std::this_thread::yield();
        CHECK(to == from);
        client->IsAmongFirstSaved(1, 10);
        if (i % 7 == 0) runtime.Forget(owner);
        runtime.Unregister(owner);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(runtime.budget().usage().limit_bytes == HostBudget::kUnlimited);
  CHECK(runtime.budget().usage().reserved_bytes == 0);
  CHECK(SpillFile::usage().reserved_bytes == 0);
  rmdir(folder.c_str());
}

}  // namespace

void TestFiles() {
  FileGivesBackEveryByte();
  FileKeepsItsLimit();
  FileSurvivesAWorseSystem();
  FileNoticesAFlippedBit();
  HomesOnDiskAreReadAndWrittenInParts();
  HomesOnAFullDiskAreRefused();
  DevicesDoNotWaitForEachOther();
  ClientsFromManyThreads();
  if (tfswap::planes::IsAvailable()) {
    FileCompressesWhatGains();
    PlanesNoticeWhatTheyDidNotMake();
    std::puts("with zstd");
  }
}
