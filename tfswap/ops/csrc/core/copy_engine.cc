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

// Below this a copy fits in a core's second-level cache, and its reader profits.
//
// Measured on two cores of an AMD EPYC (32 MiB of third-level cache, shared), for
// copies of 1 to 256 MiB through a lane of one thread: 20 GB/s with streaming
// stores, 13 GB/s with memcpy, 13 to 14 GB/s for a bare memcpy; 24 GB/s with two
// threads. See benchmarks/copy_rate.py.
constexpr size_t kStreamFromBytes = size_t{1} << 20;

// Below this the caller makes a copy itself, if nothing is before it: as long as two
// threads take to wake one another (25 to 50 us), at 10 GB/s.
constexpr size_t kAtOnceBytes = size_t{256} << 10;

// The lane whose copy's `done` this thread runs.
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
    // Streaming stores are weakly ordered: without the fence another thread could
    // see the copy ended and read old bytes.
    _mm_sfence();
    std::memcpy(out, in, bytes % 64);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

// Small enough that two threads share a typical feature map evenly and that a throttled lane
// notices new settings, large enough that a chunk's bookkeeping (one lock) costs under 0.1% of it.
constexpr size_t CopyLane::kChunkBytes;

void CopyLane::Submit(void* to, const void* from, size_t bytes, Done done) {
  if (!MayCopyAtOnce(bytes)) {
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
  done(Ended{std::chrono::duration<double>(Clock::now() - start).count(), /*at_once=*/true, bytes, ""});
}

void CopyLane::Submit(size_t bytes, Move move, Done done) {
  auto copy = std::make_shared<Copy>();
  copy->bytes = bytes;
  copy->move = std::move(move);
  copy->done = std::move(done);
  std::unique_lock<std::mutex> lock(mu_);
  if (moving_for == this) {  // from a copy's `done`: its thread moves this next
    queue_.push_back(std::move(copy));
    ++under_way_;
    work_or_settings_.notify_all();
    return;
  }
  // Threads that are to leave end first what was queued before.
  work_or_settings_.wait(lock, [this] { return wanted_threads_ > 0 || running_threads_ == 0; });
  queue_.push_back(std::move(copy));
  ++under_way_;
  if (!caller_moves_) StartThreadsLocked();
  if (running_threads_ == 0) {
    // One caller at a time, in the place of the lane's first thread.
    work_or_settings_.wait(lock, [this] { return !caller_moves_; });
    caller_moves_ = true;
    while (!queue_.empty()) MovePiece(lock, /*thread=*/0);
    caller_moves_ = false;
  }
  work_or_settings_.notify_all();
}

bool CopyLane::MayCopyAtOnce(size_t bytes) const {
  if (bytes >= kAtOnceBytes) return false;
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
      // Detached: a copy may still run when the process exits, and a lane is never
      // destroyed, so there is no thread to join.
      std::thread([this, index = running_threads_] { Work(index); }).detach();
      started_ = true;
    } catch (const std::system_error&) {
      return;  // those that there are do the work
    }
  }
}

// When the link will have carried `bytes` more, of a piece that was begun then.
CopyLane::Clock::time_point CopyLane::LinkEndLocked(Clock::time_point begun, size_t bytes, bool first_chunk) {
  double seconds = first_chunk ? throttle_.latency_us * 1e-6 : 0;
  if (throttle_.bandwidth_bytes_per_s > 0) {
    seconds += static_cast<double>(bytes) / throttle_.bandwidth_bytes_per_s;
  }
  // A year: a longer wait would overflow the clock, and is as good as for ever.
  seconds = std::min(seconds, 3e7);
  const auto start = std::max(link_free_, begun);
  link_free_ = start + std::chrono::duration_cast<Clock::duration>(
                           std::chrono::duration<double>(seconds));
  return link_free_;
}

// `end` is LinkEndLocked's, under the settings of `throttle_version`. New settings end
// the wait, also those that came while the bytes were copied: what the old link would
// still have taken no longer means anything.
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
    // Threads leave from the last to the first, so that the indices stay dense. The first stays for what is queued.
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

// Moves the next piece of the first copy in the queue, and ends the copy with its last piece.
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

  if (copy->error.empty()) {  // else it is lost already
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
                    /*at_once=*/caller_moves_, copy->carried_bytes, std::move(copy->error)};
  Done done = std::move(copy->done);
  copy.reset();  // and what `move` owns
  lock.unlock();
  const CopyLane* const outer = std::exchange(moving_for, this);
  done(ended);
  // What the callback owns must be gone before the thread sleeps again.
  done = nullptr;
  moving_for = outer;
  lock.lock();
  --under_way_;
}

}  // namespace tfswap
