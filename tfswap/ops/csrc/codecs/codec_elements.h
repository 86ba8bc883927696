// The codecs' work on elements, written once for CPUs and GPUs.
//
// Each codec is a struct that can be copied bytewise. Its `operator()(int64_t i)` does the i-th piece of the work.
// Pieces are independent, so they may run in any order. codec_kernel.h runs them on a CPU's threads. This file includes
// neither TensorFlow nor the standard library, so that CUDA compilers, NVRTC included, accept it unchanged.
// More than 500 lines, since NVRTC gets it as one text.
//
// Arithmetic on float and double uses the processor's instructions, as TensorFlow's kernels do, and no bit operations
// whose results could differ: TensorFlow's threads flush denormals to zero, and a codec must treat them as the kernel
// does that it replaces.

#ifndef TFSWAP_OPS_CSRC_CODECS_CODEC_ELEMENTS_H_
#define TFSWAP_OPS_CSRC_CODECS_CODEC_ELEMENTS_H_

#ifdef __CUDACC__
#define TFSWAP_HD __host__ __device__ inline
#else
#define TFSWAP_HD inline
#endif

#ifdef __CUDACC_RTC__
namespace tfswap::codec {
using int64_t = long long;
using uint64_t = unsigned long long;
using int32_t = int;
using uint32_t = unsigned int;
using uint16_t = unsigned short;
using uint8_t = unsigned char;
}  // namespace tfswap::codec
#else
#include <cstdint>
#include <cstring>
#endif

namespace tfswap::codec {

template <typename To, typename From>
TFSWAP_HD To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using Type = uint8_t;
};
template <>
struct WordOf<2> {
  using Type = uint16_t;
};
template <>
struct WordOf<4> {
  using Type = uint32_t;
};
template <>
struct WordOf<8> {
  using Type = uint64_t;
};
// The unsigned integer of T's size.
template <typename T>
using Word = typename WordOf<sizeof(T)>::Type;

// chosen ? a : b by bit operations. For ?: in a loop compilers may emit a branch, which is twenty times as slow for
// random data and prevents vector code.
template <typename T>
TFSWAP_HD T Choose(bool chosen, T a, T b) {
  const Word<T> mask = static_cast<Word<T>>(Word<T>(0) - static_cast<Word<T>>(chosen));
  return BitCast<T>(static_cast<Word<T>>((BitCast<Word<T>>(a) & mask) |
                                         (BitCast<Word<T>>(b) & static_cast<Word<T>>(~mask))));
}

TFSWAP_HD int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
TFSWAP_HD int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }
TFSWAP_HD int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---------------------------------------------------------------------------
// Small floating-point formats

// A binary floating-point format of 1 + kExponent + kMantissa bits with IEEE's bias and subnormals. In a format without
// infinities (OCP's e4m3) only the code of all ones is special: NaN.
template <int kExponent, int kMantissa, bool kInfinities>
struct Minifloat {
  static constexpr int kBits = 1 + kExponent + kMantissa;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr uint32_t kSign = 1u << (kBits - 1);
  static constexpr uint32_t kInfinity = ((1u << kExponent) - 1) << kMantissa;
  static constexpr uint32_t kNan = kInfinities ? kInfinity | 1u << (kMantissa - 1) : kSign - 1;
  static constexpr uint32_t kLargest = (kInfinities ? kInfinity : kNan) - 1;

  // The largest finite number as a float's bits, and the float that replaces larger numbers: the next power of two,
  // which is one step of the format above it and encodes to infinity.
  static constexpr int kDropped = 23 - kMantissa;
  static constexpr uint32_t kBiasGap = static_cast<uint32_t>(127 - kBias) << 23;
  static constexpr uint32_t kLargestBits = (kLargest << kDropped) + kBiasGap;
  static constexpr uint32_t kBeyondBits = (kInfinity << kDropped) + kBiasGap;
  // The exponent of the smallest normal number and of the subnormal numbers.
  static constexpr uint32_t kSmallestExponent = kBiasGap + (1u << 23);

