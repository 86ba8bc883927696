#include "byte_planes.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

// TensorFlow has no header of zstd. These functions are in zstd's interface since 1.4, and null if no library of the
// process has them.
extern "C" {
#define TFSWAP_IF_THERE __attribute__((weak))
typedef struct ZSTD_CCtx_s ZSTD_CCtx;
typedef struct ZSTD_DCtx_s ZSTD_DCtx;
TFSWAP_IF_THERE ZSTD_CCtx* ZSTD_initStaticCCtx(void* memory, size_t bytes);
TFSWAP_IF_THERE ZSTD_DCtx* ZSTD_initStaticDCtx(void* memory, size_t bytes);
TFSWAP_IF_THERE size_t ZSTD_CCtx_setParameter(ZSTD_CCtx* context, int parameter, int value);
TFSWAP_IF_THERE size_t ZSTD_compress2(ZSTD_CCtx* context, void* to, size_t room, const void* from, size_t bytes);
TFSWAP_IF_THERE size_t ZSTD_decompressDCtx(ZSTD_DCtx* context, void* to, size_t room, const void* from, size_t bytes);
TFSWAP_IF_THERE unsigned ZSTD_isError(size_t result);
#undef TFSWAP_IF_THERE
}

namespace tfswap::planes {
namespace {

// Zstd's memory grows with the size of a frame. Each frame follows its length.
constexpr size_t kFrameBytes = size_t{64} << 10;
using Length = uint32_t;

constexpr int kLevel = 100;         // ZSTD_c_compressionLevel
constexpr int kLiteralsMode = 1002;  // ZSTD_c_literalCompressionMode
// A level with almost no search for matches. Literals are Huffman-coded even at this level.
constexpr int kHardlyAny = -1000;
constexpr int kAlwaysHuffman = 1;

// A constant width, so that compilers emit vector code.
template <size_t kWidth>
void CutBy(const char* values, size_t count, char* planes) {
  for (size_t plane = 0; plane < kWidth; ++plane) {
    for (size_t i = 0; i < count; ++i) planes[plane * count + i] = values[i * kWidth + plane];
  }
}

template <size_t kWidth>
void JoinBy(const char* planes, size_t count, char* values) {
  for (size_t i = 0; i < count; ++i) {
    for (size_t plane = 0; plane < kWidth; ++plane) values[i * kWidth + plane] = planes[plane * count + i];
  }
}

}  // namespace

bool IsAvailable() {
  return ZSTD_initStaticCCtx != nullptr && ZSTD_initStaticDCtx != nullptr && ZSTD_CCtx_setParameter != nullptr &&
         ZSTD_compress2 != nullptr && ZSTD_decompressDCtx != nullptr && ZSTD_isError != nullptr;
}

void Cut(const char* values, size_t bytes, size_t width, char* planes) {
  if (width == 2) return CutBy<2>(values, bytes / 2, planes);
  if (width == 4) return CutBy<4>(values, bytes / 4, planes);
  if (width == 8) return CutBy<8>(values, bytes / 8, planes);
  std::memcpy(planes, values, bytes);
}

void Join(const char* planes, size_t bytes, size_t width, char* values) {
  if (width == 2) return JoinBy<2>(planes, bytes / 2, values);
  if (width == 4) return JoinBy<4>(planes, bytes / 4, values);
  if (width == 8) return JoinBy<8>(planes, bytes / 8, values);
  std::memcpy(values, planes, bytes);
}

size_t Compress(const char* from, size_t bytes, char* to, size_t room, void* memory) {
  ZSTD_CCtx* const context = ZSTD_initStaticCCtx(memory, kCompressBytes);
  if (context == nullptr || ZSTD_isError(ZSTD_CCtx_setParameter(context, kLevel, kHardlyAny)) ||
      ZSTD_isError(ZSTD_CCtx_setParameter(context, kLiteralsMode, kAlwaysHuffman))) {
    return 0;
  }
  size_t taken = 0;
  for (size_t at = 0; at < bytes; at += kFrameBytes) {
    if (room - taken <= sizeof(Length)) return 0;
    const size_t frame = ZSTD_compress2(context, to + taken + sizeof(Length), room - taken - sizeof(Length), from + at,
                                        std::min(kFrameBytes, bytes - at));
    if (ZSTD_isError(frame)) return 0;
    const auto length = static_cast<Length>(frame);
    std::memcpy(to + taken, &length, sizeof(length));
    taken += sizeof(length) + frame;
  }
  return taken;
}

bool Decompress(const char* from, size_t stored, char* to, size_t bytes, void* memory) {
  ZSTD_DCtx* const context = ZSTD_initStaticDCtx(memory, kDecompressBytes);
  if (context == nullptr) return false;
  size_t read = 0;
  for (size_t at = 0; at < bytes; at += kFrameBytes) {
    Length length;
    if (stored - read < sizeof(length)) return false;
    std::memcpy(&length, from + read, sizeof(length));
    read += sizeof(length);
    if (stored - read < length) return false;
    const size_t wanted = std::min(kFrameBytes, bytes - at);
    if (ZSTD_decompressDCtx(context, to + at, wanted, from + read, length) != wanted) return false;
    read += length;
  }
  return read == stored;
}

}  // namespace tfswap::planes
