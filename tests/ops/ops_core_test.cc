// A stand-alone test of the core without TensorFlow (host_pool, copy_engine, spill_file, runtime). `make sanitize` (tests/support/sanitize.py)
// builds and runs it under the sanitizers, tests/ops/test_ops_build.py without one.

#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "copy_engine.h"
#include "online_choice.h"
#include "host_pool.h"
#include "byte_planes.h"
#include "runtime.h"
#include "spill_file.h"
#include "system_memory.h"

namespace {

using tfswap::AvailableMemory;
using tfswap::CopyLane;
using tfswap::Direction;
using tfswap::FileCalls;
using tfswap::HostBudget;
using tfswap::HostPool;
using tfswap::MmapBlockSource;
using tfswap::Runtime;
using tfswap::SpillFile;
using tfswap::SpillSlot;
using tfswap::Staging;
using tfswap::Tier;

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "line %d: not so: %s\n", __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

void PoolReusesSplitsAndMerges() {
  HostBudget budget;
  MmapBlockSource source;
  HostPool pool(&source, &budget);
  HostPool::Failure failure;
  std::mt19937 random(7);
  std::vector<std::pair<unsigned char*, size_t>> live;
  for (int round = 0; round < 3000; ++round) {
    if (live.size() < 40 && random() % 2 == 0) {
      const size_t bytes = 1 + random() % (size_t{1} << 20);
      auto* piece = static_cast<unsigned char*>(pool.Allocate(bytes, &failure));
      CHECK(failure == HostPool::Failure::kNone);
      CHECK(reinterpret_cast<uintptr_t>(piece) % HostPool::kAlignment == 0);
      std::memset(piece, static_cast<int>(bytes % 251), bytes);
      live.emplace_back(piece, bytes);
    } else if (!live.empty()) {
      std::swap(live[random() % live.size()], live.back());
      const auto [piece, bytes] = live.back();
      // No other block has these bytes.
      for (size_t i = 0; i < bytes; i += 97) CHECK(piece[i] == bytes % 251);
      pool.Free(piece);
      live.pop_back();
    }
    if (round % 100 == 0) CHECK(pool.CheckInvariant().empty());
  }
  // The peak of live bytes was 40 MiB: one block must have done.
  CHECK(pool.reserved_bytes() == HostPool::kDefaultBlockBytes);
  for (const auto& piece : live) pool.Free(piece.first);
  CHECK(pool.CheckInvariant().empty());
  CHECK(budget.usage().in_use_bytes == 0);
  pool.ReleaseUnusedBlocks();
  CHECK(budget.usage().reserved_bytes == 0);
}

void PoolTakesTheBestFit() {
  HostBudget budget;
  MmapBlockSource source;
  HostPool pool(&source, &budget);
  HostPool::Failure failure;
  void* large = pool.Allocate(8192, &failure);
  void* wall = pool.Allocate(256, &failure);
  void* small = pool.Allocate(1024, &failure);
  void* wall2 = pool.Allocate(256, &failure);
  pool.Free(large);
  pool.Free(small);
  void* fitting = pool.Allocate(1000, &failure);
  CHECK(fitting == small);
  for (void* piece : {wall, wall2, fitting}) pool.Free(piece);
}

// A device's pinned pool and the CPU's share one limit: what one holds unused is the other's.
void PoolsLeaveEachOtherWhatTheyDoNotUse() {
  HostBudget budget;
  MmapBlockSource source;
  HostPool pinned(&source, &budget), pageable(&source, &budget);
  HostPool::Failure failure;
  budget.SetLimit(size_t{8} << 20);
  CHECK(pageable.Reserve(size_t{8} << 20) == HostPool::Failure::kNone);
  void* piece = pinned.Allocate(size_t{4} << 20, &failure);
  CHECK(piece != nullptr && failure == HostPool::Failure::kNone);
  CHECK(pageable.reserved_bytes() == 0);
  // What is in use stays where it is.
  CHECK(pageable.Reserve(size_t{6} << 20) == HostPool::Failure::kLimit);
  pinned.Free(piece);
  CHECK(pageable.Reserve(size_t{6} << 20) == HostPool::Failure::kNone);
  CHECK(pinned.reserved_bytes() == 0);
}

void PoolKeepsTheLimit() {
  HostBudget budget;
  MmapBlockSource source;
  HostPool pool(&source, &budget);
  HostPool::Failure failure;
  const size_t two_mib = HostPool::kBlockMultiple;
  budget.SetLimit(3 * two_mib);
  void* first = pool.Allocate(two_mib, &failure);  // less than a default block
  CHECK(first != nullptr);
  CHECK(pool.Allocate(3 * two_mib, &failure) == nullptr);
  CHECK(failure == HostPool::Failure::kLimit);
  CHECK(budget.usage().reserved_bytes == two_mib);
  CHECK(pool.Reserve(4 * two_mib) == HostPool::Failure::kLimit);
  pool.Free(first);
  // Only after the small block is returned is there room for one of this size.
  void* whole = pool.Allocate(3 * two_mib, &failure);
  CHECK(whole != nullptr);
  CHECK(budget.usage().reserved_bytes == 3 * two_mib);
  pool.Free(whole);
  budget.SetLimit(HostBudget::kUnlimited);
  CHECK(pool.Allocate(SIZE_MAX - 4096, &failure) == nullptr);
  CHECK(failure == HostPool::Failure::kSystem);
  CHECK(pool.Reserve(10 * two_mib) == HostPool::Failure::kNone);
  CHECK(pool.reserved_bytes() == 10 * two_mib);
}

void RegisteredLimitsAddUp() {
  HostBudget budget;
  MmapBlockSource source;
  HostPool pool(&source, &budget);
  HostPool::Failure failure;
  budget.Register(1, 1000);
  budget.Register(1, 1000);  // the same one, twice: counts once
  budget.Register(2, 256);
  CHECK(budget.usage().limit_bytes == 1256);
  // A limit that is no multiple of anything can be used up.
  CHECK(pool.Reserve(1000) == HostPool::Failure::kNone);
  CHECK(budget.usage().reserved_bytes == 1024);
  budget.Register(2, 300);
  void* rest = pool.Allocate(1024, &failure);
  CHECK(rest != nullptr);
  CHECK(pool.Allocate(512, &failure) == nullptr);
  CHECK(failure == HostPool::Failure::kLimit);
  pool.Free(rest);
  budget.Register(3, HostBudget::kUnlimited);
  CHECK(budget.usage().limit_bytes == HostBudget::kUnlimited);
  budget.SetLimit(2000);  // what the process has been given holds for all together
  CHECK(budget.usage().limit_bytes == 2000);
  budget.Unregister(3);
  CHECK(budget.usage().limit_bytes == 1300);
  budget.Unregister(1);
  CHECK(budget.usage().limit_bytes == 1300);
  budget.Unregister(1);
  CHECK(budget.usage().limit_bytes == 300);
  CHECK(budget.usage().reserved_bytes == 0);  // unused blocks were returned
  budget.Unregister(2);
  budget.Unregister(2);
  CHECK(budget.usage().limit_bytes == 2000);
}

// Two pieces that fit into what there is in all, but into none of the blocks.
void AStepsMemoryIsOneBlock() {
  HostBudget budget;
  MmapBlockSource source;
  HostPool pool(&source, &budget);
  HostPool::Failure failure;
  const size_t two_mib = HostPool::kBlockMultiple;
  CHECK(pool.Reserve(2 * two_mib) == HostPool::Failure::kNone);
  void* held = pool.Allocate(two_mib, &failure);
  CHECK(pool.Reserve(4 * two_mib) == HostPool::Failure::kNone);
  CHECK(pool.reserved_bytes() == 6 * two_mib);
  pool.Free(held);
  budget.SetLimit(5 * two_mib);
  CHECK(pool.Reserve(5 * two_mib) == HostPool::Failure::kNone);
  CHECK(pool.reserved_bytes() == 5 * two_mib);
  void* whole = pool.Allocate(5 * two_mib, &failure);
  CHECK(whole != nullptr);
  pool.Free(whole);
}

void PoolFromManyThreads() {
  HostBudget budget;
  MmapBlockSource source;
  HostPool pool(&source, &budget);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      std::mt19937 random(t);
      HostPool::Failure failure;
      for (int i = 0; i < 500; ++i) {
        const size_t bytes = 1 + random() % 100000;
        auto* piece = static_cast<unsigned char*>(pool.Allocate(bytes, &failure));
        std::memset(piece, t, bytes);
        CHECK(piece[bytes - 1] == t);
        pool.Free(piece);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(pool.CheckInvariant().empty());
  CHECK(budget.usage().in_use_bytes == 0);
}

// Every size around the boundaries of lines, streaming and chunks, misaligned too.
void LaneCopiesEveryByte() {
  auto* lane = new CopyLane;
  const size_t chunk = size_t{2} << 20;
  for (const int threads : {1, 3, 2, 1}) {
    lane->SetThreads(threads);
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{63}, chunk / 2 - 1, chunk / 2 + 77,
                               chunk, chunk + 1, 3 * chunk + 12345}) {
      for (const size_t shift : {0, 1, 60}) {
        std::vector<unsigned char> from(bytes + 64);
        std::vector<unsigned char> to(bytes + 128, 0xEE);
        for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 31);
        std::atomic<bool> ended{false};
        lane->Submit(to.data() + shift, from.data(), bytes, [&](const CopyLane::Ended&) { ended = true; });
        while (!ended) std::this_thread::yield();
        CHECK(std::memcmp(to.data() + shift, from.data(), bytes) == 0);
        CHECK(shift == 0 || to[shift - 1] == 0xEE);
        CHECK(to[shift + bytes] == 0xEE);
      }
    }
  }
}