  // Rounds to nearest even. Finite values above the largest become the largest if kSaturate, otherwise infinity. NaNs
  // lose their payload. There are no branches, so that compilers emit vector code.
  template <bool kSaturate>
  TFSWAP_HD static uint32_t Encode(float value) {
    static_assert(kSaturate || kInfinities, "there is nothing to overflow to");
    const uint32_t signed_bits = BitCast<uint32_t>(value);
    const uint32_t bits = signed_bits & 0x7FFFFFFFu;
    uint32_t code;
    if constexpr (kExponent < 8) {
      const uint32_t most = kSaturate ? kLargestBits : kBeyondBits;
      const uint32_t kept = bits < most ? bits : most;
      const uint32_t own = kept & 0x7F800000u;
      const uint32_t exponent = own > kSmallestExponent ? own : kSmallestExponent;
      // Adds a power of two whose last place is the code's last place, so the addition rounds.
      constexpr uint32_t kRaise = static_cast<uint32_t>(kDropped) << 23;
      const float sum = BitCast<float>(kept) + BitCast<float>(exponent + kRaise);
      const uint32_t significand = BitCast<uint32_t>(sum) - (exponent + kRaise);
      code = significand + ((exponent - kSmallestExponent) >> kDropped);
    } else {
      // The format has a float's exponents. For the largest there is no such power, and no subnormals need one.
      const uint32_t odd = (bits >> kDropped) & 1;
      code = (bits + odd + ((1u << (kDropped - 1)) - 1)) >> kDropped;
      code = Choose(code > kLargest, kSaturate ? +kLargest : +kInfinity, code);
    }
    code = Choose(bits == 0x7F800000u, kInfinities ? +kInfinity : +kNan, code);
    code = Choose(bits > 0x7F800000u, +kNan, code);
    return code | (signed_bits >> 31 << (kBits - 1));
  }

  TFSWAP_HD static uint32_t EncodeSaturating(float value) { return Encode<true>(value); }
  TFSWAP_HD static uint32_t EncodeOverflowing(float value) { return Encode<false>(value); }

  TFSWAP_HD static float Decode(uint32_t code) {
    const uint32_t magnitude = code & (kSign - 1);
    uint32_t bits = (magnitude << (23 - kMantissa)) + (static_cast<uint32_t>(127 - kBias) << 23);
    if constexpr (kExponent < 8) {
      constexpr uint32_t kSmallest = static_cast<uint32_t>(128 - kBias - kMantissa) << 23;
      const float subnormal =
          static_cast<float>(static_cast<int32_t>(magnitude)) * BitCast<float>(kSmallest);
      bits = Choose(magnitude < (1u << kMantissa), BitCast<uint32_t>(subnormal), bits);
    }
    bits = Choose(magnitude > kLargest, 0x7FC00000u, bits);
    bits = Choose(kInfinities && magnitude == kInfinity, 0x7F800000u, bits);
    return BitCast<float>(bits | (code & kSign) << (32 - kBits));
  }
};

using Float16 = Minifloat<5, 10, true>;
using BrainFloat16 = Minifloat<8, 7, true>;

// The memory layout of TensorFlow's half and bfloat16.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The type in which arithmetic on T is done, as in Eigen.
template <typename T>
struct ArithmeticOf {
  using Type = T;
};
template <>
struct ArithmeticOf<Half> {
  using Type = float;
};
template <>
struct ArithmeticOf<BFloat16> {
  using Type = float;
};
template <typename T>
using Arithmetic = typename ArithmeticOf<T>::Type;

TFSWAP_HD float Value(float value) { return value; }
TFSWAP_HD double Value(double value) { return value; }
TFSWAP_HD float Value(Half value) { return Float16::Decode(value.bits); }
TFSWAP_HD float Value(BFloat16 value) {
  return BitCast<float>(static_cast<uint32_t>(value.bits) << 16);
}

template <typename T>
struct FormatOf;
template <>
struct FormatOf<Half> {
  using Type = Float16;
};
template <>
struct FormatOf<BFloat16> {
  using Type = BrainFloat16;
};

template <typename T>
TFSWAP_HD T Rounded(Arithmetic<T> value) {
  return value;
}
template <>
TFSWAP_HD Half Rounded<Half>(float value) {
  return Half{static_cast<uint16_t>(Float16::EncodeOverflowing(value))};
}
template <>
TFSWAP_HD BFloat16 Rounded<BFloat16>(float value) {
  return BFloat16{
      static_cast<uint16_t>(BrainFloat16::EncodeOverflowing(value))};
}

// `value` rounded to T, as an arithmetic value.
template <typename T>
TFSWAP_HD Arithmetic<T> RoundedValue(Arithmetic<T> value) {
  return value;
}
template <>
TFSWAP_HD float RoundedValue<Half>(float value) {
  return Float16::Decode(Float16::EncodeOverflowing(value));
}
template <>
TFSWAP_HD float RoundedValue<BFloat16>(float value) {
  return BrainFloat16::Decode(BrainFloat16::EncodeOverflowing(value));
}

