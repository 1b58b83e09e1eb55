// Microseconds from one kernel to the next in a CUDA graph, where kernels do nothing: 132 CTAs of
// 384 threads with all shared memory of an SM, as our kernels have.
//
//   launch        each kernel starts when the one before has ended
//   early_launch  programmatic dependent launch: each kernel lets the next one start at once and
//                 waits for the one before itself (griddepcontrol)
#include "harness.h"

namespace {

constexpr int kKernels = 200;
constexpr int kThreads = 384;

__global__ void nothing(bool early) {
  if (!early) return;
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

void enqueue(cudaStream_t stream, bool early) {
  cudaLaunchConfig_t config = {};
  config.gridDim = harness::sms();
  config.blockDim = kThreads;
  config.dynamicSmemBytes = harness::kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  CHECK(cudaLaunchKernelEx(&config, nothing, early));
}

void measure(const char* name, bool early) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < kKernels; ++i) enqueue(stream, early);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&ready, graph, 0));
  harness::report(name, "",
                  harness::each(kKernels, [&] { CHECK(cudaGraphLaunch(ready, cudaStreamLegacy)); }));
  CHECK(cudaGraphExecDestroy(ready));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
}

}  // namespace

int main() {
  harness::begin();
  harness::allow(nothing);
  measure("launch", false);
  measure("early_launch", true);
  return 0;
}
