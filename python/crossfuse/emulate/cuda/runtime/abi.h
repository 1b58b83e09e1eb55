// What generated code calls in the emulator. Included by the device headers (compiled with the
// generated text) and by the runtime, so that both sides agree on every signature.
#pragma once

struct CrossfuseIndex {
  unsigned x, y, z;
};
struct CrossfuseWide {
  unsigned long long low, high;
};
// A TMA descriptor of matrices (rank 2 to 5: copies are of a box of one matrix, or
// of the same of several), or of images of
// pixels of channels (rank 4) that im2col mode loads; the name is the one that generated text has
// for it.
struct CUtensorMap {
  void* base;
  unsigned rank;
  unsigned long long extents[5], strides[4];  // innermost first; bytes, of all but the innermost
  unsigned box[3], swizzle, item;  // of pixels: channels and pixels that a copy moves
  int pixels;              // whether it is one of pixels
  int lower[2], upper[2];  // of pixels: corners of the box of an image that copies walk through
  int buffer;
};
enum CrossfuseElement : int { CROSSFUSE_F16, CROSSFUSE_BF16, CROSSFUSE_E4M3, CROSSFUSE_E5M2 };
struct CrossfuseKernel {
  const char* symbol;
  void (*call)(void* const* pointers);
  unsigned pointers;
};

// How an access to a flag orders others; a weak one is an ordinary load.
enum CrossfuseOrder : int {
  CROSSFUSE_WEAK,
  CROSSFUSE_RELAXED,
  CROSSFUSE_ACQUIRE,
  CROSSFUSE_RELEASE,
  CROSSFUSE_ACQ_REL,
};

// For which threads it does: the order of emu::Scope.
enum CrossfuseScope : int { CROSSFUSE_CTA, CROSSFUSE_CLUSTER, CROSSFUSE_GPU, CROSSFUSE_SYS };

// Which memory a fence is about.
enum CrossfuseSpace : int { CROSSFUSE_ALL, CROSSFUSE_SHARED, CROSSFUSE_GLOBAL };

// Which CrossfuseIndex to ask for.
enum CrossfuseWhich : int {
  CROSSFUSE_THREAD_INDEX,
  CROSSFUSE_BLOCK_INDEX,
  CROSSFUSE_BLOCK_EXTENT,
  CROSSFUSE_GRID_EXTENT,
  CROSSFUSE_CTA_IN_CLUSTER,
  CROSSFUSE_CLUSTER_EXTENT,
  CROSSFUSE_CLUSTER_INDEX,
  CROSSFUSE_CLUSTER_GRID,
};

