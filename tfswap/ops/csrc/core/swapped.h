// A swapped tensor: its place outside of the device, its copies, and the handle and ticket that the swap ops pass
// to one another.
//
// Ownership:
//   handle (Variant)  owns a Swapped, which owns
//                       the device tensor, until Release
//                       the place in host memory, on disk or in another device's memory
//                       the tensor that Prefetch has allocated, until SwapIn takes it
//   running copy      owns the Swapped, and the tensor that it fills
//   ticket (Variant)  owns the copy's end, no tensor
// So a step that fails or is cancelled may drop its handles and tickets at any time: the buffers of a running copy stay
// until it has ended.

#ifndef TFSWAP_OPS_CSRC_CORE_SWAPPED_H_
#define TFSWAP_OPS_CSRC_CORE_SWAPPED_H_

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "device_copier.h"
#include "host_pool.h"
#include "lent_blocks.h"
#include "op_support.h"
#include "runtime.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "transfer.h"

namespace tfswap {

// `where` names the node in the message. It is "" in shape functions, whose messages TensorFlow extends by the node.
inline absl::Status CheckSwapType(tensorflow::DataType type, const std::string& where) {
  if (tensorflow::DataTypeCanUseMemcpy(type)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "tfswap can't swap tensors of type ", tensorflow::DataTypeString(type), where,
      ": only types whose elements are plain bytes of a fixed size can be copied to the host."));
}

// Counts the copies of one tensor, for the process and for the step of the tensor's client.
class Account {
 public:
  Account() = default;
  explicit Account(std::shared_ptr<Client> client)
      : client_(std::move(client)), step_(client_ == nullptr ? 0 : client_->copy_stats.step()) {}

  void Add(Direction direction, Tier tier, size_t bytes, const Copied& copied) const {
    if (!copied.status.ok()) return;
    ForBoth([&](CopyStats& copy_stats, uint64_t step) {
      copy_stats.Copied(step, direction, tier, bytes, copied.carried_bytes, copied.busy_s);
      if (copied.is_inline) copy_stats.Stalled(step, Stall::kInlineCopy, copied.busy_s);
    });
  }

  void Add(Stall stall, double seconds) const {
    ForBoth([&](CopyStats& copy_stats, uint64_t step) { copy_stats.Stalled(step, stall, seconds); });
  }

  void Hold(Tier tier, int64_t bytes) const {
    if (client_ != nullptr) client_->copy_stats.Hold(tier, bytes);  // for the process, the pools count
  }

 private:
  template <typename Visit>
  void ForBoth(Visit visit) const {
    CopyStats& all = Runtime::Get().copy_stats();
    visit(all, all.step());
    if (client_ != nullptr) visit(client_->copy_stats, step_);
  }

  std::shared_ptr<Client> client_;
  uint64_t step_ = 0;
};

// The place of a swapped tensor's bytes: memory of a pool, a slot of a file, or memory of another device. An empty tensor
// has none.
struct Place {
  HostBuffer memory;
  std::unique_ptr<SpillSlot> slot;
  LentPiece lent;

  bool is_lent() const { return lent.data() != nullptr; }
  Tier tier() const { return is_lent() ? Tier::kLent : slot == nullptr ? Tier::kHost : Tier::kDisk; }
};

// The bytes of one number. A complex value is two numbers.
inline size_t ValueBytes(tensorflow::DataType type) {
  const auto bytes = static_cast<size_t>(tensorflow::DataTypeSize(type));
  return tensorflow::DataTypeIsComplex(type) ? bytes / 2 : bytes;
}

// A tensor on the device, and the end of the copy that fills it.
struct Loading {
  tensorflow::Tensor tensor;
  std::shared_ptr<Transfer> copied;
};

class Swapped {
 public:
  Swapped(const tensorflow::Tensor& tensor, Place place, Account account)
      : dtype_(tensor.dtype()),
        shape_(tensor.shape()),
        bytes_(tensor.TotalBytes()),
        place_(std::move(place)),
        account_(std::move(account)),
        copied_(std::make_shared<Transfer>()),
        device_(tensor) {
    account_.Hold(place_.tier(), static_cast<int64_t>(bytes_));
  }
  ~Swapped() { account_.Hold(place_.tier(), -static_cast<int64_t>(bytes_)); }
  Swapped(const Swapped&) = delete;
  Swapped& operator=(const Swapped&) = delete;

