// Kernels of a loop's body that run as soon as what they read is there, on as many threads as there are, in a step whose
// memory is known beforehand.
//
// Most of a loop's kernels are too small to gain by being shared among threads, but many need not wait for one another.
// What the allocator is asked for, and when what it gave comes back, must not depend on which of them is faster. So one
// op runs all kernels of such a group:
//
//   - before the first starts, the op requests chunks for all of them;
//   - a kernel's requests are served by places in these chunks. One place serves several requests where all that used it
//     have ended, whichever is faster: the kernel reads what they make (analysis/groups.py), or waits for them
//     (planner/concurrent.py);
//   - they are freed when the last kernel has ended, as what the kernels read does.
//
// Another thread is called where kernels are ready that take long enough for that, as measured. A kernel that runs alone,
// or takes long, shares its work with the device's threads; others stay on their core. Where more than one thread gains
// little, whether it is faster is found out as the loop runs. Parts, and bits, are the same.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "online_choice.h"
#include "inner_kernels.h"
#include "serial_executor.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/node_properties.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfswap {
namespace {

// Where a request is served.
struct ChunkPlace {
  int chunk;
  int64_t offset;
};

using tensorflow::Allocator;
using tensorflow::AsyncOpKernel;
using tensorflow::NodeProperties;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("Tfswap>Group")
    .Input("inputs: Tin")
    .Output("outputs: Tout")
    .Attr("Tin: list(type) >= 0")
    .Attr("Tout: list(type) >= 1")
    .Attr("kernels: list(string) >= 2")
    .Attr("sources: list(int)")
    .Attr("overwrites: list(int)")
    .Attr("chunks: list(int)")
    .Attr("requests: list(int)")
    .Attr("kept: list(int)")
    .Attr("ranks: list(int)")
    .Attr("waits: list(int) = []")
    .Attr("reserved: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Runs several of TensorFlow's kernels, each as soon as what it reads is there.

inputs: What they read of what others make.
outputs: What the kernels make, one after the other.
kernels: The nodes, as serialized NodeDefs, in an order in which they could run.
sources: For each input of each kernel the number of an input, or -1 - n for the n-th output.
overwrites: For each input of each kernel whether it writes over it: nothing else reads it.
chunks: The bytes of the chunks that serve their requests.
requests: For each kernel how many requests it makes of the allocator, and for each the number of the chunk that serves
  it, and the offset there.
kept: For each output whether anything else reads it; others are empty.
ranks: Of the kernels that can run next, the one with the lowest starts first.
waits: Pairs of kernels, by number: the first one, and a later one that starts when that has ended.
reserved: The most bytes that the kernels request at a time from the process's allocator.
)doc");

// The chunks of one run, which are requested when it begins. They live as long as any tensor in them, since a tensor is
// freed by the allocator that it came from.
class GroupChunks {
 public:
  // The device's allocator as one kernel sees it.
  class View : public Allocator {
   public:
    View(GroupChunks* chunks, const std::vector<ChunkPlace>& requests) : chunks_(*chunks), requests_(requests) {}

    std::string Name() override { return chunks_.allocator_->Name(); }
    void* AllocateRaw(size_t alignment, size_t num_bytes) override {
      return AllocateRaw(alignment, num_bytes, tensorflow::AllocationAttributes());
    }
    void* AllocateRaw(size_t alignment, size_t num_bytes,
                      const tensorflow::AllocationAttributes& attributes) override {
      return chunks_.Serve(this, alignment, num_bytes, attributes);
    }
    void DeallocateRaw(void* ptr) override { chunks_.Return(ptr); }
    bool TracksAllocationSizes() const override { return false; }  // of what lies within a chunk it knows none
    std::optional<tensorflow::AllocatorStats> GetStats() override { return chunks_.allocator_->GetStats(); }
    tensorflow::AllocatorMemoryType GetMemoryType() const override { return chunks_.allocator_->GetMemoryType(); }

   private:
    friend class GroupChunks;

    GroupChunks& chunks_;
    const std::vector<ChunkPlace>& requests_;  // the op's: read while the run lasts
    size_t next_ = 0;
  };

  // Args:
  //   reserved: bytes that are free as well once the chunks are there, for requests that no view of these serves: some
  //     kernels request temporaries from the process's allocator (redux_functor.h, ReduceOuterDimensions).
  GroupChunks(Allocator* allocator, const std::vector<int64_t>& sizes, int64_t reserved) : allocator_(allocator) {
    void* const room = reserved > 0 ? allocator->AllocateRaw(Allocator::kAllocatorAlignment, reserved) : nullptr;
    chunks_.reserve(sizes.size());
    for (const int64_t size : sizes) {
      chunks_.push_back({allocator->AllocateRaw(Allocator::kAllocatorAlignment, size), size, 0});
    }
    if (room != nullptr) allocator->DeallocateRaw(room);
  }

