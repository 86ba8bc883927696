// What the parts of the plug-in give to StreamExecutor's tables (platform.cc). TensorFlow's own header says what each does.

#ifndef TESTS_EMULATED_GPU_CSRC_PLATFORM_H_
#define TESTS_EMULATED_GPU_CSRC_PLATFORM_H_

#include <cstdint>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"
#include "tensorflow/c/tf_status.h"

namespace emulated_gpu {

// memory.cc
void Allocate(const SP_Device*, uint64_t bytes, int64_t space, SP_DeviceMemoryBase* memory);
void Deallocate(const SP_Device*, SP_DeviceMemoryBase* memory);
void* AllocatePinned(const SP_Device*, uint64_t bytes);
void DeallocatePinned(const SP_Device*, void* memory);
TF_Bool DeviceMemoryUsage(const SP_Device*, int64_t* free, int64_t* total);

// streams.cc
void CreateStream(const SP_Device*, SP_Stream*, TF_Status*);
void DestroyStream(const SP_Device*, SP_Stream);
void CreateStreamDependency(const SP_Device*, SP_Stream dependent, SP_Stream other, TF_Status*);
void GetStreamStatus(const SP_Device*, SP_Stream, TF_Status*);
void CreateEvent(const SP_Device*, SP_Event*, TF_Status*);
void DestroyEvent(const SP_Device*, SP_Event);
SE_EventStatus GetEventStatus(const SP_Device*, SP_Event);
void RecordEvent(const SP_Device*, SP_Stream, SP_Event, TF_Status*);
void BlockHostForEvent(const SP_Device*, SP_Event, TF_Status*);
void WaitForEvent(const SP_Device*, SP_Stream, SP_Event, TF_Status*);
void BlockHostUntilDone(const SP_Device*, SP_Stream, TF_Status*);
void SynchronizeAllActivity(const SP_Device*, TF_Status*);
TF_Bool HostCallback(const SP_Device*, SP_Stream, SE_StatusCallbackFn, void* argument);

// copies.cc
void CopyToHost(const SP_Device*, SP_Stream, void* to, const SP_DeviceMemoryBase* from, uint64_t bytes, TF_Status*);
void CopyToDevice(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* to, const void* from, uint64_t bytes, TF_Status*);
void CopyBetween(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from, uint64_t bytes,
                 TF_Status*);
void CopyToHostNow(const SP_Device*, void* to, const SP_DeviceMemoryBase* from, uint64_t bytes, TF_Status*);
void CopyToDeviceNow(const SP_Device*, SP_DeviceMemoryBase* to, const void* from, uint64_t bytes, TF_Status*);
void CopyBetweenNow(const SP_Device*, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from, uint64_t bytes,
                    TF_Status*);
void MemZero(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* at, uint64_t bytes, TF_Status*);
void MemSet(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* at, uint8_t pattern, uint64_t bytes, TF_Status*);
void MemSet32(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* at, uint32_t pattern, uint64_t bytes, TF_Status*);

}  // namespace emulated_gpu

#endif  // TESTS_EMULATED_GPU_CSRC_PLATFORM_H_