extern "C" {
// The value never changes within one CUDA thread, so calls may be merged (attribute const).
CrossfuseIndex crossfuse_emulate_index(int which) __attribute__((const));
unsigned crossfuse_emulate_cluster_rank() __attribute__((const));
unsigned crossfuse_emulate_thread_rank() __attribute__((const));

void* crossfuse_emulate_dynamic_shared(unsigned long alignment);
void* crossfuse_emulate_static_shared(int id, unsigned long bytes, unsigned long alignment,
                                      const char* name);

void crossfuse_emulate_cta_barrier();
void crossfuse_emulate_cluster_arrive(int relaxed);
void crossfuse_emulate_cluster_wait();

void crossfuse_emulate_warp_sync(unsigned mask);
unsigned long long crossfuse_emulate_warp_shuffle(unsigned mask, unsigned long long value,
                                                  unsigned source_lane);
unsigned crossfuse_emulate_warp_ballot(unsigned mask, int predicate);
void crossfuse_emulate_warp_multiply(int element, float* sum0, float* sum1, float* sum2, float* sum3,
                                     unsigned low, unsigned low_behind, unsigned high,
                                     unsigned high_behind, unsigned right, unsigned right_behind);
unsigned crossfuse_emulate_warp_transpose(unsigned word);
unsigned crossfuse_emulate_active_mask();

unsigned crossfuse_emulate_shared_address(const void* pointer);
unsigned crossfuse_emulate_map_rank(unsigned address, unsigned rank);
CrossfuseWide crossfuse_emulate_remote_load(unsigned address, unsigned bytes);
void crossfuse_emulate_remote_store(unsigned address, unsigned bytes, CrossfuseWide value);

void crossfuse_emulate_mbarrier_init(unsigned address, unsigned count);
// What the thread has initialised is known behind the cluster barriers that follow.
void crossfuse_emulate_fence_initialised();
// `scope` is a CrossfuseScope; or below 0, of an arrival that releases nothing.
void crossfuse_emulate_mbarrier_arrive(unsigned address, unsigned count, unsigned bytes, int scope);
void crossfuse_emulate_mbarrier_wait(unsigned address, unsigned parity, int scope);
// Whether a first phase is complete: now; or after a wait that may end before; or which of two is.
unsigned crossfuse_emulate_mbarrier_test(unsigned address, int scope);
unsigned crossfuse_emulate_mbarrier_try(unsigned address, int scope);
unsigned crossfuse_emulate_mbarrier_either(unsigned address, unsigned other, int scope);
// `ranks` are the receiving CTAs as bits, or -1 for this CTA alone.
// `place` are `rank` coordinates, innermost first.
void crossfuse_emulate_tma_load(unsigned destination, const void* map, const int* place,
                                unsigned rank, unsigned barrier, int ranks);
// The same of pixels: from the channel and the pixel (x, y) of the image on, at these offsets.
void crossfuse_emulate_tma_load_pixels(unsigned destination, const void* map, int channel, int x,
                                       int y, int image, unsigned barrier, unsigned across,
                                       unsigned down, int ranks);
void crossfuse_emulate_tma_store(const void* map, const int* place, unsigned rank,
                                 unsigned source);
// The same of float32, added to what is there.
// Stores that complete bytes of an mbarrier, both in the same CTA; and reads of what they stored.
void crossfuse_emulate_store_async(unsigned address, const void* values, unsigned bytes,
                                   unsigned barrier);
// A bulk copy from this CTA's shared memory, which completes bytes of an mbarrier where it goes to.
void crossfuse_emulate_load_shared(unsigned address, void* values, unsigned bytes);
void crossfuse_emulate_bulk_commit();
void crossfuse_emulate_grid_wait();
void crossfuse_emulate_launch_dependents();
// `only_reads`: until shared memory is free, though what was read may still land.
void crossfuse_emulate_bulk_wait(unsigned pending, int only_reads);
void crossfuse_emulate_fence_async(int space);
void crossfuse_emulate_named_barrier(unsigned id, unsigned threads);
// The same, without waiting for the others.
void crossfuse_emulate_named_arrive(unsigned id, unsigned threads);
void crossfuse_emulate_store_matrices(unsigned address, const unsigned* registers, unsigned count);
// An ordinary store of neighbours by one thread.
void crossfuse_emulate_store_shared(unsigned address, const float* values, unsigned bytes);
// The addresses of the n / 2 accumulators of a thread follow.
void crossfuse_emulate_wgmma(unsigned n, unsigned k, int left_type, int right_type,
                             int right_is_transposed, unsigned long long left,
                             unsigned long long right, unsigned keep, ...);
// The same, with four registers of each thread as the left operand.
void crossfuse_emulate_wgmma_registers(unsigned n, unsigned k, int left_type, int right_type,
                                       int right_is_transposed, unsigned* a, unsigned* b,
                                       unsigned* c, unsigned* d, unsigned long long right,
                                       unsigned keep, ...);
void crossfuse_emulate_wgmma_fence();
void crossfuse_emulate_wgmma_commit();
void crossfuse_emulate_wgmma_wait(unsigned pending);

// Flags in global memory, by which CTAs of different clusters wait for each other.
unsigned crossfuse_emulate_flag_load(const void* flag, int order, int scope);
void crossfuse_emulate_flag_store(void* flag, unsigned value, int order, int scope);
unsigned crossfuse_emulate_flag_add(void* flag, unsigned value, int order, int scope);

// Orders relaxed accesses to flags, and atomics, as a release before and an acquire after them.
void crossfuse_emulate_fence_memory();

// Notes a read-modify-write of `bytes` at `pointer`; the caller then does it.
void crossfuse_emulate_atomic(void* pointer, unsigned bytes);
void crossfuse_emulate_copy(void* to, const void* from, unsigned long bytes);
void crossfuse_emulate_fill(void* to, int value, unsigned long bytes);
[[noreturn]] void crossfuse_emulate_trap();
}