  // For a kernel whose requests these chunks serve, one after the other.
  View* Add(const std::vector<ChunkPlace>& requests) { return &views_.emplace_back(this, requests); }

  // All kernels have ended, and what stays is what others read.
  void Close() {
    std::vector<void*> unused;
    bool last;
    {
      std::lock_guard<std::mutex> lock(mu_);
      is_open_ = false;
      for (Chunk& chunk : chunks_) {
        if (chunk.tensors == 0 && chunk.ptr != nullptr) unused.push_back(std::exchange(chunk.ptr, nullptr));
      }
      last = tensors_ == 0;
    }
    Allocator* const allocator = allocator_;
    for (void* ptr : unused) allocator->DeallocateRaw(ptr);
    if (last) delete this;
  }

 private:
  struct Chunk {
    void* ptr;
    int64_t size;
    int tensors;  // that lie in it
  };

  void* Serve(View* view, size_t alignment, size_t num_bytes, const tensorflow::AllocationAttributes& attributes) {
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (is_open_ && view->next_ < view->requests_.size()) {
        const ChunkPlace& place = view->requests_[view->next_];
        Chunk& chunk = chunks_[place.chunk];
        if (chunk.ptr != nullptr && static_cast<size_t>(chunk.size - place.offset) >= num_bytes) {
          ++view->next_;
          ++chunk.tensors;
          ++tensors_;
          return static_cast<char*>(chunk.ptr) + place.offset;
        }
      }
    }
    // The plan did not know of this request.
    void* const made = allocator_->AllocateRaw(alignment, num_bytes, attributes);
    if (made == nullptr) return nullptr;
    std::lock_guard<std::mutex> lock(mu_);
    ++tensors_;
    return made;
  }

  void Return(void* ptr) {
    Allocator* const allocator = allocator_;  // once this is counted, another thread may be the last, and delete it
    bool last, is_last_of_chunk = true;
    {
      std::lock_guard<std::mutex> lock(mu_);
      --tensors_;
      const auto found = std::find_if(chunks_.begin(), chunks_.end(), [ptr](const Chunk& chunk) {
        return chunk.ptr != nullptr && ptr >= chunk.ptr && ptr < static_cast<char*>(chunk.ptr) + chunk.size;
      });
      if (found != chunks_.end()) {
        // Damaged attributes may have several tensors in one chunk that outlive the run.
        is_last_of_chunk = --found->tensors == 0 && !is_open_;
        if (is_last_of_chunk) ptr = std::exchange(found->ptr, nullptr);
      }
      last = !is_open_ && tensors_ == 0;
    }
    if (is_last_of_chunk) allocator->DeallocateRaw(ptr);
    if (last) delete this;
  }

  Allocator* const allocator_;
  std::mutex mu_;
  std::vector<Chunk> chunks_;
  std::deque<View> views_;
  int64_t tensors_ = 0;
  bool is_open_ = true;
};

// To call another thread takes less than that.
constexpr float kWorthAThreadS = 40e-6f;
// A group that saves so much by other threads calls them, whatever was found out while others used the cores. A kernel
// that takes so long shares its work with them, unless others that are ready keep them busy meanwhile.
constexpr float kLongS = 10 * kWorthAThreadS;
// A kernel that takes so long shares its work with them in any case: on one core it would leave the others idle where
// those that are ready end before it.
constexpr float kSharedS = 50 * kWorthAThreadS;

// Number of runs, of which the fastest counts: the first ones fault pages in.
constexpr int kFirstRuns = 4;

// A kernel of the group.
struct Member {
  std::unique_ptr<OpKernel> kernel;
  std::vector<int> sources;
  std::vector<bool> overwrites;  // by input
  std::vector<ChunkPlace> requests;
  int first_output = 0;
  int rank = 0;
  int awaited = 0;              // how many others it reads, or waits for
  std::vector<int> awaited_by;  // who reads it, or waits for it
  mutable std::atomic<float> seconds{kWorthAThreadS};  // that it takes: the mean of late
  mutable std::atomic<int> runs{0};                    // up to kFirstRuns

