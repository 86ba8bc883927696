// Runs the pieces of codec_elements.h with this processor's vector instructions.
//
// For most pieces compilers emit good vector code. They are compiled here for several widths of vectors, of which one
// is chosen at run time, since the library may have been built on another machine. For masks, conversions and the
// compression of sparse rows, avx2.h and avx512.h have intrinsics. All variants give the same bits
// (tests/unit/codec_vectors_test.cc). Products and sums are not fused, see COMPILE_FLAGS in native/build.py. This file
// does not include TensorFlow.

#ifndef TFSWAP_OPS_CSRC_CODECS_VECTORS_H_
#define TFSWAP_OPS_CSRC_CODECS_VECTORS_H_

#include <cstdint>

#ifdef __x86_64__
#include "avx2.h"
#include "avx512.h"
#endif

namespace tfswap {

// Runs piece(begin) ... piece(end - 1).
template <typename Piece>
__attribute__((always_inline)) inline void RunRange(const Piece& piece, int64_t begin,
                                                    int64_t end) {
  // A copy whose address is not taken: its fields stay in registers. A store of bytes might alias `piece`.
  const Piece own = piece;
  for (int64_t i = begin; i < end; ++i) own(i);
}

template <typename Piece>
void RunRangeAnywhere(const Piece& piece, int64_t begin, int64_t end) {
  RunRange(piece, begin, end);
}

#ifdef __x86_64__
template <typename Piece>
__attribute__((target("avx2"), flatten)) void RunRangeAvx2(const Piece& piece, int64_t begin,
                                                           int64_t end) {
  RunRange(piece, begin, end);
}

template <typename Piece>
__attribute__((target("avx512bw,avx512dq,avx512vl,prefer-vector-width=512"), flatten)) void
RunRangeAvx512(const Piece& piece, int64_t begin, int64_t end) {
  RunRange(piece, begin, end);
}
#endif

inline bool HasAvx512() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

inline bool HasAvx2() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

template <typename Piece>
auto RangeForThisProcessor() {
#ifdef __x86_64__
  if (HasAvx512()) {
    if constexpr (avx512::ByHand<Piece>::value) {
      return avx512::ByHand<Piece>::Run;
    } else {
      return RunRangeAvx512<Piece>;
    }
  }
  if (HasAvx2()) {
    if constexpr (avx2::ByHand<Piece>::value) {
      return avx2::ByHand<Piece>::Run;
    } else {
      return RunRangeAvx2<Piece>;
    }
  }
#endif
  return RunRangeAnywhere<Piece>;
}

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CODECS_VECTORS_H_
