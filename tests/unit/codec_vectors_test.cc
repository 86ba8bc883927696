// Whether the code by hand of avx2.h and avx512.h gives the bits that codec_elements.h gives, for every kind of number
// and at every length. tests/unit/test_codec_vectors.py builds it and runs it for each; it ends with 77 where the processor
// does not have that.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <immintrin.h>

#include "vectors.h"

namespace {

using tfswap::codec::BitCast;

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "line %d: not so: %s\n", __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

constexpr int kBlock = 192;

// All signs and exponents with the first seven bits of the fraction, and behind these what makes it lie on, just
// below and just above the middle of two neighbours in every format. Then the same in an order that mixes numbers
// which are not finite among others.
std::vector<float> Numbers() {
  std::vector<float> numbers;
  for (uint32_t high = 0; high < 1u << 16; ++high) {
    for (const uint32_t low : {0u, 1u, 0xFFFu, 0x1000u, 0x1001u, 0x2FFFu, 0x3000u, 0x3001u, 0xFFFFu}) {
      numbers.push_back(BitCast<float>(high << 16 | low));
    }
  }
  const size_t count = numbers.size();
  for (size_t i = 0; i < count; ++i) numbers.push_back(numbers[i * 7919 % count]);
  return numbers;
}

struct Avx2 {
  static bool There() { return tfswap::HasAvx2(); }
  template <typename Piece>
  using ByHand = tfswap::avx2::ByHand<Piece>;
  static constexpr auto CountPresent = tfswap::avx2::CountPresent;
  static constexpr auto Compress = tfswap::avx2::Compress;
  static constexpr bool kWritesBehind = true;
};

struct Avx512 {
  static bool There() { return tfswap::HasAvx512(); }
  template <typename Piece>
  using ByHand = tfswap::avx512::ByHand<Piece>;
  static constexpr auto CountPresent = tfswap::avx512::CountPresent;
  static constexpr auto Compress = tfswap::avx512::Compress;
  static constexpr bool kWritesBehind = false;
};

template <typename Vectors, typename Piece>
void RunBoth(const Piece& expected, const Piece& actual, int64_t count) {
  const int64_t pieces = tfswap::codec::CeilDiv(count, kBlock);
  using ByHand = typename Vectors::template ByHand<Piece>;
  tfswap::RunRangeAnywhere(expected, 0, pieces);
  // In two parts, as threads share the work.
  ByHand::Run(actual, 0, pieces / 2);
  ByHand::Run(actual, pieces / 2, pieces);
}

template <typename Vectors, typename Format, typename Word>
void FloatsAreTheSame(const std::vector<float>& numbers) {
  using Encode = tfswap::codec::EncodeFloats<Format, Word, float, kBlock>;
  using Decode = tfswap::codec::DecodeFloats<Format, Word, float, kBlock>;
  std::vector<int64_t> counts = {static_cast<int64_t>(numbers.size())};
  for (int64_t count = 0; count < 3 * kBlock; count += 11) counts.push_back(count);
  for (const int64_t count : counts) {
    std::vector<Word> expected(count + 64, 0xAB), actual = expected;
    RunBoth<Vectors>(Encode{numbers.data() + 1 - count % 2, count, expected.data()},
                     Encode{numbers.data() + 1 - count % 2, count, actual.data()}, count);
    CHECK(expected == actual);
  }
  // Every code, those that nothing encodes to as well.
  std::vector<Word> codes(1 << 18);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<Word>(i < 1 << 17 ? i : i * 40503 >> 3);
  for (const int64_t count : {codes.size(), codes.size() - 77}) {
    std::vector<uint32_t> expected(count + 64, 0xABABABAB), actual = expected;
    RunBoth<Vectors>(Decode{codes.data(), count, reinterpret_cast<float*>(expected.data())},
                     Decode{codes.data(), count, reinterpret_cast<float*>(actual.data())}, count);
    CHECK(expected == actual);
  }
}

template <typename Vectors>
void ProductsAreTheSame(const std::vector<float>& numbers) {
  using Piece = tfswap::codec::MultiplyByMask<float, kBlock / 8>;
  std::vector<uint8_t> mask(numbers.size() / 8 + 1);
  for (size_t i = 0; i < mask.size(); ++i) mask[i] = static_cast<uint8_t>(i * 181 >> 2);
  for (int64_t count : {numbers.size(), size_t{0}, size_t{1}, size_t{17}, size_t{193}, size_t{575}}) {
    std::vector<uint32_t> expected(count + 64, 0xABABABAB), actual = expected;
    RunBoth<Vectors>(Piece{numbers.data(), mask.data(), count, reinterpret_cast<float*>(expected.data())},
                     Piece{numbers.data(), mask.data(), count, reinterpret_cast<float*>(actual.data())}, count);
    CHECK(expected == actual);
  }
}

template <typename Vectors, typename Predicate>
void PredicatesAreTheSame(const std::vector<float>& numbers) {
  using Piece = tfswap::codec::EncodeMask<Predicate, float, kBlock / 8>;
  for (int64_t count : {numbers.size(), size_t{0}, size_t{1}, size_t{17}, size_t{191}, size_t{193}, size_t{575}}) {
    std::vector<uint8_t> expected(count / 8 + 65, 0xAB), actual = expected;
    RunBoth<Vectors>(Piece{numbers.data() + 1 - count % 2, count, expected.data()},
                     Piece{numbers.data() + 1 - count % 2, count, actual.data()}, count);
    CHECK(expected == actual);
  }
}

// Of bools, which AVX2 alone has by hand.
void MasksAreTheSame() {
  using Encode = tfswap::codec::EncodeMask<tfswap::codec::IsTrue, bool, kBlock / 8>;
  using Decode = tfswap::codec::DecodeMask<kBlock / 8, false>;
  std::vector<uint8_t> bools(5 * kBlock);
  for (size_t i = 0; i < bools.size(); ++i) bools[i] = static_cast<uint8_t>(i * 2654435761u >> 7 & 1);
  for (int64_t count = 0; count <= static_cast<int64_t>(bools.size()); ++count) {
    std::vector<uint8_t> expected(count / 8 + 65, 0xAB), actual = expected, back(count + 64, 0xAB), wanted = back;
    const auto* const values = reinterpret_cast<const bool*>(bools.data());
    RunBoth<Avx2>(Encode{values, count, expected.data()}, Encode{values, count, actual.data()}, count);
    CHECK(expected == actual);
    RunBoth<Avx2>(Decode{expected.data(), count, reinterpret_cast<bool*>(wanted.data())},
                  Decode{expected.data(), count, reinterpret_cast<bool*>(back.data())}, count);
    CHECK(wanted == back);
    CHECK(std::equal(back.begin(), back.begin() + count, bools.begin()));
  }
}

// Groups of all sizes and lengths: of wild numbers, of finite ones alone, of a narrow range, and of zeros of both signs.
template <typename Vectors, int kBits>
void GroupsAreTheSame(const std::vector<float>& numbers) {
  using Piece = tfswap::codec::EncodeGroups<float, kBits>;
  std::vector<std::vector<float>> all(4, numbers);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const bool finite = std::isfinite(numbers[i]);
    all[1][i] = finite ? numbers[i] : 1.0f;
    all[2][i] = 1 + static_cast<float>(i * 2654435761u >> 8 & 0xFFFFFF) / (1 << 28);
    all[3][i] = i % 16 == 0 ? 1.0f : std::copysign(i % 3 ? 0.0f : 1e-40f, i % 7 ? 1.0f : -1.0f);
  }
  for (const std::vector<float>& values : all) {
    for (const int64_t size : {4, 32, 64, 256, 260}) {
      for (const int64_t count : {values.size(), size_t{1}, size_t{31}, size_t{256}, size_t{1000}}) {
        const int64_t groups = tfswap::codec::CeilDiv(count, size), bytes = groups * size * kBits / 8;
        std::vector<float> expected_ranges(2 * groups), ranges(2 * groups);
        std::vector<uint8_t> expected(bytes + 64, 0xAB), actual = expected;
        const Piece by_element{values.data(), count, size, 7, expected_ranges.data(), expected.data()};
        const Piece by_hand{values.data(), count, size, 7, ranges.data(), actual.data()};
        tfswap::RunRangeAnywhere(by_element, 0, groups);
        using ByHand = typename Vectors::template ByHand<Piece>;
        ByHand::Run(by_hand, 0, groups / 2);
        ByHand::Run(by_hand, groups / 2, groups);
        CHECK(std::memcmp(expected_ranges.data(), ranges.data(), 8 * groups) == 0);
        CHECK(expected == actual);
      }
    }
  }
}

