// Runs the pieces of codec_elements.h on a GPU's compute stream.
//
// A user's machine has no CUDA compiler and no CUDA headers, but TensorFlow for GPUs includes NVRTC. So the library
// contains the text of codec_elements.h, and compiles a codec for the device at its first run. NVRTC and the driver are
// opened then, and never on a machine without a GPU.
//
// It has run on an H200 (docs/gpu.md), and runs in tests with stand-ins for NVRTC and the driver
// (docs/emulated_gpu.md).

#ifndef TFSWAP_OPS_CSRC_CODECS_GPU_PIECES_H_
#define TFSWAP_OPS_CSRC_CODECS_GPU_PIECES_H_

#include <cstdint>
#include <set>
#include <string>
#include <typeinfo>

#include "absl/status/status.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfswap {

// Enqueues piece(0) ... piece(count - 1) on the kernel's stream. `type` is the C++ name of the struct, whose bytes are
// at `piece`. Fails if NVRTC or the driver fails.
absl::Status LaunchPieces(tensorflow::OpKernelContext* ctx, const std::string& type,
                          const void* piece, int64_t count);

// "tfswap::codec::DecodeMask" for N6tfswap5codec10DecodeMaskE.
std::string Demangled(const std::type_info& type);

// The types of all pieces that the library's kernels launch.
std::set<std::string>& GpuPieceTypes();

// Compiles all of these types for an architecture such as "sm_90". Needs NVRTC, but no GPU.
absl::Status CompileAllPieces(const std::string& architecture);

template <typename Piece>
struct GpuPiece {
  static const std::string type;
};
template <typename Piece>
const std::string GpuPiece<Piece>::type =
    *GpuPieceTypes().insert(Demangled(typeid(Piece))).first;

}  // namespace tfswap

#endif  // TFSWAP_OPS_CSRC_CODECS_GPU_PIECES_H_
