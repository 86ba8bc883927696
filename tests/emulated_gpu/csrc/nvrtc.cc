// A stand-in for NVRTC: compiles a program for CUDA's devices with the C++ compiler of the host.
//
// A program has one kernel, named by an expression: a second expression is an error. What is compiled is a shared library with a function that runs it for
// all threads of a grid; in the place of a cubin it is handed over with its length before it.

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cuda_driver.h"

namespace emulated_gpu {
namespace {

// What NVRTC declares by itself, as far as the kernels use it.
constexpr char kBegin[] = R"(
#include <cstring>
#include <utility>
#define __CUDACC__ 1
#define __CUDACC_RTC__ 1
#define __global__
#define __host__
#define __device__
struct dim3 { unsigned x = 1, y = 1, z = 1; };
static thread_local dim3 gridDim, blockDim, blockIdx, threadIdx;
)";

// Each thread has copies of the parameters. The last thread is the first to run: nothing orders them.
constexpr char kEnd[] = R"(
template <typename... Parameters, size_t... I>
static void RunThread(void (*kernel)(Parameters...), void* const* parameters, std::index_sequence<I...>) {
  kernel(*static_cast<Parameters*>(parameters[I])...);
}
template <typename... Parameters>
static void RunGrid(void (*kernel)(Parameters...), void* const* parameters, unsigned blocks, unsigned threads) {
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = blocks; blockIdx.x-- > 0;) {
    for (threadIdx.x = threads; threadIdx.x-- > 0;) {
      RunThread(kernel, parameters, std::index_sequence_for<Parameters...>());
    }
  }
}
extern "C" void emulated_kernel(void* const* parameters, unsigned blocks, unsigned threads) {
)";

// Those of nvrtc.h that are returned here.
enum NvrtcResult {
  kNvrtcSuccess = 0,
  kNvrtcProgramCreationFailure = 2,
  kNvrtcInvalidOption = 5,
  kNvrtcCompilation = 6,
  kNvrtcNameExpressionNotValid = 10,
};

struct Program {
  std::string source, expression, log, image;
  std::map<std::string, std::string> headers;
};

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  return content.str();
}

void WriteFile(const std::filesystem::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

// The host compiler's flag for one of NVRTC's; "" for one that it does not know.
std::string HostOption(absl::string_view option) {
  int number;
  if (absl::ConsumePrefix(&option, "--gpu-architecture=sm_")) return absl::SimpleAtoi(option, &number) ? "-O1" : "";
  if (absl::StartsWith(option, "--std=c++")) return std::string(option.substr(1));
  if (option == "--fmad=false") return "-ffp-contract=off";
  if (option == "--fmad=true") return "-ffp-contract=fast";
  return "";
}

void CompileIn(const std::filesystem::path& folder, const std::string& options, Program* program) {
  for (const auto& [name, text] : program->headers) WriteFile(folder / name, text);
  WriteFile(folder / "program.cc", absl::StrCat(kBegin, program->source, kEnd, "RunGrid(&", program->expression,
                                                ", parameters, blocks, threads);\n}\n"));
  const char* const compiler = std::getenv("EMULATED_GPU_COMPILER");
  const std::string command = absl::StrCat("cd ", folder.string(), " && ", compiler == nullptr ? "g++" : compiler,
                                           options, " -shared -fPIC program.cc -o program.so > log 2>&1");
  const bool compiled = std::system(command.c_str()) == 0;
  program->log = ReadFile(folder / "log");
  if (!compiled) return;
  const std::string library = ReadFile(folder / "program.so");
  const size_t bytes = library.size();
  program->image.assign(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
  program->image += library;
}

Program* From(void* program) { return static_cast<Program*>(program); }

}  // namespace
}  // namespace emulated_gpu

using emulated_gpu::From;

#define EMULATED_NVRTC extern "C" __attribute__((visibility("default")))

EMULATED_NVRTC int nvrtcCreateProgram(void** program, const char* source, const char*, int headers,
                                      const char* const* texts, const char* const* names) {
  auto* const made = new emulated_gpu::Program{source, "", "", "", {}};
  for (int i = 0; i < headers; ++i) made->headers[names[i]] = texts[i];
  *program = made;
  return emulated_gpu::kNvrtcSuccess;
}

EMULATED_NVRTC int nvrtcDestroyProgram(void** program) {
  delete From(*program);
  *program = nullptr;
  return emulated_gpu::kNvrtcSuccess;
}

EMULATED_NVRTC int nvrtcAddNameExpression(void* program, const char* expression) {
  if (!From(program)->expression.empty()) return emulated_gpu::kNvrtcNameExpressionNotValid;
  From(program)->expression = expression;
  return emulated_gpu::kNvrtcSuccess;
}

EMULATED_NVRTC int nvrtcCompileProgram(void* program, int options, const char* const* given) {
  std::string flags;
  for (int i = 0; i < options; ++i) {
    const std::string flag = emulated_gpu::HostOption(given[i]);
    if (flag.empty()) return emulated_gpu::kNvrtcInvalidOption;
    absl::StrAppend(&flags, " ", flag);
  }
  std::string folder = (std::filesystem::temp_directory_path() / "emulated_nvrtc_XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return emulated_gpu::kNvrtcProgramCreationFailure;
  emulated_gpu::CompileIn(folder, flags, From(program));
  std::filesystem::remove_all(folder);
  return From(program)->image.empty() ? emulated_gpu::kNvrtcCompilation : emulated_gpu::kNvrtcSuccess;
}

EMULATED_NVRTC int nvrtcGetProgramLogSize(void* program, size_t* size) {
  *size = From(program)->log.size() + 1;
  return emulated_gpu::kNvrtcSuccess;
}

EMULATED_NVRTC int nvrtcGetProgramLog(void* program, char* log) {
  const std::string& text = From(program)->log;
  text.copy(log, text.size());
  log[text.size()] = '\0';
  return emulated_gpu::kNvrtcSuccess;
}

EMULATED_NVRTC int nvrtcGetLoweredName(void* program, const char* expression, const char** name) {
  if (From(program)->expression != expression) return emulated_gpu::kNvrtcNameExpressionNotValid;
  *name = kEmulatedKernel;
  return emulated_gpu::kNvrtcSuccess;
}

EMULATED_NVRTC int nvrtcGetCUBINSize(void* program, size_t* size) {
  *size = From(program)->image.size();
  return emulated_gpu::kNvrtcSuccess;
}

EMULATED_NVRTC int nvrtcGetCUBIN(void* program, char* image) {
  From(program)->image.copy(image, From(program)->image.size());
  return emulated_gpu::kNvrtcSuccess;
}
