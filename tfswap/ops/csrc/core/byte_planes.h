// A lossless codec for what goes to disk: planes of bytes (the first bytes of all values, then the second ones, ...),
// compressed by zstd.
//
// Of floats that are near each other in size the first plane, sign and exponent, takes about a third of its bits, and the
// others next to none less, unless many values are zero. So zstd is asked for its Huffman stage above all, which is
// fast; looking for matches finds little more. Zstd is TensorFlow's own: its library exports it from 2.18 on at least.
// Where one does not, There() says so.
//
// Nothing is allocated: a caller gives the memory, which belongs to a limit.
//
// This file and byte_planes.cc know nothing of TensorFlow.

#ifndef TFSWAP_OPS_CSRC_CORE_PLANES_H_
#define TFSWAP_OPS_CSRC_CORE_PLANES_H_

#include <cstddef>

namespace tfswap::planes {

// Memory that Compress and Decompress need, aligned to 8 bytes; with as much zstd 1.4.5 does (TensorFlow 2.18), and later
// ones with less.
constexpr size_t kCompressBytes = size_t{512} << 10;
constexpr size_t kDecompressBytes = size_t{160} << 10;

// Whether there is a zstd in this process.
bool There();

// Values of `width` bytes to planes, and back. `bytes` is a multiple of `width`.
void Cut(const char* values, size_t bytes, size_t width, char* planes);
void Join(const char* planes, size_t bytes, size_t width, char* values);

// How many bytes of `to` were taken, of `room`; 0 where these do not do.
size_t Compress(const char* from, size_t bytes, char* to, size_t room, void* memory);
// Whether `from` holds exactly what Compress made of `bytes`, which are then in `to`.
bool Decompress(const char* from, size_t stored, char* to, size_t bytes, void* memory);

}  // namespace tfswap::planes

#endif  // TFSWAP_OPS_CSRC_CORE_PLANES_H_
