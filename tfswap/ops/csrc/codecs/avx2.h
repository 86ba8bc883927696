// Pieces of codec_elements.h in AVX2 and F16C intrinsics, for processors without AVX-512; see simd_loops.h.

#ifndef TFSWAP_OPS_CSRC_CODECS_AVX2_H_
#define TFSWAP_OPS_CSRC_CODECS_AVX2_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "codec_elements.h"

#define TFSWAP_VECTOR __attribute__((target("avx2,f16c")))
#define TFSWAP_VECTOR_INLINE TFSWAP_VECTOR __attribute__((always_inline)) inline

namespace tfswap::avx2 {

constexpr int kLanes = 8;
using Floats = __m256;
using Ints = int32_t __attribute__((vector_size(32)));
using Shorts = int16_t __attribute__((vector_size(32)));
using Bits = uint8_t;
using Longs = uint64_t __attribute__((vector_size(32)));
using Doubles = __m256d;
using HalfInts = int32_t __attribute__((vector_size(16)));

template <typename Vector>
TFSWAP_VECTOR_INLINE Vector Load(const void* from) {
  return (Vector)_mm256_loadu_si256(static_cast<const __m256i*>(from));
}
template <typename Vector>
TFSWAP_VECTOR_INLINE void Store(void* to, Vector vector) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), (__m256i)vector);
}

TFSWAP_VECTOR_INLINE Bits Where(codec::IsPositive, Floats values) {
  return static_cast<Bits>(_mm256_movemask_ps(_mm256_cmp_ps(values, _mm256_setzero_ps(), _CMP_GT_OQ)));
}
TFSWAP_VECTOR_INLINE Bits Where(codec::IsInRelu6Range, Floats values) {
  return static_cast<Bits>(
      _mm256_movemask_ps(_mm256_and_ps(_mm256_cmp_ps(values, _mm256_setzero_ps(), _CMP_GT_OQ),
                                       _mm256_cmp_ps(values, _mm256_set1_ps(6), _CMP_LT_OQ))));
}

TFSWAP_VECTOR_INLINE Floats OneWhere(Bits bits) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i there = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), bit), bit);
  return _mm256_and_ps(_mm256_castsi256_ps(there), _mm256_set1_ps(1));
}

// Magnitudes have no sign bit, so comparing them as signed integers is correct.
TFSWAP_VECTOR_INLINE Ints Min(Ints a, Ints b) { return (Ints)_mm256_min_epi32((__m256i)a, (__m256i)b); }
TFSWAP_VECTOR_INLINE Ints Max(Ints a, Ints b) { return (Ints)_mm256_max_epi32((__m256i)a, (__m256i)b); }
TFSWAP_VECTOR_INLINE bool Any(__m256i chosen) { return _mm256_movemask_epi8(chosen) != 0; }
TFSWAP_VECTOR_INLINE bool AnyIsNotFinite(Ints magnitudes) {
  return _mm256_movemask_epi8(_mm256_cmpgt_epi32(_mm256_set1_epi32(0x7F800000), (__m256i)magnitudes)) != -1;
}
TFSWAP_VECTOR_INLINE bool AnyIsNan(Floats values) {
  return _mm256_movemask_ps(_mm256_cmp_ps(values, values, _CMP_UNORD_Q)) != 0;
}

TFSWAP_VECTOR_INLINE Ints SumOfHalves(Ints ints, int16_t upper, int16_t lower) {
  return (Ints)_mm256_madd_epi16((__m256i)ints, _mm256_set1_epi32(upper << 16 | lower));
}

TFSWAP_VECTOR_INLINE void StoreAsHalves(uint16_t* to, Floats values) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}
TFSWAP_VECTOR_INLINE Floats LoadHalves(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
TFSWAP_VECTOR_INLINE Floats LowerHalves(Shorts halves) {
  return _mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)halves));
}
TFSWAP_VECTOR_INLINE Floats UpperHalves(Shorts halves) {
  return _mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)halves, 1));
}

