#include "streams.h"

#include <dirent.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "platform.h"

namespace emulated_gpu {
namespace {

std::mutex streams_mu;
std::map<int, std::vector<SP_Stream>> streams;  // by device, in the order of their making

std::mutex own_threads_mu;
std::set<pid_t> own_threads;  // whose work is to let time pass

void IsOwnThread() {
  std::lock_guard<std::mutex> lock(own_threads_mu);
  own_threads.insert(static_cast<pid_t>(syscall(SYS_gettid)));
}

// By the order in which TensorFlow makes a device's streams (pluggable_device.cc), four for each that it makes of this one.
// Before 2.21 kernels run on the last of them, which also copies between devices, and the first has nothing to do.
Role RoleOf(int number) {
  static constexpr Role kRoles[] = {kCompute, kIn, kOut, kBetween}, kRolesBefore[] = {kBetween, kIn, kOut, kCompute};
  static const bool before = std::atoi(std::strchr(TFSWAP_BUILT_FOR, '.') + 1) < 21;
  return (before ? kRolesBefore : kRoles)[number % 4];
}

std::string NameOf(int device, int number) {
  static constexpr const char* kNames[] = {"compute", "host to device", "device to host", "between devices"};
  return std::string(kNames[RoleOf(number)]) + " stream of GPU:" + std::to_string(device);
}

// The content of a file of a thread of this process; empty where the thread has ended.
std::string ReadOfThread(const char* thread, const char* file) {
  char text[512] = "";
  std::FILE* const opened = std::fopen((std::string("/proc/self/task/") + thread + "/" + file).c_str(), "r");
  if (opened == nullptr) return "";
  const size_t length = std::fread(text, 1, sizeof(text) - 1, opened);
  std::fclose(opened);
  return std::string(text, length);
}

// How often all threads but the device's own have been given a core; -1 where one of them is not asleep. A thread that
// waits for memory (D) goes on by itself. Threads are read one after the other, and may wake each other meanwhile: only
// where the number stays the same has none of them run.
long long RunsIfAsleep() {
  DIR* const folder = opendir("/proc/self/task");
  if (folder == nullptr) return 0;
  const std::unique_ptr<DIR, int (*)(DIR*)> closed(folder, closedir);
  long long runs = 0;
  while (const dirent* const entry = readdir(folder)) {
    const pid_t thread = static_cast<pid_t>(std::atoi(entry->d_name));
    {
      std::lock_guard<std::mutex> lock(own_threads_mu);
      if (thread == 0 || own_threads.count(thread) != 0) continue;
    }
    const std::string state = ReadOfThread(entry->d_name, "stat");
    const size_t name_end = state.rfind(')');  // a name may hold anything
    if (name_end == std::string::npos || name_end + 2 >= state.size()) continue;
    if (state[name_end + 2] == 'R' || state[name_end + 2] == 'D') return -1;
    long long of_thread = 0;
    std::sscanf(ReadOfThread(entry->d_name, "schedstat").c_str(), "%*s %*s %lld", &of_thread);
    runs += of_thread;
  }
  return runs;
}

}  // namespace

void IsPoller() {
  thread_local const bool once = [] {
    IsOwnThread();
    return true;
  }();
  (void)once;
}

void AwaitIdleProcess() {
  long long before = -1;
  for (int in_a_row = 0; in_a_row < 3;) {
    const long long runs = RunsIfAsleep();
    in_a_row = runs < 0 ? 0 : runs == before ? in_a_row + 1 : 1;
    before = runs;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

bool IsStreamOf(int device, const SP_Stream_st* stream) {
  std::lock_guard<std::mutex> lock(streams_mu);
  const auto& its = streams[device];
  return std::find(its.begin(), its.end(), stream) != its.end();
}

// ---------------------------------------------------------------------------
// StreamExecutor's functions.

void CreateStream(const SP_Device* device, SP_Stream* stream, TF_Status*) {
  std::lock_guard<std::mutex> lock(streams_mu);
  auto& its = streams[device->ordinal];
  *stream = new SP_Stream_st(device->ordinal, static_cast<int>(its.size()));
  its.push_back(*stream);
}

void DestroyStream(const SP_Device* device, SP_Stream stream) {
  {
    std::lock_guard<std::mutex> lock(streams_mu);
    auto& its = streams[device->ordinal];
    its.erase(std::find(its.begin(), its.end(), stream));
  }
  delete stream;
}

void CreateStreamDependency(const SP_Device*, SP_Stream dependent, SP_Stream other, TF_Status*) {
  if ((Settings::Get().ignored_waits & (1u << dependent->role())) != 0) return;
  RaceDetector::Get().StreamWaits(dependent->id(), other->id());
  dependent->WaitFor(other);
}

void GetStreamStatus(const SP_Device*, SP_Stream, TF_Status*) {}

void CreateEvent(const SP_Device*, SP_Event* event, TF_Status*) { *event = new SP_Event_st; }

void DestroyEvent(const SP_Device*, SP_Event event) { event->self.reset(); }

SE_EventStatus GetEventStatus(const SP_Device*, SP_Event event) {
  IsPoller();
  Clock clock;
  {
    std::lock_guard<std::mutex> lock(event->mu);
    if (event->early) return SE_EVENT_COMPLETE;
    if (event->ended < event->recorded) return SE_EVENT_PENDING;
    clock = event->clock;
  }
  RaceDetector::Get().HostSees(clock);
  return SE_EVENT_COMPLETE;
}

void RecordEvent(const SP_Device*, SP_Stream stream, SP_Event event, TF_Status*) {
  uint64_t ticket;
  {
    std::lock_guard<std::mutex> lock(event->mu);
    ticket = ++event->recorded;
    event->early = (Settings::Get().early_events & (1u << stream->role())) != 0;
    event->clock = RaceDetector::Get().ClockOf(stream->id());
  }
  if (stream->EndsNow(0)) return event->End(ticket, std::chrono::steady_clock::now());
  stream->PushRecord(event->self, ticket);
}

void BlockHostForEvent(const SP_Device*, SP_Event event, TF_Status*) {
  Clock clock;
  {
    std::unique_lock<std::mutex> lock(event->mu);
    event->changed.wait(lock, [event, ticket = event->recorded] { return event->ended >= ticket; });
    clock = event->clock;
  }
  RaceDetector::Get().HostSees(clock);
}

void WaitForEvent(const SP_Device*, SP_Stream stream, SP_Event event, TF_Status*) {
  if ((Settings::Get().ignored_waits & (1u << stream->role())) != 0) return;
  uint64_t ticket;
  {
    std::lock_guard<std::mutex> lock(event->mu);
    ticket = event->recorded;
    RaceDetector::Get().StreamWaits(stream->id(), event->clock);
    if (event->ended >= ticket) return;
  }
  stream->PushWait(event->self, ticket);
}

void BlockHostUntilDone(const SP_Device*, SP_Stream stream, TF_Status*) {
  const Clock clock = RaceDetector::Get().ClockOf(stream->id());
  stream->AwaitEnd(stream->pushed());
  RaceDetector::Get().HostSees(clock);
}

void SynchronizeAllActivity(const SP_Device* device, TF_Status* status) {
  std::vector<SP_Stream> its;
  {
    std::lock_guard<std::mutex> lock(streams_mu);
    its = streams[device->ordinal];
  }
  for (const SP_Stream stream : its) BlockHostUntilDone(device, stream, status);
}

TF_Bool HostCallback(const SP_Device*, SP_Stream stream, SE_StatusCallbackFn callback, void* argument) {
  const Clock clock = RaceDetector::Get().ClockOf(stream->id());
  stream->Push(0, [callback, argument, clock] {
    RaceDetector::Get().HostSees(clock);
    TF_Status* const status = TF_NewStatus();
    callback(argument, status);
    TF_DeleteStatus(status);
  });
  return true;
}

}  // namespace emulated_gpu

using emulated_gpu::Settings;

void SP_Event_st::End(uint64_t ticket, emulated_gpu::Moment at) {
  std::lock_guard<std::mutex> lock(mu);
  ended = std::max(ended, ticket);
  ended_at = std::max(ended_at, at);
  changed.notify_all();
}

emulated_gpu::Moment SP_Event_st::AwaitEnd(uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mu);
  changed.wait(lock, [this, ticket] { return ended >= ticket; });
  return ended_at;
}

SP_Stream_st::SP_Stream_st(int device, int number)
    : device_(device),
      number_(number),
      role_(emulated_gpu::RoleOf(number)),
      id_(emulated_gpu::RaceDetector::Get().AddStream(emulated_gpu::NameOf(device, number))),
      draws_(static_cast<unsigned>(Settings::Get().jitter + 7919 * number + device)),
      thread_([this] { Work(); }) {}

SP_Stream_st::~SP_Stream_st() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    leaves_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void SP_Stream_st::Push(Task task) {
  std::lock_guard<std::mutex> lock(mu_);
  task.microseconds = Drawn(task.microseconds);
  tasks_.push_back(std::move(task));
  ++pushed_;
  changed_.notify_all();
}

void SP_Stream_st::Push(double microseconds, std::function<void()> shown, emulated_gpu::Label label) {
  Push(Task{nullptr, microseconds,
            [shown = std::move(shown)](emulated_gpu::Moment) {
              if (shown != nullptr) shown();
            },
            std::move(label)});
}

void SP_Stream_st::PushRecord(std::shared_ptr<SP_Event_st> event, uint64_t ticket) {
  Push(Task{nullptr, 0, [event = std::move(event), ticket](emulated_gpu::Moment at) { event->End(ticket, at); }});
}

void SP_Stream_st::PushWait(std::shared_ptr<SP_Event_st> event, uint64_t ticket) {
  Push(Task{[event = std::move(event), ticket] { return event->AwaitEnd(ticket); }, 0, nullptr});
}

bool SP_Stream_st::EndsNow(double microseconds, const emulated_gpu::Label& label) {
  if (microseconds > 0 || Settings::Get().ends_late) return false;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (pushed_ != ended_) return false;
  }
  const auto now = std::chrono::steady_clock::now();
  Trace(label, now, now);
  return true;
}

