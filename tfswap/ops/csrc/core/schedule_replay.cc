#include "schedule_replay.h"

#include <algorithm>
#include <utility>

#include "chunk_splitter.h"
#include "export.h"

namespace tfswap {
namespace {

std::vector<uint64_t> SplitChunks(SimulatedArena* arena, const std::vector<int64_t>& sizes) {
  return ChunkSplitter<SimulatedArena>(arena).Split(sizes);
}

std::vector<uint64_t> SplitChunks(LiveLedger*, const std::vector<int64_t>&) { return {}; }

}  // namespace

uint64_t LiveLedger::Allocate(size_t nbytes) {
  if (nbytes == 0) return 0;
  sizes_.push_back(ChunkBytes(nbytes));
  in_use_bytes_ += sizes_.back();
  peak_bytes_ = std::max(peak_bytes_, in_use_bytes_);
  return sizes_.size();
}

void LiveLedger::Free(uint64_t address) {
  if (address != 0) in_use_bytes_ -= sizes_[address - 1];
}

NotingLedger::NotingLedger(const LiveLedger& before) : LiveLedger(before) {
  for (const uint64_t bytes : sizes_) lives_.push_back({bytes});
}

uint64_t NotingLedger::Allocate(size_t nbytes) {
  if (nbytes > 0) lives_.push_back({nbytes, step_});
  return LiveLedger::Allocate(nbytes);
}

void NotingLedger::Free(uint64_t address) {
  LiveLedger::Free(address);
  if (address == 0) return;
  lives_[address - 1].gone = step_;
  lives_[address - 1].made_before_gone = static_cast<int64_t>(lives_.size());
}

void NotingLedger::RestartPeak() {
  ++step_;
  LiveLedger::RestartPeak();
}

template <typename Arena>
ScheduleReplay<Arena>::ScheduleReplay(const FlatDataflow& flow, const Arena& arena, const uint64_t* addresses,
                                      const int32_t* pins, const Schedule& steps)
    : flow_(flow),
      arena_(arena),
      refs_(flow.value_count),
      late_of_(flow.value_count, kNone),
      now_(flow.value_count, kNone),
      coming_(flow.value_count, kNone),
      held_(flow.value_count, kNone),
      temporaries_(flow.node_count) {
  CountReads(steps);
  for (int64_t k = 0; k < flow.persistent_count; ++k) persistent_.push_back(Add(addresses[k], 0, pins[k]));
}

template <typename Arena>
void ScheduleReplay<Arena>::CountReads(const Schedule& steps) {
  for (int64_t n = 0; n < steps.count; ++n) {
    const StepKind kind = static_cast<StepKind>(steps.kinds[n]);
    const int32_t subject = static_cast<int32_t>(steps.subjects[n]);
    if (kind == kRun || kind == kLead || kind == kRerun || kind == kBegin) {
      for (const Lists& held : {flow_.reads, flow_.consumes}) {
        for (int32_t e = held.begins[subject]; e < held.begins[subject + 1]; ++e) AddReads(held.elements[e]);
      }
    } else if (kind == kCopyOut) {
      AddReads(subject);  // by its own edge, then by its handle, until the release
    }
    if (kind == kRerun) {
      for (int32_t e = flow_.makes.begins[subject]; e < flow_.makes.begins[subject + 1]; ++e) {
        Renew(flow_.makes.elements[e]);
      }
    } else if (kind == kAwait) {
      Renew(subject);
    }
  }
  for (int64_t k = 0; k < flow_.fetched_count; ++k) ++refs_[flow_.fetched[k]];
}

template <typename Arena>
void ScheduleReplay<Arena>::AddReads(int32_t value) {
  ++(late_of_[value] == kNone ? refs_[value] : late_[late_of_[value]].back());
}

// Later reads are of a new buffer.
template <typename Arena>
void ScheduleReplay<Arena>::Renew(int32_t value) {
  if (late_of_[value] == kNone) {
    late_of_[value] = static_cast<int32_t>(late_.size());
    late_.emplace_back();
  }
  late_[late_of_[value]].push_back(0);
}

// The reads of the buffer of `value` that is made now.
template <typename Arena>
int64_t ScheduleReplay<Arena>::NextReads(int32_t value) {
  if (late_of_[value] == kNone || renewed_[value] == kNone) return refs_[value];
  const std::vector<int64_t>& late = late_[late_of_[value]];
  const size_t nth = renewed_[value]++;
  if (nth < late.size()) return late[nth];
  failed_ = true;
  return 0;
}

template <typename Arena>
int32_t ScheduleReplay<Arena>::Add(uint64_t address, int64_t refs, int32_t pins) {
  buffers_.push_back({address, refs, pins});
  return static_cast<int32_t>(buffers_.size()) - 1;
}

template <typename Arena>
typename ScheduleReplay<Arena>::Buffer& ScheduleReplay<Arena>::At(int32_t value) {
  failed_ = failed_ || now_[value] == kNone;
  return buffers_[std::max(now_[value], 0)];
}

template <typename Arena>
void ScheduleReplay<Arena>::FreeIfUnused(Buffer* buffer) {
  if (buffer->refs != 0 || buffer->pins != 0) return;
  arena_.Free(buffer->address);
  buffer->address = 0;
}

template <typename Arena>
void ScheduleReplay<Arena>::Unread(Buffer* buffer) {
  --buffer->refs;
  FreeIfUnused(buffer);
}

template <typename Arena>
bool ScheduleReplay<Arena>::Repeat(const Schedule& steps, uint64_t most_bytes, int64_t* before_bytes,
                                   int64_t* during_bytes) {
  Start();
  peak_bytes_ = 0;
  peak_step_ = 0;
  for (int64_t number = 0; number < steps.count; ++number) {
    const uint64_t before = arena_.in_use_bytes();
    arena_.RestartPeak();
    if (!Take(steps, number)) return false;
    const uint64_t during = arena_.peak_bytes();
    if (during > peak_bytes_) {
      peak_bytes_ = during;
      peak_step_ = number;
      if (during > most_bytes) return true;
    }
    if (before_bytes != nullptr) {
      before_bytes[number] = static_cast<int64_t>(before);
      during_bytes[number] = static_cast<int64_t>(during);
    }
    if (steps.kinds[number] != kSplitChunk) {
      for (const uint64_t rest : rests_) arena_.Free(rest);
      rests_.clear();
    }
  }
  End();
  return !failed_;
}

template <typename Arena>
void ScheduleReplay<Arena>::Start() {
  renewed_.assign(flow_.value_count, kNone);
  std::fill(now_.begin(), now_.end(), kNone);
  if (buffers_.empty()) Add(0, 0, 1);  // `At` has one to return
  for (int64_t k = 0; k < flow_.persistent_count; ++k) {
    const int32_t value = flow_.persistent[k];
    buffers_[persistent_[k]].refs = refs_[value];
    now_[value] = persistent_[k];
  }
}

template <typename Arena>
bool ScheduleReplay<Arena>::Run(int64_t kernel, uint64_t* during_bytes) {
  const int32_t kind = kRun;
  arena_.RestartPeak();
  const bool done = Take({&kind, &kernel, 1}, 0);
  *during_bytes = arena_.peak_bytes();
  return done;
}

template <typename Arena>
void ScheduleReplay<Arena>::Save(State* state) const {
  state->arena = arena_;
  state->buffers = buffers_;
  state->now = now_;
}

template <typename Arena>
void ScheduleReplay<Arena>::Restore(const State& state) {
  arena_ = state.arena;
  buffers_ = state.buffers;
  now_ = state.now;
}

template <typename Arena>
bool ScheduleReplay<Arena>::Take(const Schedule& steps, int64_t number) {
  const StepKind kind = static_cast<StepKind>(steps.kinds[number]);
  const int32_t subject = static_cast<int32_t>(steps.subjects[number]);
  switch (kind) {
    case kRerun:
      for (int32_t e = flow_.makes.begins[subject]; e < flow_.makes.begins[subject + 1]; ++e) {
        const int32_t value = flow_.makes.elements[e];
        if (renewed_[value] == kNone) renewed_[value] = 0;
        now_[value] = kNone;
      }
      [[fallthrough]];
    case kRun:
    case kLead:
      Begin(subject, kind != kLead && running_.empty());
      running_.push_back(subject);
      if (kind != kLead) {
        for (const int32_t node : running_) Finish(node);
        running_.clear();
      }
      break;
    case kBegin:
      Begin(subject, true);
      break;
    case kFinish:
      Finish(subject);
      break;
    case kCopyOut:
      At(subject);
      held_[subject] = now_[subject];
      break;
    case kRelease:
      if (held_[subject] == kNone) return false;
      Unread(&buffers_[std::exchange(held_[subject], kNone)]);
      break;
    case kCopyIn: {
      if (renewed_[subject] == kNone) renewed_[subject] = 0;
      const uint64_t address = arena_.Allocate(flow_.value_bytes[subject]);
      coming_[subject] = Add(address, NextReads(subject), 0);
      break;
    }
    case kAwait:
      if (coming_[subject] == kNone) return false;
      now_[subject] = std::exchange(coming_[subject], kNone);
      break;
    case kSplitChunk:
      if (number + 1 < steps.count && steps.kinds[number + 1] != kSplitChunk) {
        int64_t first = number;
        while (first > 0 && steps.kinds[first - 1] == kSplitChunk) --first;
        rests_ = SplitChunks(&arena_, {steps.subjects + first, steps.subjects + number + 1});
      }
      break;
    case kExact:
      arena_.SplitAll();
      break;
  }
  return !failed_;
}

template <typename Arena>
void ScheduleReplay<Arena>::Begin(int32_t node, bool may_forward) {
  for (int32_t u = flow_.update_begins[node]; u < flow_.update_begins[node + 1]; ++u) {
    Buffer& old = At(flow_.update_old[u]);
    const bool held = flow_.update_copies[u] != 0 || old.pins > 1 || old.refs > flow_.update_reads[u];
    if (flow_.update_adopted[u] != kNone || !held) continue;
    --old.pins;
    changed_ = true;
    const int32_t made = flow_.update_new[u];
    now_[made] = Add(arena_.Allocate(flow_.value_bytes[made]), refs_[made], 1);
  }
  std::vector<uint64_t>& temporaries = temporaries_[node];
  temporaries.clear();
  std::vector<std::vector<uint64_t>> rests;  // of splits inside of bodies
  std::vector<int64_t> parted;
  for (int32_t r = flow_.request_begins[node]; r < flow_.request_begins[node + 1]; ++r) {
    const int32_t subject = flow_.request_subjects[r];
    switch (static_cast<RequestKind>(flow_.request_kinds[r])) {
      case kOut: {
        const uint64_t address = Serve(r, may_forward);
        now_[subject] = Add(address, NextReads(subject), 0);
        break;
      }
      case kTemp:
        temporaries.push_back(Serve(r, may_forward));
        break;
      case kFree:
        arena_.Free(std::exchange(temporaries[subject], 0));
        break;
      case kReleaseValue:
        Unread(&At(subject));
        break;
      case kSplitFor:
        parted.push_back(flow_.request_bytes[r]);
        break;
      case kPart:
        rests.push_back(SplitChunks(&arena_, parted));
        parted.clear();
        break;
      case kRest:
        if (rests.empty()) break;  // in a body by itself splits are nodes: no chunk was split here
        for (const uint64_t rest : rests.back()) arena_.Free(rest);
        rests.pop_back();
        break;
    }
  }
}

// The address that a request gets: with buffer forwarding, that of an input without other holders, if there is one.
template <typename Arena>
uint64_t ScheduleReplay<Arena>::Serve(int32_t request, bool may_forward) {
  const int32_t end = flow_.candidates.begins[request + 1];
  for (int32_t e = flow_.candidates.begins[request]; may_forward && e < end; ++e) {
    Buffer& source = At(flow_.candidates.elements[e]);
    if (source.refs == 1 && source.pins == 0 && source.address != 0) return std::exchange(source.address, 0);
  }
  return arena_.Allocate(flow_.request_bytes[request]);
}

template <typename Arena>
void ScheduleReplay<Arena>::Finish(int32_t node) {
  for (int32_t u = flow_.update_begins[node]; u < flow_.update_begins[node + 1]; ++u) Commit(u);
  const std::vector<uint64_t>& temporaries = temporaries_[node];
  for (auto address = temporaries.rbegin(); address != temporaries.rend(); ++address) arena_.Free(*address);
  for (int32_t e = flow_.reads.begins[node]; e < flow_.reads.begins[node + 1]; ++e) {
    Unread(&At(flow_.reads.elements[e]));
  }
  for (int32_t e = flow_.makes.begins[node]; e < flow_.makes.begins[node + 1]; ++e) {
    FreeIfUnused(&At(flow_.makes.elements[e]));  // it has no readers
  }
}

template <typename Arena>
void ScheduleReplay<Arena>::Commit(int32_t update) {
  Buffer& old = At(flow_.update_old[update]);
  const int32_t made = flow_.update_new[update], from = flow_.update_adopted[update];
  if (from != kNone) {
    Buffer& adopted = At(from);
    ++adopted.pins;
    adopted.refs += refs_[made];
    now_[made] = now_[from];
    --old.pins;
  } else if (now_[made] == kNone) {  // in place
    old.refs += refs_[made];
    now_[made] = now_[flow_.update_old[update]];
    return;
  }
  FreeIfUnused(&old);
}

// The caller releases the fetches, and variables have their updated buffers.
template <typename Arena>
void ScheduleReplay<Arena>::End() {
  for (int64_t k = 0; k < flow_.fetched_count; ++k) Unread(&At(flow_.fetched[k]));
  for (int32_t u = 0; u < flow_.update_begins[flow_.node_count]; ++u) {
    const int32_t now = now_[flow_.update_new[u]];
    int32_t& before = persistent_[flow_.update_variable[u]];
    if (now == kNone) failed_ = true;
    if (now == before || now == kNone) continue;
    changed_ = true;
    before = now;
  }
}

template class ScheduleReplay<SimulatedArena>;
template class ScheduleReplay<LiveLedger>;
template class ScheduleReplay<NotingLedger>;

}  // namespace tfswap

