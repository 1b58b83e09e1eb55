// Memory that a program keeps from one launch to the next, such as flags that count on.
#ifndef CROSSFUSE_HOST_STATE_H
#define CROSSFUSE_HOST_STATE_H

#include <algorithm>
#include <map>
#include <mutex>

#include "arguments.h"

namespace crossfuse {

// Pieces of zeroed memory on one device. Launches of one stream follow each other and share a
// piece; a graph may be replayed beside anything else, so each launch that is captured has its own.
// Nothing is ever freed: a captured graph may outlive every handle to the library.
class StateMemory {
 public:
  // The piece for a launch on `stream`; the context of the device is current.
  char* piece(size_t bytes, void* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    int capturing = 0;
    check(driver().cuStreamIsCapturing(stream, &capturing), "cuStreamIsCapturing");
    if (capturing) return allocate(bytes);
    unsigned long long id = 0;  // of the stream itself: handles are used again
    check(driver().cuStreamGetId(stream, &id), "cuStreamGetId");
    char*& slot = of_stream_[id];
    if (slot == nullptr) slot = allocate(bytes);
    return slot;
  }

 private:
  static constexpr size_t kPieces = 64;     // of a chunk, at most
  static constexpr size_t kChunk = 4 << 20;  // bytes, unless a piece takes more
  static constexpr size_t kAlign = 256;

  char* allocate(size_t bytes) {
    const size_t size = (bytes + kAlign - 1) / kAlign * kAlign;
    if (left_ == 0) {
      left_ = std::max<size_t>(1, std::min(kPieces, kChunk / size));
      next_ = zeroed(size * left_);
    }
    --left_;
    char* piece = next_;
    next_ += size;
    return piece;
  }

  // On a stream of its own, in relaxed mode: another one may be capturing just now.
  static char* zeroed(size_t bytes) {
    int mode = kCaptureRelaxed;
    check(driver().cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode");
    DevicePointer memory = 0;
    void* stream = nullptr;
    Status status = driver().cuMemAlloc_v2(&memory, bytes);
    if (!status) status = driver().cuStreamCreate(&stream, kStreamNonBlocking);
    if (!status) status = driver().cuMemsetD8Async(memory, 0, bytes, stream);
    if (!status) status = driver().cuStreamSynchronize(stream);
    if (stream) driver().cuStreamDestroy_v2(stream);
    driver().cuThreadExchangeStreamCaptureMode(&mode);
    check(status, "allocating " + std::to_string(bytes) + " bytes of zeroed memory",
          "free memory on the GPU");
    return reinterpret_cast<char*>(memory);
  }

  std::mutex mutex_;
  std::map<unsigned long long, char*> of_stream_;
  char* next_ = nullptr;
  size_t left_ = 0;
};

}  // namespace crossfuse

#endif  // CROSSFUSE_HOST_STATE_H