template <typename Vectors>
void RowsAreTheSame() {
  constexpr int kRow = 256;
  for (uint32_t round = 0; round < 1001; ++round) {
    uint32_t row[kRow];
    for (uint32_t k = 0; k < kRow; ++k) {
      const uint32_t random = (k + kRow * round) * 2654435761u;
      row[k] = (random >> 16) % 1000 < round ? random | 1u << 31 : 0;  // from none to all
    }
    std::vector<uint32_t> values(kRow, 0xAB), expected = values;
    std::vector<uint8_t> columns(kRow, 0xAB), expected_columns = columns;
    uint32_t found = 0;
    for (int k = 0; k < kRow; ++k) {
      if (row[k] == 0) continue;
      expected[found] = row[k];
      expected_columns[found++] = static_cast<uint8_t>(k);
    }
    CHECK(Vectors::CountPresent(row, kRow) == found);
    Vectors::Compress(row, kRow, values.data(), columns.data());
    if (Vectors::kWritesBehind) {
      values.resize(found), expected.resize(found), columns.resize(found), expected_columns.resize(found);
    }
    CHECK(values == expected);
    CHECK(columns == expected_columns);
  }
}

template <typename Vectors>
int AllIsTheSame() {
  if (!Vectors::There()) return 77;
  const std::vector<float> numbers = Numbers();
  for (const bool flush : {false, true}) {  // TensorFlow's threads take denormals for zeros
    _mm_setcsr(flush ? _mm_getcsr() | 0x8040 : _mm_getcsr() & ~0x8040u);
    FloatsAreTheSame<Vectors, tfswap::codec::Float16, uint16_t>(numbers);
    FloatsAreTheSame<Vectors, tfswap::codec::Float8E4M3Fn, uint8_t>(numbers);
    FloatsAreTheSame<Vectors, tfswap::codec::Float8E5M2, uint8_t>(numbers);
    FloatsAreTheSame<Vectors, tfswap::codec::GistFloat8, uint8_t>(numbers);
    ProductsAreTheSame<Vectors>(numbers);
    PredicatesAreTheSame<Vectors, tfswap::codec::IsPositive>(numbers);
    PredicatesAreTheSame<Vectors, tfswap::codec::IsInRelu6Range>(numbers);
    GroupsAreTheSame<Vectors, 8>(numbers);
    GroupsAreTheSame<Vectors, 4>(numbers);
  }
  RowsAreTheSame<Vectors>();
  return 0;
}

}  // namespace

int main(int, char** arguments) {
  if (std::strcmp(arguments[1], "avx512") == 0) return AllIsTheSame<Avx512>();
  const int result = AllIsTheSame<Avx2>();
  if (result == 0) MasksAreTheSame();
  return result;
}