using tfswap::ArenaChunk;
using tfswap::FlatDataflow;
using tfswap::LiveLedger;
using tfswap::NotingLedger;
using tfswap::Schedule;
using tfswap::ScheduleReplay;
using tfswap::SimulatedArena;

namespace {

// The contents before a step, in an arena, or as live bytes.
struct MemoryBefore {
  bool live;
  SimulatedArena arena;
  LiveLedger ledger;

  uint64_t Allocate(int64_t bytes) {
    if (bytes <= 0) return 0;
    return live ? ledger.Allocate(bytes) : arena.Allocate(bytes);
  }
  uint64_t in_use_bytes() const { return live ? ledger.in_use_bytes() : arena.in_use_bytes(); }
};

}  // namespace

const LiveLedger& tfswap::LedgerOf(const void* filled) { return static_cast<const MemoryBefore*>(filled)->ledger; }

int64_t tfswap::PeakOfRuns(const FlatDataflow& flow, const void* filled, const uint64_t* addresses, const int32_t* pins,
                           const int32_t* kinds, const int64_t* subjects, const std::vector<int64_t>& counts) {
  uint64_t peak = 0;
  const SimulatedArena& before = static_cast<const MemoryBefore*>(filled)->arena;
  ScheduleReplay<SimulatedArena> replay(flow, before, addresses, pins, {kinds, subjects, counts[0]});
  for (const int64_t count : counts) {
    if (!replay.Repeat({kinds, subjects, count}, UINT64_MAX, nullptr, nullptr)) return -1;
    peak = std::max(peak, replay.peak_bytes());
    kinds += count;
    subjects += count;
  }
  return static_cast<int64_t>(peak);
}

