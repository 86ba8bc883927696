// Replays a schedule in a simulated arena. simulator/replay.py has the same replay and its reasons, and tests compare
// the two. This file does not depend on TensorFlow.

#ifndef TFSWAP_OPS_CSRC_CORE_SCHEDULE_REPLAY_H_
#define TFSWAP_OPS_CSRC_CORE_SCHEDULE_REPLAY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arena_replay.h"

namespace tfswap {

// List i has the elements from begins[i] to begins[i + 1].
struct Lists {
  const int32_t* begins;
  const int32_t* elements;
};

// analysis/flat_dataflow.py, field for field as the ctypes structure in simulator/native_replay.py.
struct FlatDataflow {
  int64_t node_count;
  int64_t value_count;
  int64_t persistent_count;
  int64_t fetched_count;
  const int64_t* value_bytes;
  const int32_t* persistent;
  const int32_t* fetched;  // in ascending order
  Lists reads;             // of nodes: values
  Lists consumes;
  Lists makes;
  const int32_t* update_begins;  // of nodes: updates
  const int32_t* update_old;
  const int32_t* update_new;
  const int32_t* update_adopted;  // -1: none
  const int32_t* update_copies;
  const int32_t* update_reads;     // how often the kernel reads the old version
  const int32_t* update_variable;  // the position in `persistent` of the variable's first version
  const int32_t* request_begins;   // of nodes: requests
  const int32_t* request_kinds;    // RequestKind
  const int32_t* request_subjects;
  const int64_t* request_bytes;
  Lists candidates;  // of requests: values
};

enum RequestKind : int32_t { kOut, kTemp, kFree, kReleaseValue, kSplitFor, kPart, kRest };

// plan/schedule.py. BEGIN and FINISH are the two parts of RUN, for kernels that run concurrently.
enum StepKind : int32_t { kRun, kLead, kRerun, kCopyOut, kRelease, kCopyIn, kAwait, kSplitChunk, kExact, kBegin, kFinish };

struct Schedule {
  const int32_t* kinds;
  const int64_t* subjects;
  int64_t count;
};

// Counts bytes as if memory never fragmented: `Ledger` in simulator/arena_snapshot.py.
class LiveLedger {
 public:
  uint64_t Allocate(size_t nbytes);
  void Free(uint64_t address);
  void SplitAll() {}
  uint64_t in_use_bytes() const { return in_use_bytes_; }
  uint64_t peak_bytes() const { return peak_bytes_; }
  void RestartPeak() { peak_bytes_ = in_use_bytes_; }

 protected:
  std::vector<uint64_t> sizes_;  // by allocation, rounded

 private:
  uint64_t in_use_bytes_ = 0;
  uint64_t peak_bytes_ = 0;
};

// The ledger of what tfswap_fill has made as live bytes.
const LiveLedger& LedgerOf(const void* filled);

// The peak of steps one after another in what tfswap_fill has made as an arena, each with an order of its own; -1 for
// orders that are not those of this step.
//
// Args:
//   kinds, subjects: of all steps.
//   counts: of each step.
int64_t PeakOfRuns(const FlatDataflow& flow, const void* filled, const uint64_t* addresses, const int32_t* pins,
                   const int32_t* kinds, const int64_t* subjects, const std::vector<int64_t>& counts);

// Notes which step of one repeat makes each allocation, and which frees it: simulator/lives.py.
class NotingLedger : public LiveLedger {
 public:
  struct Life {
    uint64_t bytes;
    int64_t made = -1;
    int64_t gone = -1;
    int64_t made_before_gone = INT64_MAX;
  };

  explicit NotingLedger(const LiveLedger& before);
  uint64_t Allocate(size_t nbytes);
  void Free(uint64_t address);
  void RestartPeak();  // called at the start of each step
  const std::vector<Life>& lives() const { return lives_; }

 private:
  std::vector<Life> lives_;
  int64_t step_ = -1;
};

// One process: an arena, and repeats of a step.
template <typename Arena>
class ScheduleReplay {
 public:
  struct Buffer {
    uint64_t address;
    int64_t refs;
    int32_t pins;
  };

  // addresses: of the persistent values; 0 where unknown.
  // pins: the number of variables and others that hold each.
  // steps: the schedule of all repeats, or one with the same reads.
  ScheduleReplay(const FlatDataflow& flow, const Arena& arena, const uint64_t* addresses, const int32_t* pins,
                 const Schedule& steps);

  // Runs a schedule once. Returns false where it is not one of this step.
  //
  // Args:
  //   before_bytes, during_bytes: get, per step, the bytes in use before it, and the most while it runs. May be null.
  //   most_bytes: end with the first step that uses more.
  bool Repeat(const Schedule& steps, uint64_t most_bytes, int64_t* before_bytes, int64_t* during_bytes);

  // As Repeat, of a schedule that evicts nothing, kernel by kernel: begins, and runs one, with the most bytes while it
  // does.
  void Start();
  bool Run(int64_t kernel, uint64_t* during_bytes);

  // What changes from kernel to kernel of such a schedule.
  struct State {
    Arena arena;
    std::vector<Buffer> buffers;
    std::vector<int32_t> now;
  };
  State Save() const { return {arena_, buffers_, now_}; }
  void Save(State* state) const;
  void Restore(const State& state);

  // Of the last repeat.
  uint64_t peak_bytes() const { return peak_bytes_; }
  int64_t peak_step() const { return peak_step_; }
  // Whether an update has moved a variable, so that the next repeat finds another arena.
  bool changed() const { return changed_; }
  const Arena& arena() const { return arena_; }

 private:
  static constexpr int32_t kNone = -1;

  void CountReads(const Schedule& steps);
  void AddReads(int32_t value);
  int64_t NextReads(int32_t value);
  void Renew(int32_t value);
  int32_t Add(uint64_t address, int64_t refs, int32_t pins);
  Buffer& At(int32_t value);
  void Unread(Buffer* buffer);
  void FreeIfUnused(Buffer* buffer);
  bool Take(const Schedule& steps, int64_t number);
  void Begin(int32_t node, bool may_forward);
  void Finish(int32_t node);
  void Commit(int32_t update);
  uint64_t Serve(int32_t request, bool may_forward);
  void End();

  const FlatDataflow& flow_;
  Arena arena_;
  std::vector<int64_t> refs_;                // by value: reads of its original buffer
  std::vector<std::vector<int64_t>> late_;   // by `late_of_`: reads of each later buffer
  std::vector<int32_t> late_of_;             // by value; kNone where it has one buffer
  std::vector<int32_t> renewed_;             // by value: its buffers after the original; kNone before it is evicted
  std::vector<Buffer> buffers_;
  std::vector<int32_t> persistent_;          // the buffers of persistent values
  std::vector<int32_t> now_;                 // by value: its buffer
  std::vector<int32_t> coming_;              // by value: the buffer that a copy fills
  std::vector<int32_t> held_;                // by value: the buffer that a copy reads
  std::vector<std::vector<uint64_t>> temporaries_;  // by node
  std::vector<int32_t> running_;             // concurrent kernels
  std::vector<uint64_t> rests_;              // of splits for the next step
  bool failed_ = false;
  bool changed_ = false;
  uint64_t peak_bytes_ = 0;
  int64_t peak_step_ = 0;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_SCHEDULE_REPLAY_H_
