// A lossless codec for tensors on disk: planes of bytes (the first bytes of all values, then the second bytes, ...),
// compressed by zstd.
//
// For floats of similar magnitude the plane of sign and exponent is compressed to about a third, and the others hardly
// at all, unless many values are zero. So zstd is set to use mainly its Huffman stage, which is fast; a search for
// matches gains little more. TensorFlow's library exports zstd, at least from 2.18 on. IsAvailable() is false if it
// does not.
//
// Nothing is allocated: the caller passes the memory, so that it counts towards a limit.
//
// This file and byte_planes.cc do not depend on TensorFlow.

#ifndef TFSWAP_OPS_CSRC_CORE_BYTE_PLANES_H_
#define TFSWAP_OPS_CSRC_CORE_BYTE_PLANES_H_

#include <cstddef>

namespace tfswap::planes {

// The memory that Compress and Decompress need, aligned to 8 bytes. It is enough for zstd 1.4.5 (TensorFlow 2.18), and
// later versions need less.
constexpr size_t kCompressBytes = size_t{512} << 10;
constexpr size_t kDecompressBytes = size_t{160} << 10;

// Whether a library of this process exports zstd.
bool IsAvailable();

// Values of `width` bytes to planes, and back. `bytes` is a multiple of `width`.
void Cut(const char* values, size_t bytes, size_t width, char* planes);
void Join(const char* planes, size_t bytes, size_t width, char* values);

// Returns the number of bytes written to `to`, at most `room`; 0 if that is too little.
size_t Compress(const char* from, size_t bytes, char* to, size_t room, void* memory);
// Writes `bytes` to `to`. Returns whether `from` is the output of Compress for this number of bytes.
bool Decompress(const char* from, size_t stored, char* to, size_t bytes, void* memory);

}  // namespace tfswap::planes

#endif  // TFSWAP_OPS_CSRC_CORE_BYTE_PLANES_H_