// Stores the first n <= kBlock values, rounded to T. Two loops if the widths differ: compilers emit vector code for
// each of them, but not for one loop that does both.
template <int kBlock, typename T>
TFSWAP_HD void Store(const Arithmetic<T>* values, int n, T* to) {
  if constexpr (sizeof(T) == sizeof(*values)) {
    for (int k = 0; k < n; ++k) to[k] = values[k];
  } else {
    uint32_t codes[kBlock];
    using Format = typename FormatOf<T>::Type;
    for (int k = 0; k < n; ++k) codes[k] = Format::EncodeOverflowing(values[k]);
    for (int k = 0; k < n; ++k) to[k].bits = static_cast<uint16_t>(codes[k]);
  }
}

// ---------------------------------------------------------------------------
// Masks of one bit per value: value i is bit i % 8 of byte i / 8. The bits after the last value are zero. One piece of
// work is one byte, or kBytes.

struct IsPositive {
  template <typename T>
  TFSWAP_HD static bool Holds(T value) {
    return Value(value) > 0;
  }
};
// Where the gradient of ReLU6 is not 0.
struct IsInRelu6Range {
  template <typename T>
  TFSWAP_HD static bool Holds(T value) {
    return (Value(value) > 0) & (Value(value) < 6);
  }
};
struct IsTrue {
  TFSWAP_HD static bool Holds(bool value) { return value; }
};

// Eight bools as one byte: byte k becomes bit 56 + k of the product, and no two terms overlap.
TFSWAP_HD uint8_t PackedBools(const bool* bools) {
  uint64_t word;
  memcpy(&word, bools, 8);
  return static_cast<uint8_t>(word * 0x0102040810204080u >> 56);
}

// One byte as eight bools: byte k of `kept` has bit k only, and the addition, which does not carry into the next byte,
// moves it to the byte's highest bit.
TFSWAP_HD uint64_t SpreadBits(uint8_t bits) {
  const uint64_t kept = bits * uint64_t{0x0101010101010101} & 0x8040201008040201u;
  return (kept + 0x7F7F7F7F7F7F7F7Fu) >> 7 & 0x0101010101010101u;
}

template <typename Predicate, typename T, int kBytes>
struct EncodeMask {
  const T* values;
  int64_t count;
  uint8_t* mask;

  TFSWAP_HD void operator()(int64_t piece) const {
    constexpr int kValues = 8 * kBytes;
    const int64_t left = count - kValues * piece;
    if (left >= kValues) {  // a loop of constant length
      Encode(values + kValues * piece, kValues, mask + kBytes * piece);
    } else {
      Encode(values + kValues * piece, static_cast<int>(left), mask + kBytes * piece);
    }
  }

 private:
  TFSWAP_HD static void Encode(const T* from, int n, uint8_t* to) {
    bool holds[8 * kBytes] = {};
    for (int k = 0; k < n; ++k) holds[k] = Predicate::Holds(from[k]);
    for (int byte = 0; 8 * byte < n; ++byte) to[byte] = PackedBools(holds + 8 * byte);
  }
};

// Calls write(k, bit), with a bit of 0 or 1, for the values of one byte. The loop has constant length except for the
// last byte.
template <typename Write>
TFSWAP_HD void ForEachBit(uint32_t bits, int64_t left, Write write) {
  if (left >= 8) {
    for (int k = 0; k < 8; ++k) write(k, static_cast<int32_t>(bits >> k & 1));
  } else {
    for (int k = 0; k < left; ++k) write(k, static_cast<int32_t>(bits >> k & 1));
  }
}

// kWide: all bytes are expanded in one loop, for which compilers emit vector code. It is seven times as fast with
// AVX-512, which multiplies 64-bit words, and four times as slow with AVX2, which does not.
template <int kBytes, bool kWide>
struct DecodeMask {
  const uint8_t* mask;
  int64_t count;
  bool* values;

  TFSWAP_HD void operator()(int64_t piece) const {
    constexpr int kValues = 8 * kBytes;
    const uint8_t* const from = mask + kBytes * piece;
    bool* const to = values + kValues * piece;
    const int64_t left = count - kValues * piece;
    if (left >= kValues) {
      if constexpr (kWide) {
        uint64_t bools[kBytes];
        for (int byte = 0; byte < kBytes; ++byte) bools[byte] = SpreadBits(from[byte]);
        memcpy(to, bools, sizeof(bools));
      } else {
        for (int byte = 0; byte < kBytes; ++byte) {
          const uint64_t bools = SpreadBits(from[byte]);
          memcpy(to + 8 * byte, &bools, 8);
        }
      }
    } else {
      for (int k = 0; k < left; ++k) to[k] = (from[k / 8] >> k % 8 & 1) != 0;
    }
  }
};

