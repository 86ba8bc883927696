// The loops that avx2.h and avx512.h share. Each of them includes this file once, in its own namespace, after the
// definitions below. An include, since an attribute of each function names the instruction set, and a template argument
// cannot choose an attribute.
//
// Full vectors of finite values are processed here. codec_elements.h processes the last few values, and vectors with an
// infinity or a NaN. So this code need only be correct for finite numbers.
//
// Definitions needed before the include:
//   TFSWAP_VECTOR, TFSWAP_VECTOR_INLINE  the attributes of functions
//   kLanes                               the number of floats in a vector
//   Floats, Ints, Shorts                 GCC's vector types, whose operators work on each lane
//   Bits                                 the unsigned integer with one bit per lane
//   Load<Vector>, Store                  for unaligned memory
//   Where(predicate, floats)             the bits of the lanes for which the predicate holds
//   OneWhere(bits)                       1 in these lanes, 0 in the others
//   Min, Max, AnyIsNotFinite             of magnitudes: bits of floats without their signs
//   AnyIsNan, StoreAsHalves, LoadHalves, LowerHalves, UpperHalves
//   SumOfHalves(ints, upper, lower)      the upper 16 bits times `upper` plus the lower times `lower`, with their signs
//   StoreCodes, LoadBytes, AnyIsLarger   of codes of a byte each
//   Lower, Higher                        the lower and the higher of two floats, neither of them a NaN
//   Longs, Doubles, HalfInts             vectors of kLanes / 2, 64 bits wide and 32
//   Product(longs, factor)               of the lower 32 bits of each
//   EveryFourth(from, k)                 from[k], from[4 + k], from[8 + k] ... as doubles
//   Truncated(doubles), Least(half ints), StoreAsShorts(to, half ints)

// Whether a piece has vector code, by intrinsics. If so, Run(piece, begin, end) does piece(begin) ... piece(end - 1).
template <typename Piece>
struct ByHand : std::false_type {};

// Runs Hand::Whole for the first `whole` pieces, and the code of codec_elements.h for the others.
template <typename Hand, typename Piece>
TFSWAP_VECTOR_INLINE void RunWhole(const Piece& piece, int64_t begin, int64_t end, int64_t whole) {
  const Piece own = piece;  // see RunRange
  int64_t i = begin;
  for (; i < codec::Min(end, whole); ++i) Hand::Whole(own, i);
  for (; i < end; ++i) piece(i);
}

template <typename Predicate, int kBytes>
struct ByHand<codec::EncodeMask<Predicate, float, kBytes>> : std::true_type {
  using Piece = codec::EncodeMask<Predicate, float, kBytes>;
  static_assert(8 * kBytes % kLanes == 0, "pieces are whole vectors");

  TFSWAP_VECTOR static void Run(const Piece& piece, int64_t begin, int64_t end) {
    RunWhole<ByHand>(piece, begin, end, piece.count / (8 * kBytes));
  }

  TFSWAP_VECTOR_INLINE static void Whole(const Piece& piece, int64_t i) {
    for (int k = 0; k < 8 * kBytes; k += kLanes) {
      const Bits bits = Where(Predicate(), Load<Floats>(piece.values + 8 * kBytes * i + k));
      std::memcpy(piece.mask + kBytes * i + k / 8, &bits, sizeof(bits));
    }
  }
};

// gradients * cast(mask)
template <int kBytes>
struct ByHand<codec::MultiplyByMask<float, kBytes>> : std::true_type {
  using Piece = codec::MultiplyByMask<float, kBytes>;
  static_assert(8 * kBytes % kLanes == 0, "pieces are whole vectors");

  TFSWAP_VECTOR static void Run(const Piece& piece, int64_t begin, int64_t end) {
    RunWhole<ByHand>(piece, begin, end, piece.count / (8 * kBytes));
  }

  TFSWAP_VECTOR_INLINE static void Whole(const Piece& piece, int64_t i) {
    for (int k = 0; k < 8 * kBytes; k += kLanes) {
      const int64_t at = 8 * kBytes * i + k;
      Bits bits;
      std::memcpy(&bits, piece.mask + kBytes * i + k / 8, sizeof(bits));
      Store(piece.products + at, Load<Floats>(piece.gradients + at) * OneWhere(bits));
    }
  }
};

// Converts values from `begin` on by Codec::Vectors, kPerStep at a time. Returns the first value that it could not
// convert, or that fewer than kPerStep are left from. A separate function: together with the code of codec_elements.h,
// constants do not stay in registers.
template <typename Codec, typename From, typename To>
TFSWAP_VECTOR __attribute__((noinline)) int64_t ByVectors(const From* from, int64_t begin, int64_t stop, To* to) {
  int64_t i = begin;
  while (i + Codec::kPerStep <= stop && __builtin_expect(Codec::Vectors(from + i, to + i), 1)) i += Codec::kPerStep;
  return i;
}

