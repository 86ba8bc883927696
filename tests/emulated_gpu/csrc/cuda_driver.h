// A stand-in for CUDA's driver (libcuda.so.1), as far as launching kernels that nvrtc.cc has compiled goes.
//
// The context that is current is that of the device whose op this thread runs. A launch takes the kernel's parameters from
// where they point, runs all threads of the grid, the last one first, and takes its time on the stream that it names. The
// race detector takes the op's inputs in device memory to be read, and its results to be written.

#ifndef TESTS_EMULATED_GPU_CSRC_CUDA_DRIVER_H_
#define TESTS_EMULATED_GPU_CSRC_CUDA_DRIVER_H_

// What a compiled module exports (nvrtc.cc): the kernel, for all threads of a grid of one dimension.
using EmulatedKernel = void(void* const* parameters, unsigned blocks, unsigned threads);
constexpr char kEmulatedKernel[] = "emulated_kernel";

#endif  // TESTS_EMULATED_GPU_CSRC_CUDA_DRIVER_H_
