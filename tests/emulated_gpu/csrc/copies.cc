// Copies between the host and devices, and fills.
//
// The device's memory is read and written when a copy is enqueued (streams.h). The host's memory has the values when the
// copy ends, and what no number is until then. The host must not write to what a copy reads before that has ended, which
// is checked for pinned memory. With pageable memory a driver returns when it has taken the bytes, or has written them.

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "counters.h"
#include "current_op.h"
#include "memory.h"
#include "platform.h"
#include "streams.h"

namespace emulated_gpu {
namespace {

uint64_t Digest(const void* memory, size_t bytes) {
  const char* at = static_cast<const char*>(memory);
  uint64_t digest = 0xcbf29ce484222325 ^ bytes;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    digest = (digest ^ word) * 0x9E3779B97F4A7C15;
    digest ^= digest >> 29;
  }
  for (; bytes > 0; --bytes, ++at) digest = (digest ^ static_cast<unsigned char>(*at)) * 0x100000001b3;
  return digest;
}

double Microseconds(const Link& link, const void* host, uint64_t bytes) {
  const Settings& settings = Settings::Get();
  const bool slow = !IsPinned(host) && settings.pageable.Microseconds(bytes) > 0;
  return (slow ? settings.pageable : link).Microseconds(bytes);
}

void Check(SP_Stream stream, const std::string& what, const std::vector<Range>& reads, const std::vector<Range>& writes) {
  if (Settings::Get().checks) RaceDetector::Get().Enqueue(stream->id(), ByCurrentOp(what), reads, writes);
}

void CheckOnHost(const std::string& what, const std::vector<Range>& reads, const std::vector<Range>& writes) {
  if (Settings::Get().checks) RaceDetector::Get().OnHost(ByCurrentOp(what), reads, writes);
}

std::string Copy(uint64_t bytes, const char* where) { return absl::StrCat("a copy of ", bytes, " bytes ", where); }

template <typename Fill>
void FillWith(SP_Stream stream, SP_DeviceMemoryBase* at, uint64_t bytes, Fill fill) {
  Check(stream, absl::StrCat("a fill of ", bytes, " bytes"), {}, {RangeOf(at->opaque, bytes)});
  const Access access;
  fill(static_cast<char*>(at->opaque));
}

}  // namespace

void CopyToHost(const SP_Device*, SP_Stream stream, void* to, const SP_DeviceMemoryBase* from, uint64_t bytes,
                TF_Status*) {
  Counters::Get().Add(&Counters::Get().out, bytes);
  Check(stream, Copy(bytes, "to the host"), {RangeOf(from->opaque, bytes)}, {RangeOf(to, bytes)});
  const double microseconds = Microseconds(Settings::Get().out, to, bytes);
  const Label label = LabelOf("MemcpyD2H");
  const Access access;
  if (stream->EndsNow(microseconds, label)) {
    std::memcpy(to, from->opaque, bytes);
    return;
  }
  const auto* const begin = static_cast<const char*>(from->opaque);
  auto values = std::make_shared<const std::vector<char>>(begin, begin + bytes);
  std::memset(to, kPoison, bytes);
  auto show = [to, values = std::move(values)] { std::memcpy(to, values->data(), values->size()); };
  stream->Push(microseconds, std::move(show), label);
  if (!IsPinned(to)) stream->AwaitEnd(stream->pushed());
}

void CopyToDevice(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* to, const void* from, uint64_t bytes,
                  TF_Status*) {
  Counters::Get().Add(&Counters::Get().in, bytes);
  if (SP_Stream_st* const kernels = StreamOfConstant()) CreateStreamDependency(device, stream, kernels, nullptr);
  const std::string what = Copy(bytes, "to the device");
  Check(stream, what, {RangeOf(from, bytes)}, {RangeOf(to->opaque, bytes)});
  const double microseconds = Microseconds(Settings::Get().in, from, bytes);
  {
    const Access access;
    std::memcpy(to->opaque, from, bytes);
  }
  const Label label = LabelOf("MemcpyH2D");
  if (stream->EndsNow(microseconds, label)) return;
  if (!Settings::Get().checks || !IsPinned(from)) return stream->Push(microseconds, nullptr, label);
  auto check = [from, bytes, digest = Digest(from, bytes), what = ByCurrentOp(what)] {
    if (Digest(from, bytes) != digest) {
      RaceDetector::Get().Report("the host writes to pinned memory that " + what + " reads, and does not wait for it");
    }
  };
  stream->Push(microseconds, std::move(check), label);
}

void CopyBetween(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                 uint64_t bytes, TF_Status*) {
  Counters::Get().Add(&Counters::Get().between, bytes);
  Check(stream, Copy(bytes, "between devices"), {RangeOf(from->opaque, bytes)}, {RangeOf(to->opaque, bytes)});
  {
    const Access access;
    std::memmove(to->opaque, from->opaque, bytes);
  }
  const bool same = DeviceOf(to->opaque) == DeviceOf(from->opaque);
  const double microseconds = same ? 0 : Settings::Get().between.Microseconds(bytes);
  const Label label = LabelOf(same ? "MemcpyD2D" : "MemcpyP2P");
  if (!stream->EndsNow(microseconds, label)) stream->Push(microseconds, nullptr, label);
}

void CopyToHostNow(const SP_Device* device, void* to, const SP_DeviceMemoryBase* from, uint64_t bytes,
                   TF_Status* status) {
  SynchronizeAllActivity(device, status);
  CheckOnHost(Copy(bytes, "to the host"), {RangeOf(from->opaque, bytes)}, {RangeOf(to, bytes)});
  const Access access;
  std::memcpy(to, from->opaque, bytes);
}

void CopyToDeviceNow(const SP_Device* device, SP_DeviceMemoryBase* to, const void* from, uint64_t bytes,
                     TF_Status* status) {
  SynchronizeAllActivity(device, status);
  CheckOnHost(Copy(bytes, "to the device"), {RangeOf(from, bytes)}, {RangeOf(to->opaque, bytes)});
  const Access access;
  std::memcpy(to->opaque, from, bytes);
}

void CopyBetweenNow(const SP_Device* device, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from, uint64_t bytes,
                    TF_Status* status) {
  SynchronizeAllActivity(device, status);
  CheckOnHost(Copy(bytes, "between devices"), {RangeOf(from->opaque, bytes)}, {RangeOf(to->opaque, bytes)});
  const Access access;
  std::memmove(to->opaque, from->opaque, bytes);
}

void MemZero(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* at, uint64_t bytes, TF_Status*) {
  FillWith(stream, at, bytes, [bytes](char* to) { std::memset(to, 0, bytes); });
}

void MemSet(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* at, uint8_t pattern, uint64_t bytes, TF_Status*) {
  FillWith(stream, at, bytes, [=](char* to) { std::memset(to, pattern, bytes); });
}

void MemSet32(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* at, uint32_t pattern, uint64_t bytes,
              TF_Status*) {
  FillWith(stream, at, bytes, [=](char* to) {
    for (uint64_t i = 0; i + 4 <= bytes; i += 4) std::memcpy(to + i, &pattern, 4);
  });
}

}  // namespace emulated_gpu
