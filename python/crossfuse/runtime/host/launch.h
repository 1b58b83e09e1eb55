// Launching on device tensors or on host arrays.
#ifndef CROSSFUSE_HOST_LAUNCH_H
#define CROSSFUSE_HOST_LAUNCH_H

#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>

#include "load.h"

namespace crossfuse {

inline void check_fit(const Program& program, const Loaded& loaded, int index) {
  const Launch& launch = program.launches[index];
  const int room = loaded.clusters[index];
  const unsigned needed =
      launch.cooperative ? launch.grid.x * launch.grid.y * launch.grid.z / cluster_size(launch) : 1;
  if (room >= static_cast<int>(needed)) return;
  refuse("RuntimeError", "cluster-fit",
         std::string("kernel '") + launch.symbol + "' on " + loaded.device,
         "room for " + (room ? std::to_string(room) + " clusters" : std::string("no cluster")) +
             " of " + std::to_string(cluster_size(launch)) + " CTAs of " +
             std::to_string(launch.block.x * launch.block.y * launch.block.z) + " threads and " +
             std::to_string(launch.shared_bytes) + " bytes of dynamic shared memory",
         launch.cooperative ? std::to_string(needed) + " clusters that run at the same time"
                            : "at least 1 cluster on the device",
         launch.cooperative ? "compile without grid_stage, as two kernels, or for this device"
                            : "compile with a smaller cluster, fewer threads or less shared memory");
}

// A descriptor of `data`. Of so many rows, if not 0: the last extent, which counts them. Copies from
// there on load zeros and store nothing.
inline EncodedMap encode(const TensorMap& map, void* data, int64_t rows) {
  EncodedMap encoded;
  const uint32_t steps[] = {1, 1, 1, 1, 1};
  if (map.lower != nullptr) {
    const uint32_t channels = map.box[0], pixels = map.box[1];
    check(driver().cuTensorMapEncodeIm2col(&encoded, map.data_type, map.rank, data, map.extents,
                                           map.strides, map.lower, map.upper, channels, pixels,
                                           steps, /*interleave=*/0, map.swizzle, map.promotion,
                                           /*fill=*/0),
          "cuTensorMapEncodeIm2col");
    return encoded;
  }
  uint64_t extents[5];
  std::copy_n(map.extents, map.rank, extents);
  if (rows) extents[map.rank - 1] = static_cast<uint64_t>(rows);
  check(driver().cuTensorMapEncodeTiled(&encoded, map.data_type, map.rank, data, extents,
                                        map.strides, map.box, steps, /*interleave=*/0, map.swizzle,
                                        map.promotion, /*fill=*/0),
        "cuTensorMapEncodeTiled");
  return encoded;
}

// Adds the addresses of what the program keeps from launch to launch: one piece holds all of it.
inline void add_state(const Program& program, const Loaded& loaded, void* stream,
                      std::vector<void*>* data) {
  if (program.state_count == 0) return;
  std::vector<size_t> offsets;
  size_t bytes = 0;
  for (int i = 0; i < program.state_count; ++i) {
    offsets.push_back(bytes);
    bytes += (static_cast<size_t>(bytes_of(program.state[i])) + 15) / 16 * 16;
  }
  char* piece = loaded.state.piece(bytes, stream);
  for (size_t offset : offsets) data->push_back(piece + offset);
}

// Launches all kernels of the program; `data` holds the device address of each buffer, `rows` how
// many rows those have that may have fewer. As the `first` of a chain, none starts before what lies
// before them is over.
inline void launch_all(const Program& program, const Loaded& loaded, std::vector<void*> data,
                       int64_t rows, void* stream, bool first = false) {
  for (int i = 0; i < program.launch_count; ++i) check_fit(program, loaded, i);
  ContextScope scope(loaded.context);
  add_state(program, loaded, stream, &data);
  std::vector<void*> parameters;
  std::vector<EncodedMap> maps;
  int32_t row_count = static_cast<int32_t>(rows);
  for (int i = 0; i < program.launch_count; ++i) {
    const Launch& launch = program.launches[i];
    parameters.clear();
    maps.clear();
    maps.reserve(launch.argument_count);  // no growth, which would move what parameters point to
    for (int j = 0; j < launch.argument_count; ++j) {
      const int index = launch.arguments[j];
      if (index == kRowCount) {
        parameters.push_back(&row_count);
        continue;
      }
      if (index >= 0) {
        parameters.push_back(&data[index]);
        continue;
      }
      const TensorMap& map = launch.tensor_maps[-1 - index];
      const bool cut = map.buffer < program.buffer_count && program.buffers[map.buffer].rows;
      maps.push_back(encode(map, data[map.buffer], cut ? rows : 0));
      parameters.push_back(&maps.back());
    }
    LaunchAttributes attributes;
    const bool early = launch.early && !(first && i == 0);
    const LaunchConfig config = launch_config(launch, early, &attributes, stream);
    check(driver().cuLaunchKernelEx(&config, loaded.functions[i], parameters.data(), nullptr),
          std::string("cuLaunchKernelEx of kernel '") + launch.symbol + "' on " + loaded.device);
  }
}

// Workspaces of one call, from the allocator of the caller's framework: it frees them in the order
// of the stream, and a graph that is being captured keeps them. A caller without one, such as TVM's
// virtual machine, gets the driver's memory in the order of the stream, which does the same.
class Workspaces {
 public:
  Workspaces(void* context, void* stream) : context_(context), stream_(stream) {}
  ~Workspaces() {
    for (TVMFFIObjectHandle handle : handles_) TVMFFIObjectDecRef(handle);
    if (owned_.empty()) return;
    try {
      ContextScope scope(context_);
      for (DevicePointer each : owned_) driver().cuMemFreeAsync(each, stream_);
    } catch (...) {  // the call has its own error to tell
    }
  }
  Workspaces(const Workspaces&) = delete;
  Workspaces& operator=(const Workspaces&) = delete;

