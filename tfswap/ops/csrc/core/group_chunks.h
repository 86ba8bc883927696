// The memory of a group of kernels (group_ops.cc): chunks that are requested before the first kernel starts, and the
// allocators that serve the kernels' requests from them.

#ifndef TFSWAP_OPS_CSRC_CORE_GROUP_CHUNKS_H_
#define TFSWAP_OPS_CSRC_CORE_GROUP_CHUNKS_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/allocator.h"

namespace tfswap {

// The place of a request: a chunk, by number, and an offset in bytes.
struct ChunkPlace {
  int chunk;
  int64_t offset;
};

// The chunks of one run of a group, requested when it begins. Each is freed when no tensor lies in it any more. This
// object deletes itself after the last of them: a tensor keeps a pointer to the allocator that frees it.
class GroupChunks {
 public:
  // The device's allocator as one kernel sees it.
  class View : public tensorflow::Allocator {
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
    bool TracksAllocationSizes() const override { return false; }  // a chunk has none for its parts
    std::optional<tensorflow::AllocatorStats> GetStats() override { return chunks_.allocator_->GetStats(); }
    tensorflow::AllocatorMemoryType GetMemoryType() const override { return chunks_.allocator_->GetMemoryType(); }

   private:
    friend class GroupChunks;

    GroupChunks& chunks_;
    const std::vector<ChunkPlace>& requests_;  // the op's: read during the run only
    size_t next_ = 0;
  };

  // Args:
  //   reserved: bytes that stay free next to the chunks, for requests that no view serves: some kernels request
  //     temporaries from the process's allocator (redux_functor.h, ReduceOuterDimensions).
  GroupChunks(tensorflow::Allocator* allocator, const std::vector<int64_t>& sizes, int64_t reserved)
      : allocator_(allocator) {
    constexpr size_t kAlignment = tensorflow::Allocator::kAllocatorAlignment;
    void* const room = reserved > 0 ? allocator->AllocateRaw(kAlignment, reserved) : nullptr;
    chunks_.reserve(sizes.size());
    for (const int64_t size : sizes) chunks_.push_back({allocator->AllocateRaw(kAlignment, size), size, 0});
    if (room != nullptr) allocator->DeallocateRaw(room);
  }

  // The allocator of one kernel. Its requests are served in the order of `requests`.
  View* Add(const std::vector<ChunkPlace>& requests) { return &views_.emplace_back(this, requests); }

  // All kernels have ended: chunks without tensors are freed, the others with their last tensor.
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
    tensorflow::Allocator* const allocator = allocator_;
    for (void* ptr : unused) allocator->DeallocateRaw(ptr);
    if (last) delete this;
  }

 private:
  struct Chunk {
    void* ptr;
    int64_t size;
    int tensors;  // the number of tensors in it
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
    // The plan has no place for this request.
    void* const made = allocator_->AllocateRaw(alignment, num_bytes, attributes);
    if (made == nullptr) return nullptr;
    std::lock_guard<std::mutex> lock(mu_);
    ++tensors_;
    return made;
  }

  void Return(void* ptr) {
    tensorflow::Allocator* const allocator = allocator_;  // below, another thread may be the last and delete this
    bool last, is_last_of_chunk = true;
    {
      std::lock_guard<std::mutex> lock(mu_);
      --tensors_;
      const auto found = std::find_if(chunks_.begin(), chunks_.end(), [ptr](const Chunk& chunk) {
        return chunk.ptr != nullptr && ptr >= chunk.ptr && ptr < static_cast<char*>(chunk.ptr) + chunk.size;
      });
      if (found != chunks_.end()) {
        // With damaged attributes several tensors of one chunk may outlive the run.
        is_last_of_chunk = --found->tensors == 0 && !is_open_;
        if (is_last_of_chunk) ptr = std::exchange(found->ptr, nullptr);
      }
      last = !is_open_ && tensors_ == 0;
    }
    if (is_last_of_chunk) allocator->DeallocateRaw(ptr);
    if (last) delete this;
  }

  tensorflow::Allocator* const allocator_;
  std::mutex mu_;
  std::vector<Chunk> chunks_;
  std::deque<View> views_;
  int64_t tensors_ = 0;
  bool is_open_ = true;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_GROUP_CHUNKS_H_
