#include "runtime.h"

#include <pthread.h>

namespace tfswap {

Runtime& Runtime::Get() {
  static Runtime* const runtime = new Runtime;
  return *runtime;
}

CopyLane& Runtime::lane(Direction direction, int device) {
  std::lock_guard<std::mutex> lock(mu_);
  return *LanesLocked(device)[static_cast<int>(direction)];
}

Runtime::Lanes& Runtime::LanesLocked(int device) {
  const auto [found, is_new] = lanes_.try_emplace(device);
  if (is_new) {
    const CopyLane& first = *lanes_.at(0)[0];
    for (CopyLane*& lane : found->second) {
      lane = new CopyLane;
      lane->SetThreads(first.threads());
      lane->SetThrottle(first.throttle());
    }
  }
  return found->second;
}

void Runtime::SetThreads(int threads_per_direction) {
  std::lock_guard<std::mutex> lock(mu_);
  for (const auto& lanes : lanes_) {
    for (CopyLane* const lane : lanes.second) lane->SetThreads(threads_per_direction);
  }
}

void Runtime::SetThrottle(const CopyLane::Throttle& throttle) {
  std::lock_guard<std::mutex> lock(mu_);
  for (const auto& lanes : lanes_) {
    for (CopyLane* const lane : lanes.second) lane->SetThrottle(throttle);
  }
}

bool Client::IsAmongFirstSaved(uint64_t bytes, uint64_t first_bytes) {
  const uint64_t step = copy_stats.step();
  std::lock_guard<std::mutex> lock(saved_mu_);
  if (saved_step_ != step) {
    saved_step_ = step;
    saved_bytes_ = 0;
  }
  if (saved_bytes_ >= first_bytes) return false;
  saved_bytes_ += bytes;
  return true;
}

std::string Runtime::WhyNoRoom(HostPool::Failure failure, const std::string& node,
                               size_t bytes, const std::string& tensor) const {
  const HostBudget::Usage usage = budget_.usage();
  const std::string message =
      "tfswap has no host memory for node '" + node + "': it requests " +
      std::to_string(HostPool::RoundUp(bytes)) + " bytes (" + tensor + ") while " +
      std::to_string(usage.in_use_bytes) + " bytes are in use, " +
      std::to_string(usage.reserved_bytes) + " reserved";
  if (failure == HostPool::Failure::kSystem) {
    return message +
           ", and the system gave no more. Free memory on this machine, store a part on disk "
           "(host_memory_limit= and spill_dir=), or swap less (a higher memory_limit=, or tactics= "
           "without \"swap\").";
  }
  return message + ", of a limit of " + std::to_string(usage.limit_bytes) +
         ". Raise host_memory_limit=, or swap less (a higher memory_limit=).";
}

std::shared_ptr<Client> Runtime::client(int64_t owner) {
  std::lock_guard<std::mutex> lock(mu_);
  return ClientLocked(owner);
}

std::shared_ptr<Client> Runtime::ClientLocked(int64_t owner) {
  std::shared_ptr<Client>& found = clients_[owner];
  if (found == nullptr) found = std::make_shared<Client>();
  return found;
}

void Runtime::Forget(int64_t owner) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto found = clients_.find(owner);
  if (found == clients_.end()) return;
  found->second->forgotten = true;
  if (found->second->registrations == 0) clients_.erase(found);
}

std::string Runtime::Register(int64_t owner, uint64_t host_limit, const std::string& folder,
                           uint64_t spill_limit, HostPool* pool) {
  if (is_late_child_) return kLateChild;
  std::shared_ptr<Client> registered;
  {
    // First of all: a client that is forgotten meanwhile stays until its last registration ends.
    std::lock_guard<std::mutex> lock(mu_);
    registered = ClientLocked(owner);
    ++registered->registrations;
  }
  budget_.Register(owner, host_limit);
  std::string why;
  if (!folder.empty()) {
    SpillFile* const file = SpillFile::Of(folder, &why);
    if (file != nullptr) why = file->Register(owner, spill_limit, pool);
    if (why.empty()) registered->spill = file;
  }
  if (!why.empty()) EndRegistration(owner, registered.get());
  return why;
}

void Runtime::Unregister(int64_t owner) {
  if (is_late_child_) return;
  const std::shared_ptr<Client> registered = client(owner);
  SpillFile* const file = registered->spill;
  if (file != nullptr) file->Unregister(owner);
  EndRegistration(owner, registered.get());
}

void Runtime::EndRegistration(int64_t owner, Client* registered) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (--registered->registrations == 0) {
      registered->spill = nullptr;
      if (registered->forgotten) clients_.erase(owner);
    }
  }
  budget_.Unregister(owner);
}

Runtime::Runtime() : pool_(&mmap_, &budget_) {
  lanes_[0] = {new CopyLane, new CopyLane};
  pthread_atfork(nullptr, nullptr, [] {
    // Without locks: another thread of the parent's may have had them.
    Runtime& runtime = Get();
    bool late = runtime.is_late_child_ || SpillFile::any();
    for (const auto& lanes : runtime.lanes_) {
      for (const CopyLane* const lane : lanes.second) late = late || lane->started();
    }
    runtime.is_late_child_ = late;
  });
}

}  // namespace tfswap