  void* add(const Program& program, const Buffer& buffer, int device_id) {
    if (TVMFFIEnvGetDLPackManagedTensorAllocator() == nullptr) return own(buffer);
    std::vector<int64_t> shape(buffer.shape, buffer.shape + buffer.rank);
    DLTensor prototype{};
    prototype.device = {kDLCUDA, device_id};
    prototype.ndim = buffer.rank;
    prototype.dtype = buffer.dtype;
    prototype.shape = shape.data();
    TVMFFIObjectHandle handle = nullptr;
    if (TVMFFIEnvTensorAlloc(&prototype, &handle) != 0) {
      TVMFFIObjectHandle error = nullptr;
      TVMFFIErrorMoveFromRaised(&error);
      if (error != nullptr) TVMFFIObjectDecRef(error);
      refuse("RuntimeError", "workspace", program.name,
             "no memory for the workspace '" + std::string(buffer.name) + "'",
             std::to_string(bytes_of(buffer)) + " bytes from the caller's framework",
             "free some, or call it with fewer tensors at once");
    }
    handles_.push_back(handle);
    return TVMFFITensorGetDLTensorPtr(handle)->data;
  }

 private:
  void* own(const Buffer& buffer) {
    ContextScope scope(context_);
    DevicePointer address = 0;
    check(driver().cuMemAllocAsync(&address, bytes_of(buffer), stream_), "cuMemAllocAsync");
    owned_.push_back(address);
    return reinterpret_cast<void*>(address);
  }

  void* context_;
  void* stream_;
  std::vector<TVMFFIObjectHandle> handles_;
  std::vector<DevicePointer> owned_;
};

inline void call_on_device(const Program& program, const TVMFFIAny* values, int count,
                           bool first = false) {
  const auto [tensors, rows] = check_arguments(program, values, count, kDLCUDA);
  const int device_id = tensors.empty() ? 0 : tensors[0]->device.device_id;
  std::vector<void*> data;
  for (const DLTensor* tensor : tensors) data.push_back(data_of(tensor));
  void* stream = TVMFFIEnvGetStream(kDLCUDA, device_id);
  const Loaded& loaded = loaded_on(program, device_id);
  Workspaces workspaces(loaded.context, stream);
  for (int i = 0; i < program.workspace_count; ++i) {
    data.push_back(workspaces.add(program, program.workspaces[i], device_id));
  }
  launch_all(program, loaded, std::move(data), rows, stream, first);
}

// Device copies of host arrays for the time of one call.
class DeviceCopies {
 public:
  ~DeviceCopies() {
    for (DevicePointer pointer : pointers_) driver().cuMemFree_v2(pointer);
  }
  // Without a source the memory is left as it is.
  void* add(const Buffer& buffer, const char* source, int64_t rows = 0) {
    const size_t bytes = static_cast<size_t>(bytes_of(buffer, rows));
    const std::string of = std::string(" of argument '") + buffer.name + "'";
    DevicePointer pointer = 0;
    check(driver().cuMemAlloc_v2(&pointer, bytes),
          "cuMemAlloc of " + std::to_string(bytes) + " bytes" + of, "free memory on the GPU");
    pointers_.push_back(pointer);
    if (source) check(driver().cuMemcpyHtoD_v2(pointer, source, bytes), "cuMemcpyHtoD" + of);
    return reinterpret_cast<void*>(pointer);
  }

 private:
  std::vector<DevicePointer> pointers_;
};

// Host arrays: copied in (outputs too, since a kernel may write only a part of them), run on the
// default stream, and outputs copied back, which waits for the kernels.
inline void call_on_host(const Program& program, const TVMFFIAny* values, int count) {
  if (count < 1 || values[0].type_index != kTVMFFIInt) {
    refuse("TypeError", "argument-kind", std::string(program.name) + "_host", "no device index",
           "an integer before the tensors", "call it as host(device_index, *tensors)");
  }
  const auto [tensors, rows] = check_arguments(program, values + 1, count - 1, kDLCPU);
  const Loaded& loaded = loaded_on(program, static_cast<int>(values[0].v_int64));
  ContextScope scope(loaded.context);
  DeviceCopies copies;
  std::vector<void*> data;
  for (int i = 0; i < program.buffer_count; ++i) {
    data.push_back(copies.add(program.buffers[i], data_of(tensors[i]), rows));
  }
  for (int i = 0; i < program.workspace_count; ++i) {
    data.push_back(copies.add(program.workspaces[i], nullptr));
  }
  launch_all(program, loaded, data, rows, nullptr);
  for (int i = 0; i < program.buffer_count; ++i) {
    const Buffer& buffer = program.buffers[i];
    if (!buffer.output) continue;
    check(driver().cuMemcpyDtoH_v2(data_of(tensors[i]), reinterpret_cast<DevicePointer>(data[i]),
                                   static_cast<size_t>(bytes_of(buffer, rows))),
          std::string("the kernels or the copy back of '") + buffer.name + "' of " + program.name);
  }
}

}  // namespace crossfuse

#endif  // CROSSFUSE_HOST_LAUNCH_H