template <typename Codec, typename From, typename To>
TFSWAP_VECTOR_INLINE void Convert(const From* from, int64_t begin, int64_t stop, To* to) {
  while (begin < stop) {
    begin = ByVectors<Codec>(from, begin, stop, to);
    const int64_t behind = codec::Min(begin + Codec::kPerStep, stop);
    for (; begin < behind; ++begin) to[begin] = Codec::Element(from[begin]);
  }
}

template <typename Format>
struct Encoder;
template <typename Format>
struct Decoder;

// For words of several values, and for bfloat16, the upper half of a float, compilers emit good code.
template <typename Format, typename Word>
constexpr bool kConverts = 8 * sizeof(Word) == Format::kBits && !std::is_same_v<Format, codec::BrainFloat16>;

template <typename Format, typename Word, int kBlock>
struct ByHand<codec::EncodeFloats<Format, Word, float, kBlock>>
    : std::bool_constant<kConverts<Format, Word>> {
  using Piece = codec::EncodeFloats<Format, Word, float, kBlock>;

  TFSWAP_VECTOR static void Run(const Piece& piece, int64_t begin, int64_t end) {
    Convert<Encoder<Format>>(piece.values, kBlock * begin, codec::Min(kBlock * end, piece.count), piece.words);
  }
};

template <typename Format, typename Word, int kBlock>
struct ByHand<codec::DecodeFloats<Format, Word, float, kBlock>>
    : std::bool_constant<kConverts<Format, Word>> {
  using Piece = codec::DecodeFloats<Format, Word, float, kBlock>;

  TFSWAP_VECTOR static void Run(const Piece& piece, int64_t begin, int64_t end) {
    Convert<Decoder<Format>>(piece.words, kBlock * begin, codec::Min(kBlock * end, piece.count), piece.values);
  }
};

constexpr int32_t kMagnitude = 0x7FFFFFFF;

// float16 by the processor's conversion. It overflows to infinity, so values are saturated before.
template <>
struct Encoder<codec::Float16> {
  static constexpr int kPerStep = 4 * kLanes;

  TFSWAP_VECTOR_INLINE static bool Vectors(const float* from, uint16_t* to) {
    Ints largest = {};
    for (int k = 0; k < kPerStep; k += kLanes) {
      const Ints bits = Load<Ints>(from + k);
      const Ints magnitudes = bits & kMagnitude;
      largest = Max(largest, magnitudes);
      const Ints kept = Min(magnitudes, Ints{} + static_cast<int32_t>(codec::Float16::kLargestBits));
      StoreAsHalves(to + k, (Floats)(kept | (bits & ~kMagnitude)));
    }
    return !AnyIsNotFinite(largest);
  }

  static uint16_t Element(float value) {
    return static_cast<uint16_t>(codec::Float16::EncodeSaturating(value));
  }
};

template <>
struct Decoder<codec::Float16> {
  static constexpr int kPerStep = kLanes;

  TFSWAP_VECTOR_INLINE static bool Vectors(const uint16_t* from, float* to) {
    const Floats values = LoadHalves(from);
    Store(to, values);
    return !AnyIsNan(values);
  }

  static float Element(uint16_t code) { return codec::Float16::Decode(code); }
};

// Formats of eight bits, as in Minifloat::Encode.
template <int kExponent, int kMantissa, bool kInfinities>
struct Encoder<codec::Minifloat<kExponent, kMantissa, kInfinities>> {
  using Format = codec::Minifloat<kExponent, kMantissa, kInfinities>;
  static constexpr int kPerStep = 4 * kLanes;

  TFSWAP_VECTOR_INLINE static bool Vectors(const float* from, uint8_t* to) {
    // The upper 16 bits of a sum count its exponent in steps of 1 << 7. The lower 16 bits are the significand, and 1 <<
    // kMantissa of it are one step of the code's exponent. The code's exponent is 0 where the power's exponent is
    // kFirst. So kFirst << kMantissa is subtracted in the lower 16 bits of the power, as a signed number. It is even,
    // so that the rounding of the sums does not change.
    constexpr int kScale = 7 - kMantissa;
    constexpr int kFirst = static_cast<int>(Format::kSmallestExponent >> 23) + Format::kDropped;
    constexpr int kLess = (1 << 16) - (kFirst << kMantissa);
    static_assert(kLess > 1 << 15 && kLess % 2 == 0, "below zero, and even");
    Ints codes[4], bits[4];
    Ints largest = {};
    for (int k = 0; k < 4; ++k) {
      bits[k] = Load<Ints>(from + k * kLanes);
      const Ints magnitudes = bits[k] & kMagnitude;
      largest = Max(largest, magnitudes);
      const Ints kept = Min(magnitudes, Ints{} + static_cast<int32_t>(Format::kLargestBits));
      const Ints exponents = Max(kept & 0x7F800000, Ints{} + static_cast<int32_t>(Format::kSmallestExponent));
      const Ints powers = exponents + ((Format::kDropped << 23) + kLess);
      const Ints sums = (Ints)((Floats)kept + (Floats)powers);
      codes[k] = SumOfHalves(sums, 1, 1 << kScale);
    }
    StoreCodes<kScale>(to, codes, bits);
    return !AnyIsNotFinite(largest);
  }

