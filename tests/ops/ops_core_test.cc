// A stand-alone test of the core without TensorFlow: the host pool, copy lanes and the choice between two ways.
// ops_core_files_test.cc has its spill files.

#include "ops_core_test.h"

namespace {

void PoolReusesSplitsAndMerges() {
  PooledHost host;
  HostPool::Failure failure;
  std::mt19937 random(7);
  std::vector<std::pair<unsigned char*, size_t>> live;
  for (int round = 0; round < 3000; ++round) {
    if (live.size() < 40 && random() % 2 == 0) {
      const size_t bytes = 1 + random() % (size_t{1} << 20);
      auto* piece = static_cast<unsigned char*>(host.pool.Allocate(bytes, &failure));
      CHECK(failure == HostPool::Failure::kNone);
      CHECK(reinterpret_cast<uintptr_t>(piece) % HostPool::kAlignment == 0);
      std::memset(piece, static_cast<int>(bytes % 251), bytes);
      live.emplace_back(piece, bytes);
    } else if (!live.empty()) {
      std::swap(live[random() % live.size()], live.back());
      const auto [piece, bytes] = live.back();
      // No other block has these bytes.
      for (size_t i = 0; i < bytes; i += 97) CHECK(piece[i] == bytes % 251);
      host.pool.Free(piece);
      live.pop_back();
    }
    if (round % 100 == 0) CHECK(host.pool.CheckInvariant().empty());
  }
  // The peak of live bytes was 40 MiB: one block must have done.
  CHECK(host.pool.reserved_bytes() == HostPool::kDefaultBlockBytes);
  for (const auto& piece : live) host.pool.Free(piece.first);
  CHECK(host.pool.CheckInvariant().empty());
  CHECK(host.budget.usage().in_use_bytes == 0);
  host.pool.ReleaseUnusedBlocks();
  CHECK(host.budget.usage().reserved_bytes == 0);
}

void PoolTakesTheBestFit() {
  PooledHost host;
  HostPool::Failure failure;
  void* large = host.pool.Allocate(8192, &failure);
  void* wall = host.pool.Allocate(256, &failure);
  void* small = host.pool.Allocate(1024, &failure);
  void* wall2 = host.pool.Allocate(256, &failure);
  host.pool.Free(large);
  host.pool.Free(small);
  void* fitting = host.pool.Allocate(1000, &failure);
  CHECK(fitting == small);
  for (void* piece : {wall, wall2, fitting}) host.pool.Free(piece);
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
  PooledHost host;
  HostPool::Failure failure;
  const size_t two_mib = HostPool::kBlockMultiple;
  host.budget.SetLimit(3 * two_mib);
  void* first = host.pool.Allocate(two_mib, &failure);  // less than a default block
  CHECK(first != nullptr);
  CHECK(host.pool.Allocate(3 * two_mib, &failure) == nullptr);
  CHECK(failure == HostPool::Failure::kLimit);
  CHECK(host.budget.usage().reserved_bytes == two_mib);
  CHECK(host.pool.Reserve(4 * two_mib) == HostPool::Failure::kLimit);
  host.pool.Free(first);
  // Only after the small block is returned is there room for one of this size.
  void* whole = host.pool.Allocate(3 * two_mib, &failure);
  CHECK(whole != nullptr);
  CHECK(host.budget.usage().reserved_bytes == 3 * two_mib);
  host.pool.Free(whole);
  host.budget.SetLimit(HostBudget::kUnlimited);
  CHECK(host.pool.Allocate(SIZE_MAX - 4096, &failure) == nullptr);
  CHECK(failure == HostPool::Failure::kSystem);
  CHECK(host.pool.Reserve(10 * two_mib) == HostPool::Failure::kNone);
  CHECK(host.pool.reserved_bytes() == 10 * two_mib);
}

void RegisteredLimitsAddUp() {
  PooledHost host;
  HostPool::Failure failure;
  host.budget.Register(1, 1000);
  host.budget.Register(1, 1000);  // the same one, twice: counts once
  host.budget.Register(2, 256);
  CHECK(host.budget.usage().limit_bytes == 1256);
  // A limit that is no multiple of anything can be used up.
  CHECK(host.pool.Reserve(1000) == HostPool::Failure::kNone);
  CHECK(host.budget.usage().reserved_bytes == 1024);
  host.budget.Register(2, 300);
  void* rest = host.pool.Allocate(1024, &failure);
  CHECK(rest != nullptr);
  CHECK(host.pool.Allocate(512, &failure) == nullptr);
  CHECK(failure == HostPool::Failure::kLimit);
  host.pool.Free(rest);
  host.budget.Register(3, HostBudget::kUnlimited);
  CHECK(host.budget.usage().limit_bytes == HostBudget::kUnlimited);
  host.budget.SetLimit(2000);  // what the process has been given holds for all together
  CHECK(host.budget.usage().limit_bytes == 2000);
  host.budget.Unregister(3);
  CHECK(host.budget.usage().limit_bytes == 1300);
  host.budget.Unregister(1);
  CHECK(host.budget.usage().limit_bytes == 1300);
  host.budget.Unregister(1);
  CHECK(host.budget.usage().limit_bytes == 300);
  CHECK(host.budget.usage().reserved_bytes == 0);  // unused blocks were returned
  host.budget.Unregister(2);
  host.budget.Unregister(2);
  CHECK(host.budget.usage().limit_bytes == 2000);
}

// Two pieces that fit into what there is in all, but into none of the blocks.
void AStepsMemoryIsOneBlock() {
  PooledHost host;
  HostPool::Failure failure;
  const size_t two_mib = HostPool::kBlockMultiple;
  CHECK(host.pool.Reserve(2 * two_mib) == HostPool::Failure::kNone);
  void* held = host.pool.Allocate(two_mib, &failure);
  CHECK(host.pool.Reserve(4 * two_mib) == HostPool::Failure::kNone);
  CHECK(host.pool.reserved_bytes() == 6 * two_mib);
  host.pool.Free(held);
  host.budget.SetLimit(5 * two_mib);
  CHECK(host.pool.Reserve(5 * two_mib) == HostPool::Failure::kNone);
  CHECK(host.pool.reserved_bytes() == 5 * two_mib);
  void* whole = host.pool.Allocate(5 * two_mib, &failure);
  CHECK(whole != nullptr);
  host.pool.Free(whole);
}

void PoolFromManyThreads() {
  PooledHost host;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&host, t] {
      std::mt19937 random(t);
      HostPool::Failure failure;
      for (int i = 0; i < 500; ++i) {
        const size_t bytes = 1 + random() % 100000;
        auto* piece = static_cast<unsigned char*>(host.pool.Allocate(bytes, &failure));
        std::memset(piece, t, bytes);
        CHECK(piece[bytes - 1] == t);
        host.pool.Free(piece);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(host.pool.CheckInvariant().empty());
  CHECK(host.budget.usage().in_use_bytes == 0);
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
    bool is_inline = false;
    lane->Submit(to.data(), from.data(), from.size(), [&](const CopyLane::Ended& how) { is_inline = how.is_inline; });
    _exit(is_inline && to == from && !lane->started() ? 0 : 1);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
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
  PooledHost host;
  CHECK(host.pool.Reserve(size_t{1} << 46) == HostPool::Failure::kSystem);
  CHECK(host.budget.usage().reserved_bytes == 0);
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
  TestFiles();
  TheFasterWayIsFound();
  std::puts("ok");
  return 0;
}