  void Took(float took_s) const {
    const float mean_s = seconds.load(std::memory_order_relaxed);
    const int run = runs.load(std::memory_order_relaxed);
    float now_s = took_s;
    if (run >= kFirstRuns) {
      // A thread that was set aside meanwhile says nothing of the kernel.
      now_s = mean_s + (std::min(took_s, 4 * mean_s + 1e-6f) - mean_s) / 8;
    } else {
      runs.store(run + 1, std::memory_order_relaxed);
      if (run > 0) now_s = std::min(took_s, mean_s);
    }
    seconds.store(now_s, std::memory_order_relaxed);
  }
};

// One run of a kernel. What it reads is held twice where it is not to be written over.
struct MemberRun : InnerRun {
  MemberRun(tensorflow::DeviceBase* device, Allocator* allocator) : device(device, allocator) {}

  InnerDevice device;
  std::vector<Tensor> held_again;
};

// One run of all.
class Run : public std::enable_shared_from_this<Run> {
 public:
  // Args:
  //   one_core: threads for a kernel that stays on its core.
  //   most_threads: on which kernels run.
  Run(OpKernelContext* ctx, const std::deque<Member>& members, const std::vector<int64_t>& sizes,
      int64_t reserved, const std::vector<int>& kept, const std::vector<int>& reads, const OneCore* one_core,
      int most_threads, AsyncOpKernel::DoneCallback done)
      : ctx_(ctx),
        members_(members),
        kept_(kept),
        chunks_(new GroupChunks(ctx->device()->GetAllocator({}), sizes, reserved)),
        one_core_(one_core),
        most_threads_(most_threads),
        made_(kept.size()),
        reads_(reads.size()),
        left_(members.size()),
        done_(std::move(done)) {
    for (size_t o = 0; o < reads.size(); ++o) reads_[o].store(reads[o], std::memory_order_relaxed);
    runs_.reserve(members.size());
    for (size_t i = 0; i < members.size(); ++i) {
      runs_.push_back(std::make_unique<MemberRun>(ctx->device(), chunks_->Add(members[i].requests)));
      awaited_.push_back(members[i].awaited);
      if (members[i].awaited == 0) AddReady(i);
    }
  }

  // On the calling thread, and on others of the step's as long as kernels are ready.
  void Work() {
    for (;;) {
      int next;
      bool alone, shares, call_another;
      {
        std::lock_guard<std::mutex> lock(mu_);
        if (ready_.empty()) {
          --working_;
          return;
        }
        next = ready_.begin()->second;
        ready_.erase(ready_.begin());
        alone = most_threads_ == 1 || (ready_.empty() && running_ == 0);
        const float seconds = members_[next].seconds.load(std::memory_order_relaxed);
        shares = seconds >= kSharedS || (seconds >= kLongS && !IsReady(seconds * (most_threads_ - 1)));
        ++running_;
        call_another = working_ < most_threads_ && IsReady(kWorthAThreadS);
        if (call_another) ++working_;
      }
      if (call_another) {
        Behind(*ctx_->runner())([run = shared_from_this()] { run->Work(); });
      }
      const bool succeeded = RunKernel(next, alone, shares);
      bool last;
      {
        std::lock_guard<std::mutex> lock(mu_);
        --running_;
        --left_;
        if (!succeeded) failed_ = true;
        for (const int reader : members_[next].awaited_by) {
          if (--awaited_[reader] == 0) AddReady(reader);
        }
        if (failed_) ready_.clear();
        last = running_ == 0 && (left_ == 0 || failed_);
        if (last) --working_;
      }
      if (last) return End();
    }
  }

 private:
  using Ready = std::pair<int, int>;  // rank, and number

  void AddReady(int number) { ready_.emplace(members_[number].rank, number); }

  // Whether what is ready takes so long.
  bool IsReady(float most_s) const {
    float seconds = 0;
    for (const Ready& ready : ready_) {
      seconds += members_[ready.second].seconds.load(std::memory_order_relaxed);
      if (seconds >= most_s) return true;
    }
    return false;
  }

