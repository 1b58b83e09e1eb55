/* A CUDA driver that runs nothing: it writes down what is asked of it, one line of JSON each, to the
 * file named by STUB_LOG. STUB_COMPUTE is the compute capability times ten, STUB_CLUSTERS the
 * answer of the occupancy query, STUB_DEVICES the number of GPUs, STUB_FAIL a call that fails with
 * CUDA_ERROR_ILLEGAL_ADDRESS. Every launch writes 7.0f to the start of its last parameter. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long pointer;
typedef struct {
  int id;
  char padding[4];
  unsigned x, y, z;
  char rest[52];
} attribute;
typedef struct {
  unsigned grid[3], block[3], shared;
  void* stream;
  attribute* attributes;
  unsigned count;
} config;

static void* current = NULL;
static int parameters = 0;

static void note(const char* format, ...) {
  FILE* file = fopen(getenv("STUB_LOG"), "a");
  va_list list;
  va_start(list, format);
  vfprintf(file, format, list);
  va_end(list);
  fputc('\n', file);
  fclose(file);
}

static int setting(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

static int result(const char* call) {
  const char* failing = getenv("STUB_FAIL");
  return failing && strcmp(failing, call) == 0 ? 700 : 0;
}

int cuInit(unsigned flags) { return flags == 0 && setting("STUB_DEVICES", 1) ? 0 : 100; }
int cuGetErrorName(int status, const char** text) {
  *text = status == 100   ? "CUDA_ERROR_NO_DEVICE"
          : status == 101 ? "CUDA_ERROR_INVALID_DEVICE"
                          : "CUDA_ERROR_ILLEGAL_ADDRESS";
  return 0;
}
int cuGetErrorString(int status, const char** text) {
  *text = status == 700 ? "an illegal memory access was encountered" : NULL;
  return 0;
}
int cuDeviceGet(int* device, int index) {
  *device = index + 40; /* handles need not be indices */
  return index < setting("STUB_DEVICES", 1) ? 0 : 101;
}
int cuDeviceGetName(char* name, int size, int device) {
  snprintf(name, size, "Stub GPU %d", device - 40);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const int compute = setting("STUB_COMPUTE", 90);
  (void)device;
  *value = attribute == 75    ? compute / 10
           : attribute == 76  ? compute % 10
           : attribute == 16  ? 132     /* SMs */
           : attribute == 81  ? 233472  /* bytes of shared memory of an SM */
           : attribute == 111 ? 1024    /* of these reserved for a CTA */
                              : -1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  note("{\"call\": \"retain\", \"device\": %d}", device - 40);
  *context = (void*)(size_t)(0x1000 + device);
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}
int cuCtxPushCurrent_v2(void* context) {
  current = context;
  return 0;
}
int cuCtxPopCurrent_v2(void** context) {
  *context = current;
  current = NULL;
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  static int now = 0;
  const int before = now;
  now = *mode;
  *mode = before;
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  note("{\"call\": \"load\", \"elf\": %s}", memcmp(image, "\177ELF", 4) ? "false" : "true");
  *module = (void*)0x20;
  return result("cuModuleLoadData");
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  (void)module;
  note("{\"call\": \"function\", \"name\": \"%s\"}", name);
  parameters = strcmp(name, "sum_kernel") ? 3 : 2;
  *function = (void*)0x30;
  return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  (void)function;
  note("{\"call\": \"attribute\", \"id\": %d, \"value\": %d}", attribute, value);
  return result("cuFuncSetAttribute");
}
int cuOccupancyMaxActiveClusters(int* clusters, void* function, const config* launch) {
  (void)function;
  note("{\"call\": \"occupancy\", \"cluster\": [%u, %u, %u]}", launch->attributes[0].x,
       launch->attributes[0].y, launch->attributes[0].z);
  *clusters = setting("STUB_CLUSTERS", 7);
  return 0;
}
int cuLaunchKernelEx(const config* launch, void* function, void** arguments, void** extra) {
  const float written = 7.0f;
  const attribute* first = launch->attributes;
  (void)function, (void)extra;
  note("{\"call\": \"launch\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, "
       "\"stream\": %zu, \"attributes\": %u, \"ids\": [%d, %d], \"cluster\": [%u, %u, %u], "
       "\"context\": %zu, \"second\": %zu, \"number\": %d}",
       launch->grid[0], launch->grid[1], launch->grid[2], launch->block[0], launch->block[1],
       launch->block[2], launch->shared, (size_t)launch->stream, launch->count,
       first[0].id, launch->count > 1 ? first[1].id : 0, first[0].x, first[0].y, first[0].z,
       (size_t)current, parameters > 1 ? *(size_t*)arguments[1] : 0,
       parameters > 1 ? *(int*)arguments[1] : 0);
  memcpy(*(void**)arguments[parameters - 1], &written, sizeof(written));
  return result("cuLaunchKernelEx");
}
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address,
                           const unsigned long long* extents, const unsigned long long* strides,
                           const unsigned* box, const unsigned* steps, int interleave, int swizzle,
                           int promotion, int fill) {
  (void)steps, (void)interleave, (void)promotion, (void)fill;
  memcpy(map, &address, sizeof(address)); /* where a launch writes */
  note("{\"call\": \"encode\", \"type\": %d, \"rank\": %u, \"extents\": [%llu, %llu], "
       "\"pitch\": %llu, \"box\": [%u, %u], \"swizzle\": %d}",
       type, rank, extents[0], extents[1], strides[0], box[0], box[1], swizzle);
  return result("cuTensorMapEncodeTiled");
}
int cuTensorMapEncodeIm2col(void* map, int type, unsigned rank, void* address,
                            const unsigned long long* extents, const unsigned long long* strides,
                            const int* lower, const int* upper, unsigned channels, unsigned pixels,
                            const unsigned* steps, int interleave, int swizzle, int promotion,
                            int fill) {
  (void)interleave, (void)promotion, (void)fill;
  memcpy(map, &address, sizeof(address)); /* where a launch writes */
  note("{\"call\": \"encode pixels\", \"type\": %d, \"extents\": [%llu, %llu, %llu, %llu], "
       "\"strides\": [%llu, %llu, %llu], \"box\": [%u, %u], \"lower\": [%d, %d], "
       "\"upper\": [%d, %d], \"steps\": [%u, %u], \"swizzle\": %d}",
       type, extents[0], extents[1], extents[2], extents[rank - 1], strides[0], strides[1],
       strides[rank - 2], channels, pixels, lower[0], lower[1], upper[0], upper[1], steps[0],
       steps[rank - 1], swizzle);
  return result("cuTensorMapEncodeIm2col");
}
int cuMemAlloc_v2(pointer* address, size_t bytes) {
  *address = (pointer)(size_t)malloc(bytes);
  note("{\"call\": \"allocate\", \"bytes\": %zu}", bytes);
  return 0;
}
int cuMemFree_v2(pointer address) {
  free((void*)(size_t)address);
  note("{\"call\": \"free\"}");
  return 0;
}
int cuMemAllocAsync(pointer* address, size_t bytes, void* stream) {
  *address = (pointer)(size_t)malloc(bytes);
  note("{\"call\": \"allocate in order\", \"bytes\": %zu, \"stream\": %zu}", bytes, (size_t)stream);
  return result("cuMemAllocAsync");
}
int cuMemFreeAsync(pointer address, void* stream) {
  free((void*)(size_t)address);
  note("{\"call\": \"free in order\", \"stream\": %zu}", (size_t)stream);
  return 0;
}
int cuMemcpyHtoD_v2(pointer target, const void* source, size_t bytes) {
  memcpy((void*)(size_t)target, source, bytes);
  return 0;
}
int cuMemcpyDtoH_v2(void* target, pointer source, size_t bytes) {
  memcpy(target, (void*)(size_t)source, bytes);
  return result("cuMemcpyDtoH_v2");
}
int cuMemsetD8Async(pointer address, unsigned char value, size_t bytes, void* stream) {
  memset((void*)(size_t)address, value, bytes);
  note("{\"call\": \"clear\", \"bytes\": %zu, \"own stream\": %s}", bytes,
       stream == (void*)0x40 ? "true" : "false");
  return 0;
}
int cuStreamCreate(void** stream, unsigned flags) {
  *stream = (void*)0x40;
  return flags == 1 ? 0 : 1;
}
int cuStreamDestroy_v2(void* stream) { return stream == (void*)0x40 ? 0 : 1; }
int cuStreamSynchronize(void* stream) { return stream == (void*)0x40 ? 0 : 1; }
int cuStreamIsCapturing(void* stream, int* capturing) {
  (void)stream;
  *capturing = setting("STUB_CAPTURING", 0);
  return 0;
}
int cuStreamGetId(void* stream, unsigned long long* id) {
  *id = (size_t)stream + 1;
  return 0;
}
