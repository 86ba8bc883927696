// The loops that avx2.h and avx512.h have in common. Each includes this once, in its own namespace, behind what they
// do not: a function is compiled for the vectors that its attribute names, which no argument of a template can choose.
//
// Values are taken in vectors; the last few, and vectors that hold an infinity or a NaN, by the elements' own code.
// So what is written here need only be right for finite numbers.
//
// What is there before:
//   TFSWAP_VECTOR, TFSWAP_VECTOR_INLINE  the attributes of functions
//   kLanes                               how many floats are in a vector
//   Floats, Ints, Shorts                 vectors as GCC has them: operators are for each lane
//   Bits                                 the unsigned integer that has a bit for each lane
//   Load<Vector>, Store                  from and to anywhere
//   Where(predicate, floats)             the bits of the lanes that it holds for
//   OneWhere(bits)                       1 in these lanes, 0 in the others
//   Min, Max, AnyIsNotFinite             of magnitudes: bits of floats without their signs
//   AnyIsNan, StoreAsHalves, LoadHalves, LowerHalves, UpperHalves
//   SumOfHalves(ints, upper, lower)      the upper 16 bits times `upper` plus the lower times `lower`, with their signs
//   StoreCodes, LoadBytes, AnyIsLarger   of codes of a byte each

// A piece that has code by hand: Run(piece, begin, end) is piece(begin) ... piece(end - 1).
template <typename Piece>
struct ByHand : std::false_type {};

// Hand::Whole for the first `whole` pieces, and the elements' own code for the others.
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

// Values from `begin` on by Codec::Vectors, kAtOnce at a time; returns where it could not, or where fewer are left. A
// function of its own: beside the elements' code constants do not stay in registers.
template <typename Codec, typename From, typename To>
TFSWAP_VECTOR __attribute__((noinline)) int64_t ByVectors(const From* from, int64_t begin, int64_t stop, To* to) {
  int64_t i = begin;
  while (i + Codec::kAtOnce <= stop && __builtin_expect(Codec::Vectors(from + i, to + i), 1)) i += Codec::kAtOnce;
  return i;
}

template <typename Codec, typename From, typename To>
TFSWAP_VECTOR_INLINE void Convert(const From* from, int64_t begin, int64_t stop, To* to) {
  while (begin < stop) {
    begin = ByVectors<Codec>(from, begin, stop, to);
    const int64_t behind = codec::Min(begin + Codec::kAtOnce, stop);
    for (; begin < behind; ++begin) to[begin] = Codec::Element(from[begin]);
  }
}

template <typename Format>
struct Encoder;
template <typename Format>
struct Decoder;

// Of words of several values and of bfloat16, which is half a float, compilers make good code.
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

// float16 as the processor converts it, which overflows where we saturate.
template <>
struct Encoder<codec::Float16> {
  static constexpr int kAtOnce = 4 * kLanes;

  TFSWAP_VECTOR_INLINE static bool Vectors(const float* from, uint16_t* to) {
    Ints largest = {};
    for (int k = 0; k < kAtOnce; k += kLanes) {
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
  static constexpr int kAtOnce = kLanes;

  TFSWAP_VECTOR_INLINE static bool Vectors(const uint16_t* from, float* to) {
    const Floats values = LoadHalves(from);
    Store(to, values);
    return !AnyIsNan(values);
  }

  static float Element(uint16_t code) { return codec::Float16::Decode(code); }
};

// Eight bits: Minifloat::Encode.
template <int kExponent, int kMantissa, bool kInfinities>
struct Encoder<codec::Minifloat<kExponent, kMantissa, kInfinities>> {
  using Format = codec::Minifloat<kExponent, kMantissa, kInfinities>;
  static constexpr int kAtOnce = 4 * kLanes;

  TFSWAP_VECTOR_INLINE static bool Vectors(const float* from, uint8_t* to) {
    // A sum's upper half is its exponent, 1 << 7 a step, and its lower half the significand, of which 1 << kMantissa
    // are one step of the code's exponent. That is 0 where the power's is kFirst: so much less is in the power's lower
    // half, as a number with a sign, and an even one, so that sums are rounded as they would be without.
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

// Eight bits become a float16 of another bias, exponents up to the largest included, which the
// processor converts, and a product with a power of two sets that right.
template <int kExponent, int kMantissa, bool kInfinities>
struct Decoder<codec::Minifloat<kExponent, kMantissa, kInfinities>> {
  using Format = codec::Minifloat<kExponent, kMantissa, kInfinities>;
  static constexpr int kAtOnce = 4 * kLanes;

  TFSWAP_VECTOR_INLINE static bool Vectors(const uint8_t* from, float* to) {
    constexpr int kRaise = 10 - kMantissa;
    constexpr float kScale = static_cast<float>(1 << (codec::Float16::kBias - Format::kBias));
    if (AnyIsLarger(from, Format::kLargest)) return false;
    for (int k = 0; k < kAtOnce; k += 2 * kLanes) {
      // With the sign in all bits from the seventh on; it belongs to the highest alone.
      const Shorts halves = (LoadBytes(from + k) << kRaise) & static_cast<int16_t>(0x8000 | 0x7F << kRaise);
      Store(to + k, LowerHalves(halves) * kScale);
      Store(to + k + kLanes, UpperHalves(halves) * kScale);
    }
    return true;
  }

  static float Element(uint8_t code) { return Format::Decode(code); }
};
