// What codec_elements.h says, in AVX2 and F16C by hand, for processors that have no AVX-512; see avx512.h.

#ifndef TFSWAP_OPS_CSRC_CODECS_AVX2_H_
#define TFSWAP_OPS_CSRC_CODECS_AVX2_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "codec_elements.h"

#define TFSWAP_AVX2 __attribute__((target("avx2,f16c")))
#define TFSWAP_AVX2_INLINE TFSWAP_AVX2 __attribute__((always_inline)) inline

namespace tfswap::avx2 {

// A piece that has code by hand: Run(piece, begin, end) is piece(begin) ... piece(end - 1).
template <typename Piece>
struct ByHand : std::false_type {};

TFSWAP_AVX2_INLINE __m256i Load(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
TFSWAP_AVX2_INLINE void Store(void* to, __m256i vector) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), vector);
}

// Bools are 0 or 1: shifted to the top of their byte, or to that of one below it where there is nothing.
template <int kBytes>
struct ByHand<codec::EncodeMask<codec::IsTrue, bool, kBytes>> : std::true_type {
  using Piece = codec::EncodeMask<codec::IsTrue, bool, kBytes>;

  TFSWAP_AVX2 static void Run(const Piece& piece, int64_t begin, int64_t end) {
    static_assert(kBytes % 4 == 0, "pieces are whole vectors");
    const bool* const from = piece.values;
    uint8_t* const to = piece.mask;
    const int64_t whole = codec::Min(end, piece.count / (8 * kBytes));
    for (int64_t i = 8 * kBytes * begin; i < 8 * kBytes * whole; i += 32) {
      const int bits = _mm256_movemask_epi8(_mm256_slli_epi16(Load(from + i), 7));
      std::memcpy(to + i / 8, &bits, sizeof(bits));
    }
    for (int64_t i = codec::Max(begin, whole); i < end; ++i) piece(i);
  }
};

// Each byte four times eight times beside itself, of which each copy keeps its bit.
template <int kBytes>
struct ByHand<codec::DecodeMask<kBytes, false>> : std::true_type {
  using Piece = codec::DecodeMask<kBytes, false>;

  TFSWAP_AVX2 static void Run(const Piece& piece, int64_t begin, int64_t end) {
    static_assert(kBytes % 4 == 0, "pieces are whole vectors");
    const uint8_t* const from = piece.mask;
    bool* const to = piece.values;
    const __m256i source = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                            2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
    const int64_t whole = codec::Min(end, piece.count / (8 * kBytes));
    for (int64_t i = 8 * kBytes * begin; i < 8 * kBytes * whole; i += 32) {
      int bits;
      std::memcpy(&bits, from + i / 8, sizeof(bits));
      const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), source);
      // 1 where the bit is there, of which min makes no more than 1.
      Store(to + i, _mm256_min_epu8(_mm256_and_si256(spread, bit), _mm256_set1_epi8(1)));
    }
    for (int64_t i = codec::Max(begin, whole); i < end; ++i) piece(i);
  }
};

// gradients * cast(mask): the bits of a byte choose from a vector of ones.
template <int kBytes>
struct ByHand<codec::MultiplyByMask<float, kBytes>> : std::true_type {
  using Piece = codec::MultiplyByMask<float, kBytes>;

  TFSWAP_AVX2 static void Run(const Piece& piece, int64_t begin, int64_t end) {
    const float* const from = piece.gradients;
    const uint8_t* const mask = piece.mask;
    float* const to = piece.products;
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i one = _mm256_castps_si256(_mm256_set1_ps(1));
    const int64_t whole = codec::Min(end, piece.count / (8 * kBytes));
    for (int64_t byte = kBytes * begin; byte < kBytes * whole; ++byte) {
      const __m256i there = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask[byte]), bit), bit);
      const __m256 factor = _mm256_castsi256_ps(_mm256_and_si256(there, one));
      _mm256_storeu_ps(to + 8 * byte, _mm256_mul_ps(_mm256_loadu_ps(from + 8 * byte), factor));
    }
    for (int64_t i = codec::Max(begin, whole); i < end; ++i) piece(i);
  }
};

// The bits of |x|, and whether any of them are not finite; as numbers with a sign they are as large.
TFSWAP_AVX2_INLINE __m256i Magnitude(__m256i bits) {
  return _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
}
TFSWAP_AVX2_INLINE __m256i NotFinite(__m256i magnitude) {
  return _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F7FFFFF));
}
TFSWAP_AVX2_INLINE bool Any(__m256i chosen) { return _mm256_movemask_epi8(chosen) != 0; }

// float16 as the processor converts it, which overflows where we saturate.
template <int kBlock>
struct ByHand<codec::EncodeFloats<codec::Float16, uint16_t, float, kBlock>> : std::true_type {
  using Format = codec::Float16;
  using Piece = codec::EncodeFloats<Format, uint16_t, float, kBlock>;

