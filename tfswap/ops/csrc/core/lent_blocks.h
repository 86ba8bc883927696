// Memory of one device's arena in which swapped tensors of another device wait.
//
// A block is allocated by LendBlock on the device that lends it, and is used by the SwapOuts that have its number. Each
// has its own place in the block, which the plan has chosen (planner/host_tiers.py).
//
// Invariant: no two pieces of a block overlap, also where a step fails, or runs twice at one time. A block is freed when
// it was dropped, and the last copy from or to it has ended.

#ifndef TFSWAP_OPS_CSRC_CORE_LENT_BLOCKS_H_
#define TFSWAP_OPS_CSRC_CORE_LENT_BLOCKS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "tensorflow/core/framework/tensor.h"

namespace tfswap {

class LentBlock {
 public:
  explicit LentBlock(tensorflow::Tensor memory) : memory_(std::move(memory)) {}

  // `bytes` from `place` on; null where they are in use, or are not of this block.
  void* Take(int64_t place, int64_t bytes);
  void Release(int64_t place);

 private:
  std::mutex mu_;
  tensorflow::Tensor memory_;
  std::map<int64_t, int64_t> ends_;  // of the pieces in use, by place
};

// Owns a piece of a block, and keeps the block.
class LentPiece {
 public:
  LentPiece() = default;
  LentPiece(std::shared_ptr<LentBlock> block, int64_t place, void* data)
      : block_(std::move(block)), place_(place), data_(data) {}
  LentPiece(LentPiece&& other) noexcept { *this = std::move(other); }
  LentPiece& operator=(LentPiece&& other) noexcept {
    std::swap(block_, other.block_);
    std::swap(place_, other.place_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~LentPiece() {
    if (data_ != nullptr) block_->Release(place_);
  }
  void* data() const { return data_; }

 private:
  std::shared_ptr<LentBlock> block_;
  int64_t place_ = 0;
  void* data_ = nullptr;
};

// The blocks of this process.
class LentBlocks {
 public:
  static LentBlocks& Get();

  void Add(int64_t number, tensorflow::Tensor memory);
  void Drop(int64_t number);

  // A piece without data where the block was dropped, or has no such piece free.
  LentPiece Take(int64_t number, int64_t place, size_t bytes);

 private:
  std::mutex mu_;
  std::map<int64_t, std::shared_ptr<LentBlock>> blocks_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_LENT_BLOCKS_H_