// One where the mask's bit is set, otherwise zero: a cast of bools.
template <typename T>
struct MaskAsNumbers {
  const uint8_t* mask;
  int64_t count;
  T one;
  T* values;

  TFSWAP_HD void operator()(int64_t byte) const {
    T* const to = values + 8 * byte;
    const T set = one;
    ForEachBit(mask[byte], count - 8 * byte,
               [to, set](int k, int32_t bit) { to[k] = Choose(bit != 0, set, T{}); });
  }
};

// gradients * cast(mask), which ReluGrad and Relu6Grad compute (relu_op_functor.h). It is a product and not a
// selection, for the same bits: NaN * 0 is NaN, -1 * 0 is -0, and a denormal times 1 may be 0. So the bit is converted
// to a number: for `bit ? 1 : 0` compilers emit a selection. The output may be the gradients' own buffer.
template <typename T, int kBytes>
struct MultiplyByMask {
  const T* gradients;
  const uint8_t* mask;
  int64_t count;
  T* products;

  TFSWAP_HD void operator()(int64_t piece) const {
    const int64_t left = count - kValues * piece;
    const T* const from = gradients + kValues * piece;
    const uint8_t* const bits = mask + kBytes * piece;
    T* const to = products + kValues * piece;
    if (left >= kValues) {  // a loop of constant length
      Multiply(from, bits, kValues, to);
    } else {
      Multiply(from, bits, static_cast<int>(left), to);
    }
  }

 private:
  static constexpr int kValues = 8 * kBytes;

  TFSWAP_HD static void Multiply(const T* from, const uint8_t* bits, int n, T* to) {
    using A = Arithmetic<T>;
    // Each value's byte in a word as wide as the value, so that compilers emit one vector loop for the rest.
    Word<A> bytes[kValues];
    for (int byte = 0; 8 * byte < n; ++byte) {
      for (int k = 0; k < 8; ++k) bytes[8 * byte + k] = bits[byte];
    }
    A product[kValues];
    for (int k = 0; k < n; ++k) {
      const auto bit = static_cast<int32_t>(bytes[k] >> (k % 8) & 1);
      product[k] = Value(from[k]) * static_cast<A>(bit);
    }
    Store<kValues>(product, n, to);
  }
};

// mask ? gradients : gradients * alpha, which LeakyReluGrad computes.
template <typename T>
struct LeakyReluGradient {
  const T* gradients;
  const uint8_t* mask;
  int64_t count;
  T alpha;
  T* products;

  TFSWAP_HD void operator()(int64_t byte) const {
    const T* const from = gradients + 8 * byte;
    T* const to = products + 8 * byte;
    const Arithmetic<T> slope = Value(alpha);
    const int n = static_cast<int>(Min(8, count - 8 * byte));
    if constexpr (sizeof(T) == sizeof(Arithmetic<T>)) {
      ForEachBit(mask[byte], n, [from, to, slope](int k, int32_t bit) {
        to[k] = Choose(bit != 0, from[k], from[k] * slope);
      });
    } else {
      Arithmetic<T> product[8];
      T scaled[8];
      for (int k = 0; k < n; ++k) product[k] = Value(from[k]) * slope;
      Store<8>(product, n, scaled);
      ForEachBit(mask[byte], n, [from, to, &scaled](int k, int32_t bit) {
        to[k] = Choose(bit != 0, from[k], scaled[k]);
      });
    }
  }
};

// mask ? chosen : other. A stride is 1, or 0 for a scalar, which is repeated.
template <typename T>
struct SelectByMask {
  const uint8_t* mask;
  const T* chosen;
  int chosen_stride;
  const T* other;
  int other_stride;
  int64_t count;
  T* values;

  TFSWAP_HD void operator()(int64_t byte) const {
    const T* const a = chosen + 8 * byte * chosen_stride;
    const T* const b = other + 8 * byte * other_stride;
    T* const to = values + 8 * byte;
    const int a_stride = chosen_stride, b_stride = other_stride;
    ForEachBit(mask[byte], count - 8 * byte, [=](int k, int32_t bit) {
      to[k] = Choose(bit != 0, a[k * a_stride], b[k * b_stride]);
    });
  }
};