  static uint8_t Element(float value) { return static_cast<uint8_t>(Format::EncodeSaturating(value)); }
};

// Eight bits become a float16 with the same exponent bits, which the processor converts. A product with a power of two
// corrects the bias.
template <int kExponent, int kMantissa, bool kInfinities>
struct Decoder<codec::Minifloat<kExponent, kMantissa, kInfinities>> {
  using Format = codec::Minifloat<kExponent, kMantissa, kInfinities>;
  static constexpr int kPerStep = 4 * kLanes;

  TFSWAP_VECTOR_INLINE static bool Vectors(const uint8_t* from, float* to) {
    constexpr int kRaise = 10 - kMantissa;
    constexpr float kScale = static_cast<float>(1 << (codec::Float16::kBias - Format::kBias));
    if (AnyIsLarger(from, Format::kLargest)) return false;
    for (int k = 0; k < kPerStep; k += 2 * kLanes) {
      // LoadBytes extends the sign to all bits from the seventh on; the mask keeps the highest.
      const Shorts halves = (LoadBytes(from + k) << kRaise) & static_cast<int16_t>(0x8000 | 0x7F << kRaise);
      Store(to + k, LowerHalves(halves) * kScale);
      Store(to + k + kLanes, UpperHalves(halves) * kScale);
    }
    return true;
  }

  static float Element(uint8_t code) { return Format::Decode(code); }
};

// Full groups of finite values. Ten rounds of Philox run for kLanes / 2 counters together, each word in the lower half
// of 64 bits. The k-th number of counter j belongs to value 4 * j + k. The codes of four consecutive values are the
// bytes of one integer.
template <int kBits>
struct ByHand<codec::EncodeGroups<float, kBits>> : std::true_type {
  using Piece = codec::EncodeGroups<float, kBits>;
  static constexpr int kPerStep = 2 * kLanes;

  TFSWAP_VECTOR static void Run(const Piece& piece, int64_t begin, int64_t end) {
    const bool divides = piece.group_size % kPerStep == 0;
    RunWhole<ByHand>(piece, begin, end, divides ? piece.count / piece.group_size : 0);
  }

  TFSWAP_VECTOR_INLINE static void Whole(const Piece& piece, int64_t group) {
    const int64_t begin = group * piece.group_size;
    Floats low = Load<Floats>(piece.values + begin), high = low;
    Ints largest = {};
    for (int64_t i = 0; i < piece.group_size; i += kLanes) {
      const Floats values = Load<Floats>(piece.values + begin + i);
      low = Lower(values, low);
      high = Higher(values, high);
      largest = Max(largest, (Ints)values & kMagnitude);
    }
    if (AnyIsNotFinite(largest)) return piece(group);
    float lowest = low[0], highest = high[0];
    for (int k = 1; k < kLanes; ++k) {
      lowest = low[k] < lowest ? low[k] : lowest;
      highest = high[k] > highest ? high[k] : highest;
    }
    const auto rounding = piece.template Begin<true>(group, lowest, highest);
    uint8_t* const to = piece.codes + begin / Piece::kPerByte;
    for (int64_t i = 0; i < piece.group_size; i += kPerStep) {
      Encode(rounding, static_cast<uint64_t>((begin + i) / 4), piece.values + begin + i, to + i / Piece::kPerByte);
    }
  }

  TFSWAP_VECTOR_INLINE static void Encode(const typename Piece::Rounding& rounding, uint64_t counter, const float* from,
                                          uint8_t* to) {
    constexpr uint64_t kWord = 0xFFFFFFFF;
    Longs counters = Longs{} + counter;
    for (int j = 0; j < kLanes / 2; ++j) counters[j] += j;
    Longs words[4] = {counters & kWord, counters >> 32, Longs{}, Longs{}};
    uint32_t k0 = static_cast<uint32_t>(rounding.key), k1 = static_cast<uint32_t>(rounding.key >> 32);
    for (int round = 0; round < 10; ++round) {
      const Longs a = Product(words[0], 0xD2511F53), b = Product(words[2], 0xCD9E8D57);
      words[0] = (b >> 32) ^ words[1] ^ k0;
      words[1] = b & kWord;
      words[2] = (a >> 32) ^ words[3] ^ k1;
      words[3] = a & kWord;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    HalfInts codes = {};
    for (int k = 0; k < 4; ++k) {
      // An integer below 2^52, put into the significand of the double 2^52, gives 2^52 plus the integer.
      const Doubles places = (Doubles)(words[k] >> 8 | 0x4330000000000000) - 0x1p52;
      const Doubles chances = (places + 0.5) * 0x1p-24;
      const Doubles levels = (EveryFourth(from, k) - rounding.levels.low) * rounding.per_step + chances;
      codes |= Least(Truncated(levels), rounding.levels.top) << (k * kBits);
    }
    if constexpr (kBits == 8) {
      std::memcpy(to, &codes, sizeof(codes));
    } else {
      StoreAsShorts(to, codes);
    }
  }
};