  TFSWAP_AVX2 static void Run(const Piece& piece, int64_t begin, int64_t end) {
    const float* const from = piece.values;
    uint16_t* const to = piece.words;
    const __m256i largest = _mm256_set1_epi32(Format::kLargestBits);
    const int64_t stop = codec::Min(kBlock * end, piece.count);
    int64_t i = kBlock * begin;
    for (; i + 8 <= stop; i += 8) {
      const __m256i bits = Load(from + i);
      const __m256i magnitude = Magnitude(bits);
      if (__builtin_expect(Any(NotFinite(magnitude)), 0)) {
        for (int k = 0; k < 8; ++k) to[i + k] = Element(from[i + k]);
        continue;
      }
      const __m256i sign = _mm256_andnot_si256(_mm256_set1_epi32(0x7FFFFFFF), bits);
      const __m256i kept = _mm256_or_si256(_mm256_min_epi32(magnitude, largest), sign);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_castsi256_ps(kept), _MM_FROUND_TO_NEAREST_INT));
    }
    for (; i < stop; ++i) to[i] = Element(from[i]);
  }

 private:
  static uint16_t Element(float value) { return static_cast<uint16_t>(Format::EncodeSaturating(value)); }
};

template <int kBlock>
struct ByHand<codec::DecodeFloats<codec::Float16, uint16_t, float, kBlock>> : std::true_type {
  using Format = codec::Float16;
  using Piece = codec::DecodeFloats<Format, uint16_t, float, kBlock>;

  TFSWAP_AVX2 static void Run(const Piece& piece, int64_t begin, int64_t end) {
    const uint16_t* const from = piece.words;
    float* const to = piece.values;
    const int64_t stop = codec::Min(kBlock * end, piece.count);
    int64_t i = kBlock * begin;
    for (; i + 8 <= stop; i += 8) {
      const __m256 values = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
      if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(values, values, _CMP_UNORD_Q)) != 0, 0)) {
        for (int k = 0; k < 8; ++k) to[i + k] = Format::Decode(from[i + k]);
        continue;
      }
      _mm256_storeu_ps(to + i, values);
    }
    for (; i < stop; ++i) to[i] = Format::Decode(from[i]);
  }
};

// Eight bits: Minifloat::Encode, of whose sums only the lowest byte is wanted.
template <int kExponent, int kMantissa, bool kInfinities, int kBlock>
struct ByHand<codec::EncodeFloats<codec::Minifloat<kExponent, kMantissa, kInfinities>, uint8_t, float, kBlock>>
    : std::true_type {
  using Format = codec::Minifloat<kExponent, kMantissa, kInfinities>;
  using Piece = codec::EncodeFloats<Format, uint8_t, float, kBlock>;
  static constexpr int kAtOnce = 32;

  TFSWAP_AVX2 static void Run(const Piece& piece, int64_t begin, int64_t end) {
    const float* const from = piece.values;
    uint8_t* const to = piece.words;
    const int64_t stop = codec::Min(kBlock * end, piece.count);
    int64_t i = kBlock * begin;
    for (; i + kAtOnce <= stop; i += kAtOnce) {
      if (__builtin_expect(!EncodeVectors(from + i, to + i), 0)) {
        for (int k = 0; k < kAtOnce; ++k) to[i + k] = Element(from[i + k]);
      }
    }
    for (; i < stop; ++i) to[i] = Element(from[i]);
  }

 private:
  static uint8_t Element(float value) { return static_cast<uint8_t>(Format::EncodeSaturating(value)); }

  // Whether all were finite.
  TFSWAP_AVX2_INLINE static bool EncodeVectors(const float* from, uint8_t* to) {
    __m256i codes[4];
    __m256i largest = _mm256_setzero_si256();
    for (int k = 0; k < 4; ++k) {
      const __m256i bits = Load(from + 8 * k);
      const __m256i magnitude = Magnitude(bits);
      largest = _mm256_max_epi32(largest, magnitude);
      const __m256i kept = _mm256_min_epi32(magnitude, _mm256_set1_epi32(Format::kLargestBits));
      const __m256i exponent = _mm256_max_epi32(_mm256_and_si256(kept, _mm256_set1_epi32(0x7F800000)),
                                                _mm256_set1_epi32(Format::kSmallestExponent));
      const __m256i power = _mm256_add_epi32(exponent, _mm256_set1_epi32(Format::kDropped << 23));
      const __m256i sum =
          _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(kept), _mm256_castsi256_ps(power)));
      // The power's own bits are all above the lowest byte.
      const __m256i steps =
          _mm256_srli_epi32(_mm256_sub_epi32(exponent, _mm256_set1_epi32(Format::kSmallestExponent)), Format::kDropped);
      const __m256i code = _mm256_add_epi32(sum, steps);
      const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
      codes[k] = _mm256_or_si256(_mm256_and_si256(code, _mm256_set1_epi32(0x7F)), sign);
    }
    // Packing takes the halves of vectors by themselves, four bytes of each at a time.
    const __m256i mixed = _mm256_packus_epi16(_mm256_packus_epi32(codes[0], codes[1]),
                                              _mm256_packus_epi32(codes[2], codes[3]));
    Store(to, _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    return !Any(NotFinite(largest));
  }
};

