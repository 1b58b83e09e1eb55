// The CUDA driver API, reached through dlopen, so that a kernel library loads (and can be
// inspected) on a machine without a driver, and is built without the CUDA toolkit's headers.
#ifndef CROSSFUSE_HOST_DRIVER_H
#define CROSSFUSE_HOST_DRIVER_H

#include <dlfcn.h>

#include <cstdint>
#include <string>

namespace crossfuse {

// A refusal on its way to the C ABI boundary. The text is spelt as crossfuse.errors.Refusal renders
// itself, so that the Python loader can take it apart again and a plain tvm-ffi user can read it.
struct Refused {
  const char* kind;  // Python exception class that tvm-ffi raises
  std::string text;
};

[[noreturn]] inline void refuse(const char* kind, const std::string& rule, const std::string& where,
                                const std::string& found, const std::string& limit,
                                const std::string& instead) {
  throw Refused{kind, rule + ": " + where + ": found " + found + "; limit: " + limit +
                          ". Instead: " + instead + "."};
}

using Status = int;              // CUresult; 0 is success
using DevicePointer = uint64_t;  // CUdeviceptr

// The layouts of CUlaunchAttribute and CUlaunchConfig are ABI of the driver since CUDA 11.8.
struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    struct {
      unsigned x, y, z;
    } cluster;
    int programmatic;
    int cooperative;
    char bytes[64];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72, "CUlaunchAttribute");

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56, "CUlaunchConfig");

// CUtensorMap: opaque, 64-byte aligned.
struct alignas(64) EncodedMap {
  uint64_t words[16];
};

constexpr int kAttributeMultiprocessors = 16;
constexpr int kAttributeComputeMajor = 75;
constexpr int kAttributeComputeMinor = 76;
constexpr int kAttributeSharedOfMultiprocessor = 81;
constexpr int kAttributeReservedOfCta = 111;
constexpr int kFunctionMaxDynamicShared = 8;
constexpr int kFunctionSharedCarveout = 9;
constexpr int kFunctionNonPortableCluster = 14;
constexpr int kLaunchCooperative = 2;
constexpr int kLaunchClusterDimension = 4;
constexpr int kLaunchProgrammatic = 6;
constexpr int kCaptureRelaxed = 2;
constexpr unsigned kStreamNonBlocking = 1;
constexpr Status kErrorNoDevice = 100;

#define CROSSFUSE_DRIVER_API(X)                                       \
  X(cuInit, (unsigned))                                               \
  X(cuGetErrorName, (Status, const char**))                           \
  X(cuGetErrorString, (Status, const char**))                         \
  X(cuDeviceGet, (int*, int))                                         \
  X(cuDeviceGetName, (char*, int, int))                               \
  X(cuDeviceGetAttribute, (int*, int, int))                           \
  X(cuDevicePrimaryCtxRetain, (void**, int))                          \
  X(cuCtxGetCurrent, (void**))                                        \
  X(cuCtxPushCurrent_v2, (void*))                                     \
  X(cuCtxPopCurrent_v2, (void**))                                     \
  X(cuThreadExchangeStreamCaptureMode, (int*))                        \
  X(cuModuleLoadData, (void**, const void*))                          \
  X(cuModuleGetFunction, (void**, void*, const char*))                \
  X(cuFuncSetAttribute, (void*, int, int))                            \
  X(cuOccupancyMaxActiveClusters, (int*, void*, const LaunchConfig*)) \
  X(cuLaunchKernelEx, (const LaunchConfig*, void*, void**, void**))   \
  X(cuTensorMapEncodeTiled,                                           \
    (EncodedMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, \
     const uint32_t*, int, int, int, int))                            \
  X(cuTensorMapEncodeIm2col,                                          \
    (EncodedMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const int*, const int*, \
     uint32_t, uint32_t, const uint32_t*, int, int, int, int))        \
  X(cuMemAlloc_v2, (DevicePointer*, size_t))                          \
  X(cuMemFree_v2, (DevicePointer))                                    \
  X(cuMemAllocAsync, (DevicePointer*, size_t, void*))                 \
  X(cuMemFreeAsync, (DevicePointer, void*))                           \
  X(cuMemsetD8Async, (DevicePointer, unsigned char, size_t, void*))   \
  X(cuStreamCreate, (void**, unsigned))                               \
  X(cuStreamDestroy_v2, (void*))                                      \
  X(cuStreamSynchronize, (void*))                                     \
  X(cuStreamIsCapturing, (void*, int*))                               \
  X(cuStreamGetId, (void*, unsigned long long*))                      \
  X(cuMemcpyHtoD_v2, (DevicePointer, const void*, size_t))            \
  X(cuMemcpyDtoH_v2, (void*, DevicePointer, size_t))

struct Driver {
#define CROSSFUSE_DECLARE(name, parameters) Status(*name) parameters;
  CROSSFUSE_DRIVER_API(CROSSFUSE_DECLARE)
#undef CROSSFUSE_DECLARE
};

inline std::string describe(const Driver& api, Status status) {
  const char* name = nullptr;
  const char* text = nullptr;
  api.cuGetErrorName(status, &name);
  api.cuGetErrorString(status, &text);
  return std::string(name ? name : "CUDA error") + " (" + std::to_string(status) +
         (text ? std::string(", ") + text : std::string()) + ")";
}

inline Driver open_driver() {
  constexpr const char* kLimit = "an NVIDIA driver of CUDA 12.3 or newer";
  constexpr const char* kInstead =
      "run on a machine with an NVIDIA GPU of this library's architecture and its driver";
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    refuse("RuntimeError", "cuda-driver", "libcuda.so.1", reason ? reason : "no such library",
           kLimit, kInstead);
  }
  Driver api;
#define CROSSFUSE_RESOLVE(name, parameters)                                             \
  api.name = reinterpret_cast<Status(*) parameters>(dlsym(library, #name));             \
  if (api.name == nullptr) {                                                            \
    refuse("RuntimeError", "cuda-driver", "libcuda.so.1", "no function " #name, kLimit, \
           "update the NVIDIA driver");                                                 \
  }
  CROSSFUSE_DRIVER_API(CROSSFUSE_RESOLVE)
#undef CROSSFUSE_RESOLVE
  if (Status status = api.cuInit(0)) {
    refuse("RuntimeError", status == kErrorNoDevice ? "cuda-device" : "cuda-driver", "cuInit",
           describe(api, status), "a GPU that the driver shows", kInstead);
  }
  return api;
}

// Opened at the first use. A failed attempt throws and is tried again at the next use.
inline const Driver& driver() {
  static const Driver api = open_driver();
  return api;
}

inline void check(Status status, const std::string& call,
                  const char* instead =
                      "run the program under compute-sanitizer, since a fault of "
                      "an earlier kernel is reported by a later call too") {
  if (status != 0) {
    refuse("RuntimeError", "cuda-call", call, describe(driver(), status), "CUDA_SUCCESS", instead);
  }
}

// Makes a context current for one scope and leaves the thread as it was found.
class ContextScope {
 public:
  explicit ContextScope(void* context) {
    void* current = nullptr;
    check(driver().cuCtxGetCurrent(&current), "cuCtxGetCurrent");
    if (current != context) {
      check(driver().cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
      pushed_ = true;
    }
  }
  ~ContextScope() {
    void* popped = nullptr;
    if (pushed_) driver().cuCtxPopCurrent_v2(&popped);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace crossfuse

#endif  // CROSSFUSE_HOST_DRIVER_H
