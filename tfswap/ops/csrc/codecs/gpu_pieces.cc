#include "gpu_pieces.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "export.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/util/work_sharder.h"
#include "xla/stream_executor/stream.h"

// The text of codec_elements.h, as a string. The path is relative to the compiler's working directory.
__asm__(
    ".pushsection .rodata\n"
    ".hidden tfswap_codec_elements\n"
    ".global tfswap_codec_elements\n"
    "tfswap_codec_elements:\n"
    ".incbin \"codecs/codec_elements.h\"\n"
    ".byte 0\n"
    ".popsection\n");
extern "C" const char tfswap_codec_elements[];

namespace tfswap {
namespace {

constexpr char kProgram[] = R"(
#include "codec_elements.h"
namespace tfswap::codec {
template <typename Piece>
__global__ void RunPieces(const Piece piece, const int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i < count; i += step) piece(i);
}
}  // namespace tfswap::codec
)";

constexpr int64_t kThreadsPerBlock = 256;
constexpr int64_t kMaxBlocks = int64_t{1} << 30;

// A shared library, opened at first use and never closed.
class Library {
 public:
  // Opens the first of `names` that exists.
  explicit Library(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (handle_ != nullptr) return;
    }
  }
  bool found() const { return handle_ != nullptr; }

  // Calls a C function that returns an int. Its signature is taken from the arguments.
  template <typename... Arguments>
  int Call(const char* name, Arguments... arguments) const {
    auto* const function =
        reinterpret_cast<int (*)(Arguments...)>(dlsym(handle_, name));
    return function == nullptr ? kNoSuchFunction : function(arguments...);
  }

  static constexpr int kNoSuchFunction = -1;

 private:
  void* handle_ = nullptr;
};

// By the loader's path, then next to TensorFlow, where pip installs it.
std::vector<std::string> NvrtcNames() {
  std::vector<std::string> names = {"libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so"};
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&tensorflow::Shard), &info) != 0) {
    const std::string framework = info.dli_fname;
    const std::string folder = framework.substr(0, framework.rfind('/'));
    names.push_back(folder + "/../nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    names.push_back(folder + "/../nvidia/cu13/lib/libnvrtc.so.13");
  }
  return names;
}

const Library& Nvrtc() {
  static const auto* const library = new Library(NvrtcNames());
  return *library;
}

const Library& Driver() {
  static const auto* const library = new Library({"libcuda.so.1"});
  return *library;
}

absl::Status Failed(const char* what, int code) {
  return absl::InternalError(absl::StrCat(
      "tfswap: ", what, " failed with ", code,
      ". Please report this. To avoid it, leave \"encode\" out of tactics=."));
}