// Eight bits become a float16 of another bias, exponents up to the largest included, which the
// processor converts, and a product with a power of two sets that right.
template <int kExponent, int kMantissa, bool kInfinities, int kBlock>
struct ByHand<codec::DecodeFloats<codec::Minifloat<kExponent, kMantissa, kInfinities>, uint8_t, float, kBlock>>
    : std::true_type {
  using Format = codec::Minifloat<kExponent, kMantissa, kInfinities>;
  using Piece = codec::DecodeFloats<Format, uint8_t, float, kBlock>;
  static constexpr int kAtOnce = 32;

  TFSWAP_AVX2 static void Run(const Piece& piece, int64_t begin, int64_t end) {
    const uint8_t* const from = piece.words;
    float* const to = piece.values;
    const int64_t stop = codec::Min(kBlock * end, piece.count);
    int64_t i = kBlock * begin;
    for (; i + kAtOnce <= stop; i += kAtOnce) {
      const __m256i magnitudes = _mm256_and_si256(Load(from + i), _mm256_set1_epi8(0x7F));
      if (__builtin_expect(Any(_mm256_cmpgt_epi8(magnitudes, _mm256_set1_epi8(Format::kLargest))), 0)) {
        for (int k = 0; k < kAtOnce; ++k) to[i + k] = Format::Decode(from[i + k]);
        continue;
      }
      for (int k = 0; k < kAtOnce; k += 16) DecodeVectors(from + i + k, to + i + k);
    }
    for (; i < stop; ++i) to[i] = Format::Decode(from[i]);
  }

 private:
  TFSWAP_AVX2_INLINE static void DecodeVectors(const uint8_t* from, float* to) {
    constexpr int kRaise = 10 - kMantissa;
    constexpr float kScale = static_cast<float>(1 << (codec::Float16::kBias - Format::kBias));
    // With the sign in all bits from the seventh on; it belongs to the highest alone.
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, kRaise),
                                            _mm256_set1_epi16(static_cast<int16_t>(0x8000 | 0x7F << kRaise)));
    const __m256 scale = _mm256_set1_ps(kScale);
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), scale));
    _mm256_storeu_ps(to + 8, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), scale));
  }
};

// How many of the words are not zero. The number of words is a multiple of 8, here and below.
TFSWAP_AVX2 inline uint32_t CountPresent(const uint32_t* words, int64_t count) {
  __m256i zeros = _mm256_setzero_si256();  // how many in each of eight columns, below zero
  for (int64_t i = 0; i < count; i += 8) {
    zeros = _mm256_add_epi32(zeros, _mm256_cmpeq_epi32(Load(words + i), _mm256_setzero_si256()));
  }
  int32_t sums[8];
  Store(sums, zeros);
  int64_t present = count;
  for (const int32_t sum : sums) present += sum;
  return static_cast<uint32_t>(present);
}

// For each choice of eight, the places of the chosen ones, each in a byte, from the lowest on.
struct Places {
  uint64_t of[256] = {};
  constexpr Places() {
    for (int chosen = 0; chosen < 256; ++chosen) {
      int found = 0;
      for (int k = 0; k < 8; ++k) {
        if (chosen >> k & 1) of[chosen] |= static_cast<uint64_t>(k) << (8 * found++);
      }
    }
  }
};
inline constexpr Places kPlaces;

// The words that are not zero, and where they stand. What lies behind these, up to `count`, is written over.
TFSWAP_AVX2 inline void Compress(const uint32_t* words, int64_t count, uint32_t* values, uint8_t* columns) {
  for (int64_t i = 0; i < count; i += 8) {
    const __m256i vector = Load(words + i);
    const __m256i zero = _mm256_cmpeq_epi32(vector, _mm256_setzero_si256());
    const auto there = static_cast<uint8_t>(~_mm256_movemask_ps(_mm256_castsi256_ps(zero)));
    const uint64_t places = kPlaces.of[there];
    const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(places)));
    Store(values, _mm256_permutevar8x32_epi32(vector, order));
    const uint64_t at = places + static_cast<uint64_t>(i) * 0x0101010101010101u;  // no byte carries: i < 256
    std::memcpy(columns, &at, sizeof(at));
    const int found = __builtin_popcount(there);
    values += found;
    columns += found;
  }
}

}  // namespace tfswap::avx2

#endif  // TFSWAP_OPS_CSRC_CODECS_AVX2_H_
