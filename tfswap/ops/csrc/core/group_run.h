// One run of a group of kernels (group_ops.cc): which kernel runs next, on which threads, and with which buffers.

#ifndef TFSWAP_OPS_CSRC_CORE_GROUP_RUN_H_
#define TFSWAP_OPS_CSRC_CORE_GROUP_RUN_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "group_chunks.h"
#include "inner_kernels.h"
#include "serial_executor.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfswap {

// An upper bound for the time that calling another thread takes.
constexpr float kWorthAThreadS = 40e-6f;
// A group that saves more than this with several threads uses them without a trial, since a trial may fall into a time
// in which others use the cores. A kernel that takes longer than this shares its work with the other threads, unless
// ready kernels keep them busy.
constexpr float kLongS = 10 * kWorthAThreadS;
// A kernel that takes longer than this always shares its work: on one core it would leave the others idle after the
// ready kernels have ended.
constexpr float kSharedS = 50 * kWorthAThreadS;

// The fastest of this many first runs counts: the first ones fault pages in.
constexpr int kFirstRuns = 4;

// A kernel of a group.
struct GroupMember {
  std::unique_ptr<tensorflow::OpKernel> kernel;
  std::vector<int> sources;
  std::vector<bool> overwrites;  // by input
  std::vector<ChunkPlace> requests;
  int first_output = 0;
  int rank = 0;
  int awaited = 0;              // the number of members that it reads or waits for
  std::vector<int> awaited_by;  // the members that read it or wait for it
  mutable std::atomic<float> seconds{kWorthAThreadS};  // of a run: a running mean
  mutable std::atomic<int> runs{0};                    // up to kFirstRuns

  // Records the time of a run.
  void Took(float took_s) const {
    const float mean_s = seconds.load(std::memory_order_relaxed);
    const int run = runs.load(std::memory_order_relaxed);
    float now_s = took_s;
    if (run >= kFirstRuns) {
      // A long run may be one whose thread was preempted: it counts as four times the mean at most.
      now_s = mean_s + (std::min(took_s, 4 * mean_s + 1e-6f) - mean_s) / 8;
    } else {
      runs.store(run + 1, std::memory_order_relaxed);
      if (run > 0) now_s = std::min(took_s, mean_s);
    }
    seconds.store(now_s, std::memory_order_relaxed);
  }
};

// One run of a kernel. A second reference to an input keeps the kernel from forwarding its buffer.
struct MemberRun : InnerRun {
  MemberRun(tensorflow::DeviceBase* device, tensorflow::Allocator* allocator) : device(device, allocator) {}

  InnerDevice device;
  std::vector<tensorflow::Tensor> held_again;
};

// One run of a group.
class GroupRun : public std::enable_shared_from_this<GroupRun> {
 public:
  // Args:
  //   kept, reads: by output, whether others read it, and the number of all its readers.
  //   one_core: threads for a kernel that stays on its core.
  //   most_threads: the largest number of threads that run kernels.
  GroupRun(tensorflow::OpKernelContext* ctx, const std::deque<GroupMember>& members, const std::vector<int64_t>& sizes,
           int64_t reserved, const std::vector<int>& kept, const std::vector<int>& reads, const OneCore* one_core,
           int most_threads, tensorflow::AsyncOpKernel::DoneCallback done)
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

  // Runs kernels on the calling thread, and on others of the step while kernels are ready.
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

  // Whether the ready kernels take at least `most_s` seconds in all.
  bool IsReady(float most_s) const {
    float seconds = 0;
    for (const Ready& ready : ready_) {
      seconds += members_[ready.second].seconds.load(std::memory_order_relaxed);
      if (seconds >= most_s) return true;
    }
    return false;
  }

  // Runs a kernel; returns whether it succeeded.
  //
  // Args:
  //   alone: no other kernel runs or is ready.
  //   shares: its work is shared with the device's threads.
  bool RunKernel(int number, bool alone, bool shares) {
    const GroupMember& member = members_[number];
    MemberRun& run = *runs_[number];
    tensorflow::OpKernel* const kernel = member.kernel.get();
    run.device.set_threads(alone || shares ? nullptr : one_core_);
    // The device itself: in an iteration on trial with one thread, ctx->device() has that thread only.
    if (shares && most_threads_ > 1) run.device.set_shared(ctx_->device()->UnderlyingDevice());
    run.held.reserve(member.sources.size());
    for (size_t i = 0; i < member.sources.size(); ++i) {
      const int source = member.sources[i];
      run.held.push_back(source < 0 ? made_[-1 - source] : ctx_->input(source));
      if (source < 0) {
        if (!member.overwrites[i]) run.held_again.push_back(run.held.back());
        // The last reader releases it, so that a later kernel may forward the buffer that it is a view of.
        if (reads_[-1 - source].fetch_sub(1) == 1) made_[-1 - source] = tensorflow::Tensor();
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
      const std::unique_ptr<tensorflow::Tensor> made(run.ctx->release_output(i).tensor);
      if (made != nullptr) made_[member.first_output + i] = std::move(*made);
    }
    run.ctx.reset();
    run.held.clear();  // so that the next kernel may forward these buffers
    run.held_again.clear();
    return true;
  }

  // Sets the outputs, or the status of the first kernel that failed, with that kernel's name.
  void End() {
    absl::Status status;
    for (size_t i = 0; i < runs_.size() && status.ok(); ++i) {
      if (runs_[i]->ctx != nullptr && !runs_[i]->ctx->status().ok()) {
        status = tensorflow::AttachDef(runs_[i]->ctx->status(), members_[i].kernel->def());
      }
    }
    for (size_t o = 0; o < made_.size() && status.ok(); ++o) {
      // A result that no other kernel reads may lie in a chunk that serves another.
      ctx_->set_output(o, kept_[o] ? made_[o] : tensorflow::Tensor(ctx_->expected_output_dtype(o)));
    }
    if (!status.ok()) ctx_->SetStatus(status);
    runs_.clear();
    made_.clear();
    chunks_->Close();
    const tensorflow::AsyncOpKernel::DoneCallback done = std::move(done_);
    done();
  }

  tensorflow::OpKernelContext* const ctx_;
  const std::deque<GroupMember>& members_;
  const std::vector<int>& kept_;  // by output
  GroupChunks* const chunks_;  // deletes itself after Close()
  const OneCore* const one_core_;
  const int most_threads_;
  std::vector<std::unique_ptr<MemberRun>> runs_;
  std::vector<tensorflow::Tensor> made_;
  std::deque<std::atomic<int>> reads_;  // by output, the number of readers that have not run

  std::mutex mu_;
  std::vector<int> awaited_;
  std::set<Ready> ready_;
  int working_ = 1, running_ = 0;
  int64_t left_;
  bool failed_ = false;
  tensorflow::AsyncOpKernel::DoneCallback done_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_GROUP_RUN_H_
