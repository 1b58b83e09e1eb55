// The functions that a kernel library exports through tvm-ffi's C ABI.
#ifndef CROSSFUSE_HOST_EXPORT_H
#define CROSSFUSE_HOST_EXPORT_H

#include <exception>

#include "launch.h"

namespace crossfuse {

// Whether there is a GPU at all; refuses one of another architecture.
inline bool check_device(const Program& program, int device_id) {
  try {
    driver();
  } catch (const Refused&) {
    return false;
  }
  check_architecture(program, device_of(device_id));
  return true;
}

inline int max_active_clusters(const Program& program, int device_id, int launch) {
  if (launch < 0 || launch >= program.launch_count) {
    refuse("ValueError", "launch-index", program.name, std::to_string(launch),
           "0 to " + std::to_string(program.launch_count - 1), "pass the index of a launch");
  }
  return loaded_on(program, device_id).clusters[launch];
}

inline int integer(const Program& program, const TVMFFIAny* values, int count, int index) {
  if (index >= count || values[index].type_index != kTVMFFIInt) {
    refuse("TypeError", "argument-kind",
           std::string("argument ") + std::to_string(index) + " of a query of " + program.name,
           "no integer", "an integer", "pass an integer");
  }
  return static_cast<int>(values[index].v_int64);
}

// Runs `body` behind the C ABI: no C++ exception may leave the library.
template <typename Body>
int guarded(Body body) {
  try {
    body();
    return 0;
  } catch (const Refused& refused) {
    TVMFFIErrorSetRaisedFromCStr(refused.kind, refused.text.c_str());
  } catch (const std::exception& error) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", error.what());
  }
  return -1;
}

inline TVMFFIAny integer_result(int64_t value, TVMFFITypeIndex type) {
  TVMFFIAny result{};
  result.type_index = type;
  result.v_int64 = value;
  return result;
}

}  // namespace crossfuse

#define CROSSFUSE_FUNCTION(name)                                                     \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* values, \
                                                     int32_t count, TVMFFIAny* result)

// The functions of a kernel library; `program` is its crossfuse::Program.
#define CROSSFUSE_EXPORT(name, program)                                                            \
  CROSSFUSE_FUNCTION(name) {                                                                       \
    (void)result;                                                                                  \
    return crossfuse::guarded([&] { crossfuse::call_on_device(program, values, count); });         \
  }                                                                                                \
  CROSSFUSE_FUNCTION(name##_host) {                                                                \
    (void)result;                                                                                  \
    return crossfuse::guarded([&] { crossfuse::call_on_host(program, values, count); });           \
  }                                                                                                \
  CROSSFUSE_FUNCTION(name##_check_device) {                                                        \
    return crossfuse::guarded([&] {                                                                \
      const int device = crossfuse::integer(program, values, count, 0);                            \
      *result = crossfuse::integer_result(crossfuse::check_device(program, device), kTVMFFIBool);  \
    });                                                                                            \
  }                                                                                                \
  CROSSFUSE_FUNCTION(name##_max_active_clusters) {                                                 \
    return crossfuse::guarded([&] {                                                                \
      const int device = crossfuse::integer(program, values, count, 0);                            \
      const int launch = crossfuse::integer(program, values, count, 1);                            \
      *result = crossfuse::integer_result(crossfuse::max_active_clusters(program, device, launch), \
                                          kTVMFFIInt);                                             \
    });                                                                                            \
  }                                                                                                \
  CROSSFUSE_FUNCTION(name##_manifest) {                                                            \
    (void)values, (void)count;                                                                     \
    const TVMFFIByteArray bytes{program.manifest,                                                  \
                                static_cast<size_t>(program.manifest_end - program.manifest)};     \
    return TVMFFIStringFromByteArray(&bytes, result);                                              \
  }                                                                                                \
  CROSSFUSE_FUNCTION(name##_cubin) {                                                               \
    (void)values, (void)count;                                                                     \
    const TVMFFIByteArray bytes{program.cubin,                                                     \
                                static_cast<size_t>(program.cubin_end - program.cubin)};           \
    return TVMFFIBytesFromByteArray(&bytes, result);                                               \
  }

#endif  // CROSSFUSE_HOST_EXPORT_H
