// The plug-in's entry for StreamExecutor: a platform whose devices TensorFlow calls GPU:0, GPU:1, ...

#include "platform.h"

#include "settings.h"

namespace emulated_gpu {
namespace {

TF_Bool NoStats(const SP_Device*, SP_AllocatorStats*) { return false; }

// TensorFlow makes timers and never reads them.
void CreateTimer(const SP_Device*, SP_Timer*, TF_Status*) {}
void DestroyTimer(const SP_Device*, SP_Timer) {}
void UseTimer(const SP_Device*, SP_Stream, SP_Timer, TF_Status*) {}
uint64_t Nanoseconds(SP_Timer) { return 0; }

void GetDeviceCount(const SP_Platform*, int* count, TF_Status*) { *count = Settings::Get().devices; }

void CreateDevice(const SP_Platform*, SE_CreateDeviceParams* params, TF_Status*) {
  params->device->struct_size = SP_DEVICE_STRUCT_SIZE;
  params->device->ordinal = params->ordinal;
  params->device->hardware_name = "emulated";
  params->device->device_vendor = "none";
  params->device->pci_bus_id = "0";
}
void DestroyDevice(const SP_Platform*, SP_Device*) {}

int32_t NumaNode(const SP_Device*) { return 0; }
int64_t MemoryBandwidth(const SP_Device*) { return int64_t{1000} << 30; }
double Gflops(const SP_Device*) { return 10000; }
void CreateDeviceFns(const SP_Platform*, SE_CreateDeviceFnsParams* params, TF_Status*) {
  params->device_fns->struct_size = SP_DEVICE_FNS_STRUCT_SIZE;
  params->device_fns->get_numa_node = NumaNode;
  params->device_fns->get_memory_bandwidth = MemoryBandwidth;
  params->device_fns->get_gflops = Gflops;
}
void DestroyDeviceFns(const SP_Platform*, SP_DeviceFns*) {}

void CreateExecutor(const SP_Platform*, SE_CreateStreamExecutorParams* params, TF_Status*) {
  SP_StreamExecutor* const executor = params->stream_executor;
  executor->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
  executor->allocate = Allocate;
  executor->deallocate = Deallocate;
  executor->host_memory_allocate = AllocatePinned;
  executor->host_memory_deallocate = DeallocatePinned;
  executor->get_allocator_stats = NoStats;
  executor->device_memory_usage = DeviceMemoryUsage;
  executor->create_stream = CreateStream;
  executor->destroy_stream = DestroyStream;
  executor->create_stream_dependency = CreateStreamDependency;
  executor->get_stream_status = GetStreamStatus;
  executor->create_event = CreateEvent;
  executor->destroy_event = DestroyEvent;
  executor->get_event_status = GetEventStatus;
  executor->record_event = RecordEvent;
  executor->wait_for_event = WaitForEvent;
  executor->create_timer = CreateTimer;
  executor->destroy_timer = DestroyTimer;
  executor->start_timer = UseTimer;
  executor->stop_timer = UseTimer;
  executor->memcpy_dtoh = CopyToHost;
  executor->memcpy_htod = CopyToDevice;
  executor->memcpy_dtod = CopyBetween;
  executor->sync_memcpy_dtoh = CopyToHostNow;
  executor->sync_memcpy_htod = CopyToDeviceNow;
  executor->sync_memcpy_dtod = CopyBetweenNow;
  executor->block_host_for_event = BlockHostForEvent;
  executor->block_host_until_done = BlockHostUntilDone;
  executor->synchronize_all_activity = SynchronizeAllActivity;
  executor->mem_zero = MemZero;
  executor->memset = MemSet;
  executor->memset32 = MemSet32;
  executor->host_callback = HostCallback;
}
void DestroyExecutor(const SP_Platform*, SP_StreamExecutor*) {}

void CreateTimerFns(const SP_Platform*, SP_TimerFns* fns, TF_Status*) { fns->nanoseconds = Nanoseconds; }
void DestroyTimerFns(const SP_Platform*, SP_TimerFns*) {}
void DestroyPlatform(SP_Platform*) {}
void DestroyPlatformFns(SP_PlatformFns*) {}

}  // namespace
}  // namespace emulated_gpu

extern "C" __attribute__((visibility("default"))) void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status*) {
  using namespace emulated_gpu;
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "EMULATED";
  params->platform->type = "GPU";
  params->platform->use_bfc_allocator = true;
  SP_PlatformFns* const fns = params->platform_fns;
  fns->struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  fns->get_device_count = GetDeviceCount;
  fns->create_device = CreateDevice;
  fns->destroy_device = DestroyDevice;
  fns->create_device_fns = CreateDeviceFns;
  fns->destroy_device_fns = DestroyDeviceFns;
  fns->create_stream_executor = CreateExecutor;
  fns->destroy_stream_executor = DestroyExecutor;
  fns->create_timer_fns = CreateTimerFns;
  fns->destroy_timer_fns = DestroyTimerFns;
  params->destroy_platform = DestroyPlatform;
  params->destroy_platform_fns = DestroyPlatformFns;
}
