// Preloaded, this sets threads aside as a busy machine does, but often and on any machine: a thread that deletes
// something sleeps before it does so, now and then. What a step still holds by then, that its plan counts on being
// gone, shows in its peak.
//
//     g++ -std=c++17 -O1 -shared -fPIC tests/property/set_aside.cc -o set_aside.so
//     LD_PRELOAD=$PWD/set_aside.so python ...

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <random>
#include <thread>

namespace {

std::atomic<unsigned> one_in{0};
std::atomic<long> times{0};

void Rest() {
  const unsigned n = one_in.load(std::memory_order_relaxed);
  if (n == 0) return;
  thread_local std::minstd_rand draw{std::random_device{}()};
  if (draw() % n != 0) return;
  ++times;
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

// From now on one in `n` deletions waits; 0 for none.
extern "C" void set_aside_one_in(unsigned n) { one_in = n; }

// How many have.
extern "C" long set_aside_times() { return times; }

void operator delete(void* memory) noexcept {
  Rest();
  std::free(memory);
}

void operator delete(void* memory, std::size_t) noexcept {
  Rest();
  std::free(memory);
}
