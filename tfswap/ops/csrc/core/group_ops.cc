// Runs a group of TensorFlow's kernels on several threads, in a step whose memory is known before it runs.
//
// Most kernels of a loop's body are too small to be shared among threads, but many need not wait for one another. The
// allocator's requests and frees must not depend on which of them is faster. So one op runs all kernels of a group:
//
//   - before the first kernel starts, the op requests chunks for all of them;
//   - a kernel's requests are served by places in these chunks. One place serves a second request where all users of
//     the first have ended in any case: the later kernel reads their outputs (analysis/groups.py), or waits for them
//     (planner/concurrent.py);
//   - the chunks, and the references to the group's inputs, are released when the last kernel has ended.
//
// Another thread is called when the ready kernels are measured to take long enough for that. A kernel that runs alone,
// or takes long, shares its work with the device's threads; others stay on their core. Where several threads gain
// little, the op measures now and then whether one is faster. A kernel's work has the same parts, and its result the
// same bits, on any number of threads.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "group_run.h"
#include "inner_kernels.h"
#include "online_choice.h"
#include "serial_executor.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/node_properties.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfswap {
namespace {

using tensorflow::Allocator;
using tensorflow::AsyncOpKernel;
using tensorflow::NodeProperties;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

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
Runs several of TensorFlow's kernels, each as soon as its inputs are ready.

inputs: Tensors of other nodes that the kernels read.
outputs: The outputs of the kernels, in the order of the kernels.
kernels: The nodes, as serialized NodeDefs, in an order in which they could run.
sources: For each input of each kernel the number of an input, or -1 - n for the n-th output.
overwrites: For each input of each kernel whether the kernel may forward its buffer: it has no other reader.
chunks: The sizes of the chunks that serve the kernels' requests, in bytes.
requests: For each kernel the number of its requests to the allocator, and for each request the number of its chunk and
  the offset in the chunk, in bytes.
kept: For each output whether a node outside of the group reads it. Other outputs are empty.
ranks: Of the kernels that can run next, the one with the lowest starts first.
waits: Pairs of kernels, by number: the second starts after the first has ended.
reserved: The most bytes that the kernels request at a time from the process's allocator.
)doc");

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
    // In an iteration on trial with one thread its groups use one thread too: the trial times one thread.
    const OnLane* const on = ctx->runner()->target<OnLane>();
    const bool alone = on != nullptr && on->lane->is_alone();
    const bool sure = SavedS(threads) >= kLongS;
    const int way = sure ? kConcurrently : alone ? kOneThread : faster_.Next();
    const auto began = std::chrono::steady_clock::now();
    auto ended = [this, is_trial = !sure && !alone, way, began, done = std::move(done)] {
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
      if (is_trial) faster_.Took(way, took.count());
      done();
    };
    const int most = way == kOneThread ? 1 : threads;
    const auto run = std::make_shared<GroupRun>(ctx, members_, chunks_, reserved_, kept_, reads_, &one_core_, most,
                                                std::move(ended));
    run->Work();
  }

 private:
  enum Way { kConcurrently, kOneThread };

  // The seconds that several threads save at most, by the kernels' times so far: the longest chain of kernels remains.
  float SavedS(int threads) const {
    float all_s = 0, longest_s = 0;
    std::vector<float> starts(members_.size());  // of each, after all members that it waits for
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
      GroupMember& member = members_.emplace_back();
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

  // Makes kernels wait for earlier ones.
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
  std::deque<GroupMember> members_;
  std::vector<int64_t> chunks_;
  int64_t reserved_ = 0;
  std::vector<int> kept_;
  int outputs_ = 0;
  std::vector<int> reads_;  // by output, the number of readers in the group and outside of it
  FasterWay faster_;
};

// On a CPU alone: a GPU's kernels run one after another on its stream.
REGISTER_KERNEL_BUILDER(Name("Tfswap>Group").Device(tensorflow::DEVICE_CPU), GroupOp);

}  // namespace
}  // namespace tfswap