  // Args:
  //   alone: nothing else runs, or is ready.
  //   shares: it takes longer than what is ready.
  bool RunKernel(int number, bool alone, bool shares) {
    const Member& member = members_[number];
    MemberRun& run = *runs_[number];
    OpKernel* const kernel = member.kernel.get();
    run.device.set_threads(alone || shares ? nullptr : one_core_);
    // An iteration that is tried on one thread has another device, which shares nothing.
    if (shares && most_threads_ > 1) run.device.set_shared(ctx_->device()->UnderlyingDevice());
    run.held.reserve(member.sources.size());
    for (size_t i = 0; i < member.sources.size(); ++i) {
      const int source = member.sources[i];
      run.held.push_back(source < 0 ? made_[-1 - source] : ctx_->input(source));
      if (source < 0) {
        if (!member.overwrites[i]) run.held_again.push_back(run.held.back());
        // The last that reads it releases it, so that a later kernel may write over what it is a view of.
        if (reads_[-1 - source].fetch_sub(1) == 1) made_[-1 - source] = Tensor();
      }
      run.inputs.emplace_back(&run.held[i]);
      run.input_attributes.push_back(source < 0 ? tensorflow::AllocatorAttributes() : ctx_->input_alloc_attr(source));
    }
    for (int i = 0; i < kernel->num_outputs(); ++i) {
      run.output_attributes.push_back(ctx_->output_alloc_attr(member.first_output + i));
    }
    run.MakeContext(ctx_, kernel, &run.device);
    const auto began = std::chrono::steady_clock::now();
    kernel->Compute(run.ctx.get());
    const std::chrono::duration<float> took = std::chrono::steady_clock::now() - began;
    member.Took(took.count());
    if (!run.ctx->status().ok()) return false;
    for (int i = 0; i < kernel->num_outputs(); ++i) {
      const std::unique_ptr<Tensor> made(run.ctx->release_output(i).tensor);
      if (made != nullptr) made_[member.first_output + i] = std::move(*made);
    }
    run.ctx.reset();
    run.held.clear();  // so that the next may write over what this one read, or wrote over
    run.held_again.clear();
    return true;
  }

  // Hands over what the kernels made, or the status of the first that failed, with its own name.
  void End() {
    absl::Status status;
    for (size_t i = 0; i < runs_.size() && status.ok(); ++i) {
      if (runs_[i]->ctx != nullptr && !runs_[i]->ctx->status().ok()) {
        status = tensorflow::AttachDef(runs_[i]->ctx->status(), members_[i].kernel->def());
      }
    }
    for (size_t o = 0; o < made_.size() && status.ok(); ++o) {
      // A result that no other kernel reads may lie in a chunk that serves another.
      ctx_->set_output(o, kept_[o] ? made_[o] : Tensor(ctx_->expected_output_dtype(o)));
    }
    if (!status.ok()) ctx_->SetStatus(status);
    runs_.clear();
    made_.clear();
    chunks_->Close();
    const AsyncOpKernel::DoneCallback done = std::move(done_);
    done();
  }

  OpKernelContext* const ctx_;
  const std::deque<Member>& members_;
  const std::vector<int>& kept_;  // by output
  GroupChunks* const chunks_;  // its own, once closed
  const OneCore* const one_core_;
  const int most_threads_;
  std::vector<std::unique_ptr<MemberRun>> runs_;
  std::vector<Tensor> made_;
  std::deque<std::atomic<int>> reads_;  // by output, how many are to come

  std::mutex mu_;
  std::vector<int> awaited_;
  std::set<Ready> ready_;
  int working_ = 1, running_ = 0;
  int64_t left_;
  bool failed_ = false;
  AsyncOpKernel::DoneCallback done_;
};