void LaneKeepsItsOrder() {
  auto* lane = new CopyLane;
  std::vector<char> from(1000), to(1000);
  std::vector<int> ended;  // written by the lane's one thread
  std::atomic<int> count{0};
  for (int i = 0; i < 200; ++i) {
    lane->Submit(to.data(), from.data(), from.size(), [&, i](const CopyLane::Ended&) {
      ended.push_back(i);
      ++count;
    });
  }
  while (count < 200) std::this_thread::yield();
  for (int i = 0; i < 200; ++i) CHECK(ended[i] == i);
}

// A copy that would take hours ends when the throttle is lifted.
void LaneNoticesANewThrottle() {
  auto* lane = new CopyLane;
  lane->SetThrottle({1000.0, 0});
  std::vector<char> from(size_t{8} << 20, 5), to(size_t{8} << 20);
  std::atomic<bool> ended{false};
  lane->Submit(to.data(), from.data(), from.size(), [&](const CopyLane::Ended&) { ended = true; });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(!ended);
  lane->SetThrottle({});
  while (!ended) std::this_thread::yield();
  CHECK(to == from);
}

// The same when the throttle is lifted while the bytes themselves are being copied. The
// target's pages can't be written until that has happened: the copy thread's first store
// ends in the signal handler, and waits there.
char* held_back = nullptr;
constexpr size_t kHeldBackBytes = size_t{1} << 20;
std::atomic<bool> copying{false};
std::atomic<bool> lifted{false};

