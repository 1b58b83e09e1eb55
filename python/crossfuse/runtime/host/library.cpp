// The functions of kernel libraries, compiled once for all of them (launcher.py). Libraries may be
// linked from the objects of several kernels, each of which has these: the linker keeps one.
#include <exception>

#include "export.h"
#include "launch.h"

namespace crossfuse {

namespace {
// Whether there is a GPU at all; refuses one of another architecture.
bool check_device(const Program& program, int device_id) {
  try {
    driver();
  } catch (const Refused&) {
    return false;
  }
  check_architecture(program, device_of(device_id));
  return true;
}

int max_active_clusters(const Program& program, int device_id, int launch) {
  if (launch < 0 || launch >= program.launch_count) {
    refuse("ValueError", "launch-index", program.name, std::to_string(launch),
           "0 to " + std::to_string(program.launch_count - 1), "pass the index of a launch");
  }
  return loaded_on(program, device_id).clusters[launch];
}

int integer(const Program& program, const TVMFFIAny* values, int count, int index) {
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

TVMFFIAny integer_result(int64_t value, TVMFFITypeIndex type) {
  TVMFFIAny result{};
  result.type_index = type;
  result.v_int64 = value;
  return result;
}
}  // namespace

[[gnu::weak]] int run_on_device(const Program& program, const TVMFFIAny* values, int count) {
  return guarded([&] { call_on_device(program, values, count); });
}

[[gnu::weak]] int run_first_on_device(const Program& program, const TVMFFIAny* values, int count) {
  return guarded([&] { call_on_device(program, values, count, /*first=*/true); });
}

[[gnu::weak]] int run_on_host(const Program& program, const TVMFFIAny* values, int count) {
  return guarded([&] { call_on_host(program, values, count); });
}

[[gnu::weak]] int ask_device(const Program& program, const TVMFFIAny* values, int count,
                             TVMFFIAny* result) {
  return guarded([&] {
    const int device = integer(program, values, count, 0);
    *result = integer_result(check_device(program, device), kTVMFFIBool);
  });
}

[[gnu::weak]] int ask_clusters(const Program& program, const TVMFFIAny* values, int count,
                               TVMFFIAny* result) {
  return guarded([&] {
    const int device = integer(program, values, count, 0);
    const int launch = integer(program, values, count, 1);
    *result = integer_result(max_active_clusters(program, device, launch), kTVMFFIInt);
  });
}

}  // namespace crossfuse
