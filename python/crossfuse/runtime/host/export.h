// The functions that a kernel library exports through tvm-ffi's C ABI.
#ifndef CROSSFUSE_HOST_EXPORT_H
#define CROSSFUSE_HOST_EXPORT_H

#include <cstddef>

#include "program.h"

namespace crossfuse {

// Of library.cpp: behind the C ABI, no C++ exception leaves them. On tensors of a device; on host
// arrays, after the number of a device.
int run_on_device(const Program& program, const TVMFFIAny* values, int count);
// The same, once all that lies before on the stream is over, even if its first kernel may start early:
// it then waits for nothing, and kernels behind it that start early find what was written before it.
int run_first_on_device(const Program& program, const TVMFFIAny* values, int count);
int run_on_host(const Program& program, const TVMFFIAny* values, int count);
// Whether there is a device at all; refuses one of another architecture.
int ask_device(const Program& program, const TVMFFIAny* values, int count, TVMFFIAny* result);
// How many clusters of a launch a device holds at once.
int ask_clusters(const Program& program, const TVMFFIAny* values, int count, TVMFFIAny* result);

}  // namespace crossfuse

#define CROSSFUSE_FUNCTION(name)                                                     \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* values, \
                                                     int32_t count, TVMFFIAny* result)

// The functions of a kernel library; `program` is its crossfuse::Program.
#define CROSSFUSE_EXPORT(name, program)                                             \
  CROSSFUSE_FUNCTION(name) {                                                        \
    (void)result;                                                                   \
    return crossfuse::run_on_device(program, values, count);                        \
  }                                                                                 \
  CROSSFUSE_FUNCTION(name##_first) {                                                \
    (void)result;                                                                   \
    return crossfuse::run_first_on_device(program, values, count);                  \
  }                                                                                 \
  CROSSFUSE_FUNCTION(name##_host) {                                                 \
    (void)result;                                                                   \
    return crossfuse::run_on_host(program, values, count);                          \
  }                                                                                 \
  CROSSFUSE_FUNCTION(name##_check_device) {                                         \
    return crossfuse::ask_device(program, values, count, result);                   \
  }                                                                                 \
  CROSSFUSE_FUNCTION(name##_max_active_clusters) {                                  \
    return crossfuse::ask_clusters(program, values, count, result);                 \
  }                                                                                 \
  CROSSFUSE_FUNCTION(name##_manifest) {                                             \
    (void)values, (void)count;                                                      \
    const size_t size = program.manifest_end - program.manifest;                    \
    const TVMFFIByteArray bytes{program.manifest, size};                            \
    return TVMFFIStringFromByteArray(&bytes, result);                               \
  }                                                                                 \
  CROSSFUSE_FUNCTION(name##_cubin) {                                                \
    (void)values, (void)count;                                                      \
    const size_t size = program.cubin_end - program.cubin;                          \
    const TVMFFIByteArray bytes{program.cubin, size};                               \
    return TVMFFIBytesFromByteArray(&bytes, result);                                \
  }

#endif  // CROSSFUSE_HOST_EXPORT_H