namespace {

constexpr int32_t kWithin = 1, kAbove = 0, kFailed = -1;

// peak: the highest of all repeats, and the step that has it.
template <typename Arena>
int32_t ReplaySteps(ScheduleReplay<Arena> replay, const Schedule& steps, int64_t most_bytes, int32_t repeats,
                    int64_t* before_bytes, int64_t* during_bytes, int64_t* peak) {
  const uint64_t most = most_bytes < 0 ? UINT64_MAX : static_cast<uint64_t>(most_bytes);
  peak[0] = -1;
  for (int32_t n = 0; n < repeats && (n == 0 || replay.changed()); ++n) {
    if (!replay.Repeat(steps, most, n == 0 ? before_bytes : nullptr, during_bytes)) return kFailed;
    if (replay.peak_bytes() > most) return kAbove;
    if (static_cast<int64_t>(replay.peak_bytes()) > peak[0]) {
      peak[0] = static_cast<int64_t>(replay.peak_bytes());
      peak[1] = replay.peak_step();
    }
  }
  return kWithin;
}

}  // namespace

// The contents before a step, for the replays below: an arena, or a ledger of live bytes where `live`.
//
// Args:
//   known_bytes: of a ledger, the bytes that `chunks` have in use.
//   chunks, count: rows of an address, bytes, and whether it is in use, in order of address.
//   limit_bytes: of the arena; -1: none.
//   sizes, size_count: bytes that are allocated first; their addresses are written.
//   total_bytes: the bytes that are then in use, at least.
TFSWAP_C_API void* tfswap_fill(bool live, int64_t known_bytes, const int64_t* chunks, uint64_t count, int64_t limit_bytes,
                               bool collects, const int64_t* sizes, uint64_t size_count, int64_t total_bytes,
                               uint64_t* addresses) {
  const std::vector<ArenaChunk> arena = tfswap::ChunksOfRows(chunks, count);
  auto* const filled = new MemoryBefore{
      live, limit_bytes < 0 ? SimulatedArena(arena) : SimulatedArena(arena, limit_bytes, collects), {}};
  filled->Allocate(known_bytes);
  for (uint64_t i = 0; i < size_count; ++i) addresses[i] = filled->Allocate(sizes[i]);
  filled->Allocate(total_bytes - static_cast<int64_t>(filled->in_use_bytes()));
  return filled;
}

