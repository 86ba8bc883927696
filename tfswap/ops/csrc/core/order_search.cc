// The local search over orders. planner/order_search.py has the same search and its reasons, and tests compare the two,
// result for result. This file does not depend on TensorFlow.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "draws.h"
#include "export.h"
#include "schedule_replay.h"

namespace tfswap {

// In the order of the ctypes structure in planner/native_orders.py.
struct OrderConstants {
  int64_t visits;
  int64_t tries;
  int64_t near_peak;
  int64_t least_stride;
  int64_t most_states;
};

namespace {

class OrderSearch {
 public:
  OrderSearch(const FlatDataflow& flow, const LiveLedger& before, const uint64_t* addresses, const int32_t* pins,
              const int8_t* is_kernel, const Lists& deps, const Lists& users, const OrderConstants& constants,
              std::vector<int64_t> order)
      : flow_(flow),
        is_kernel_(is_kernel),
        deps_(deps),
        users_(users),
        constants_(constants),
        visits_(constants.visits),
        count_(static_cast<int64_t>(order.size())),
        scales_(Scales(count_)),
        stride_(std::max(constants.least_stride, count_ / constants.most_states)),
        order_(std::move(order)),
        moved_(flow.node_count),
        during_(count_),
        excess_(count_ + 1),
        replay_(flow, before, addresses, pins, Kernels()) {
    replay_.Start();
    states_.assign(count_ / stride_ + 1, replay_.Save());
  }

  // Returns false for an order that is not one of this step.
  bool Run() {
    if (!Replay(0)) return false;
    for (int64_t tries = 0; tries < constants_.tries && visits_ > 0 && !over_.empty(); ++tries) {
      if (Move() && Improves() && !Take()) return false;
    }
    return true;
  }

  const std::vector<int64_t>& order() const { return order_; }

 private:
  // The number of powers of two from 2 to the first that is no less than `count`.
  static int64_t Scales(int64_t count) {
    int64_t scales = 1;
    while ((int64_t{1} << scales) < count) ++scales;
    return scales;
  }

  Schedule Kernels() {
    for (const int64_t node : order_) {
      if (is_kernel_[node]) kernels_.push_back(node);
    }
    kinds_.assign(kernels_.size(), kRun);
    return {kinds_.data(), kernels_.data(), static_cast<int64_t>(kernels_.size())};
  }

  int64_t Distance() { return draws_.Below(std::min(count_, int64_t{2} << draws_.Below(scales_))); }

  uint64_t Over(uint64_t bytes) const { return bytes > most_ ? bytes - most_ : 0; }

  bool RunNode(int64_t node, uint64_t* during) {
    *during = 0;
    if (!is_kernel_[node]) return true;
    visits_ -= std::max(1, flow_.request_begins[node + 1] - flow_.request_begins[node]);
    return replay_.Run(node, during);
  }

  // Replays the order from a multiple of `stride_` on.
  bool Replay(int64_t begin) {
    replay_.Restore(states_[begin / stride_]);
    for (int64_t place = begin; place < count_; ++place) {
      if (place % stride_ == 0) replay_.Save(&states_[place / stride_]);
      if (!RunNode(order_[place], &during_[place])) return false;
    }
    peak_ = 0;
    for (const uint64_t bytes : during_) peak_ = std::max(peak_, bytes);
    most_ = peak_ - peak_ / static_cast<uint64_t>(constants_.near_peak);
    over_.clear();
    for (int64_t place = 0; place < count_; ++place) {
      excess_[place + 1] = excess_[place] + Over(during_[place]);
      if (Over(during_[place]) > 0) over_.push_back(place);
    }
    return true;
  }

