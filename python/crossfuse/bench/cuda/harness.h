// What every micro-benchmark shares on the host: errors, faults of bounded waits, warm clocks,
// repeats and their median, one line of JSON for each number.
//
// A program prints {"name": ..., keys..., "value": median, "spread": (max - min) / median,
// "repeats": n} and ends with exit code 0. With code 3 it says on standard error which wait of
// which kernel did not end.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace harness {

constexpr int kRepeats = 11;
constexpr int kSharedBytes = 227 * 1024;  // all that a CTA of compute capability 9.0 can have

inline unsigned* fault_word = nullptr;  // on the host, written by a kernel before it traps

inline void check(cudaError_t status, const char* file, int line) {
  if (status == cudaSuccess) return;
  const unsigned fault = fault_word ? *fault_word : 0;
  if (fault)
    std::fprintf(stderr, "a wait did not end: code %u (%s:%d)\n", fault, file, line);
  else
    std::fprintf(stderr, "%s (%s:%d)\n", cudaGetErrorString(status), file, line);
  // Destructors of the runtime would only repeat the error.
  std::_Exit(3);
}
#define CHECK(call) harness::check((call), __FILE__, __LINE__)

static __device__ unsigned* device_fault_word;

static __global__ void spin(long long cycles, float* sink) {
  const long long start = clock64();
  float x = static_cast<float>(threadIdx.x), y = x + 1, z = x + 2;
  while (clock64() - start < cycles) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      x = x * 0.999f + 1.0f;
      y = y * 0.998f + 1.0f;
      z = z * 0.997f + 1.0f;
    }
  }
  if (x + y + z < 0) *sink = x;
}

inline int sms() {
  int count = 0;
  CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

// Keep every SM busy until the clocks are up: about a quarter of a second.
inline void warm() {
  for (int i = 0; i < 10; ++i) spin<<<sms(), 256>>>(45'000'000, nullptr);
  CHECK(cudaDeviceSynchronize());
}

inline void begin() {
  CHECK(cudaSetDevice(0));
  CHECK(cudaHostAlloc(&fault_word, sizeof *fault_word, cudaHostAllocMapped));
  *fault_word = 0;
  unsigned* mapped = nullptr;
  CHECK(cudaHostGetDevicePointer(&mapped, fault_word, 0));
  CHECK(cudaMemcpyToSymbol(device_fault_word, &mapped, sizeof mapped));
  warm();
}

template <typename T>
T* device_array(size_t count) {
  T* memory = nullptr;
  CHECK(cudaMalloc(&memory, count * sizeof(T)));
  CHECK(cudaMemset(memory, 0, count * sizeof(T)));
  return memory;
}

struct Sample {
  double median, spread;
  int repeats;
};

inline Sample summary(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const double middle = values[values.size() / 2];
  return {middle, (values.back() - values.front()) / middle, static_cast<int>(values.size())};
}

struct Nothing {
  void operator()() const {}
};

// Microseconds of what `work` puts into the default stream, without what `prepare` puts there
// before; the first run does not count.
template <typename Work, typename Prepare = Nothing>
std::vector<double> times(Work work, Prepare prepare = {}) {
  cudaEvent_t start, stop;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  std::vector<double> found;
  for (int i = 0; i <= kRepeats; ++i) {
    // Something to do while the host asks for the rest, so that its pace is not measured.
    spin<<<1, 32>>>(60'000, nullptr);
    prepare();
    CHECK(cudaEventRecord(start));
    work();
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(stop));
    CHECK(cudaEventSynchronize(stop));
    float milliseconds = 0;
    CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
    if (i) found.push_back(milliseconds * 1e3);
  }
  CHECK(cudaEventDestroy(start));
  CHECK(cudaEventDestroy(stop));
  return found;
}

// Units of work in a microsecond.
template <typename Work>
Sample rate(double units, Work work) {
  std::vector<double> found = times(work);
  for (double& each : found) each = units / each;
  return summary(found);
}

// Microseconds of one of `count` equal steps.
template <typename Work, typename Prepare = Nothing>
Sample each(double count, Work work, Prepare prepare = {}) {
  std::vector<double> found = times(work, prepare);
  for (double& time : found) time /= count;
  return summary(found);
}

// `keys` is JSON without braces, such as "\"size\": 4".
inline void report(const char* name, const std::string& keys, const Sample& sample) {
  std::printf("{\"name\": \"%s\", %s%s\"value\": %.9g, \"spread\": %.4g, \"repeats\": %d}\n", name,
              keys.c_str(), keys.empty() ? "" : ", ", sample.median, sample.spread, sample.repeats);
  std::fflush(stdout);
}

// A launch with clusters of `size` CTAs and all the shared memory of an SM for each.
struct ClusterLaunch {
  cudaLaunchAttribute attribute = {};
  cudaLaunchConfig_t config = {};

  ClusterLaunch(int grid, int block, int size) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = size;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = kSharedBytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // config points into this one
};

// Launch `kernel` with clusters of `size` CTAs and all the shared memory of an SM for each.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int grid, int block, int size, Arguments... arguments) {
  const ClusterLaunch launch(grid, block, size);
  CHECK(cudaLaunchKernelEx(&launch.config, kernel, static_cast<Parameters>(arguments)...));
}

// Allow a kernel all shared memory and clusters of up to 16.
template <typename... Parameters>
void allow(void (*kernel)(Parameters...)) {
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
}

// Clusters of `size` CTAs that run at once with one CTA on an SM; 0 where there are no such ones.
template <typename... Parameters>
int resident(void (*kernel)(Parameters...), int block, int size) {
  const ClusterLaunch launch(size * sms(), block, size);
  int count = 0;
  const cudaError_t status =
      cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config);
  if (status == cudaErrorInvalidClusterSize) {
    cudaGetLastError();  // forget it
    return 0;
  }
  CHECK(status);
  return count;
}

}  // namespace harness
