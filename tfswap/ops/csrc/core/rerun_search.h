// The search over reruns and swaps. planner/solvers/rerun_search.py has the same search and its reasons, and tests
// compare the two, result for result. This file does not depend on TensorFlow.

#ifndef TFSWAP_OPS_CSRC_CORE_RERUN_SEARCH_H_
#define TFSWAP_OPS_CSRC_CORE_RERUN_SEARCH_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "draws.h"

namespace tfswap {

// List i has the elements from begins[i] to begins[i + 1].
struct LongLists {
  const int64_t* begins;
  const int64_t* elements;
};

// Facts in planner/solvers/rerun_layout.py, field for field as the ctypes structure in native_reruns.py.
struct RerunFacts {
  int64_t count;
  int64_t copies;
  const int64_t* nbytes;
  const int64_t* extra;
  const int64_t* waiting;
  const int64_t* makers;
  const int8_t* stays;
  LongLists reads;
  LongLists makes;
  const int64_t* ticks;
  const int64_t* needs;
  const int64_t* until;
};

// The constants of planner/solvers/rerun_search.py, in the order of the ctypes structure.
struct RerunConstants {
  int64_t least_tries;
  int64_t most_tries;
  int64_t most_chain;
  int64_t least_removed;
  int64_t removed_share;
  int64_t change_share;
  double worse;
  const double* factors;  // 256
};

// A set of reruns and returns, laid out in order: `Layout` in rerun_layout.py, where the fields are described.
class RerunLayout {
 public:
  RerunLayout(const RerunFacts& facts, int64_t most_bytes);

  void Become(std::vector<int64_t> wanted);  // keys in any order
  void Add(int64_t key);
  void Remove(int64_t key);
  bool has(int64_t key) const;

  int64_t At(int64_t key) const;
  int64_t Before(int64_t value, int64_t key) const;
  int64_t Last(int64_t value, int64_t mark) const;

  int64_t width() const { return width_; }
  int64_t ticks() const { return ticks_; }
  // The bytes by which all places exceed `most_bytes`.
  int64_t excess() const { return excess_; }
  const std::vector<int64_t>& keys() const { return keys_; }
  const std::vector<int64_t>& live() const { return live_; }
  const std::vector<int64_t>& added() const { return added_; }
  const std::vector<int64_t>& marks(int64_t value) const { return marks_[value]; }

 private:
  int64_t NumberAt(int64_t place) const;
  int64_t ExtraAt(int64_t place) const;
  void Change(int64_t begin, int64_t end, int64_t bytes);
  int64_t Over(int64_t bytes) const { return bytes > most_bytes_ ? bytes - most_bytes_ : 0; }

  const RerunFacts& facts_;
  const int64_t most_bytes_;
  int64_t width_;
  int64_t ticks_ = 0;
  int64_t excess_ = 0;
  std::vector<int64_t> keys_;
  std::vector<int64_t> live_;
  std::vector<int64_t> added_;
  std::vector<std::vector<int64_t>> marks_;
};

// The search for one target.
class RerunSearch {
 public:
  RerunSearch(const RerunFacts& facts, const RerunConstants& constants, int64_t most_bytes, int64_t visits);

  // Returns whether a choice meets the target, and writes the keys of the cheapest.
  bool Run(const std::vector<std::vector<int64_t>>& begins, std::vector<int64_t>* found);

 private:
  struct Choice {
    bool found = false;
    int64_t cost = 0;
    std::vector<int64_t> added;
  };
  // What waits at the peak, in the order in which it is tried.
  struct Offer {
    double optimistic;
    int64_t end;
    int64_t number;
    int64_t relief;
    double factor;
    bool operator<(const Offer& other) const;
  };
  struct Chain {
    std::vector<int64_t> numbers;
    int64_t ticks;
    int64_t harm;
  };

  Choice Now() const { return {true, layout_.ticks(), layout_.added()}; }
  void KeepNearer(Choice* nearest) const;
  void Become(std::vector<int64_t> added);
  void AddOne(int64_t key);
  void RemoveOne(int64_t key);
  std::vector<int64_t> WithoutSome(std::vector<int64_t> keys);
  bool Repair(bool noisy);
  void Shave();
  bool FitsWithout(int64_t key) const;

  std::vector<int64_t> BestRepair(bool noisy);
  void FindOver();
  void FindOffers(bool noisy);
  int64_t Relief(int64_t begin, int64_t end, int64_t bytes) const;
  void FindChain(int64_t first, int64_t end, int64_t position, double most, double price, Chain* chain);
  int64_t Gain(const std::vector<int64_t>& keys);
  int64_t Maker(int64_t value, int64_t position) const;
  int64_t Harm(int64_t begin, int64_t end, int64_t bytes) const;

  const RerunFacts& facts_;
  const RerunConstants& constants_;
  const int64_t most_bytes_, all_visits_;
  int64_t visits_;
  Draws draws_;
  RerunLayout layout_;
  std::vector<int64_t> leaves_;
  std::vector<int64_t> over_places_, over_bytes_;  // of the places that exceed the target
  std::vector<Offer> offers_;
  std::vector<int64_t> pending_, seen_;
};

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CORE_RERUN_SEARCH_H_