// ---------------------------------------------------------------------------
// Max pooling: for each pooled value, the position of the maximum in its window.
//
// The order of comparisons is that of SpatialMaxPoolWithArgMaxHelper (maxpooling_op.cc). The first element of the
// window inside the image is the first maximum. Each later one, row by row, replaces the maximum if it is larger. So of
// equal values the first is chosen, and a NaN only if it is the first element. Position p is row p / window_cols,
// column p % window_cols of the window, counted from its corner, which may be in the padding.

// Images are [images, rows, cols, depth], row-major.
struct Pooling {
  int64_t rows;
  int64_t cols;
  int64_t depth;
  int64_t out_rows;
  int64_t out_cols;
  int64_t window_rows;
  int64_t window_cols;
  int64_t row_stride;
  int64_t col_stride;
  int64_t pad_top;
  int64_t pad_left;
};

// The bytes of one output pixel's positions, of kBits each. Pixels begin at whole bytes, so that several threads can
// write them.
template <int kBits>
TFSWAP_HD int64_t PositionBytesPerPixel(int64_t depth) {
  return kBits == 8 ? depth : CeilDiv(depth, 2);
}

template <typename T>
struct IndexOf {
  using Type = uint32_t;  // as wide as the arithmetic type, so that vectors have the same number of lanes
};
template <>
struct IndexOf<double> {
  using Type = uint64_t;
};

// One piece of work is kBlock (even) consecutive channels of one output pixel.
template <typename T, int kBits, int kBlock>
struct EncodePositions {
  Pooling pooling;
  const T* image;
  uint8_t* positions;

  TFSWAP_HD void operator()(int64_t piece) const {
    using A = Arithmetic<T>;
    using Index = typename IndexOf<T>::Type;
    const Pooling& p = pooling;
    const int64_t blocks = CeilDiv(p.depth, kBlock);
    const int64_t pixel = piece / blocks;
    const int64_t first_depth = piece % blocks * kBlock;
    const int n = static_cast<int>(Min(kBlock, p.depth - first_depth));
    const int64_t top = pixel / p.out_cols % p.out_rows * p.row_stride - p.pad_top;
    const int64_t left = pixel % p.out_cols * p.col_stride - p.pad_left;
    const int64_t first_row = pixel / p.out_cols / p.out_rows * p.rows;

    A best[kBlock];
    Index at[kBlock];
    bool found = false;
    for (int64_t row = Max(top, 0); row < Min(top + p.window_rows, p.rows); ++row) {
      for (int64_t col = Max(left, 0); col < Min(left + p.window_cols, p.cols); ++col) {
        const T* const from =
            image + ((first_row + row) * p.cols + col) * p.depth + first_depth;
        const Index here = static_cast<Index>((row - top) * p.window_cols + col - left);
        if (!found) {
          for (int d = 0; d < n; ++d) {
            best[d] = Value(from[d]);
            at[d] = here;
          }
          found = true;
          continue;
        }
        for (int d = 0; d < n; ++d) {
          const A value = Value(from[d]);
          const bool larger = best[d] < value;
          best[d] = Choose(larger, value, best[d]);
          at[d] = Choose(larger, here, at[d]);
        }
      }
    }

    uint8_t* const to = positions + pixel * PositionBytesPerPixel<kBits>(p.depth) +
                        first_depth * kBits / 8;
    if constexpr (kBits == 8) {
      for (int d = 0; d < n; ++d) to[d] = static_cast<uint8_t>(at[d]);
    } else {
      for (int d = 0; d + 1 < n; d += 2) {
        to[d / 2] = static_cast<uint8_t>(at[d] | at[d + 1] << 4);
      }
      if (n % 2 == 1) to[n / 2] = static_cast<uint8_t>(at[n - 1]);
    }
  }
};

// The result of MaxPoolGrad. Each input pixel sums the gradients of the windows whose maximum it is, in the order of
// the outputs, which is that kernel's order. One piece of work is kBlock (even) consecutive channels of one input
// pixel.
template <typename T, int kBits, int kBlock>
struct MaxPoolGradient {
  Pooling pooling;
  const T* gradients;
  const uint8_t* positions;
  T* backprop;