#define RETURN_IF_NONZERO(library, function, ...)                     \
  do {                                                                \
    const int code = (library).Call(#function, __VA_ARGS__);          \
    if (code != 0) return Failed(#function, code);                    \
  } while (false)

struct Compiled {
  std::vector<std::string> names;  // of the kernels, mangled
  std::string cubin;
};

absl::Status CompileProgram(void* program, const std::string& architecture,
                            const std::vector<std::string>& expressions, Compiled* compiled) {
  const Library& nvrtc = Nvrtc();
  for (const std::string& expression : expressions) {
    RETURN_IF_NONZERO(nvrtc, nvrtcAddNameExpression, program, expression.c_str());
  }
  const std::string target = absl::StrCat("--gpu-architecture=", architecture);
  // Products and sums are rounded separately, as on a CPU.
  const char* const options[] = {target.c_str(), "--std=c++17", "--fmad=false"};
  if (nvrtc.Call("nvrtcCompileProgram", program, 3, &options[0]) != 0) {
    size_t size = 0;
    RETURN_IF_NONZERO(nvrtc, nvrtcGetProgramLogSize, program, &size);
    std::string log(size, '\0');
    RETURN_IF_NONZERO(nvrtc, nvrtcGetProgramLog, program, &log[0]);
    return absl::InternalError(absl::StrCat("tfswap: NVRTC can't compile ",
                                            absl::StrJoin(expressions, ", "), " for ", architecture,
                                            ":\n", log.c_str()));
  }
  for (const std::string& expression : expressions) {
    const char* name = nullptr;
    RETURN_IF_NONZERO(nvrtc, nvrtcGetLoweredName, program, expression.c_str(), &name);
    compiled->names.push_back(name);
  }
  size_t size = 0;
  RETURN_IF_NONZERO(nvrtc, nvrtcGetCUBINSize, program, &size);
  compiled->cubin.resize(size);
  RETURN_IF_NONZERO(nvrtc, nvrtcGetCUBIN, program, &compiled->cubin[0]);
  return absl::OkStatus();
}

// Compiles the kernels of these types in one program, so that NVRTC parses its text once.
absl::Status Compile(const std::set<std::string>& types, const std::string& architecture,
                     Compiled* compiled) {
  if (!Nvrtc().found()) {
    return absl::FailedPreconditionError(
        "tfswap compiles its codecs for this GPU with NVRTC (libnvrtc.so), which is not "
        "installed. It comes with pip install \"tensorflow[and-cuda]\", or alone with pip install "
        "nvidia-cuda-nvrtc-cu12.");
  }
  const char* const header = tfswap_codec_elements;
  const char* const header_name = "codec_elements.h";
  void* program = nullptr;
  RETURN_IF_NONZERO(Nvrtc(), nvrtcCreateProgram, &program, &kProgram[0], "tfswap.cu", 1, &header,
                    &header_name);
  std::vector<std::string> expressions;
  for (const std::string& type : types) {
    expressions.push_back(absl::StrCat("tfswap::codec::RunPieces<", type, ">"));
  }
  const absl::Status status = CompileProgram(program, architecture, expressions, compiled);
  Nvrtc().Call("nvrtcDestroyProgram", &program);
  return status;
}

// The kernel for a type in the current CUDA context. The first call compiles it.
absl::Status FindKernel(const std::string& type, void** kernel) {
  static std::mutex* const mu = new std::mutex;
  static auto* const kernels = new std::map<std::pair<void*, std::string>, void*>;
  const Library& driver = Driver();
  if (!driver.found()) {
    return absl::FailedPreconditionError(
        "tfswap's codecs run on NVIDIA's GPUs, whose driver (libcuda.so.1) is not installed. Leave "
        "\"encode\" out of tactics=, and precision= out.");
  }
  void* context = nullptr;
  RETURN_IF_NONZERO(driver, cuCtxGetCurrent, &context);
  std::lock_guard<std::mutex> lock(*mu);
  void*& known = (*kernels)[{context, type}];
  if (known == nullptr) {
    constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...
    int device = 0, major = 0, minor = 0;
    RETURN_IF_NONZERO(driver, cuCtxGetDevice, &device);
    RETURN_IF_NONZERO(driver, cuDeviceGetAttribute, &major, kMajor, device);
    RETURN_IF_NONZERO(driver, cuDeviceGetAttribute, &minor, kMinor, device);
    Compiled compiled;
    TF_RETURN_IF_ERROR(Compile({type}, absl::StrCat("sm_", major, minor), &compiled));
    void* module = nullptr;
    RETURN_IF_NONZERO(driver, cuModuleLoadData, &module,
                      static_cast<const void*>(compiled.cubin.data()));
    RETURN_IF_NONZERO(driver, cuModuleGetFunction, &known, module, compiled.names[0].c_str());
  }
  *kernel = known;
  return absl::OkStatus();
}

}  // namespace

absl::Status LaunchPieces(tensorflow::OpKernelContext* ctx, const std::string& type,
                          const void* piece, int64_t count) {
  if (count == 0) return absl::OkStatus();
  void* kernel = nullptr;
  TF_RETURN_IF_ERROR(FindKernel(type, &kernel));
  void* const stream =
      ctx->op_device_context()->stream()->platform_specific_handle().stream;
  const auto blocks = static_cast<unsigned>(
      std::min((count + kThreadsPerBlock - 1) / kThreadsPerBlock, kMaxBlocks));
  void* parameters[] = {const_cast<void*>(piece), &count};
  RETURN_IF_NONZERO(Driver(), cuLaunchKernel, kernel, blocks, 1u, 1u,
                    static_cast<unsigned>(kThreadsPerBlock), 1u, 1u, 0u, stream, &parameters[0],
                    static_cast<void**>(nullptr));
  return absl::OkStatus();
}

std::string Demangled(const std::type_info& type) {
  int status = 0;
  char* const text = abi::__cxa_demangle(type.name(), nullptr, nullptr, &status);
  const std::string name = text;
  std::free(text);
  return name;
}

std::set<std::string>& GpuPieceTypes() {
  static auto* const types = new std::set<std::string>;
  return *types;
}

absl::Status CompileAllPieces(const std::string& architecture) {
  Compiled compiled;
  return Compile(GpuPieceTypes(), architecture, &compiled);
}

}  // namespace tfswap

// The library's C interface, which load.py mirrors.

// The TensorFlow that the library was compiled against, as build.py passed it. Each of tfswap's libraries has a
// function of this name; dlsym on a library finds its own first.
TFSWAP_C_API const char* tfswap_built_for() { return TFSWAP_BUILT_FOR; }

// Returns the number of types that NVRTC compiled for `architecture`, or a negative number and the error in `message`.
// For tests.
TFSWAP_C_API int tfswap_compile_gpu_pieces(const char* architecture, char* message, size_t size) {
  const absl::Status status = tfswap::CompileAllPieces(architecture);
  if (status.ok()) return static_cast<int>(tfswap::GpuPieceTypes().size());
  const std::string text(status.message());
  message[text.copy(message, size - 1)] = '\0';
  return -1;
}
