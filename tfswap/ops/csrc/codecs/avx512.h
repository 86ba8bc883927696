// What codec_elements.h says, in AVX-512 by hand where compilers make less of it.
//
// Values are taken in vectors; the last few, and the vectors that hold an infinity or a NaN, by the
// elements' own code. So what is written here need only be right for finite numbers.

#ifndef TFSWAP_OPS_CSRC_CODECS_AVX512_H_
#define TFSWAP_OPS_CSRC_CODECS_AVX512_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "codec_elements.h"

// GCC 12's intrinsics pass variables that are undefined on purpose, and it warns of them (GCC bug 105593).
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define TFSWAP_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define TFSWAP_AVX512_INLINE TFSWAP_AVX512 __attribute__((always_inline)) inline

namespace tfswap::avx512 {

using codec::BitCast;

// A piece that has code by hand: Run(piece, begin, end) is piece(begin) ... piece(end - 1).
template <typename Piece>
struct ByHand : std::false_type {};

// gradients * cast(mask): 16 bits of the mask choose from a vector of ones.
template <int kBytes>
struct ByHand<codec::MultiplyByMask<float, kBytes>> : std::true_type {
  using Piece = codec::MultiplyByMask<float, kBytes>;

  TFSWAP_AVX512 static void Run(const Piece& piece, int64_t begin, int64_t end) {
    const float* const from = piece.gradients;
    float* const to = piece.products;
    const __m512 one = _mm512_set1_ps(1);
    const int64_t stop = codec::Min(8 * kBytes * end, piece.count);
    int64_t i = 8 * kBytes * begin;
    for (; i + 16 <= stop; i += 16) {
      uint16_t bits;
      std::memcpy(&bits, piece.mask + i / 8, sizeof(bits));
      _mm512_storeu_ps(to + i, _mm512_mul_ps(_mm512_loadu_ps(from + i),
                                             _mm512_maskz_mov_ps(bits, one)));
    }
    for (; i < stop; ++i) {
      const auto bit = static_cast<int32_t>(piece.mask[i / 8] >> (i % 8) & 1);
      to[i] = from[i] * static_cast<float>(bit);
    }
  }
};

// The bits of |x|, and which of them are not finite.
TFSWAP_AVX512_INLINE __m512i Magnitude(__m512i bits) {
  return _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
}
TFSWAP_AVX512_INLINE __mmask16 NotFinite(__m512i magnitude) {
  return _mm512_cmpge_epu32_mask(magnitude, _mm512_set1_epi32(0x7F800000));
}

// float16 as the processor converts it, which overflows where we saturate.
template <int kBlock>
struct ByHand<codec::EncodeFloats<codec::Float16, uint16_t, float, kBlock>> : std::true_type {
  using Format = codec::Float16;
  using Piece = codec::EncodeFloats<Format, uint16_t, float, kBlock>;

  TFSWAP_AVX512 static void Run(const Piece& piece, int64_t begin, int64_t end) {
    const float* const from = piece.values;
    uint16_t* const to = piece.words;
    const __m512i largest = _mm512_set1_epi32(Format::kLargestBits);
    const int64_t stop = codec::Min(kBlock * end, piece.count);
    int64_t i = kBlock * begin;
    for (; i + 16 <= stop; i += 16) {
      const __m512i bits = _mm512_loadu_si512(from + i);
      const __m512i magnitude = Magnitude(bits);
      if (__builtin_expect(NotFinite(magnitude) != 0, 0)) {
        for (int k = 0; k < 16; ++k) to[i + k] = Element(from[i + k]);
        continue;
      }
      const __m512i sign = _mm512_andnot_si512(_mm512_set1_epi32(0x7FFFFFFF), bits);
      const __m512i kept = _mm512_or_si512(_mm512_min_epu32(magnitude, largest), sign);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                          _mm512_cvtps_ph(_mm512_castsi512_ps(kept),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    for (; i < stop; ++i) to[i] = Element(from[i]);
  }

 private:
  static uint16_t Element(float value) {
    return static_cast<uint16_t>(Format::EncodeSaturating(value));
  }
};

template <int kBlock>
struct ByHand<codec::DecodeFloats<codec::Float16, uint16_t, float, kBlock>> : std::true_type {
  using Format = codec::Float16;
  using Piece = codec::DecodeFloats<Format, uint16_t, float, kBlock>;

  TFSWAP_AVX512 static void Run(const Piece& piece, int64_t begin, int64_t end) {
    const uint16_t* const from = piece.words;
    float* const to = piece.values;
    const int64_t stop = codec::Min(kBlock * end, piece.count);
    int64_t i = kBlock * begin;
    for (; i + 16 <= stop; i += 16) {
      const __m512 values =
          _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
      if (__builtin_expect(_mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q) != 0, 0)) {
        for (int k = 0; k < 16; ++k) to[i + k] = Format::Decode(from[i + k]);
        continue;
      }
      _mm512_storeu_ps(to + i, values);
    }
    for (; i < stop; ++i) to[i] = Format::Decode(from[i]);
  }
};

// Eight bits: Minifloat::Encode, of whose sums only the lowest byte is wanted.
template <int kExponent, int kMantissa, bool kInfinities, int kBlock>
struct ByHand<codec::EncodeFloats<codec::Minifloat<kExponent, kMantissa, kInfinities>, uint8_t,
                                  float, kBlock>> : std::true_type {
  using Format = codec::Minifloat<kExponent, kMantissa, kInfinities>;
  using Piece = codec::EncodeFloats<Format, uint8_t, float, kBlock>;
  static constexpr int kAtOnce = 64;

  TFSWAP_AVX512 static void Run(const Piece& piece, int64_t begin, int64_t end) {
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
  static uint8_t Element(float value) {
    return static_cast<uint8_t>(Format::EncodeSaturating(value));
  }

  // Whether all were finite.
  TFSWAP_AVX512_INLINE static bool EncodeVectors(const float* from, uint8_t* to) {
    __mmask16 not_finite = 0;
    for (int k = 0; k < kAtOnce; k += 16) {
      const __m512i bits = _mm512_loadu_si512(from + k);
      const __m512i magnitude = Magnitude(bits);
      not_finite |= NotFinite(magnitude);
      const __m512i kept = _mm512_min_epu32(magnitude, _mm512_set1_epi32(Format::kLargestBits));
      const __m512i exponent =
          _mm512_max_epu32(_mm512_and_si512(kept, _mm512_set1_epi32(0x7F800000)),
                           _mm512_set1_epi32(Format::kSmallestExponent));
      const __m512i power = _mm512_add_epi32(exponent, _mm512_set1_epi32(Format::kDropped << 23));
      const __m512i sum = _mm512_castps_si512(
          _mm512_add_ps(_mm512_castsi512_ps(kept), _mm512_castsi512_ps(power)));
      // The power's own bits are all above the lowest byte.
      const __m512i code = _mm512_add_epi32(
          sum, _mm512_srli_epi32(
                   _mm512_sub_epi32(exponent, _mm512_set1_epi32(Format::kSmallestExponent)),
                   Format::kDropped));
      const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k),
                       _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign)));
    }
    return not_finite == 0;
  }
};

