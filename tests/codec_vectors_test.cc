// Whether the code by hand of avx512.h gives the bits that codec_elements.h gives, for every kind of number and at
// every length. tests/test_codec_vectors.py builds and runs it; it ends with 77 where the processor has no AVX-512.

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

template <typename Piece>
void RunBoth(const Piece& expected, const Piece& actual, int64_t count) {
  const int64_t pieces = tfswap::codec::CeilDiv(count, kBlock);
  tfswap::RunRangeAnywhere(expected, 0, pieces);
  // In two parts, as threads share the work.
  tfswap::avx512::ByHand<Piece>::Run(actual, 0, pieces / 2);
  tfswap::avx512::ByHand<Piece>::Run(actual, pieces / 2, pieces);
}

template <typename Format, typename Word>
void FloatsAreTheSame(const std::vector<float>& numbers) {
  using Encode = tfswap::codec::EncodeFloats<Format, Word, float, kBlock>;
  using Decode = tfswap::codec::DecodeFloats<Format, Word, float, kBlock>;
  std::vector<int64_t> counts = {static_cast<int64_t>(numbers.size())};
  for (int64_t count = 0; count < 3 * kBlock; count += 11) counts.push_back(count);
  for (const int64_t count : counts) {
    std::vector<Word> expected(count + 64, 0xAB), actual = expected;
    RunBoth(Encode{numbers.data() + 1 - count % 2, count, expected.data()},
            Encode{numbers.data() + 1 - count % 2, count, actual.data()}, count);
    CHECK(expected == actual);
  }
  // Every code, those that nothing encodes to as well.
  std::vector<Word> codes(1 << 18);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<Word>(i < 1 << 17 ? i : i * 40503 >> 3);
  for (const int64_t count : {codes.size(), codes.size() - 77}) {
    std::vector<uint32_t> expected(count + 64, 0xABABABAB), actual = expected;
    RunBoth(Decode{codes.data(), count, reinterpret_cast<float*>(expected.data())},
            Decode{codes.data(), count, reinterpret_cast<float*>(actual.data())}, count);
    CHECK(expected == actual);
  }
}

void ProductsAreTheSame(const std::vector<float>& numbers) {
  using Piece = tfswap::codec::MultiplyByMask<float, kBlock / 8>;
  std::vector<uint8_t> mask(numbers.size() / 8 + 1);
  for (size_t i = 0; i < mask.size(); ++i) mask[i] = static_cast<uint8_t>(i * 181 >> 2);
  for (int64_t count : {numbers.size(), size_t{0}, size_t{1}, size_t{17}, size_t{193}, size_t{575}}) {
    std::vector<uint32_t> expected(count + 64, 0xABABABAB), actual = expected;
    RunBoth(Piece{numbers.data(), mask.data(), count, reinterpret_cast<float*>(expected.data())},
            Piece{numbers.data(), mask.data(), count, reinterpret_cast<float*>(actual.data())}, count);
    CHECK(expected == actual);
  }
}

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
    CHECK(tfswap::avx512::CountPresent(row, kRow) == found);
    tfswap::avx512::Compress(row, kRow, values.data(), columns.data());
    CHECK(values == expected);
    CHECK(columns == expected_columns);
  }
}

}  // namespace

int main() {
  if (!tfswap::HasAvx512()) return 77;
  const std::vector<float> numbers = Numbers();
  for (const bool flush : {false, true}) {  // TensorFlow's threads take denormals for zeros
    _mm_setcsr(flush ? _mm_getcsr() | 0x8040 : _mm_getcsr() & ~0x8040u);
    FloatsAreTheSame<tfswap::codec::Float16, uint16_t>(numbers);
    FloatsAreTheSame<tfswap::codec::Float8E4M3Fn, uint8_t>(numbers);
    FloatsAreTheSame<tfswap::codec::Float8E5M2, uint8_t>(numbers);
    FloatsAreTheSame<tfswap::codec::GistFloat8, uint8_t>(numbers);
    ProductsAreTheSame(numbers);
  }
  RowsAreTheSame();
  return 0;
}