  // Writes a changed window to `tried_`. Returns false where the move changes nothing.
  bool Move() {
    const int64_t at = over_[draws_.Below(static_cast<int64_t>(over_.size()))];
    const bool postpones = draws_.Below(2) != 0;
    begin_ = std::max<int64_t>(0, at - Distance());
    end_ = std::min(count_, at + (postpones ? 1 : 2) + Distance());
    visits_ -= end_ - begin_;
    if (postpones) {
      moved_[order_[begin_]] = 1;
      for (int64_t place = begin_ + 1; place < end_; ++place) moved_[order_[place]] = Touches(deps_, order_[place]);
    } else {
      moved_[order_[end_ - 1]] = 1;
      for (int64_t place = end_ - 2; place >= begin_; --place) moved_[order_[place]] = Touches(users_, order_[place]);
    }
    tried_.clear();
    for (const bool moved : {!postpones, postpones}) {
      for (int64_t place = begin_; place < end_; ++place) {
        if ((moved_[order_[place]] != 0) == moved) tried_.push_back(order_[place]);
      }
    }
    for (int64_t place = begin_; place < end_; ++place) moved_[order_[place]] = 0;
    return !std::equal(tried_.begin(), tried_.end(), order_.begin() + begin_);
  }

  int8_t Touches(const Lists& others, int64_t node) const {
    for (int32_t e = others.begins[node]; e < others.begins[node + 1]; ++e) {
      if (moved_[others.elements[e]] != 0) return 1;
    }
    return 0;
  }

  // Whether the window `tried_` has less excess than the one in the order, and no higher peak.
  bool Improves() {
    replay_.Restore(states_[begin_ / stride_]);
    const uint64_t most = excess_[end_] - excess_[begin_];
    uint64_t excess = 0, bytes = 0;
    for (int64_t place = begin_ / stride_ * stride_; place < end_; ++place) {
      if (!RunNode(place < begin_ ? order_[place] : tried_[place - begin_], &bytes)) return false;
      if (place < begin_) continue;
      excess += Over(bytes);
      if (bytes > peak_ || excess >= most) return false;
    }
    return true;
  }

  // The window becomes part of the order, unless the whole order then peaks higher.
  bool Take() {
    const uint64_t peak = peak_;
    const int64_t from = begin_ / stride_ * stride_;
    std::swap_ranges(tried_.begin(), tried_.end(), order_.begin() + begin_);
    if (!Replay(from)) return false;
    if (peak_ <= peak) return true;
    std::swap_ranges(tried_.begin(), tried_.end(), order_.begin() + begin_);
    return Replay(from);
  }

  const FlatDataflow& flow_;
  const int8_t* const is_kernel_;
  const Lists deps_, users_;
  const OrderConstants constants_;
  int64_t visits_;
  const int64_t count_, scales_, stride_;
  std::vector<int64_t> order_, tried_, kernels_;
  std::vector<int32_t> kinds_;
  std::vector<int8_t> moved_;
  std::vector<uint64_t> during_, excess_;
  std::vector<int64_t> over_;
  ScheduleReplay<LiveLedger> replay_;
  std::vector<ScheduleReplay<LiveLedger>::State> states_;
  Draws draws_;
  uint64_t peak_ = 0, most_ = 0;
  int64_t begin_ = 0, end_ = 0;
};

}  // namespace
}  // namespace tfswap

// Searches for an order with a lower live peak. Returns 0; -1 for an order that is not one of this step.
//
// Args:
//   before: what tfswap_fill has made as live bytes, with the addresses of persistent values; pins as of
//     tfswap_replay_steps.
//   is_kernel, deps, users: of nodes.
//   order: all `count` nodes; gets the order found.
TFSWAP_C_API int32_t tfswap_search_order(const tfswap::FlatDataflow* flow, const void* before,
                                         const uint64_t* addresses, const int32_t* pins, const int8_t* is_kernel,
                                         const tfswap::Lists* deps, const tfswap::Lists* users,
                                         const tfswap::OrderConstants* constants, int64_t* order, int64_t count) {
  tfswap::OrderSearch search(*flow, tfswap::LedgerOf(before), addresses, pins, is_kernel, *deps, *users, *constants,
                             {order, order + count});
  if (!search.Run()) return -1;
  std::copy(search.order().begin(), search.order().end(), order);
  return 0;
}
