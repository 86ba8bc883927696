#include "copy_engine.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace tfswap {
namespace {

// Smaller copies fit in a core's second-level cache, from which the next kernel reads them.
//
// Measured by benchmarks/copy_rate.py on two cores of an AMD EPYC (32 MiB of shared third-level cache), for copies of 1
// to 256 MiB: 20 GB/s with streaming stores and 13 GB/s with memcpy through a lane of one thread, 13 to 14 GB/s for
// memcpy without a lane, and 24 GB/s with streaming stores and two threads.
constexpr size_t kStreamFromBytes = size_t{1} << 20;

// Smaller copies are made by the caller if the lane is idle: at 10 GB/s they take less than the 25 to 50 us in which
// two threads wake one another.
constexpr size_t kInlineBytes = size_t{256} << 10;

// The lane whose `done` this thread runs; null outside of `done`.
thread_local const CopyLane* moving_for = nullptr;

}  // namespace

void StreamCopy(void* to, const void* from, size_t bytes) {
#ifdef __SSE2__
  if (bytes >= kStreamFromBytes) {
    auto* out = static_cast<char*>(to);
    const auto* in = static_cast<const char*>(from);
    const size_t head = (64 - reinterpret_cast<uintptr_t>(out) % 64) % 64;
    std::memcpy(out, in, head);
    out += head;
    in += head;
    bytes -= head;
    const size_t lines = bytes / 64;
    for (size_t line = 0; line < lines; ++line, in += 64, out += 64) {
      const auto* source = reinterpret_cast<const __m128i*>(in);
      auto* target = reinterpret_cast<__m128i*>(out);
      const __m128i a = _mm_loadu_si128(source);
      const __m128i b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2);
      const __m128i d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    // Streaming stores are weakly ordered: without the fence another thread could see the end of the copy and then read
    // the bytes from before it.
    _mm_sfence();
    std::memcpy(out, in, bytes % 64);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

void CopyLane::Submit(void* to, const void* from, size_t bytes, Done done) {
  if (!MayCopyInline(bytes)) {
    auto* const out = static_cast<char*>(to);
    const auto* const in = static_cast<const char*>(from);
    Submit(
        bytes,
        [out, in](size_t begin, size_t piece, int) {
          StreamCopy(out + begin, in + begin, piece);
          return Moved{piece, ""};
        },
        std::move(done));
    return;
  }
  const auto start = Clock::now();
  StreamCopy(to, from, bytes);
  done(Ended{std::chrono::duration<double>(Clock::now() - start).count(), /*is_inline=*/true, bytes, ""});
}

void CopyLane::Submit(size_t bytes, Move move, Done done) {
  auto copy = std::make_shared<Copy>();
  copy->bytes = bytes;
  copy->move = std::move(move);
  copy->done = std::move(done);
  std::unique_lock<std::mutex> lock(mu_);
  if (moving_for == this) {  // called by `done` of this lane: the same thread makes this copy next
    queue_.push_back(std::move(copy));
    ++under_way_;
    work_or_settings_.notify_all();
    return;
  }
  // After SetThreads(0), the threads first make the copies that were queued before.
  work_or_settings_.wait(lock, [this] { return wanted_threads_ > 0 || running_threads_ == 0; });
  queue_.push_back(std::move(copy));
  ++under_way_;
  if (!caller_moves_) StartThreadsLocked();
  if (running_threads_ == 0) {
    // One caller at a time acts as the lane's thread 0.
    work_or_settings_.wait(lock, [this] { return !caller_moves_; });
    caller_moves_ = true;
    while (!queue_.empty()) MovePiece(lock, /*thread=*/0);
    caller_moves_ = false;
  }
  work_or_settings_.notify_all();
}

bool CopyLane::MayCopyInline(size_t bytes) const {
  if (bytes >= kInlineBytes) return false;
  std::lock_guard<std::mutex> lock(mu_);
  return under_way_ == 0 && throttle_.bandwidth_bytes_per_s <= 0 && throttle_.latency_us <= 0;
}

void CopyLane::SetThreads(int threads) {
  std::lock_guard<std::mutex> lock(mu_);
  wanted_threads_ = std::max(threads, 0);
  if (running_threads_ > 0) StartThreadsLocked();
  work_or_settings_.notify_all();
}

void CopyLane::SetThrottle(const Throttle& throttle) {
  std::lock_guard<std::mutex> lock(mu_);
  throttle_ = throttle;
  ++throttle_version_;
  link_free_ = Clock::now();
  work_or_settings_.notify_all();
}

int CopyLane::threads() const {
  std::lock_guard<std::mutex> lock(mu_);
  return wanted_threads_;
}

CopyLane::Throttle CopyLane::throttle() const {
  std::lock_guard<std::mutex> lock(mu_);
  return throttle_;
}

void CopyLane::StartThreadsLocked() {
  for (; running_threads_ < wanted_threads_; ++running_threads_) {
    try {
      // Detached: a copy may still run when the process exits, and a lane is never destroyed.
      std::thread([this, index = running_threads_] { Work(index); }).detach();
      started_ = true;
    } catch (const std::system_error&) {
      return;  // the running threads, or the caller, make the copies
    }
  }
}

// The time at which the simulated link has carried `bytes` more, of a piece that started at `begun`.
CopyLane::Clock::time_point CopyLane::LinkEndLocked(Clock::time_point begun, size_t bytes, bool first_chunk) {
  double seconds = first_chunk ? throttle_.latency_us * 1e-6 : 0;
  if (throttle_.bandwidth_bytes_per_s > 0) {
    seconds += static_cast<double>(bytes) / throttle_.bandwidth_bytes_per_s;
  }
  // At most a year: a longer wait would overflow the clock.
  seconds = std::min(seconds, 3e7);
  const auto start = std::max(link_free_, begun);
  link_free_ = start + std::chrono::duration_cast<Clock::duration>(
                           std::chrono::duration<double>(seconds));
  return link_free_;
}

// Waits until `end`, which LinkEndLocked returned under the settings of `throttle_version`. New settings end the wait,
// those set while the bytes were copied included.
void CopyLane::WaitForLinkLocked(std::unique_lock<std::mutex>& lock,
                                 Clock::time_point end, uint64_t throttle_version) {
  work_or_settings_.wait_until(
      lock, end, [&] { return throttle_version_ != throttle_version; });
}

void CopyLane::Work(int index) {
  std::unique_lock<std::mutex> lock(mu_);
  while (true) {
    work_or_settings_.wait(
        lock, [&] { return !queue_.empty() || index >= wanted_threads_; });
    // Threads end from the last to the first, so that the indices stay dense. Thread 0 first empties the queue.
    if (index >= std::max(wanted_threads_, queue_.empty() ? 0 : 1)) {
      if (index == running_threads_ - 1) {
        --running_threads_;
        work_or_settings_.notify_all();
        return;
      }
      work_or_settings_.wait(lock);
      continue;
    }

    MovePiece(lock, index);
  }
}

// Moves the next piece of the first copy in the queue. The last piece ends the copy.
void CopyLane::MovePiece(std::unique_lock<std::mutex>& lock, int thread) {
  std::shared_ptr<Copy> copy = queue_.front();
  const size_t begin = copy->handed_bytes;
  const size_t bytes = std::min(chunk_bytes_, copy->bytes - begin);
  copy->handed_bytes += bytes;
  if (begin == 0) copy->start = Clock::now();
  if (copy->handed_bytes == copy->bytes) queue_.pop_front();
  const bool throttled = throttle_.bandwidth_bytes_per_s > 0 || throttle_.latency_us > 0;
  const auto begun = Clock::now();
  const uint64_t throttle_version = throttle_version_;

  if (copy->error.empty()) {  // after an error the other pieces are skipped
    lock.unlock();
    Moved moved;
    try {
      moved = copy->move(begin, bytes, thread);
    } catch (const std::exception& thrown) {
      moved.error = thrown.what();
    }
    lock.lock();
    if (copy->error.empty()) copy->error = std::move(moved.error);
    copy->carried_bytes += moved.carried_bytes;
    if (throttled && throttle_version == throttle_version_) {
      WaitForLinkLocked(lock, LinkEndLocked(begun, moved.carried_bytes, begin == 0), throttle_version);
    }
  }

  copy->ended_bytes += bytes;
  if (copy->ended_bytes < copy->bytes) return;
  const Ended ended{std::chrono::duration<double>(Clock::now() - copy->start).count(),
                    /*is_inline=*/caller_moves_, copy->carried_bytes, std::move(copy->error)};
  Done done = std::move(copy->done);
  copy.reset();  // frees what `move` owns
  lock.unlock();
  const CopyLane* const outer = std::exchange(moving_for, this);
  done(ended);
  done = nullptr;  // frees what the callback owns before the thread sleeps again
  moving_for = outer;
  lock.lock();
  --under_way_;
}

}  // namespace tfswap
