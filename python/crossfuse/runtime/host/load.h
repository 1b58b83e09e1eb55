// Loading the cubin once per device.
#ifndef CROSSFUSE_HOST_LOAD_H
#define CROSSFUSE_HOST_LOAD_H

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "arguments.h"
#include "state.h"

namespace crossfuse {

// A program on one device. Never unloaded: a captured CUDA graph may outlive every handle to the
// library and still run its functions.
struct Loaded {
  void* context = nullptr;
  std::string device;
  std::vector<void*> functions;  // per launch
  std::vector<int> clusters;     // per launch: clusters the device holds at once
  mutable StateMemory state;
};

// Attributes of a launch; `LaunchConfig` points to them.
struct LaunchAttributes {
  LaunchAttribute items[3] = {};
  unsigned count = 0;
};

inline unsigned cluster_size(const Launch& launch) {
  return launch.cluster.x * launch.cluster.y * launch.cluster.z;
}

// Nsight Compute (2025.3) does not launch cooperative kernels, so that it is run without. CTAs that
// wait for each other still come to run: there is room for all of them (`check_fit`), what holds it
// began earlier and ends by itself, and what starts early waits until all of them run.
inline bool may_cooperate() {
  const char* said = std::getenv("CROSSFUSE_COOPERATIVE");
  return said == nullptr || std::strcmp(said, "0") != 0;
}

inline LaunchConfig launch_config(const Launch& launch, bool starts_early,
                                  LaunchAttributes* attributes, void* stream) {
  // A single CTA is launched as a cluster too: where there is none, st.async is an illegal
  // instruction on an H100, and a reduction may be split over a cluster of one.
  LaunchAttribute& cluster = attributes->items[attributes->count++];
  cluster.id = kLaunchClusterDimension;
  cluster.value.cluster = {launch.cluster.x, launch.cluster.y, launch.cluster.z};
  if (starts_early) {
    LaunchAttribute& early = attributes->items[attributes->count++];
    early.id = kLaunchProgrammatic;
    early.value.programmatic = 1;
  }
  if (launch.cooperative && may_cooperate()) {
    LaunchAttribute& cooperative = attributes->items[attributes->count++];
    cooperative.id = kLaunchCooperative;
    cooperative.value.cooperative = 1;
  }
  return {launch.grid.x,  launch.grid.y,       launch.grid.z, launch.block.x,    launch.block.y,
          launch.block.z, launch.shared_bytes, stream,        attributes->items, attributes->count};
}

// Refuses a device that the cubin was not compiled for, and returns its name.
inline std::string check_architecture(const Program& program, int device) {
  char name[256] = {0};
  int major = 0, minor = 0;
  check(driver().cuDeviceGetName(name, sizeof(name), device), "cuDeviceGetName");
  check(driver().cuDeviceGetAttribute(&major, kAttributeComputeMajor, device),
        "cuDeviceGetAttribute");
  check(driver().cuDeviceGetAttribute(&minor, kAttributeComputeMinor, device),
        "cuDeviceGetAttribute");
  if (major != program.compute_major || minor != program.compute_minor) {
    refuse("RuntimeError", "device-arch", std::string(program.name) + " on " + name,
           "compute capability " + std::to_string(major) + "." + std::to_string(minor),
           std::string("exactly ") + std::to_string(program.compute_major) + "." +
               std::to_string(program.compute_minor) + " (" + program.arch + ")",
           "run on such a GPU, or compile the kernel for this one");
  }
  return name;
}

inline int device_of(int device_id) {
  int device = 0;
  check(driver().cuDeviceGet(&device, device_id),
        "cuDeviceGet of cuda:" + std::to_string(device_id),
        "pass the index of a GPU that the driver shows");
  return device;
}

inline void* prepare_function(const Launch& launch, void* module) {
  void* function = nullptr;
  const std::string of = std::string(" of kernel '") + launch.symbol + "'";
  check(driver().cuModuleGetFunction(&function, module, launch.symbol), "cuModuleGetFunction" + of);
  if (launch.shared_bytes > 0) {
    check(driver().cuFuncSetAttribute(function, kFunctionMaxDynamicShared,
                                      static_cast<int>(launch.shared_bytes)),
          "dynamic shared memory of " + std::to_string(launch.shared_bytes) + " bytes" + of,
          "compile with smaller tiles");
  }
  if (cluster_size(launch) > 8) {
    check(driver().cuFuncSetAttribute(function, kFunctionNonPortableCluster, 1),
          "non-portable cluster size" + of, "compile with a cluster of at most 8 CTAs");
  }
  return function;
}

// Whether a launch gets tiles by TMA, past the L1 cache.
inline bool has_tensor_maps(const Launch& launch) {
  return std::any_of(launch.arguments, launch.arguments + launch.argument_count,
                     [](int each) { return each < 0 && each != kRowCount; });
}

inline int attribute_of(int device, int attribute) {
  int value = 0;
  check(driver().cuDeviceGetAttribute(&value, attribute, device), "cuDeviceGetAttribute");
  return value;
}

// Shared memory that early kernels without TMA leave to neighbours of the same kind: where those ask
// for other shares of an SM's memory, one begins on an SM only when nothing runs on it.
constexpr int kLeastShared = 32 << 10;

// Asks for no more shared memory on an SM than its CTAs take, so that the rest of that memory caches.
// Of an early kernel the driver would keep the share of the kernel before: behind one with 206 KiB,
// L1 has 28 KiB and room for too few loads on their way. On an H200 the products of a decoder's
// layer then took 41 us instead of 35, of one row, and 62 instead of 41, of eight.
inline void prefer_l1(const Launch& launch, void* function, int clusters, int device) {
  const int sms = attribute_of(device, kAttributeMultiprocessors);
  const int most = attribute_of(device, kAttributeSharedOfMultiprocessor);
  const int of_cta = static_cast<int>(launch.shared_bytes) +
                     attribute_of(device, kAttributeReservedOfCta);
  const int ctas = (clusters * static_cast<int>(cluster_size(launch)) + sms - 1) / sms;
  const int64_t bytes = std::max<int64_t>(kLeastShared, int64_t{ctas} * of_cta);
  const int percent = static_cast<int>(std::min<int64_t>(100, (100 * bytes + most - 1) / most));
  check(driver().cuFuncSetAttribute(function, kFunctionSharedCarveout, percent),
        std::string("shared memory carve-out of kernel '") + launch.symbol + "'");
}

inline std::unique_ptr<Loaded> load_on(const Program& program, int device_id) {
  auto loaded = std::make_unique<Loaded>();
  const int device = device_of(device_id);
  loaded->device =
      check_architecture(program, device) + " (cuda:" + std::to_string(device_id) + ")";
  check(driver().cuDevicePrimaryCtxRetain(&loaded->context, device), "cuDevicePrimaryCtxRetain");
  ContextScope scope(loaded->context);
  // The first call may come inside a stream capture, where loading is allowed in relaxed mode only.
  int mode = kCaptureRelaxed;
  check(driver().cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode");
  void* module = nullptr;
  const Status status = driver().cuModuleLoadData(&module, program.cubin);
  driver().cuThreadExchangeStreamCaptureMode(&mode);
  check(status, std::string("cuModuleLoadData of ") + program.name, "update the NVIDIA driver");
  for (int i = 0; i < program.launch_count; ++i) {
    const Launch& launch = program.launches[i];
    LaunchAttributes attributes;
    const LaunchConfig config = launch_config(launch, launch.early, &attributes, nullptr);
    int clusters = 0;
    loaded->functions.push_back(prepare_function(launch, module));
    check(driver().cuOccupancyMaxActiveClusters(&clusters, loaded->functions.back(), &config),
          std::string("cuOccupancyMaxActiveClusters of kernel '") + launch.symbol + "'",
          "compile with a smaller cluster, fewer threads or less shared memory");
    loaded->clusters.push_back(clusters);
    if (launch.early && !has_tensor_maps(launch)) {
      prefer_l1(launch, loaded->functions.back(), clusters, device);
    }
  }
  return loaded;
}

// Keeps the library mapped after its last handle is closed, whoever linked it. Others link objects
// without asking for that.
inline void keep_mapped(const Program& program) {
  Dl_info found;
  if (dladdr(&program, &found) != 0 && found.dli_fname != nullptr) {
    dlopen(found.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
  }
}

// Programs that are linked into one library share this function, and the map.
inline const Loaded& loaded_on(const Program& program, int device_id) {
  static std::mutex mutex;
  static std::map<std::pair<const Program*, int>, std::unique_ptr<Loaded>> devices;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Loaded>& slot = devices[{&program, device_id}];
  if (slot == nullptr) {
    keep_mapped(program);
    slot = load_on(program, device_id);
  }
  return *slot;
}

}  // namespace crossfuse

#endif  // CROSSFUSE_HOST_LOAD_H