void HoldBack(int) {
  copying = true;
  while (!lifted) {
  }
  mprotect(held_back, kHeldBackBytes, PROT_READ | PROT_WRITE);
}

void LaneNoticesANewThrottleWhileItCopies() {
  held_back = static_cast<char*>(mmap(nullptr, kHeldBackBytes, PROT_NONE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  struct sigaction hold_back = {}, before;
  hold_back.sa_handler = HoldBack;
  CHECK(sigaction(SIGSEGV, &hold_back, &before) == 0);
  auto* lane = new CopyLane;
  lane->SetThrottle({1000.0, 0});
  const std::vector<char> from(kHeldBackBytes, 5);
  std::atomic<bool> ended{false};
  lane->Submit(held_back, from.data(), from.size(), [&](const CopyLane::Ended&) { ended = true; });
  while (!copying) std::this_thread::yield();
  lane->SetThrottle({});
  lifted = true;
  while (!ended) std::this_thread::yield();
  CHECK(std::memcmp(held_back, from.data(), from.size()) == 0);
  sigaction(SIGSEGV, &before, nullptr);
  munmap(held_back, kHeldBackBytes);
}

// The link is serial: however many threads, copies never beat the bandwidth.
void LaneIsASerialLink() {
  auto* lane = new CopyLane;
  lane->SetThreads(2);
  const double bandwidth = 400e6;
  lane->SetThrottle({bandwidth, 1000});
  std::vector<char> from(size_t{4} << 20), to(size_t{4} << 20);
  std::atomic<int> count{0};
  const auto start = CopyLane::Clock::now();
  for (int i = 0; i < 4; ++i) {
    lane->Submit(to.data(), from.data(), from.size(), [&](const CopyLane::Ended&) { ++count; });
  }
  while (count < 4) std::this_thread::yield();
  const double taken = std::chrono::duration<double>(CopyLane::Clock::now() - start).count();
  CHECK(taken >= 4 * (static_cast<double>(from.size()) / bandwidth + 1e-3));
}

void LaneFromManyThreads() {
  auto* lane = new CopyLane;
  lane->SetThreads(2);
  std::atomic<int> count{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        auto* data = new std::vector<char>(20000 + i, static_cast<char>(t));
        auto* copy = new std::vector<char>(data->size());
        lane->Submit(copy->data(), data->data(), data->size(), [&count, data, copy](const CopyLane::Ended&) {
          CHECK(*data == *copy);
          delete data;
          delete copy;
          ++count;
        });
        if (i % 10 == 0) lane->SetThreads(1 + i % 3);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  while (count < 150) std::this_thread::yield();
}

// What a copy throws, or says, is its failure; the next copy is none the worse.
void LaneHearsOfFailure() {
  auto* lane = new CopyLane(1000, 2);
  for (const bool throws : {true, false}) {
    std::atomic<int> pieces{0};
    std::atomic<bool> ended{false};
    std::string error;
    lane->Submit(
        10000,
        [&](size_t begin, size_t bytes, int) -> CopyLane::Moved {
          ++pieces;
          if (begin < 3000) return {bytes, ""};
          if (throws) throw std::runtime_error("thrown");
          return {bytes, "reported"};
        },
        [&](const CopyLane::Ended& how) {
          error = how.error;
          ended = true;
        });
    while (!ended) std::this_thread::yield();
    CHECK(error == (throws ? "thrown" : "reported"));
    CHECK(pieces >= 4 && pieces <= 5);  // those that the other thread was at; the rest is not tried
  }
  std::vector<char> from(5000, 1), to(5000);
  std::atomic<bool> ended{false};
  lane->Submit(to.data(), from.data(), from.size(), [&](const CopyLane::Ended& how) {
    CHECK(how.error.empty());
    ended = true;
  });
  while (!ended) std::this_thread::yield();
  CHECK(to == from);
}

// A system that gives no threads: who submits a copy makes it. In a process of its own, with no room for a stack; nor,
// then, for what the sanitizers keep.
void LaneWithoutThreads() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  const pid_t child = fork();
  if (child == 0) {
    std::vector<char> from(size_t{3} << 20, 5), to(size_t{3} << 20);
    auto* lane = new CopyLane;
    const rlimit none{size_t{1} << 20, size_t{1} << 20};
    setrlimit(RLIMIT_AS, &none);
    bool at_once = false;
    lane->Submit(to.data(), from.data(), from.size(), [&](const CopyLane::Ended& how) { at_once = how.at_once; });
    _exit(at_once && to == from && !lane->started() ? 0 : 1);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}

std::string NewFolder() {
  char folder[] = "/tmp/tfswap_core_test_XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  return folder;
}

// A machine of files, and what is left on it.
uint64_t LeftWith(const std::vector<std::pair<std::string, std::string>>& files) {
  namespace fs = std::filesystem;
  const std::string root = NewFolder();
  for (const auto& [path, text] : files) {
    fs::create_directories(fs::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  }
  const uint64_t left = AvailableMemory(root);
  fs::remove_all(root);
  return left;
}

void MemoryIsTheMachinesAndTheContainers() {
  CHECK(LeftWith({}) == UINT64_MAX);
  const std::pair<std::string, std::string> machine{"/proc/meminfo", "MemFree: 1 kB\nMemAvailable:  1000 kB\n"};
  CHECK(LeftWith({machine}) == 1024000);
  const std::string group = "/sys/fs/cgroup/pod/job/memory.";
  const std::pair<std::string, std::string> unified{"/proc/self/cgroup", "0::/pod/job\n"};
  const std::pair<std::string, std::string> used{group + "current", "5000\n"};
  CHECK(LeftWith({machine, unified, used, {group + "max", "9000\n"}}) == 4000);
  CHECK(LeftWith({machine, unified, used, {group + "max", "max\n"}}) == 1024000);
  const std::pair<std::string, std::string> cached{group + "stat", "anon 1\ninactive_file 3000\n"};
  CHECK(LeftWith({machine, unified, used, cached, {group + "max", "9000\n"}}) == 7000);
  CHECK(LeftWith({machine, unified, used, {group + "max", "4000\n"}}) == 0);
  // That of a group above, or of a container, whose path is not to be seen.
  const std::string top = "/sys/fs/cgroup/memory.";
  CHECK(LeftWith({machine, unified, {top + "max", "700\n"}, {top + "current", "0\n"}}) == 700);
  CHECK(LeftWith({machine,
                  {"/proc/self/cgroup", "5:cpu:/a\n4:memory:/a\n0::/\n"},
                  {"/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "90\n"},
                  {"/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "30\n"},
                  {"/sys/fs/cgroup/memory/a/memory.stat", "inactive_file 9\ntotal_inactive_file 10\n"}}) == 70);
  // More than any machine has is not asked for: the system would grant it, and end who uses it.
  HostBudget budget;
  MmapBlockSource source;
  HostPool pool(&source, &budget);
  CHECK(pool.Reserve(size_t{1} << 46) == HostPool::Failure::kSystem);
  CHECK(budget.usage().reserved_bytes == 0);
}

// --- files ---------------------------------------------------------------------------------------------------------

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
  HostBudget budget;
  MmapBlockSource source;
  HostPool pool(&source, &budget);
  const std::string folder = NewFolder();
  std::string why;
  SpillFile* const file = SpillFile::Of(folder, &why);
  CHECK(file != nullptr);
  CHECK(SpillFile::Of(folder + "/.", &why) == file);
  HostPool::Failure failure;
  CHECK(file->Allocate(1, &failure) == nullptr);  // no owner is registered
  CHECK(file->Register(1, HostBudget::kUnlimited, &pool).empty());
  CHECK(budget.usage().in_use_bytes >= Staging::kBytes);
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
  CHECK(budget.usage().in_use_bytes == 0);
}

void FileKeepsItsLimit() {
  HostBudget budget;
  MmapBlockSource source;
  HostPool pool(&source, &budget);
  const std::string folder = NewFolder();
  std::string why;
  CHECK(SpillFile::Of(folder + "/none", &why) == nullptr);
  CHECK(why.find(folder + "/none: No such file or directory") != std::string::npos);
  SpillFile* const file = SpillFile::Of(folder, &why);
  budget.SetLimit(4096);
  CHECK(file->Register(1, 100000, &pool).find("Raise host_memory_limit=") != std::string::npos);
  budget.SetLimit(HostBudget::kUnlimited);
  CHECK(file->Register(1, 100000, &pool).empty());
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
  HostBudget budget;
  MmapBlockSource source;
  HostPool pool(&source, &budget);
  const std::string folder = NewFolder();
  std::string why;
  static const FileCalls worse{WorseWrite, WorseRead, WorseReserve};
  SpillFile* const file = SpillFile::Of(folder, &why, worse);
  CHECK(file->Register(1, HostBudget::kUnlimited, &pool).empty());
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
  HostBudget budget;
  MmapBlockSource source;
  HostPool pool(&source, &budget);
  const std::string folder = NewFolder();
  std::string why;
  SpillFile* const file = SpillFile::Of(folder, &why);
  CHECK(file->Register(1, HostBudget::kUnlimited, &pool).empty());
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
  HostBudget budget;
  MmapBlockSource source;
  HostPool pool(&source, &budget);
  const std::string folder = NewFolder();
  std::string why;
  static const FileCalls lying{pwrite, LyingRead, FileCalls::System().reserve};
  SpillFile* const file = SpillFile::Of(folder, &why, lying);
  CHECK(file->Register(1, HostBudget::kUnlimited, &pool).empty());
  HostPool::Failure failure;
  auto slot = file->Allocate(5000, &failure);
  CHECK(ThereAndBack(slot.get(), 5000, 1).find("is not what was written there") != std::string::npos);
  slot.reset();
  file->Unregister(1);
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

// Each is tried, the faster one is taken, and a change is noticed within a hundred turns.
void TheFasterWayIsFound() {
  tfswap::FasterWay ways;
  const auto taken = [&ways](double first, double second, int turns) {
    int counts[2] = {};
    for (int i = 0; i < turns; ++i) {
      const int way = ways.Next();
      ++counts[way];
      ways.Took(way, way == 0 ? first : second);
    }
    return std::make_pair(counts[0], counts[1]);
  };
  const auto [slow, fast] = taken(2.0, 1.0, 640);
  CHECK(slow < 64 && fast == 640 - slow);
  const auto [soon, late] = taken(1.0, 1.5, 100);
  CHECK(soon > 30 && late == 100 - soon);
  const auto [now_fast, now_slow] = taken(1.0, 1.5, 640);
  CHECK(now_slow < 64 && now_fast == 640 - now_slow);
}

}  // namespace

int main() {
  LaneWithoutThreads();  // before there are any
  PoolReusesSplitsAndMerges();
  PoolTakesTheBestFit();
  PoolsLeaveEachOtherWhatTheyDoNotUse();
  PoolKeepsTheLimit();
  RegisteredLimitsAddUp();
  AStepsMemoryIsOneBlock();
  PoolFromManyThreads();
  MemoryIsTheMachinesAndTheContainers();
  LaneCopiesEveryByte();
  LaneKeepsItsOrder();
  LaneNoticesANewThrottle();
  LaneNoticesANewThrottleWhileItCopies();
  LaneIsASerialLink();
  LaneFromManyThreads();
  LaneHearsOfFailure();
  FileGivesBackEveryByte();
  FileKeepsItsLimit();
  FileSurvivesAWorseSystem();
  FileNoticesAFlippedBit();
  DevicesDoNotWaitForEachOther();
  ClientsFromManyThreads();
  TheFasterWayIsFound();
  if (tfswap::planes::IsAvailable()) {
    FileCompressesWhatGains();
    PlanesNoticeWhatTheyDidNotMake();
    std::puts("with zstd");
  }
  std::puts("ok");
  return 0;
}