void SP_Stream_st::WaitFor(SP_Stream_st* other) {
  if (other->EndsNow(0)) return;
  const std::shared_ptr<SP_Event_st> event = std::move((new SP_Event_st)->self);
  other->PushRecord(event, 1);
  PushWait(event, 1);
}

uint64_t SP_Stream_st::pushed() {
  std::lock_guard<std::mutex> lock(mu_);
  return pushed_;
}

void SP_Stream_st::AwaitEnd(uint64_t count) {
  std::unique_lock<std::mutex> lock(mu_);
  changed_.wait(lock, [this, count] { return ended_ >= count; });
}

double SP_Stream_st::Drawn(double microseconds) {
  if (Settings::Get().jitter == 0) return microseconds;
  return microseconds * std::uniform_real_distribution<double>(0, 2)(draws_);
}

void SP_Stream_st::Trace(const emulated_gpu::Label& label, emulated_gpu::Moment begin, emulated_gpu::Moment end) {
  static constexpr const char* kKinds[] = {"Compute", "MemcpyH2D", "MemcpyD2H", "MemcpyP2P"};
  const std::string name = "Stream #" + std::to_string(number_ + 1) + "(" + kKinds[role_] + ")";
  if (!label.name.empty()) emulated_gpu::Profiler::Get().Add(device_, name, label, begin, end);
}

void SP_Stream_st::Work() {
  emulated_gpu::IsOwnThread();
  std::unique_lock<std::mutex> lock(mu_);
  emulated_gpu::Moment at;  // by the stream's clock, all before has ended
  while (true) {
    changed_.wait(lock, [this] { return !tasks_.empty() || leaves_; });
    if (tasks_.empty()) return;
    {
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      at = std::max(at, task.enqueued);
      if (task.awaited != nullptr) at = std::max(at, task.awaited());
      const emulated_gpu::Moment begin = at;
      if (task.microseconds > 0) {
        at += std::chrono::nanoseconds(static_cast<int64_t>(std::ceil(1e3 * task.microseconds)));
        std::this_thread::sleep_until(at);
      }
      if (Settings::Get().ends_late) emulated_gpu::AwaitIdleProcess();
      Trace(task.label, begin, at);
      if (task.shown != nullptr) task.shown(at);
    }  // and what the task owns is gone
    lock.lock();
    ++ended_;
    changed_.notify_all();
  }
}
