#include "race_detector.h"

#include <algorithm>

namespace emulated_gpu {
namespace {

constexpr size_t kReports = 50;  // more say the same of other buffers

bool Covers(const Clock& clock, int stream, uint64_t count) {
  return count == 0 || (static_cast<size_t>(stream) < clock.size() && clock[stream] >= count);
}

}  // namespace

void Join(Clock* to, const Clock& from) {
  if (to->size() < from.size()) to->resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) (*to)[i] = std::max((*to)[i], from[i]);
}

RaceDetector& RaceDetector::Get() {
  static auto* const detector = new RaceDetector;
  return *detector;
}

int RaceDetector::AddStream(const std::string& name) {
  std::lock_guard<std::mutex> lock(mu_);
  names_.push_back(name);
  clocks_.push_back(clocks_[0]);
  clocks_.back().resize(names_.size(), 0);
  return static_cast<int>(names_.size()) - 1;
}

void RaceDetector::StreamWaits(int stream, int other) {
  std::lock_guard<std::mutex> lock(mu_);
  Join(&clocks_[stream], Clock(clocks_[other]));
}

void RaceDetector::StreamWaits(int stream, const Clock& clock) {
  std::lock_guard<std::mutex> lock(mu_);
  Join(&clocks_[stream], clock);
}

Clock RaceDetector::ClockOf(int stream) {
  std::lock_guard<std::mutex> lock(mu_);
  return clocks_[stream];
}

void RaceDetector::HostSees(const Clock& clock) {
  std::lock_guard<std::mutex> lock(mu_);
  Join(&clocks_[0], clock);
}

void RaceDetector::Enqueue(int stream, const std::string& what, const std::vector<Range>& reads,
                           const std::vector<Range>& writes) {
  std::lock_guard<std::mutex> lock(mu_);
  Clock& clock = clocks_[stream];
  Join(&clock, clocks_[0]);
  const Access by{stream, ++clock[stream], std::make_shared<const std::string>(what)};
  for (const Range& range : reads) TouchLocked(clock, by, range, /*writes=*/false);
  for (const Range& range : writes) TouchLocked(clock, by, range, /*writes=*/true);
}

void RaceDetector::OnHost(const std::string& what, const std::vector<Range>& reads, const std::vector<Range>& writes) {
  Enqueue(0, what, reads, writes);
}

void RaceDetector::Free(int stream, const std::string& what, Range freed) {
  std::lock_guard<std::mutex> lock(mu_);
  Clock clock = clocks_[stream];
  Join(&clock, clocks_[0]);
  TouchLocked(clock, Access{stream, clocks_[stream][stream], std::make_shared<const std::string>(what)}, freed,
              /*writes=*/true);
}

void RaceDetector::Forget(Range range) {
  std::lock_guard<std::mutex> lock(mu_);
  SplitLocked(range.begin);
  SplitLocked(range.end);
  cells_.erase(cells_.lower_bound(range.begin), cells_.lower_bound(range.end));
}

void RaceDetector::TouchLocked(const Clock& clock, const Access& by, Range range, bool writes) {
  if (range.begin >= range.end) return;
  SplitLocked(range.begin);
  SplitLocked(range.end);
  uintptr_t at = range.begin;
  for (auto cell = cells_.lower_bound(range.begin); at < range.end; ++cell) {
    if (cell == cells_.end() || cell->first > at) {  // bytes without a past
      const uintptr_t end = cell == cells_.end() ? range.end : std::min(range.end, cell->first);
      cell = cells_.emplace_hint(cell, at, Cell{end, {0, 0, nullptr}, {}});
    }
    Cell& bytes = cell->second;
    CheckLocked(clock, by, writes, bytes.written, /*wrote=*/true, range);
    if (writes) {
      for (const Access& read : bytes.reads) CheckLocked(clock, by, writes, read, /*wrote=*/false, range);
    } else {
      const auto same = [&by](const Access& read) { return read.stream == by.stream; };
      bytes.reads.erase(std::remove_if(bytes.reads.begin(), bytes.reads.end(), same), bytes.reads.end());
      bytes.reads.push_back(by);
    }
    at = bytes.end;
  }
  if (!writes) return;
  // All of it has one past from now on.
  cells_.erase(cells_.lower_bound(range.begin), cells_.lower_bound(range.end));
  cells_.emplace(range.begin, Cell{range.end, by, {}});
}

void RaceDetector::SplitLocked(uintptr_t at) {
  auto cell = cells_.upper_bound(at);
  if (cell == cells_.begin()) return;
  --cell;
  if (cell->first == at || cell->second.end <= at) return;
  Cell second = cell->second;
  cell->second.end = at;
  cells_.emplace(at, std::move(second));
}

void RaceDetector::CheckLocked(const Clock& clock, const Access& by, bool writes, const Access& before, bool wrote,
                               Range range) {
  // Work of one thing may read and write the same bytes.
  const bool same = before.stream == by.stream && before.count == by.count;
  if (same || Covers(clock, before.stream, before.count)) return;
  ++races_;
  if (reports_.size() >= kReports) return;
  reports_.insert(NameLocked(by, writes ? "writes" : "reads") + " " + std::to_string(range.end - range.begin) +
                  " bytes that " + NameLocked(before, wrote ? "writes" : "reads") + ", and does not wait for it");
}

std::string RaceDetector::NameLocked(const Access& access, const char* verb) const {
  return *access.what + " (" + names_[access.stream] + ") " + verb;
}

void RaceDetector::Report(const std::string& race) {
  std::lock_guard<std::mutex> lock(mu_);
  ++races_;
  if (reports_.size() < kReports) reports_.insert(race);
}

int64_t RaceDetector::races() {
  std::lock_guard<std::mutex> lock(mu_);
  return races_;
}

std::string RaceDetector::report() {
  std::lock_guard<std::mutex> lock(mu_);
  std::string text;
  for (const std::string& each : reports_) text += each + "\n";
  return text;
}

void RaceDetector::ClearReports() {
  std::lock_guard<std::mutex> lock(mu_);
  races_ = 0;
  reports_.clear();
}

}  // namespace emulated_gpu