// Restores the order: packing works within each half of a vector, four bytes at a time.
TFSWAP_VECTOR_INLINE __m256i InOrder(__m256i packed) {
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
// Stores bytes of codes >> kShift, which have seven bits, and the signs of `signed_bits`.
template <int kShift>
TFSWAP_VECTOR_INLINE void StoreCodes(uint8_t* to, const Ints (&codes)[4], const Ints (&signed_bits)[4]) {
  __m256i magnitudes[2], signs[2];
  for (int k = 0; k < 2; ++k) {
    magnitudes[k] =
        _mm256_srli_epi16(_mm256_packs_epi32((__m256i)codes[2 * k], (__m256i)codes[2 * k + 1]), kShift);
    // Saturation keeps the sign.
    signs[k] = _mm256_packs_epi32((__m256i)signed_bits[2 * k], (__m256i)signed_bits[2 * k + 1]);
  }
  const __m256i sign = _mm256_and_si256(_mm256_packs_epi16(signs[0], signs[1]), _mm256_set1_epi8(-128));
  Store(to, InOrder(_mm256_or_si256(_mm256_packs_epi16(magnitudes[0], magnitudes[1]), sign)));
}

TFSWAP_VECTOR_INLINE Shorts LoadBytes(const uint8_t* from) {
  return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
// Reads 32 codes.
TFSWAP_VECTOR_INLINE bool AnyIsLarger(const uint8_t* codes, int8_t magnitude) {
  const __m256i magnitudes = _mm256_and_si256(Load<__m256i>(codes), _mm256_set1_epi8(0x7F));
  return Any(_mm256_cmpgt_epi8(magnitudes, _mm256_set1_epi8(magnitude)));
}

TFSWAP_VECTOR_INLINE Floats Lower(Floats a, Floats b) { return _mm256_min_ps(a, b); }
TFSWAP_VECTOR_INLINE Floats Higher(Floats a, Floats b) { return _mm256_max_ps(a, b); }
TFSWAP_VECTOR_INLINE Longs Product(Longs longs, uint32_t factor) {
  return (Longs)_mm256_mul_epu32((__m256i)longs, _mm256_set1_epi64x(factor));
}
TFSWAP_VECTOR_INLINE Doubles EveryFourth(const float* from, int k) {
  return _mm256_setr_pd(from[k], from[4 + k], from[8 + k], from[12 + k]);
}
TFSWAP_VECTOR_INLINE HalfInts Truncated(Doubles doubles) { return (HalfInts)_mm256_cvttpd_epi32(doubles); }
TFSWAP_VECTOR_INLINE HalfInts Least(HalfInts ints, int32_t most) {
  return (HalfInts)_mm_min_epi32((__m128i)ints, _mm_set1_epi32(most));
}
TFSWAP_VECTOR_INLINE void StoreAsShorts(void* to, HalfInts ints) {
  const __m128i packed = _mm_packus_epi32((__m128i)ints, (__m128i)ints);
  _mm_storel_epi64(static_cast<__m128i*>(to), packed);
}

#include "simd_loops.h"

// Bools are 0 or 1. A shift moves them to the highest bit of their byte; bits that leave a byte are 0.
template <int kBytes>
struct ByHand<codec::EncodeMask<codec::IsTrue, bool, kBytes>> : std::true_type {
  using Piece = codec::EncodeMask<codec::IsTrue, bool, kBytes>;
  static_assert(kBytes % 4 == 0, "pieces are whole vectors");

  TFSWAP_VECTOR static void Run(const Piece& piece, int64_t begin, int64_t end) {
    RunWhole<ByHand>(piece, begin, end, piece.count / (8 * kBytes));
  }

  TFSWAP_VECTOR_INLINE static void Whole(const Piece& piece, int64_t i) {
    for (int k = 0; k < kBytes; k += 4) {
      const int64_t byte = kBytes * i + k;
      const int bits = _mm256_movemask_epi8(_mm256_slli_epi16(Load<__m256i>(piece.values + 8 * byte), 7));
      std::memcpy(piece.mask + byte, &bits, sizeof(bits));
    }
  }
};

// Repeats each byte eight times. Copy k keeps bit k.
template <int kBytes>
struct ByHand<codec::DecodeMask<kBytes, false>> : std::true_type {
  using Piece = codec::DecodeMask<kBytes, false>;
  static_assert(kBytes % 4 == 0, "pieces are whole vectors");

  TFSWAP_VECTOR static void Run(const Piece& piece, int64_t begin, int64_t end) {
    RunWhole<ByHand>(piece, begin, end, piece.count / (8 * kBytes));
  }

  TFSWAP_VECTOR_INLINE static void Whole(const Piece& piece, int64_t i) {
    const __m256i source = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                            2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
    for (int k = 0; k < kBytes; k += 4) {
      const int64_t byte = kBytes * i + k;
      int bits;
      std::memcpy(&bits, piece.mask + byte, sizeof(bits));
      const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), source);
      // The bit's value where it is set, which min reduces to 1.
      Store(piece.values + 8 * byte, _mm256_min_epu8(_mm256_and_si256(spread, bit), _mm256_set1_epi8(1)));
    }
  }
};