class GroupOp : public AsyncOpKernel {
 public:
  explicit GroupOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx), one_core_(*ctx->device()) {
    std::vector<std::string> kernels;
    std::vector<int> sources, ranks, waits, overwrites;
    std::vector<int64_t> requests;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("overwrites", &overwrites));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("chunks", &chunks_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("reserved", &reserved_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("kept", &kept_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("kernels", &kernels));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sources", &sources));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("requests", &requests));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ranks", &ranks));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("waits", &waits));
    OP_REQUIRES_OK(ctx, Make(ctx, kernels, sources, overwrites, requests, ranks));
    OP_REQUIRES_OK(ctx, Wait(waits));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const int threads = std::max(1, ctx->device()->tensorflow_cpu_worker_threads()->num_threads);
    // Of an iteration that is tried on one thread these groups are: so its time is that of one thread.
    const OnLane* const on = ctx->runner()->target<OnLane>();
    const bool alone = on != nullptr && on->lane->is_alone();
    const bool sure = SavedS(threads) >= kLongS;
    const int way = sure ? kConcurrently : alone ? kOneThread : faster_.Next();
    const auto began = std::chrono::steady_clock::now();
    auto ended = [this, asked = !sure && !alone, way, began, done = std::move(done)] {
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
      if (asked) faster_.Took(way, took.count());
      done();
    };
    const int most = way == kOneThread ? 1 : threads;
    std::make_shared<Run>(ctx, members_, chunks_, reserved_, kept_, reads_, &one_core_, most, std::move(ended))->Work();
  }

 private:
  enum Way { kConcurrently, kOneThread };

  // What this number of threads saves, by what the kernels took so far: no more than what the longest chain of them leaves.
  float SavedS(int threads) const {
    float all_s = 0, longest_s = 0;
    std::vector<float> starts(members_.size());  // of each, behind all that it reads
    for (size_t i = 0; i < members_.size(); ++i) {
      const float seconds = members_[i].seconds.load(std::memory_order_relaxed);
      const float ends = starts[i] + seconds;
      for (const int reader : members_[i].awaited_by) starts[reader] = std::max(starts[reader], ends);
      all_s += seconds;
      longest_s = std::max(longest_s, ends);
    }
    return all_s - std::max(longest_s, all_s / threads);
  }

  absl::Status Make(OpKernelConstruction* ctx, const std::vector<std::string>& kernels,
                    const std::vector<int>& sources, const std::vector<int>& overwrites,
                    const std::vector<int64_t>& requests, const std::vector<int>& ranks) {
    const absl::Status damaged = Damaged();
    size_t source = 0, request = 0;
    std::vector<int> maker;  // by output
    if (ranks.size() != kernels.size() || overwrites.size() != sources.size()) return damaged;
    for (size_t number = 0; number < kernels.size(); ++number) {
      std::shared_ptr<const NodeProperties> node;
      TF_RETURN_IF_ERROR(ParseKernel(kernels[number], &node));
      Member& member = members_.emplace_back();
      TF_RETURN_IF_ERROR(MakeKernel(ctx, node, &member.kernel));
      member.first_output = outputs_;
      member.rank = ranks[number];
      for (int i = 0; i < member.kernel->num_inputs(); ++i, ++source) {
        if (source == sources.size()) return damaged;
        const int from = sources[source];
        if (from >= ctx->num_inputs() || -1 - from >= outputs_) return damaged;
        if (from >= 0 && overwrites[source]) return damaged;
        member.sources.push_back(from);
        member.overwrites.push_back(overwrites[source] != 0);
        if (from >= 0) continue;
        ++reads_[-1 - from];
        auto& readers = members_[maker[-1 - from]].awaited_by;
        if (!readers.empty() && readers.back() == static_cast<int>(number)) continue;
        readers.push_back(number);
        ++member.awaited;
      }
      if (request == requests.size()) return damaged;
      const int64_t count = requests[request++];
      if (count < 0 || count > static_cast<int64_t>(requests.size() - request) / 2) return damaged;
      for (int64_t n = 0; n < count; ++n, request += 2) {
        const int64_t chunk = requests[request], offset = requests[request + 1];
        if (chunk < 0 || chunk >= static_cast<int64_t>(chunks_.size())) return damaged;
        if (offset < 0 || offset >= std::max<int64_t>(1, chunks_[chunk])) return damaged;
        if (offset % Allocator::kAllocatorAlignment != 0) return damaged;
        member.requests.push_back({static_cast<int>(chunk), offset});
      }
      outputs_ += member.kernel->num_outputs();
      maker.resize(outputs_, number);
      reads_.resize(outputs_);
    }
    if (source != sources.size() || request != requests.size() || outputs_ != ctx->num_outputs()) return damaged;
    if (static_cast<int>(kept_.size()) != outputs_) return damaged;
    for (int o = 0; o < outputs_; ++o) reads_[o] += kept_[o];
    return absl::OkStatus();
  }

  // Has kernels wait for others that came before them.
  absl::Status Wait(const std::vector<int>& waits) {
    if (waits.size() % 2 != 0) return Damaged();
    for (size_t n = 0; n < waits.size(); n += 2) {
      const int first = waits[n], later = waits[n + 1];
      if (first < 0 || later <= first || later >= static_cast<int>(members_.size())) return Damaged();
      members_[first].awaited_by.push_back(later);
      ++members_[later].awaited;
    }
    return absl::OkStatus();
  }

  static absl::Status Damaged() {
    return absl::InvalidArgumentError("Tfswap>Group: its attributes do not fit its kernels.");
  }

  OneCore one_core_;
  std::deque<Member> members_;
  std::vector<int64_t> chunks_;
  int64_t reserved_ = 0;
  std::vector<int> kept_;
  int outputs_ = 0;
  std::vector<int> reads_;  // by output, by the kernels and by others
  FasterWay faster_;
};

// On a CPU alone: a GPU's kernels run one after another on its stream.
REGISTER_KERNEL_BUILDER(Name("Tfswap>Group").Device(tensorflow::DEVICE_CPU), GroupOp);

}  // namespace
}  // namespace tfswap
