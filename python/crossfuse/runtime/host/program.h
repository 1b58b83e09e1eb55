// What a kernel library knows about its function: the tables that a launcher consists of.
#ifndef CROSSFUSE_HOST_PROGRAM_H
#define CROSSFUSE_HOST_PROGRAM_H

#include <tvm/ffi/c_api.h>

#include <cstdint>

namespace crossfuse {

struct Dim3 {
  unsigned x, y, z;
};

struct Buffer {
  const char* name;
  const int64_t* shape;
  int rank;
  DLDataType dtype;
  bool output;
  bool rows;  // its first extent is a number of rows, of which a call may have fewer
};

// A TMA descriptor that a kernel takes by value, see crossfuse.lower.image.TensorMap.
struct TensorMap {
  int buffer;
  int data_type, rank;
  const uint64_t* extents;
  const uint64_t* strides;
  const uint32_t* box;
  int swizzle, promotion;
  // Of copies of pixels: the corners of the box that they walk through; null for tiles of a matrix.
  const int* lower;
  const int* upper;
};

constexpr int kRowCount = INT32_MIN;  // the argument that is the number of rows of the call

struct Launch {
  const char* symbol;
  Dim3 grid, block, cluster;
  unsigned shared_bytes;
  // In the order of the kernel's parameters: the index of a buffer, of tensor map i as -1 - i, or
  // kRowCount.
  const int* arguments;
  int argument_count;
  const TensorMap* tensor_maps;
  bool early;  // may start before the launch before it is over
  bool cooperative;  // all CTAs run at the same time
};

struct Program {
  const char* name;
  const char* arch;
  int compute_major, compute_minor;
  const Buffer* buffers;
  int buffer_count;
  const Buffer* workspaces;  // their indices follow those of the buffers
  int workspace_count;
  const Buffer* state;  // their indices follow those of the workspaces
  int state_count;
  const Launch* launches;
  int launch_count;
  const char* cubin;
  const char* cubin_end;
  const char* manifest;
  const char* manifest_end;
};

}  // namespace crossfuse

#endif  // CROSSFUSE_HOST_PROGRAM_H
