#include "device_stream.h"

#include "tensorflow/core/public/version.h"
#if TF_MINOR_VERSION == 19
// Its headers name LLVM's, which its wheel does not have, for this class, which nothing here uses.
#define XLA_STREAM_EXECUTOR_GPU_TMA_METADATA_H_
namespace stream_executor::gpu {
class TmaDescriptor {};
}  // namespace stream_executor::gpu
#endif
#include "tensorflow/c/experimental/stream_executor/stream_executor_internal.h"
#include "virtual_table.h"

namespace emulated_gpu {
namespace {

using Handle = stream_executor::Stream::PlatformSpecificHandle;
using GetHandle = Handle (*)(const stream_executor::Stream*);

GetHandle get_handle = nullptr;

SP_Stream_st* Own(const stream_executor::Stream* stream) {
  return static_cast<stream_executor::CStream*>(const_cast<stream_executor::Stream*>(stream))->Handle();
}

Handle HandleOf(const stream_executor::Stream* stream) {
  Handle handle;
  handle.stream = Own(stream);
  return handle;
}

}  // namespace

SP_Stream_st* ComputeStream(const tensorflow::DeviceBase& device) {
  return Own(device.tensorflow_accelerator_device_info()->default_context->stream());
}

void GiveHandle(const tensorflow::DeviceContext& context) {
  stream_executor::Stream* const stream = context.stream();
  void** const table = CopyTable(stream);
  Replace(table, PlaceOf(&stream_executor::Stream::platform_specific_handle), &get_handle, &HandleOf);
  SetTable(stream, table);
}

}  // namespace emulated_gpu
