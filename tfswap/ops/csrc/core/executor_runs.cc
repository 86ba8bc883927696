// Runs of an unordered step: the executor and its thread pool. analysis/executor.py has the same runs and their
// reasons, and tests compare the two, result for result. This file does not depend on TensorFlow.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "draws.h"
#include "export.h"
#include "schedule_replay.h"

namespace tfswap {

// In the order of the ctypes structure in simulator/native_runs.py; executor.py has the meaning of the constants.
struct ExecutorProgram {
  int64_t node_count;
  int64_t threads;
  int64_t op_count;
  const double* seconds;   // of nodes
  const int8_t* cheap;
  const int32_t* pending;
  const int32_t* ops;      // numbered in the order of their first nodes
  const int8_t* is_kernel;
  Lists data;              // of nodes, and at last of the step's start: users by data edges
  Lists control;
  double cost_error;
  double noise;
  double contention;
  double grain_s;
  double delayed_share;    // 0 on an idle machine
  double delay_s;
  double spin_s;
  double wake_s;
  int64_t ordered_edges;
};

namespace {

class ExecutorRun {
 public:
  ExecutorRun(const ExecutorProgram& program, uint64_t seed)
      : program_(program), draws_(seed), users_(program.node_count + 1), kept_(program.threads),
        queues_(program.threads) {
    for (int64_t node = 0; node <= program.node_count; ++node) {
      const auto [data, data_end] = Edges(program.data, node);
      const auto [control, control_end] = Edges(program.control, node);
      users_[node].assign(data, data_end);
      users_[node].insert(users_[node].end(), control, control_end);
    }
    for (int64_t node = 0; node <= program.node_count; ++node) {
      const int64_t data = Count(program.data, node), control = Count(program.control, node);
      if (data + control <= program.ordered_edges) continue;
      draws_.Shuffle(users_[node].data(), data);
      draws_.Shuffle(users_[node].data() + data, control);
    }
    std::vector<double> errors(program.op_count);
    for (double& error : errors) error = Error();
    for (int64_t node = 0; node < program.node_count; ++node) {
      seconds_.push_back(program.seconds[node] * errors[program.ops[node]]);
    }
  }

  // Runs the step once; `kinds` and `subjects` get the order in which its kernels begin and finish.
  void Run(std::vector<int32_t>* kinds, std::vector<int64_t>* subjects) {
    kinds_ = kinds;
    subjects_ = subjects;
    waiting_.assign(program_.pending, program_.pending + program_.node_count);
    HandOn(program_.node_count, 0);
    idle_.clear();
    for (int32_t thread = 1; thread < program_.threads; ++thread) idle_.emplace_back(thread, -kLong);
    double now = 0.0;
    int32_t thread = 0;
    while (true) {
      if (!StartNext(thread, now)) idle_.emplace_back(thread, now);
      while (!idle_.empty() && queued_ > 0) {
        const auto [other, since] = idle_.front();
        idle_.pop_front();
        if (now - since > program_.spin_s) {
          events_.emplace(now + program_.wake_s, other, kWoken);
        } else {
          StartNext(other, now);
        }
      }
      if (events_.empty()) return;
      int64_t node;
      std::tie(now, thread, node) = events_.top();
      events_.pop();
      if (node == kWoken) continue;
      --running_;
      Note(kFinish, node);
      HandOn(node, thread);
    }
  }

 private:
  using Event = std::tuple<double, int32_t, int64_t>;
  static constexpr int64_t kWoken = -1;
  static constexpr double kLong = 1e300;

  static std::pair<const int32_t*, const int32_t*> Edges(const Lists& lists, int64_t node) {
    return {lists.elements + lists.begins[node], lists.elements + lists.begins[node + 1]};
  }
  static int64_t Count(const Lists& lists, int64_t node) { return lists.begins[node + 1] - lists.begins[node]; }