// The number of words that are not zero. `count` is a multiple of 32, here and below.
TFSWAP_VECTOR inline uint32_t CountPresent(const uint32_t* words, int64_t count) {
  Ints zeros = {};  // minus the number of zeros in each lane
  for (int64_t i = 0; i < count; i += 4 * kLanes) {
    Ints four[4];
    for (int k = 0; k < 4; ++k) four[k] = Load<Ints>(words + i + k * kLanes) == 0;
    zeros += (four[0] + four[1]) + (four[2] + four[3]);
  }
  int64_t present = count;
  for (int k = 0; k < kLanes; ++k) present += zeros[k];
  return static_cast<uint32_t>(present);
}

// For each set of eight lanes, the lanes that are not in it, one per byte in ascending order.
struct Places {
  uint64_t of[256] = {};
  constexpr Places() {
    for (int chosen = 0; chosen < 256; ++chosen) {
      int found = 0;
      for (int k = 0; k < 8; ++k) {
        if (!(chosen >> k & 1)) of[chosen] |= static_cast<uint64_t>(k) << (8 * found++);
      }
    }
  }
};
inline constexpr Places kPlaces;

// The words that are not zero, and their columns. Overwrites the outputs beyond these too, up to `count`.
TFSWAP_VECTOR inline void Compress(const uint32_t* words, int64_t count, uint32_t* values, uint8_t* columns) {
  // Several vectors together: all are read before one is written, since to compilers inputs and outputs may overlap,
  // and adjacent stores follow one another.
  constexpr int kVectors = 4;
  for (int64_t i = 0; i < count; i += kVectors * kLanes) {
    __m256i vectors[kVectors];
    const uint64_t* places[kVectors];
    int before[kVectors + 1] = {};
    for (int k = 0; k < kVectors; ++k) {
      vectors[k] = Load<__m256i>(words + i + k * kLanes);
      const __m256i zero = _mm256_cmpeq_epi32(vectors[k], _mm256_setzero_si256());
      const int zeros = _mm256_movemask_ps(_mm256_castsi256_ps(zero));
      places[k] = &kPlaces.of[zeros];
      before[k + 1] = before[k] + kLanes - __builtin_popcount(zeros);
    }
    for (int k = 0; k < kVectors; ++k) {
      const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(places[k])));
      Store(values + before[k], _mm256_permutevar8x32_epi32(vectors[k], order));
    }
    for (int k = 0; k < kVectors; ++k) {
      const uint64_t at = *places[k] + (i + k * kLanes) * 0x0101010101010101u;  // no carry between bytes: i < 256
      std::memcpy(columns + before[k], &at, sizeof(at));
    }
    values += before[kVectors];
    columns += before[kVectors];
  }
}

}  // namespace tfswap::avx2

#undef TFSWAP_VECTOR
#undef TFSWAP_VECTOR_INLINE

#endif  // TFSWAP_OPS_CSRC_CODECS_AVX2_H_
