// What the parts of the core's stand-alone test share. `make sanitize` (tests/support/sanitize.py) builds and runs it
// under the sanitizers, tests/ops/test_ops_build.py without one.

#ifndef TESTS_OPS_OPS_CORE_TEST_H_
#define TESTS_OPS_OPS_CORE_TEST_H_

#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
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
#include "disk_home.h"
#include "online_choice.h"
#include "host_pool.h"
#include "byte_planes.h"
#include "runtime.h"
#include "spill_file.h"
#include "system_memory.h"

using tfswap::AvailableMemory;
using tfswap::CopyLane;
using tfswap::Direction;
using tfswap::DiskHome;
using tfswap::FileCalls;
using tfswap::HostBudget;
using tfswap::HostPool;
using tfswap::MmapBlockSource;
using tfswap::Runtime;
using tfswap::SpillFile;
using tfswap::SpillSlot;
using tfswap::Staging;
using tfswap::Tier;

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);  \
      std::exit(1);                                                                 \
    }                                                                               \
  } while (false)

// A pool of memory of the system, with a budget of its own.
struct PooledHost {
  HostBudget budget;
  MmapBlockSource source;
  HostPool pool{&source, &budget};
};

inline std::string NewFolder() {
  std::string folder = std::filesystem::temp_directory_path() / "tfswap_core_test_XXXXXX";
  CHECK(mkdtemp(folder.data()) != nullptr);
  return folder;
}

// Spill files, and devices and clients that use them.
void TestFiles();

#endif  // TESTS_OPS_OPS_CORE_TEST_H_