// Eight bits become a float16 of another bias, exponents up to the largest included, which the
// processor converts, and a product with a power of two sets that right.
template <int kExponent, int kMantissa, bool kInfinities, int kBlock>
struct ByHand<codec::DecodeFloats<codec::Minifloat<kExponent, kMantissa, kInfinities>, uint8_t,
                                  float, kBlock>> : std::true_type {
  using Format = codec::Minifloat<kExponent, kMantissa, kInfinities>;
  using Piece = codec::DecodeFloats<Format, uint8_t, float, kBlock>;
  static constexpr int kAtOnce = 64;

  TFSWAP_AVX512 static void Run(const Piece& piece, int64_t begin, int64_t end) {
    const uint8_t* const from = piece.words;
    float* const to = piece.values;
    const int64_t stop = codec::Min(kBlock * end, piece.count);
    int64_t i = kBlock * begin;
    for (; i + kAtOnce <= stop; i += kAtOnce) {
      const __m512i codes = _mm512_loadu_si512(from + i);
      const __m512i magnitudes = _mm512_and_si512(codes, _mm512_set1_epi8(0x7F));
      const __mmask64 not_finite =
          _mm512_cmpgt_epu8_mask(magnitudes, _mm512_set1_epi8(Format::kLargest));
      if (__builtin_expect(not_finite != 0, 0)) {
        for (int k = 0; k < kAtOnce; ++k) to[i + k] = Format::Decode(from[i + k]);
        continue;
      }
      for (int k = 0; k < kAtOnce; k += 32) DecodeVectors(from + i + k, to + i + k);
    }
    for (; i < stop; ++i) to[i] = Format::Decode(from[i]);
  }

 private:
  TFSWAP_AVX512_INLINE static void DecodeVectors(const uint8_t* from, float* to) {
    constexpr int kRaise = 10 - kMantissa;
    constexpr float kScale = static_cast<float>(1 << (codec::Float16::kBias - Format::kBias));
    // With the sign in all bits from the seventh on; it belongs to the highest alone.
    const __m512i wide = _mm512_cvtepi8_epi16(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512i halves =
        _mm512_and_si512(_mm512_slli_epi16(wide, kRaise),
                         _mm512_set1_epi16(static_cast<int16_t>(0x8000 | 0x7F << kRaise)));
    const __m512 scale = _mm512_set1_ps(kScale);
    _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), scale));
    _mm512_storeu_ps(
        to + 16, _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), scale));
  }
};

// How many of the words are not zero. The number of words is a multiple of 16, here and below.
TFSWAP_AVX512 inline uint32_t CountPresent(const uint32_t* words, int64_t count) {
  uint32_t present = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const __m512i vector = _mm512_loadu_si512(words + i);
    present += __builtin_popcount(_mm512_test_epi32_mask(vector, vector));
  }
  return present;
}

// The words that are not zero, and where they stand; nothing is written behind them.
TFSWAP_AVX512 inline void Compress(const uint32_t* words, int64_t count, uint32_t* values,
                                   uint8_t* columns) {
  __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t i = 0; i < count; i += 16) {
    const __m512i vector = _mm512_loadu_si512(words + i);
    const __mmask16 there = _mm512_test_epi32_mask(vector, vector);
    const int found = __builtin_popcount(there);
    const auto first = static_cast<__mmask16>((1u << found) - 1);
    // In registers: on some processors compressing into memory takes a hundred cycles.
    _mm512_mask_storeu_epi32(values, first, _mm512_maskz_compress_epi32(there, vector));
    _mm_mask_storeu_epi8(columns, first,
                         _mm512_cvtepi32_epi8(_mm512_maskz_compress_epi32(there, at)));
    values += found;
    columns += found;
    at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
  }
}

}  // namespace tfswap::avx512

#pragma GCC diagnostic pop

#endif  // TFSWAP_OPS_CSRC_CODECS_AVX512_H_
