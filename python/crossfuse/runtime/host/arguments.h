// The check of one call's arguments against what a kernel library knows about its function.
#ifndef CROSSFUSE_HOST_ARGUMENTS_H
#define CROSSFUSE_HOST_ARGUMENTS_H

#include <string>
#include <utility>
#include <vector>

#include "driver.h"
#include "program.h"

namespace crossfuse {

// The widest access of a generated kernel (16-byte vectors, and the bulk copy engine).
constexpr uint64_t kAlignment = 16;

inline std::string text(DLDataType type) {
  const std::string bits = std::to_string(type.bits);
  const std::string lanes = type.lanes == 1 ? "" : "x" + std::to_string(type.lanes);
  switch (type.code) {
    case kDLInt:
      return "int" + bits + lanes;
    case kDLUInt:
      return "uint" + bits + lanes;
    case kDLFloat:
      return "float" + bits + lanes;
    case kDLBfloat:
      return "bfloat" + bits + lanes;
    case kDLComplex:
      return "complex" + bits + lanes;
    case kDLBool:
      return "bool" + lanes;
    case kDLFloat8_e4m3fn:
      return "float8_e4m3fn" + lanes;
    case kDLFloat8_e5m2:
      return "float8_e5m2" + lanes;
    default:
      return "DLPack type code " + std::to_string(type.code) + " of " + bits + " bits" + lanes;
  }
}

inline std::string text(const int64_t* extents, int rank) {
  std::string result = "(";
  for (int axis = 0; axis < rank; ++axis) {
    result += (axis ? ", " : "") + std::to_string(extents[axis]);
  }
  return result + (rank == 1 ? ",)" : ")");
}

inline std::string text(DLDevice device) {
  const std::string id = ":" + std::to_string(device.device_id);
  switch (device.device_type) {
    case kDLCPU:
      return "cpu" + id;
    case kDLCUDA:
      return "cuda" + id;
    default:
      return "DLPack device type " + std::to_string(device.device_type) + id;
  }
}

// Bytes of a buffer in a call of so many rows; all rows that it has where the call does not count.
inline int64_t bytes_of(const Buffer& buffer, int64_t rows = 0) {
  int64_t elements = 1;
  for (int axis = 0; axis < buffer.rank; ++axis) {
    elements *= axis == 0 && buffer.rows && rows ? rows : buffer.shape[axis];
  }
  return elements * (buffer.dtype.bits / 8);
}

inline char* data_of(const DLTensor* tensor) {
  return static_cast<char*>(tensor->data) + tensor->byte_offset;
}

inline bool is_contiguous(const DLTensor* tensor) {
  if (tensor->strides == nullptr) return true;
  int64_t expected = 1;
  for (int axis = tensor->ndim - 1; axis >= 0; --axis) {
    if (tensor->shape[axis] != 1 && tensor->strides[axis] != expected) return false;
    expected *= tensor->shape[axis];
  }
  return true;
}

// A tensor object or a DLTensor*; also an opaque pointer to a DLTensor where `opaque`, for callers
// whose arrays DLPack cannot carry (numpy's bfloat16 and fp8).
inline const DLTensor* tensor_of(const TVMFFIAny& value, bool opaque) {
  switch (value.type_index) {
    case kTVMFFITensor:
      return TVMFFITensorGetDLTensorPtr(value.v_obj);
    case kTVMFFIDLTensorPtr:
      return static_cast<const DLTensor*>(value.v_ptr);
    case kTVMFFIOpaquePtr:
      return opaque ? static_cast<const DLTensor*>(value.v_ptr) : nullptr;
    default:
      return nullptr;
  }
}

inline std::string kind_of(const TVMFFIAny& value) {
  switch (value.type_index) {
    case kTVMFFINone:
      return "None";
    case kTVMFFIInt:
      return "an integer";
    case kTVMFFIBool:
      return "a bool";
    case kTVMFFIFloat:
      return "a float";
    case kTVMFFIOpaquePtr:
      return "an opaque pointer";
    case kTVMFFIRawStr:
    case kTVMFFISmallStr:
    case kTVMFFIStr:
      return "a string";
    default:
      return "an object of tvm-ffi type index " + std::to_string(value.type_index);
  }
}

inline std::string argument(const Program& program, int index) {
  return "argument " + std::to_string(index) + " '" + program.buffers[index].name + "' of " +
         program.name;
}

inline void check_type_and_shape(const Program& program, int index, const DLTensor* tensor) {
  const Buffer& buffer = program.buffers[index];
  if (tensor->dtype.code != buffer.dtype.code || tensor->dtype.bits != buffer.dtype.bits ||
      tensor->dtype.lanes != 1) {
    refuse("TypeError", "argument-dtype", argument(program, index), text(tensor->dtype),
           text(buffer.dtype), "convert the tensor, or compile the kernel for its element type");
  }
  bool equal = tensor->ndim == buffer.rank;
  for (int axis = buffer.rows ? 1 : 0; equal && axis < buffer.rank; ++axis) {
    equal = tensor->shape[axis] == buffer.shape[axis];
  }
  const bool fits =
      !buffer.rows || (equal && tensor->shape[0] >= 1 && tensor->shape[0] <= buffer.shape[0]);
  if (!equal || !fits) {
    refuse("ValueError", "argument-shape", argument(program, index),
           text(tensor->shape, tensor->ndim),
           text(buffer.shape, buffer.rank) + (buffer.rows ? ", or fewer rows of it, at least 1" : ""),
           "pass a tensor of that shape, or compile the kernel for this one");
  }
}

// Rows of a call: as many in all tensors that have any; 0 where each call has all rows.
inline int64_t rows_of(const Program& program, const std::vector<const DLTensor*>& tensors) {
  int first = -1;
  for (int i = 0; i < program.buffer_count; ++i) {
    if (!program.buffers[i].rows) continue;
    if (first < 0) first = i;
    if (tensors[i]->shape[0] == tensors[first]->shape[0]) continue;
    refuse("ValueError", "argument-rows", argument(program, i),
           std::to_string(tensors[i]->shape[0]) + " rows",
           std::to_string(tensors[first]->shape[0]) + ", as of '" +
               program.buffers[first].name + "'",
           "pass tensors of equally many rows");
  }
  return first < 0 ? 0 : tensors[first]->shape[0];
}

inline void check_placement(const Program& program, int index, const DLTensor* tensor,
                            DLDevice device) {
  const bool on_gpu = device.device_type == kDLCUDA;
  if (tensor->device.device_type != device.device_type) {
    refuse("ValueError", "argument-device", argument(program, index), text(tensor->device),
           on_gpu ? "a CUDA device" : "the CPU",
           on_gpu ? "move the tensor to the GPU before the call"
                  : "copy the tensor to the CPU before the call");
  }
  if (tensor->device.device_id != device.device_id) {
    refuse("ValueError", "argument-device", argument(program, index), text(tensor->device),
           text(device) + ", where the first argument lies", "move all tensors to one device");
  }
  if (!is_contiguous(tensor)) {
    refuse("ValueError", "argument-layout", argument(program, index),
           "strides " + text(tensor->strides, tensor->ndim) + " of shape " +
               text(tensor->shape, tensor->ndim),
           "a contiguous row-major tensor", "pass a contiguous copy of it");
  }
  const uint64_t misaligned = reinterpret_cast<uint64_t>(data_of(tensor)) % kAlignment;
  if (on_gpu && misaligned != 0) {
    refuse("ValueError", "argument-alignment", argument(program, index),
           "an address " + std::to_string(misaligned) + " bytes past a 16-byte boundary",
           "an address that is a multiple of 16 bytes", "pass a copy (clone) of the view");
  }
}

// Kernels are generated under the promise that what they write is reached in one way only.
inline void check_overlap(const Program& program, const std::vector<const DLTensor*>& tensors,
                          int64_t rows) {
  for (int i = 0; i < program.buffer_count; ++i) {
    if (!program.buffers[i].output) continue;
    const char* begin = data_of(tensors[i]);
    const char* end = begin + bytes_of(program.buffers[i], rows);
    for (int j = 0; j < program.buffer_count; ++j) {
      const char* other = data_of(tensors[j]);
      if (i == j || other >= end) continue;
      if (other + bytes_of(program.buffers[j], rows) <= begin) continue;
      refuse("ValueError", "argument-overlap",
             "output '" + std::string(program.buffers[i].name) + "' of " + program.name,
             "memory shared with argument '" + std::string(program.buffers[j].name) + "'",
             "outputs that overlap no other argument", "pass a separate tensor for the output");
    }
  }
}

// The arguments of one call.
struct Arguments {
  std::vector<const DLTensor*> tensors;  // in the order of the buffers
  int64_t rows;                          // see rows_of
};

// Checks all arguments of one call.
inline Arguments check_arguments(const Program& program, const TVMFFIAny* values, int count,
                                 DLDeviceType device_type) {
  if (count != program.buffer_count) {
    std::string names;
    for (int i = 0; i < program.buffer_count; ++i) {
      names += (i ? ", " : "") + std::string(program.buffers[i].name);
    }
    refuse("TypeError", "argument-count", program.name, std::to_string(count) + " arguments",
           std::to_string(program.buffer_count) + " (" + names + ")",
           "pass the inputs and the outputs, in this order");
  }
  std::vector<const DLTensor*> tensors(count);
  for (int i = 0; i < count; ++i) {
    tensors[i] = tensor_of(values[i], device_type == kDLCPU);
    if (tensors[i] == nullptr) {
      refuse("TypeError", "argument-kind", argument(program, i), kind_of(values[i]), "a tensor",
             "pass a tensor that speaks DLPack");
    }
    check_type_and_shape(program, i, tensors[i]);
    check_placement(program, i, tensors[i], {device_type, tensors[0]->device.device_id});
  }
  const int64_t rows = rows_of(program, tensors);
  check_overlap(program, tensors, rows);
  return {std::move(tensors), rows};
}

}  // namespace crossfuse

#endif  // CROSSFUSE_HOST_ARGUMENTS_H