  TFSWAP_HD void operator()(int64_t piece) const {
    using A = Arithmetic<T>;
    const Pooling& p = pooling;
    const int64_t blocks = CeilDiv(p.depth, kBlock);
    const int64_t pixel = piece / blocks;
    const int64_t first_depth = piece % blocks * kBlock;
    const int n = static_cast<int>(Min(kBlock, p.depth - first_depth));
    const int64_t row = pixel / p.cols % p.rows + p.pad_top;
    const int64_t col = pixel % p.cols + p.pad_left;
    const int64_t first_out_row = pixel / p.cols / p.rows * p.out_rows;
    const int64_t pixel_bytes = PositionBytesPerPixel<kBits>(p.depth);

    A sum[kBlock];
    for (int d = 0; d < n; ++d) sum[d] = 0;
    const int64_t rows_end = Min(row / p.row_stride + 1, p.out_rows);
    const int64_t cols_end = Min(col / p.col_stride + 1, p.out_cols);
    for (int64_t y = FirstWindow(row, p.window_rows, p.row_stride); y < rows_end; ++y) {
      for (int64_t x = FirstWindow(col, p.window_cols, p.col_stride); x < cols_end; ++x) {
        const int64_t out = (first_out_row + y) * p.out_cols + x;
        const T* const from = gradients + out * p.depth + first_depth;
        const uint8_t* const packed =
            positions + out * pixel_bytes + first_depth * kBits / 8;
        const auto here = static_cast<uint8_t>((row - y * p.row_stride) * p.window_cols +
                                               col - x * p.col_stride);
        uint8_t at[kBlock];
        if constexpr (kBits == 8) {
          for (int d = 0; d < n; ++d) at[d] = packed[d];
        } else {
          for (int d = 0; d < n; d += 2) {
            at[d] = packed[d / 2] & 15;
            at[d + 1] = packed[d / 2] >> 4;
          }
        }
        A value[kBlock];
        for (int d = 0; d < n; ++d) value[d] = Value(from[d]);
        // To add 0 changes no bits, since a sum that starts at +0 is never -0.
        for (int d = 0; d < n; ++d) {
          const A term = Choose(at[d] == here, value[d], A(0));
          sum[d] = RoundedValue<T>(sum[d] + term);
        }
      }
    }
    Store<kBlock>(sum, n, backprop + pixel * p.depth + first_depth);
  }

 private:
  // The first window that contains `at`, a row or column counted from the edge of the padding.
  TFSWAP_HD static int64_t FirstWindow(int64_t at, int64_t window, int64_t stride) {
    return at < window ? 0 : (at - window) / stride + 1;
  }
};

// ---------------------------------------------------------------------------
// Fewer bits per value: lossy

using Float8E4M3Fn = Minifloat<4, 3, false>;  // OCP
using Float8E5M2 = Minifloat<5, 2, true>;     // OCP
using GistFloat8 = Minifloat<4, 3, true>;     // Jain et al. 2018
using GistFloat10 = Minifloat<5, 4, true>;    // Jain et al. 2018

// Floats in words of one or more codes. Finite values above the format's largest become the largest. Infinities become
// NaN if the format has none. One piece of work is kBlock values, a multiple of the codes in a word.
template <typename Format, typename Packed, typename T, int kBlock>
struct EncodeFloats {
  static constexpr int kPerWord = 8 * sizeof(Packed) / Format::kBits;
  static_assert(kBlock % kPerWord == 0, "words do not cross blocks");

  const T* values;
  int64_t count;
  Packed* words;

  TFSWAP_HD void operator()(int64_t piece) const {
    const T* const from = values + piece * kBlock;
    Packed* const to = words + piece * (kBlock / kPerWord);
    const int n = static_cast<int>(Min(kBlock, count - piece * kBlock));
    uint32_t codes[kBlock];
    for (int k = 0; k < n; ++k) codes[k] = Format::EncodeSaturating(Value(from[k]));
    if constexpr (kPerWord == 1) {
      for (int k = 0; k < n; ++k) to[k] = static_cast<Packed>(codes[k]);
    } else {
      for (int k = n; k % kPerWord != 0; ++k) codes[k] = 0;
      for (int word = 0; word * kPerWord < n; ++word) {
        uint32_t packed = 0;
        for (int k = 0; k < kPerWord; ++k) {
          packed |= codes[word * kPerWord + k] << (k * Format::kBits);
        }
        to[word] = packed;
      }
    }
  }
};

template <typename Format, typename Packed, typename T, int kBlock>
struct DecodeFloats {
  static constexpr int kPerWord = 8 * sizeof(Packed) / Format::kBits;
  static_assert(kBlock % kPerWord == 0, "words do not cross blocks");

  const Packed* words;
  int64_t count;
  T* values;