TFSWAP_C_API void tfswap_free_filled(void* filled) { delete static_cast<MemoryBefore*>(filled); }

// Repeats a schedule up to `repeats` times, as long as each leaves another arena. Returns 1; 0 where the peak is above
// `most_bytes` (-1: none); -1 for a schedule that is not one of this step.
//
// Args:
//   before_bytes, during_bytes: get, per step of the first repeat, the bytes in use before it, and the most in it.
//   peak: gets the peak and its step.
TFSWAP_C_API int32_t tfswap_replay_steps(const FlatDataflow* flow, const void* filled, const uint64_t* addresses,
                                         const int32_t* pins, const int32_t* kinds, const int64_t* subjects,
                                         int64_t count, int64_t most_bytes, int32_t repeats, int64_t* before_bytes,
                                         int64_t* during_bytes, int64_t* peak) {
  const auto& before = *static_cast<const MemoryBefore*>(filled);
  const Schedule steps = {kinds, subjects, count};
  const auto replayed = [&](const auto& arena) {
    return ReplaySteps(ScheduleReplay(*flow, arena, addresses, pins, steps), steps, most_bytes, repeats, before_bytes,
                       during_bytes, peak);
  };
  return before.live ? replayed(before.ledger) : replayed(before.arena);
}

// The allocations of one repeat without fragmentation. Returns their number; -1 for a schedule that is not one of this
// step, and where they are more than `most`.
//
// Args:
//   bytes, made, gone, made_before_gone: get, per allocation, what simulator/lives.py has.
//   during_bytes: gets, per step, the most bytes in it.
//   peak: gets the peak.
TFSWAP_C_API int64_t tfswap_replay_lives(const FlatDataflow* flow, const void* filled, const uint64_t* addresses,
                                         const int32_t* pins, const int32_t* kinds, const int64_t* subjects,
                                         int64_t count, int64_t* bytes, int64_t* made, int64_t* gone,
                                         int64_t* made_before_gone, int64_t most, int64_t* during_bytes, int64_t* peak) {
  const Schedule steps = {kinds, subjects, count};
  const NotingLedger before(static_cast<const MemoryBefore*>(filled)->ledger);
  ScheduleReplay<NotingLedger> replay(*flow, before, addresses, pins, steps);
  std::vector<int64_t> before_bytes(count);
  if (!replay.Repeat(steps, UINT64_MAX, before_bytes.data(), during_bytes)) return kFailed;
  peak[0] = static_cast<int64_t>(replay.peak_bytes());
  const auto& lives = replay.arena().lives();
  if (static_cast<int64_t>(lives.size()) > most) return kFailed;
  for (size_t n = 0; n < lives.size(); ++n) {
    bytes[n] = static_cast<int64_t>(lives[n].bytes);
    made[n] = lives[n].made;
    gone[n] = lives[n].gone < 0 ? count : lives[n].gone;
    made_before_gone[n] = lives[n].made_before_gone;
  }
  return static_cast<int64_t>(lives.size());
}
