// Pieces of codec_elements.h in AVX-512 intrinsics, where compilers emit slower code; see simd_loops.h.

#ifndef TFSWAP_OPS_CSRC_CODECS_AVX512_H_
#define TFSWAP_OPS_CSRC_CODECS_AVX512_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "codec_elements.h"

// GCC 12 warns of variables that its intrinsics leave undefined on purpose (GCC bug 105593).
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define TFSWAP_VECTOR __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define TFSWAP_VECTOR_INLINE TFSWAP_VECTOR __attribute__((always_inline)) inline

namespace tfswap::avx512 {

constexpr int kLanes = 16;
using Floats = __m512;
using Ints = int32_t __attribute__((vector_size(64)));
using Shorts = int16_t __attribute__((vector_size(64)));
using Bits = __mmask16;
using Longs = uint64_t __attribute__((vector_size(64)));
using Doubles = __m512d;
using HalfInts = int32_t __attribute__((vector_size(32)));

template <typename Vector>
TFSWAP_VECTOR_INLINE Vector Load(const void* from) {
  return (Vector)_mm512_loadu_si512(from);
}
template <typename Vector>
TFSWAP_VECTOR_INLINE void Store(void* to, Vector vector) {
  _mm512_storeu_si512(to, (__m512i)vector);
}

TFSWAP_VECTOR_INLINE Bits Where(codec::IsPositive, Floats values) {
  return _mm512_cmp_ps_mask(values, _mm512_setzero_ps(), _CMP_GT_OQ);
}
TFSWAP_VECTOR_INLINE Bits Where(codec::IsInRelu6Range, Floats values) {
  return _mm512_mask_cmp_ps_mask(Where(codec::IsPositive(), values), values, _mm512_set1_ps(6), _CMP_LT_OQ);
}

TFSWAP_VECTOR_INLINE Floats OneWhere(Bits bits) { return _mm512_maskz_mov_ps(bits, _mm512_set1_ps(1)); }

TFSWAP_VECTOR_INLINE Ints Min(Ints a, Ints b) { return (Ints)_mm512_min_epu32((__m512i)a, (__m512i)b); }
TFSWAP_VECTOR_INLINE Ints Max(Ints a, Ints b) { return (Ints)_mm512_max_epu32((__m512i)a, (__m512i)b); }
TFSWAP_VECTOR_INLINE bool AnyIsNotFinite(Ints magnitudes) {
  return _mm512_cmpge_epu32_mask((__m512i)magnitudes, _mm512_set1_epi32(0x7F800000)) != 0;
}
TFSWAP_VECTOR_INLINE bool AnyIsNan(Floats values) {
  return _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q) != 0;
}

TFSWAP_VECTOR_INLINE Ints SumOfHalves(Ints ints, int16_t upper, int16_t lower) {
  return (Ints)_mm512_madd_epi16((__m512i)ints, _mm512_set1_epi32(upper << 16 | lower));
}

TFSWAP_VECTOR_INLINE void StoreAsHalves(uint16_t* to, Floats values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
TFSWAP_VECTOR_INLINE Floats LoadHalves(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
TFSWAP_VECTOR_INLINE Floats LowerHalves(Shorts halves) {
  return _mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)halves));
}
TFSWAP_VECTOR_INLINE Floats UpperHalves(Shorts halves) {
  return _mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)halves, 1));
}

// Stores bytes of codes >> kShift, which have seven bits, and the signs of `signed_bits`.
template <int kShift>
TFSWAP_VECTOR_INLINE void StoreCodes(uint8_t* to, const Ints (&codes)[4], const Ints (&signed_bits)[4]) {
  for (int k = 0; k < 4; ++k) {
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32((__m512i)signed_bits[k], 24), _mm512_set1_epi32(0x80));
    const __m512i code = _mm512_or_si512(_mm512_srli_epi32((__m512i)codes[k], kShift), sign);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k * kLanes), _mm512_cvtepi32_epi8(code));
  }
}

TFSWAP_VECTOR_INLINE Shorts LoadBytes(const uint8_t* from) {
  return (Shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
// Reads 64 codes.
TFSWAP_VECTOR_INLINE bool AnyIsLarger(const uint8_t* codes, int8_t magnitude) {
  const __m512i magnitudes = _mm512_and_si512(_mm512_loadu_si512(codes), _mm512_set1_epi8(0x7F));
  return _mm512_cmpgt_epu8_mask(magnitudes, _mm512_set1_epi8(magnitude)) != 0;
}

TFSWAP_VECTOR_INLINE Floats Lower(Floats a, Floats b) { return _mm512_min_ps(a, b); }
TFSWAP_VECTOR_INLINE Floats Higher(Floats a, Floats b) { return _mm512_max_ps(a, b); }
TFSWAP_VECTOR_INLINE Longs Product(Longs longs, uint32_t factor) {
  return (Longs)_mm512_mul_epu32((__m512i)longs, _mm512_set1_epi64(factor));
}
TFSWAP_VECTOR_INLINE Doubles EveryFourth(const float* from, int k) {
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512i places = _mm512_add_epi32(first, _mm512_set1_epi32(k));
  const Floats chosen = _mm512_permutex2var_ps(Load<Floats>(from), places, Load<Floats>(from + kLanes));
  return _mm512_cvtps_pd(_mm512_castps512_ps256(chosen));
}
TFSWAP_VECTOR_INLINE HalfInts Truncated(Doubles doubles) { return (HalfInts)_mm512_cvttpd_epi32(doubles); }
TFSWAP_VECTOR_INLINE HalfInts Least(HalfInts ints, int32_t most) {
  return (HalfInts)_mm256_min_epi32((__m256i)ints, _mm256_set1_epi32(most));
}
TFSWAP_VECTOR_INLINE void StoreAsShorts(void* to, HalfInts ints) {
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_cvtepi32_epi16((__m256i)ints));
}

#include "simd_loops.h"

// The number of words that are not zero. `count` is a multiple of 16, here and below.
TFSWAP_VECTOR inline uint32_t CountPresent(const uint32_t* words, int64_t count) {
  uint32_t present = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const __m512i vector = _mm512_loadu_si512(words + i);
    present += __builtin_popcount(_mm512_test_epi32_mask(vector, vector));
  }
  return present;
}

// The words that are not zero, and their columns. Writes nothing beyond these.
TFSWAP_VECTOR inline void Compress(const uint32_t* words, int64_t count, uint32_t* values,
                                   uint8_t* columns) {
  __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t i = 0; i < count; i += 16) {
    const __m512i vector = _mm512_loadu_si512(words + i);
    const __mmask16 there = _mm512_test_epi32_mask(vector, vector);
    const int found = __builtin_popcount(there);
    const auto first = static_cast<__mmask16>((1u << found) - 1);
    // Compresses in registers: on some processors to compress into memory takes a hundred cycles.
    _mm512_mask_storeu_epi32(values, first, _mm512_maskz_compress_epi32(there, vector));
    _mm_mask_storeu_epi8(columns, first,
                         _mm512_cvtepi32_epi8(_mm512_maskz_compress_epi32(there, at)));
    values += found;
    columns += found;
    at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
  }
}

}  // namespace tfswap::avx512

#undef TFSWAP_VECTOR
#undef TFSWAP_VECTOR_INLINE

#pragma GCC diagnostic pop

#endif  // TFSWAP_OPS_CSRC_CODECS_AVX512_H_