  TFSWAP_HD void operator()(int64_t piece) const {
    const Packed* const from = words + piece * (kBlock / kPerWord);
    const int n = static_cast<int>(Min(kBlock, count - piece * kBlock));
    uint32_t codes[kBlock];
    if constexpr (kPerWord == 1) {
      for (int k = 0; k < n; ++k) codes[k] = from[k];
    } else {
      constexpr uint32_t kMask = (1u << Format::kBits) - 1;
      for (int word = 0; word * kPerWord < n; ++word) {
        for (int k = 0; k < kPerWord; ++k) {
          codes[word * kPerWord + k] = from[word] >> (k * Format::kBits) & kMask;
        }
      }
    }
    float decoded[kBlock];
    for (int k = 0; k < n; ++k) decoded[k] = Format::Decode(codes[k]);
    Store<kBlock>(decoded, n, values + piece * kBlock);
  }
};

// Philox 4x32 with 10 rounds (Salmon et al., SC 2011): random words computed from a key and a counter alone, so that
// the pieces of work are independent.
struct Philox {
  uint32_t word[4];

  TFSWAP_HD Philox(uint64_t key, uint64_t counter) {
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    word[0] = static_cast<uint32_t>(counter);
    word[1] = static_cast<uint32_t>(counter >> 32);
    word[2] = word[3] = 0;
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = uint64_t{0xD2511F53} * word[0];
      const uint64_t b = uint64_t{0xCD9E8D57} * word[2];
      const uint32_t first = static_cast<uint32_t>(b >> 32) ^ word[1] ^ k0;
      const uint32_t third = static_cast<uint32_t>(a >> 32) ^ word[3] ^ k1;
      word[0] = first;
      word[1] = static_cast<uint32_t>(b);
      word[2] = third;
      word[3] = static_cast<uint32_t>(a);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }
};

// A group's levels, from its smallest finite value to its largest. In doubles, since a float holds neither the
// difference of any two floats nor 1/255 of a float's last place.
//
// A group of finite values stores its smallest value first, and all codes are levels. A group with infinities or NaNs
// stores its largest value first, which marks it. Its last three codes are not levels but -infinity, infinity and NaN.
template <int kBits>
struct Levels {
  static constexpr int kCodes = 1 << kBits;
  enum Special { kMinusInfinity = kCodes - 3, kPlusInfinity, kNan };

  bool all_finite;
  int top;
  double low, step;

  TFSWAP_HD Levels(float first, float second)
      : all_finite(!(second < first)),
        top(all_finite ? kCodes - 1 : kMinusInfinity - 1),
        low(all_finite ? first : second),
        step(((all_finite ? second : first) - low) / top) {}

  TFSWAP_HD float At(int code) const { return static_cast<float>(low + code * step); }

  TFSWAP_HD static int CodeOf(float not_finite) {
    return not_finite > 0 ? kPlusInfinity : not_finite < 0 ? kMinusInfinity : kNan;
  }

  TFSWAP_HD static float SpecialValue(int special) {
    const uint32_t infinity = 0x7F800000u;
    if (special == kNan) return BitCast<float>(infinity | 0x400000u);
    return BitCast<float>(special == kPlusInfinity ? infinity : infinity | 0x80000000u);
  }
};

TFSWAP_HD bool IsFinite(float value) {
  return value >= -3.40282347e38f && value <= 3.40282347e38f;
}

// Groups of consecutive values as unsigned integers between the group's smallest and largest value (ActNN, Chen et al.,
// ICML 2021). Rounding is stochastic: the expected result equals the value. The random numbers are computed from the
// seed, the place and the group's range. So equal tensors have equal codes, and values are rounded differently in the
// next step, where the range differs. One piece of work is one group.
template <typename T, int kBits>
struct EncodeGroups {
  static constexpr int kPerByte = 8 / kBits;

  const T* values;
  int64_t count;
  int64_t group_size;  // a multiple of 4
  uint64_t seed;
  float* ranges;  // each group's smallest and largest value
  uint8_t* codes;

  // What the codes of one group depend on, in addition to its values.
  struct Rounding {
    Levels<kBits> levels;
    double per_step;
    uint64_t key;
  };