  double Error() {
    const double drawn = 2 * draws_.Unit() - 1;
    const double larger = 1 + (program_.cost_error - 1) * std::abs(drawn);
    return drawn > 0 ? larger : 1 / larger;
  }

  void Note(int32_t kind, int64_t node) {
    if (program_.is_kernel[node] == 0) return;
    kinds_->push_back(kind);
    subjects_->push_back(node);
  }

  bool StartNext(int32_t thread, double now) {
    int64_t node;
    if (!kept_[thread].empty()) {
      node = kept_[thread].front();
      kept_[thread].pop_front();
    } else if (!Take(thread, &node)) {
      return false;
    }
    Note(kBegin, node);
    double took = seconds_[node] * (1 + program_.noise * (2 * draws_.Unit() - 1));
    if (took > program_.grain_s && running_ > 0) took *= 1 + program_.contention * draws_.Unit();
    if (program_.delayed_share > 0 && draws_.Unit() < program_.delayed_share) took += program_.delay_s;
    events_.emplace(now + took, thread, node);
    ++running_;
    return true;
  }

  // Gives each node that the end of `done` makes ready to the thread that ended it, or to the pool.
  void HandOn(int64_t done, int32_t thread) {
    std::deque<int64_t>&kept = kept_[thread], &queue = queues_[thread];
    int64_t last = -1;
    for (const int32_t node : users_[done]) {
      if (--waiting_[node] > 0) continue;
      if (program_.cheap[node] != 0) {
        kept.push_back(node);
        continue;
      }
      if (last >= 0) Queue(&queue, last);
      last = node;
    }
    if (last < 0) return;
    if (kept.empty()) {
      kept.push_front(last);
    } else {
      Queue(&queue, last);
    }
  }

  void Queue(std::deque<int64_t>* queue, int64_t node) {
    queue->push_front(node);
    ++queued_;
  }

  bool Take(int32_t thread, int64_t* node) {
    std::deque<int64_t>& own = queues_[thread];
    if (!own.empty()) {
      *node = own.front();
      own.pop_front();
      --queued_;
      return true;
    }
    const int64_t first = draws_.Below(program_.threads);
    for (int64_t k = 0; k < program_.threads; ++k) {
      std::deque<int64_t>& queue = queues_[(first + k) % program_.threads];
      if (queue.empty()) continue;
      *node = queue.back();
      queue.pop_back();
      --queued_;
      return true;
    }
    return false;
  }

  const ExecutorProgram& program_;
  Draws draws_;
  std::vector<std::vector<int32_t>> users_;
  std::vector<double> seconds_;
  std::vector<std::deque<int64_t>> kept_, queues_;
  std::vector<int32_t> waiting_;
  std::deque<std::pair<int32_t, double>> idle_;  // threads, and since when
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
  int64_t queued_ = 0;
  int64_t running_ = 0;  // threads that run a node
  std::vector<int32_t>* kinds_ = nullptr;
  std::vector<int64_t>* subjects_ = nullptr;
};

}  // namespace
}  // namespace tfswap

// The peak of one process: an arena, a thread pool, and steps one after another; -1 where orders are not those of the
// step.
//
// Args:
//   filled, addresses, pins: as of tfswap_replay_runs.
//   seed: of the draws.
TFSWAP_C_API int64_t tfswap_unordered_peak(const tfswap::FlatDataflow* flow, const void* filled,
                                           const uint64_t* addresses, const int32_t* pins,
                                           const tfswap::ExecutorProgram* program, uint64_t seed, int64_t steps) {
  tfswap::ExecutorRun run(*program, seed);
  std::vector<int32_t> kinds;
  std::vector<int64_t> subjects, counts;
  for (int64_t step = 0; step < steps; ++step) {
    const size_t before = kinds.size();
    run.Run(&kinds, &subjects);
    counts.push_back(static_cast<int64_t>(kinds.size() - before));
  }
  return tfswap::PeakOfRuns(*flow, filled, addresses, pins, kinds.data(), subjects.data(), counts);
}