  tensorflow::DataType dtype() const { return dtype_; }
  const tensorflow::TensorShape& shape() const { return shape_; }
  const Account& account() const { return account_; }

  // Starts a copy of the whole tensor. The caller keeps this object until `done` has been called.
  void CopyOut(const std::shared_ptr<DeviceCopier>& copier, DeviceCopier::Done done) {
    const tensorflow::Tensor* const from = &device_;
    done = Counted(Direction::kOut, std::move(done));
    if (place_.is_lent()) {
      copier->CopyToDevice(from, place_.lent.data(), std::move(done));
      return;
    }
    if (place_.slot == nullptr) {
      copier->CopyOut(from, place_.memory.data(), std::move(done));
      return;
    }
    place_.slot->Write(
        ValueBytes(dtype_),
        [copier, from](size_t begin, size_t bytes, char* staging) {
          return copier->ReadPiece(*from, begin, bytes, staging);
        },
        [done = std::move(done)](const CopyLane::Ended& ended) { done(AsCopied(ended)); });
  }

  void CopyIn(const std::shared_ptr<DeviceCopier>& copier, tensorflow::Tensor* to, DeviceCopier::Done done) {
    done = Counted(Direction::kIn, std::move(done));
    if (place_.is_lent()) {
      copier->CopyFromDevice(place_.lent.data(), to, std::move(done));
      return;
    }
    if (place_.slot == nullptr) {
      copier->CopyIn(place_.memory.data(), to, std::move(done));
      return;
    }
    place_.slot->Read(
        [copier, to](size_t begin, size_t bytes, char* staging) {
          return copier->WritePiece(staging, begin, bytes, to);
        },
        [done = std::move(done)](const CopyLane::Ended& ended) { done(AsCopied(ended)); });
  }

  // The end of the copy to the host. Shared, so that it can be signalled after the last reference to the buffers has
  // been dropped.
  const std::shared_ptr<Transfer>& copied() const { return copied_; }

  void DropDeviceTensor() {
    tensorflow::Tensor dropped;
    std::lock_guard<std::mutex> lock(mu_);
    std::swap(dropped, device_);
  }

  bool IsPrefetched() {
    std::lock_guard<std::mutex> lock(mu_);
    return prefetched_.copied != nullptr;
  }

  void KeepPrefetched(Loading loading) {
    std::lock_guard<std::mutex> lock(mu_);
    prefetched_ = std::move(loading);
  }

  // The prefetched tensor; its `copied` is null if there is none.
  Loading TakePrefetched() {
    std::lock_guard<std::mutex> lock(mu_);
    return std::exchange(prefetched_, Loading());
  }

 private:
  DeviceCopier::Done Counted(Direction direction, DeviceCopier::Done done) const {
    return [account = account_, direction, tier = place_.tier(), bytes = bytes_,
            done = std::move(done)](const Copied& copied) {
      account.Add(direction, tier, bytes, copied);
      done(copied);
    };
  }

  const tensorflow::DataType dtype_;
  const tensorflow::TensorShape shape_;
  const size_t bytes_;
  const Place place_;
  const Account account_;
  const std::shared_ptr<Transfer> copied_;
  std::mutex mu_;
  tensorflow::Tensor device_;  // until DropDeviceTensor, after the copy out
  Loading prefetched_;
};

struct Handle : ProcessLocal {
  static constexpr char kMaker[] = "SwapOut";
  std::shared_ptr<Swapped> swapped;
  std::string TypeName() const { return "tfswap::Handle"; }
};

struct Ticket : ProcessLocal {
  static constexpr char kMaker[] = "SwapIn";
  std::shared_ptr<Transfer> copied;
  const void* tensor_data = nullptr;
  Account account;
  std::string TypeName() const { return "tfswap::Ticket"; }
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_SWAPPED_H_