  TFSWAP_HD void operator()(int64_t group) const {
    const int64_t begin = group * group_size;
    const int64_t end = Min(begin + group_size, count);
    float low = Value(values[begin]), high = low;
    for (int64_t i = begin; i < end; ++i) {
      const float value = Value(values[i]);
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
    bool all_finite = IsFinite(low) && IsFinite(high);
    // NaNs after the first value are false in each comparison above.
    for (int64_t i = begin; i < end; ++i) all_finite &= Value(values[i]) <= high;
    if (all_finite) {
      Encode<true>(begin, end, low, high);
    } else {
      FiniteRange(begin, end, &low, &high);
      Encode<false>(begin, end, low, high);
    }
  }

  // Stores the range of a group. Its zeros have no sign, since vector code finds the two zeros in another order.
  template <bool kAllFinite>
  TFSWAP_HD Rounding Begin(int64_t group, float low, float high) const {
    low += 0.0f;
    high += 0.0f;
    ranges[2 * group] = kAllFinite ? low : high;
    ranges[2 * group + 1] = kAllFinite ? high : low;
    const Levels<kBits> levels(ranges[2 * group], ranges[2 * group + 1]);
    const uint64_t key =
        seed ^ (static_cast<uint64_t>(BitCast<uint32_t>(high)) << 32 | BitCast<uint32_t>(low));
    return {levels, levels.step > 0 ? 1 / levels.step : 0, key};
  }

 private:
  // The range of the finite values, widened to at least 2^-126, since smaller differences are flushed to 0.
  TFSWAP_HD void FiniteRange(int64_t begin, int64_t end, float* low, float* high) const {
    bool none = true;
    *low = *high = 0;
    for (int64_t i = begin; i < end; ++i) {
      const float value = Value(values[i]);
      if (!IsFinite(value)) continue;
      *low = none || value < *low ? value : *low;
      *high = none || value > *high ? value : *high;
      none = false;
    }
    if (*high - *low >= 1.17549435e-38f) return;
    // The range becomes [low, 1], or [0, high] where high is at least 1, since floats near it differ by more than
    // 2^-126.
    *(*high < 1 ? high : low) = *high < 1 ? 1.0f : 0.0f;
  }

  template <bool kAllFinite>
  TFSWAP_HD void Encode(int64_t begin, int64_t end, float low, float high) const {
    const Rounding rounding = Begin<kAllFinite>(begin / group_size, low, high);
    const Levels<kBits>& levels = rounding.levels;
    uint8_t* const to = codes + begin / kPerByte;
    for (int64_t i = 0; i < group_size; i += 4) {
      const Philox random(rounding.key, static_cast<uint64_t>((begin + i) / 4));
      for (int k = 0; k < 4; k += kPerByte) {
        uint32_t byte = 0;
        for (int j = 0; j < kPerByte; ++j) {
          const int64_t at = begin + i + k + j;
          const float value = at < end ? Value(values[at]) : low;
          // The middle of one of 2^24 intervals between 0 and 1. It is far enough from both that an error of one
          // double's last place in the level moves the code by at most 1.
          const double chance = (static_cast<int32_t>(random.word[k + j] >> 8) + 0.5) / (1 << 24);
          const bool finite = kAllFinite || IsFinite(value);
          const double level = ((finite ? value : low) - levels.low) * rounding.per_step + chance;
          int code = static_cast<int>(level);  // not negative: rounds down
          code = code < levels.top ? code : levels.top;
          if (!finite) code = Levels<kBits>::CodeOf(value);
          byte |= static_cast<uint32_t>(code) << (j * kBits);
        }
        to[(i + k) / kPerByte] = static_cast<uint8_t>(byte);
      }
    }
  }
};

template <typename T, int kBits>
struct DecodeGroups {
  static constexpr int kPerByte = 8 / kBits;

  const float* ranges;
  const uint8_t* codes;
  int64_t count;
  int64_t group_size;
  T* values;

  TFSWAP_HD void operator()(int64_t group) const {
    const int64_t begin = group * group_size;
    const int64_t end = Min(begin + group_size, count);
    const Levels<kBits> levels(ranges[2 * group], ranges[2 * group + 1]);
    for (int64_t i = begin; i < end; ++i) values[i] = Rounded<T>(levels.At(Code(i)));
    if (levels.all_finite) return;
    for (int64_t i = begin; i < end; ++i) {
      if (Code(i) > levels.top) values[i] = Rounded<T>(Levels<kBits>::SpecialValue(Code(i)));
    }
  }

 private:
  TFSWAP_HD int Code(int64_t i) const {
    return codes[i / kPerByte] >> (i % kPerByte * kBits) & (Levels<kBits>::kCodes - 1);
  }
};

}  // namespace tfswap::codec

#endif  // TFSWAP_OPS_CSRC_CODECS_CODEC_ELEMENTS_H_
