#include "rerun_search.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <tuple>

#include "export.h"

namespace tfswap {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

bool Holds(const std::vector<int64_t>& numbers, int64_t number) {
  return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

}  // namespace

RerunLayout::RerunLayout(const RerunFacts& facts, int64_t most_bytes)
    : facts_(facts), most_bytes_(most_bytes), width_(facts.copies + facts.count + 1), marks_(facts.copies) {
  for (int64_t position = 0; position < facts.count; ++position) {
    const int64_t key = position * width_ + width_ - 1, number = facts.copies + position;
    keys_.push_back(key);
    for (int64_t e = facts.reads.begins[number]; e < facts.reads.begins[number + 1]; ++e) {
      marks_[facts.reads.elements[e]].push_back(2 * key);
    }
    for (int64_t e = facts.makes.begins[number]; e < facts.makes.begins[number + 1]; ++e) {
      marks_[facts.makes.elements[e]].push_back(2 * key + 1);
    }
  }
  std::vector<int64_t> change(facts.count + 1);
  for (int64_t v = 0; v < facts.copies; ++v) {
    change[marks_[v].front() / 2 / width_] += facts.nbytes[v];
    change[marks_[v].back() / 2 / width_ + 1] -= facts.nbytes[v];
  }
  int64_t held = 0;
  for (int64_t position = 0; position < facts.count; ++position) {
    held += change[position];
    live_.push_back(facts.extra[position] + held);
    excess_ += Over(live_.back());
  }
}

int64_t RerunLayout::At(int64_t key) const {
  return std::lower_bound(keys_.begin(), keys_.end(), key) - keys_.begin();
}

int64_t RerunLayout::Before(int64_t value, int64_t key) const {
  const std::vector<int64_t>& marks = marks_[value];
  return std::lower_bound(marks.begin(), marks.end(), 2 * key) - marks.begin() - 1;
}

int64_t RerunLayout::Last(int64_t value, int64_t mark) const {
  const std::vector<int64_t>& marks = marks_[value];
  while (mark + 1 < static_cast<int64_t>(marks.size()) && !(marks[mark + 1] & 1)) ++mark;
  return marks[mark] / 2;
}

bool RerunLayout::has(int64_t key) const { return std::binary_search(added_.begin(), added_.end(), key); }

int64_t RerunLayout::NumberAt(int64_t place) const {
  const int64_t number = keys_[place] % width_;
  return number == width_ - 1 ? facts_.copies + keys_[place] / width_ : number;
}

int64_t RerunLayout::ExtraAt(int64_t place) const {
  const int64_t position = keys_[place] / width_, number = keys_[place] % width_;
  return number == width_ - 1 ? facts_.extra[position] : facts_.waiting[position] + facts_.needs[number];
}

void RerunLayout::Change(int64_t begin, int64_t end, int64_t bytes) {
  for (int64_t place = begin; place < end; ++place) {
    excess_ -= Over(live_[place]);
    live_[place] += bytes;
    excess_ += Over(live_[place]);
  }
}

void RerunLayout::Become(std::vector<int64_t> wanted) {
  std::sort(wanted.begin(), wanted.end());
  std::vector<int64_t> changed;
  std::set_difference(added_.begin(), added_.end(), wanted.begin(), wanted.end(), std::back_inserter(changed));
  for (const int64_t key : changed) Remove(key);
  changed.clear();
  std::set_difference(wanted.begin(), wanted.end(), added_.begin(), added_.end(), std::back_inserter(changed));
  for (const int64_t key : changed) Add(key);
}

void RerunLayout::Add(int64_t key) {
  const int64_t at = At(key), number = key % width_, after = NumberAt(at);
  int64_t bytes = live_[at] - ExtraAt(at) + facts_.waiting[key / width_] + facts_.needs[number];
  for (int64_t e = facts_.makes.begins[after]; e < facts_.makes.begins[after + 1]; ++e) {
    bytes -= facts_.nbytes[facts_.makes.elements[e]];
  }
  live_.insert(live_.begin() + at, bytes);
  excess_ += Over(bytes);
  keys_.insert(keys_.begin() + at, key);
  for (int64_t e = facts_.reads.begins[number]; e < facts_.reads.begins[number + 1]; ++e) {
    const int64_t u = facts_.reads.elements[e], before = Before(u, key), last = Last(u, before);
    if (last < key) Change(At(last) + 1, at + 1, facts_.nbytes[u]);
    marks_[u].insert(marks_[u].begin() + before + 1, 2 * key);
  }
  for (int64_t e = facts_.makes.begins[number]; e < facts_.makes.begins[number + 1]; ++e) {
    const int64_t v = facts_.makes.elements[e], before = Before(v, key);
    if (Last(v, before) > key) {
      Change(At(marks_[v][before] / 2) + 1, at, -facts_.nbytes[v]);
    } else {
      Change(at, at + 1, facts_.nbytes[v]);
    }
    marks_[v].insert(marks_[v].begin() + before + 1, 2 * key + 1);
  }
  added_.insert(std::lower_bound(added_.begin(), added_.end(), key), key);
  ticks_ += facts_.ticks[number];
}

void RerunLayout::Remove(int64_t key) {
  const int64_t at = At(key), number = key % width_;
  for (int64_t e = facts_.makes.begins[number]; e < facts_.makes.begins[number + 1]; ++e) {
    const int64_t v = facts_.makes.elements[e], before = Before(v, key);
    marks_[v].erase(marks_[v].begin() + before + 1);
    if (Last(v, before) > key) Change(At(marks_[v][before] / 2) + 1, at, facts_.nbytes[v]);
  }
  for (int64_t e = facts_.reads.begins[number]; e < facts_.reads.begins[number + 1]; ++e) {
    const int64_t u = facts_.reads.elements[e], before = Before(u, key);
    marks_[u].erase(marks_[u].begin() + before + 1);
    if (Last(u, before) < key) Change(At(marks_[u][before] / 2) + 1, at + 1, -facts_.nbytes[u]);
  }
  excess_ -= Over(live_[at]);
  live_.erase(live_.begin() + at);
  keys_.erase(keys_.begin() + at);
  added_.erase(std::lower_bound(added_.begin(), added_.end(), key));
  ticks_ -= facts_.ticks[number];
}

bool RerunSearch::Offer::operator<(const Offer& other) const {
  return std::tie(optimistic, end, number, relief, factor) <
         std::tie(other.optimistic, other.end, other.number, other.relief, other.factor);
}

RerunSearch::RerunSearch(const RerunFacts& facts, const RerunConstants& constants, int64_t most_bytes, int64_t visits)
    : facts_(facts),
      constants_(constants),
      most_bytes_(most_bytes),
      all_visits_(visits),
      visits_(visits),
      layout_(facts, most_bytes) {
  for (int64_t v = 0; v < facts.copies; ++v) {
    if (!facts.stays[v] && (facts.until[v] >= 0 || facts.until[facts.makers[v]] >= 0)) leaves_.push_back(v);
  }
}

bool RerunSearch::Run(const std::vector<std::vector<int64_t>>& begins, std::vector<int64_t>* found) {
  Choice best, nearest;  // nearest: of those that do not meet the target
  for (const std::vector<int64_t>& begin : begins) {
    Become(begin);
    if (!Repair(false)) {
      KeepNearer(&nearest);
    } else if (!best.found || layout_.ticks() < best.cost) {
      best = Now();
    }
  }
  Choice current = best;
  for (int64_t tries = 1; tries < constants_.most_tries; ++tries) {
    if ((tries >= constants_.least_tries && visits_ <= 0) || (best.found && best.added.empty())) break;
    const bool goes_on = current.found || draws_.Below(2);
    const std::vector<int64_t> before = current.found ? current.added : goes_on ? nearest.added : std::vector<int64_t>();
    Become(before.empty() ? before : WithoutSome(before));
    if (!Repair(true)) {
      KeepNearer(&nearest);
      continue;
    }
    const int64_t ticks = layout_.ticks();
    const double left = static_cast<double>(std::max<int64_t>(0, visits_)) / static_cast<double>(all_visits_);
    const double worse = constants_.worse * left;
    if (!current.found || static_cast<double>(ticks) <= static_cast<double>(current.cost) * (1 + worse)) {
      current = Now();
    }
    if (!best.found || ticks < best.cost) best = Now();
  }
  *found = best.added;
  return best.found;
}

void RerunSearch::KeepNearer(Choice* nearest) const {
  if (!nearest->found || layout_.excess() < nearest->cost) *nearest = {true, layout_.excess(), layout_.added()};
}

void RerunSearch::Become(std::vector<int64_t> added) {
  visits_ -= static_cast<int64_t>(layout_.keys().size());
  layout_.Become(std::move(added));
}

void RerunSearch::AddOne(int64_t key) {
  layout_.Add(key);
  visits_ -= static_cast<int64_t>(layout_.keys().size()) / constants_.change_share;
}

void RerunSearch::RemoveOne(int64_t key) {
  layout_.Remove(key);
  visits_ -= static_cast<int64_t>(layout_.keys().size()) / constants_.change_share;
}

std::vector<int64_t> RerunSearch::WithoutSome(std::vector<int64_t> keys) {
  const int64_t size = static_cast<int64_t>(keys.size()), width = layout_.width();
  const int64_t drawn = draws_.Below(std::max(constants_.least_removed, size / constants_.removed_share));
  const int64_t count = std::min(size, 1 + drawn);
  if (draws_.Below(2)) {
    const int64_t middle = keys[draws_.Below(size)] / width;
    std::sort(keys.begin(), keys.end(), [&](int64_t a, int64_t b) {
      return std::make_pair(std::abs(a / width - middle), a) < std::make_pair(std::abs(b / width - middle), b);
    });
  } else {
    for (int64_t n = 0; n < count; ++n) std::swap(keys[n], keys[n + draws_.Below(size - n)]);
  }
  keys.erase(keys.begin(), keys.begin() + count);
  return keys;
}

bool RerunSearch::Repair(bool noisy) {
  for (int64_t n = 0; n < 4 * facts_.count; ++n) {
    if (layout_.excess() == 0) {
      Shave();
      return true;
    }
    visits_ -= static_cast<int64_t>(layout_.keys().size());
    const std::vector<int64_t> added = BestRepair(noisy);
    if (added.empty()) return false;
    for (const int64_t key : added) AddOne(key);
  }
  return false;
}

void RerunSearch::Shave() {
  std::vector<std::pair<int64_t, int64_t>> longest;
  for (const int64_t key : layout_.added()) longest.push_back({-facts_.ticks[key % layout_.width()], key});
  std::sort(longest.begin(), longest.end());
  for (const auto& [ticks, key] : longest) {
    if (!FitsWithout(key)) continue;
    RemoveOne(key);
    if (layout_.excess() > 0) AddOne(key);
  }
}

bool RerunSearch::FitsWithout(int64_t key) const {
  const int64_t at = layout_.At(key), number = key % layout_.width();
  for (int64_t e = facts_.makes.begins[number]; e < facts_.makes.begins[number + 1]; ++e) {
    const int64_t v = facts_.makes.elements[e];
    const int64_t most = most_bytes_ - facts_.nbytes[v];
    for (int64_t place = layout_.At(layout_.marks(v)[layout_.Before(v, key)] / 2) + 1; place < at; ++place) {
      if (layout_.live()[place] > most) return false;
    }
  }
  return true;
}

std::vector<int64_t> RerunSearch::BestRepair(bool noisy) {
  FindOver();
  FindOffers(noisy);
  std::sort(offers_.begin(), offers_.end());
  std::vector<int64_t> best, hopeful, keys;
  double least = kNever, least_hoped = kNever;
  Chain chain;
  for (const Offer& offer : offers_) {
    if (offer.optimistic >= least) break;
    const int64_t first = layout_.keys()[offer.end] / layout_.width() * layout_.width();
    const double relief = static_cast<double>(offer.relief);
    for (const double price : {0.0, least, kNever}) {
      FindChain(offer.number, offer.end, first / layout_.width(), least * relief / offer.factor, price, &chain);
      const double cost = static_cast<double>(chain.ticks) * offer.factor;
      if (cost / relief >= least) continue;
      std::sort(chain.numbers.begin(), chain.numbers.end());
      keys.clear();
      for (const int64_t number : chain.numbers) {
        if (!layout_.has(first + number)) keys.push_back(first + number);
      }
      const int64_t gain = Gain(keys);
      if (gain > 0 && cost / static_cast<double>(gain) < least) {
        least = cost / static_cast<double>(gain);
        best = keys;
      } else if (offer.relief > chain.harm && cost / static_cast<double>(offer.relief - chain.harm) < least_hoped) {
        least_hoped = cost / static_cast<double>(offer.relief - chain.harm);
        hopeful = keys;
      }
    }
  }
  return best.empty() ? hopeful : best;
}

int64_t RerunSearch::Gain(const std::vector<int64_t>& keys) {
  const int64_t before = layout_.excess();
  for (const int64_t key : keys) layout_.Add(key);
  const int64_t gain = before - layout_.excess();
  for (auto key = keys.rbegin(); key != keys.rend(); ++key) layout_.Remove(*key);
  return gain;
}

void RerunSearch::FindOver() {
  over_places_.clear();
  over_bytes_.clear();
  const std::vector<int64_t>& live = layout_.live();
  for (size_t place = 0; place < live.size(); ++place) {
    if (live[place] <= most_bytes_) continue;
    over_places_.push_back(static_cast<int64_t>(place));
    over_bytes_.push_back(live[place] - most_bytes_);
  }
}

int64_t RerunSearch::Relief(int64_t begin, int64_t end, int64_t bytes) const {
  int64_t sum = 0;
  const auto first = std::lower_bound(over_places_.begin(), over_places_.end(), begin);
  const auto stop = std::lower_bound(first, over_places_.end(), end);
  const int64_t* const over = over_bytes_.data();
  for (int64_t n = first - over_places_.begin(), last = stop - over_places_.begin(); n < last; ++n) {
    sum += std::min(over[n], bytes);
  }
  return sum;
}

void RerunSearch::FindOffers(bool noisy) {
  offers_.clear();
  const std::vector<int64_t>& keys = layout_.keys();
  const int64_t peak = over_places_[std::max_element(over_bytes_.begin(), over_bytes_.end()) - over_bytes_.begin()];
  const int64_t peak_key = keys[peak];
  for (const int64_t v : leaves_) {
    const std::vector<int64_t>& marks = layout_.marks(v);
    if (marks.back() <= 2 * peak_key) continue;
    const int64_t before = layout_.Before(v, peak_key);
    if (before < 0 || (marks[before + 1] & 1) || marks[before + 1] == 2 * peak_key) continue;
    const int64_t last = layout_.At(marks[before] / 2), end = layout_.At(marks[before + 1] / 2);
    const int64_t early = 1 + *(std::lower_bound(over_places_.begin(), over_places_.end(), end) - 1);
    for (const int64_t at : {end, early}) {
      const int64_t position = keys[at] / layout_.width();
      int64_t relief = 0;
      for (const int64_t number : {v, facts_.makers[v]}) {
        if (facts_.until[number] < position || layout_.has(position * layout_.width() + number)) continue;
        if (relief == 0) relief = Relief(last + 1, at, facts_.nbytes[v]);
        const double factor = noisy ? constants_.factors[draws_.Bits() >> 56] : 1.0;
        const double cost = static_cast<double>(facts_.ticks[number] + 1);
        offers_.push_back({cost * factor / static_cast<double>(relief), at, number, relief, factor});
      }
      if (early == end) break;
    }
  }
}

void RerunSearch::FindChain(int64_t first, int64_t end, int64_t position, double most, double price, Chain* chain) {
  chain->numbers = {first};
  chain->ticks = facts_.ticks[first] + 1;
  chain->harm = 0;
  pending_ = {first};
  seen_.clear();
  const int64_t room = most_bytes_ - layout_.live()[end], end_key = layout_.keys()[end];
  while (!pending_.empty() && static_cast<double>(chain->ticks) < most) {
    const int64_t kernel = pending_.back();
    pending_.pop_back();
    for (int64_t e = facts_.reads.begins[kernel]; e < facts_.reads.begins[kernel + 1]; ++e) {
      const int64_t u = facts_.reads.elements[e], bytes = facts_.nbytes[u];
      if (Holds(seen_, u)) continue;
      seen_.push_back(u);
      const int64_t until = layout_.At(layout_.Last(u, layout_.Before(u, end_key))), number = Maker(u, position);
      if (until >= end) continue;
      const int64_t held = Harm(until + 1, end + 1, bytes);
      const int64_t again = std::max<int64_t>(0, bytes - room) - std::max<int64_t>(0, -room);
      if (number < 0 || again >= held || Holds(chain->numbers, number) ||
          static_cast<double>(held - again) * price <= static_cast<double>(facts_.ticks[number]) ||
          static_cast<int64_t>(chain->numbers.size()) == constants_.most_chain) {
        chain->harm += held;
        continue;
      }
      chain->numbers.push_back(number);
      pending_.push_back(number);
      chain->ticks += facts_.ticks[number];
      chain->harm += again;
    }
  }
}

int64_t RerunSearch::Maker(int64_t value, int64_t position) const {
  const int64_t maker = facts_.makers[value];
  const bool copies = facts_.until[value] >= position, reruns = facts_.until[maker] >= position;
  if (copies && !(reruns && facts_.ticks[maker] < facts_.ticks[value])) return value;
  return reruns ? maker : -1;
}

int64_t RerunSearch::Harm(int64_t begin, int64_t end, int64_t bytes) const {
  int64_t added = 0;
  for (int64_t place = begin; place < end; ++place) {
    const int64_t room = most_bytes_ - layout_.live()[place];
    added += std::max<int64_t>(bytes - room, 0) - std::max<int64_t>(-room, 0);
  }
  return added;
}

}  // namespace tfswap

namespace {

thread_local std::vector<int64_t> found;

}  // namespace

// Searches for one target. Returns the number of keys of the choice, for tfswap_take_reruns; -1 for no choice.
//
// Args:
//   sizes, begins: the number of keys of each of `begin_count` choices to begin with, and all their keys.
TFSWAP_C_API int64_t tfswap_search_reruns(const tfswap::RerunFacts* facts, const tfswap::RerunConstants* constants,
                                          int64_t most_bytes, int64_t visits, const int64_t* sizes,
                                          const int64_t* begins, int64_t begin_count) {
  std::vector<std::vector<int64_t>> choices;
  for (int64_t n = 0; n < begin_count; ++n) {
    choices.emplace_back(begins, begins + sizes[n]);
    begins += sizes[n];
  }
  tfswap::RerunSearch search(*facts, *constants, most_bytes, visits);
  return search.Run(choices, &found) ? static_cast<int64_t>(found.size()) : -1;
}

// The keys that this thread's latest search found.
TFSWAP_C_API void tfswap_take_reruns(int64_t* keys) { std::copy(found.begin(), found.end(), keys); }
