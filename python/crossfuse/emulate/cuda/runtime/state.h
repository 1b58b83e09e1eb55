// State of the emulated device: threads, warps, CTAs, the running clusters, memory regions.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "abi.h"
#include "clocks.h"
#include "registers.h"

namespace emu {

constexpr unsigned kWarp = 32;
constexpr unsigned kWarpgroup = 128;
constexpr unsigned kThreadBits = 10;  // at most 1024 threads in a CTA
constexpr unsigned kNoSite = 0;

// A site is the return address of a hook: a place in the generated code. The executable is linked
// at fixed low addresses (-no-pie), so 31 bits hold it and the top bit can mark atomics.
using Site = uint32_t;
constexpr Site kAtomic = 0x80000000u;
// Of an extern "C" function that generated code calls.
#define CROSSFUSE_SITE \
  static_cast<emu::Site>(reinterpret_cast<uintptr_t>(__builtin_return_address(0)))

// When and by whom a byte was touched; enough to decide happens-before. `cluster` 0 means never.
struct Access {
  Access() : agent(0), time(0) {}
  Site site = kNoSite;
  uint32_t cluster = 0;
  union {
    uint32_t cta_epoch = 0;  // CTA barriers the thread had passed
    uint32_t counted_in;     // of what an mbarrier counts: the window where that is
  };
  union {
    uint32_t warp_epoch = 0;  // __syncwarps and named barriers the thread had passed
    uint32_t counted_by;      // the mbarrier's number there
  };
  uint16_t arrived = 0;     // cluster barriers the thread had arrived at
  uint16_t thread = 0;      // CTA rank << kThreadBits | thread in the CTA
  uint32_t agent : 3, time : 29;  // an Agent and its count; only where clocks run
  unsigned rank() const { return thread >> kThreadBits; }
  unsigned index() const { return thread & ((1u << kThreadBits) - 1); }
};

struct Cell {
  Access write;
  Access reads[2];
};

// A contiguous piece of device memory: one argument, or the shared memory window of one CTA.
struct Region {
  int argument = -1;  // position in Job::buffers, or -1 for shared memory
  bool writable = true;
  bool initialised = false;  // holds zeros before anything writes it
  uint8_t* base = nullptr;
  size_t bytes = 0;
  Cell* cells = nullptr;  // null: nobody may write it, so only bounds are checked
  int granule = 4;        // log2 of the bytes of one cell; halves itself when an access needs it
  // By the running launch, and by those of this run before it.
  bool read = false, written = false, was_read = false, was_written = false;
};

struct SharedArray {
  std::string name;
  size_t offset = 0, bytes = 0;
  bool placed = false;
};

enum class Wait : uint8_t {
  kNone, kCta, kCluster, kWarp, kActiveMask, kPhase, kNamed, kCopies, kProducts, kFlag, kLook,
  kGrid, kFinished
};

struct Cluster;
struct Cta;
struct Grid;
struct Warp;

// The latest access of a thread to another CTA: one that the exit of that CTA must wait for.
struct LastTouch {
  bool any = false;
  uint16_t arrived = 0;  // cluster barriers that the thread had arrived at
  Site site = kNoSite;
  size_t offset = 0;
};

constexpr size_t kNoBarrier = ~size_t(0);

struct Thread {
  unsigned index() const { return id & ((1u << kThreadBits) - 1); }

  jmp_buf context;
  bool started = false;
  Wait wait = Wait::kNone;
  Site wait_site = kNoSite;
  uint16_t id = 0;  // as in Access::thread
  unsigned lane = 0;
  uint32_t cta_epoch = 0, warp_epoch = 0;
  Site cta_barrier = kNoSite;  // the CTA barrier that it came to last
  uint16_t arrived = 0, waited = 0;
  uint16_t acquired = 0;  // cluster barriers whose release this thread has seen, also through others
  std::vector<uint16_t> relaxed;   // those that it arrived at without release
  std::vector<LastTouch> touched;  // its latest accesses to its peers, by their rank
  uint32_t seen[kWarp] = {};
  Shared met;  // as `seen`, of all threads of its CTA, by named barriers
  unsigned active_mask = 0;
  CrossfuseIndex thread_index{}, block_index{}, cta_in_cluster{};
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  // Of what runs beside the threads (async.h).
  bool makes_barriers = false;  // has initialised some mbarriers
  size_t barrier = 0;       // offset of the mbarrier it waits at
  size_t other = kNoBarrier;  // of one that it waits at as well
  unsigned parity = 0;      // of the phase it waits for
  unsigned bulk_groups = 0;  // committed groups of copies
  // The group of its last copy; the last ones that it knows have been read, and have landed.
  unsigned last_store = 0, read_stores = 0, landed_stores = 0;
  Site store_site = kNoSite;  // of that copy
  unsigned stores = 0;        // copies to global memory that it has issued
  std::vector<unsigned> store_groups;  // those before each commit
  size_t products = 0, ended_products = 0;  // issued products; those that it has waited for
  std::vector<size_t> product_groups;  // products issued before each commit
  Registers registers;                 // that they use
  // Of the flag in global memory that it read last, and how often in a row without any change.
  const uint32_t* flag = nullptr;
  uint32_t flag_value = 0;
  unsigned polls = 0;
  // Of what it knows of others, where clocks run: its own count, and that of its loads by TMA.
  Clock clock;
  Clock behind_fence;  // what its latest memory fence publishes by the relaxed writes after it
  Clock before_fence;  // what its relaxed reads have found, for its next fence
  uint32_t time = 1, loads = 0;
  uint32_t last_access = 0;  // its count then
};

// Lanes that meet in one warp-wide operation. Values are double buffered: a lane that is a step
// ahead writes the other half.
struct Meeting {
  bool orders = false;  // the memory of its lanes, as __syncwarp does
  unsigned mask = 0, arrived = 0;
  unsigned parity = 0;
  uint64_t values[2][kWarp] = {};
};

struct Warp {
  std::vector<Thread*> lanes;
  std::vector<Meeting*> meetings;
  unsigned finished = 0;
  uint16_t cluster_phase = 0;  // last cluster barrier some lane arrived at, where, and which lane
  Site cluster_site = kNoSite;
  const Thread* cluster_thread = nullptr;
};

struct Cta {
  unsigned rank = 0, linear = 0;
  unsigned window = 0;  // its place in Device::ctas, and which shared memory window is its own
  Cluster* cluster = nullptr;
  bool lets_begin = false;  // the next launch, for its part
  std::vector<Thread*> threads;
  std::vector<Warp> warps;
  unsigned at_barrier = 0;
  Region shared;
};

struct Cluster {
  Grid* grid = nullptr;
  uint32_t id = 0;     // as in Access::cluster; never reused
  unsigned first = 0;  // window of its CTA of rank 0; the others follow
  CrossfuseIndex index{};
  std::vector<unsigned> arrivals;  // arrivals[k]: threads that arrived at its barrier k (from 1)
  std::vector<Clock> released;     // by barrier, as well
  std::vector<bool> relaxed;       // whether somebody arrived at it without release
  unsigned live = 0;               // threads that have not finished
};

constexpr int kRowCount = -1000000;  // the argument that is the number of rows

struct Launch {
  int kernel = 0;
  // Clusters pass flags to one another, and clocks say what is ordered. All of them run at the same
  // time; of a launch that helps none needs another, and so they may run one after another, alone.
  bool cooperative = false, helps = false, alone = false;
  bool clocked = false;      // more than barriers orders accesses: clocks run
  bool early = false;        // may start before the launch before it is over
  int stream = 0;            // of a job with several of them, each a GPU's: launches of one follow each other
  CrossfuseIndex grid{}, block{}, cluster{};
  size_t dynamic_bytes = 0;
  int rows = 0;  // of this call, where there may be fewer
  std::vector<int> arguments;  // index of a buffer, of tensor map i as -1 - i, or kRowCount
  std::vector<CUtensorMap> maps;
  unsigned threads() const { return block.x * block.y * block.z; }
  unsigned ctas() const { return cluster.x * cluster.y * cluster.z; }
};

// What the emulation fills a buffer with, and what it does with it afterwards. Windows are what launches
// write for each other alone: nobody asks what they hold in the end, or whether all of it was written.
enum class Role : int { kInput, kOutput, kState, kWindow };

struct Buffer {
  std::string name;
  Role role = Role::kInput;
  size_t bytes = 0;
  unsigned item = 1;
  Region region;
};

// A launch, and what its clusters share. Several of a chain may run at the same time.
struct Grid {
  Launch launch;
  const CrossfuseKernel* kernel = nullptr;
  std::vector<void*> pointers;  // the arguments
  unsigned number = 0;          // of those that run at the same time, in their order
  unsigned first_cluster = 0, clusters = 0;    // in Device::clusters
  unsigned first_window = 0, first_fiber = 0;  // of its CTAs and threads
  std::vector<Thread> threads;
  std::vector<SharedArray> arrays;
  size_t dynamic_offset = 0, shared_end = 0;
  bool begun = false;
  bool waits = false;    // some thread has waited for the launch before
  bool touches = false;  // some thread has touched something before, which is reported
  unsigned letting = 0;  // CTAs that let the next launch begin
  size_t running = 0;    // clusters that have not ended
  Clock end;             // what launches behind it know, which run in one of several GPUs
  bool is_over() const { return begun && running == 0; }
};

// Where a cluster was, by its id.
struct Started {
  uint32_t linear = 0;  // position in its grid
  unsigned window = 0;  // of its first CTA
  Grid* grid = nullptr;
};

// Everything of the clusters that run now, and of the launches they belong to.
struct Device {
  bool streams = false;        // the job has several: flags are seen by the launches of all
  Grid* grid = nullptr;        // of the running thread, or of what else is looked at
  std::vector<Grid*> grids;    // all that run at the same time: one, or those of a chain
  uint32_t first_cluster = 1;  // clusters below it belong to finished launches
  uint32_t last_cluster = 0;   // the latest id given to a cluster
  std::vector<Started> started;   // by cluster id - first_cluster
  std::vector<Cluster> clusters;  // all that run at the same time: one, or those of the whole grids
  std::vector<Cta> ctas;          // of all of them, cluster after cluster
  std::vector<Cluster*> ended;    // all threads have finished, what is left in flight is unchecked
  std::vector<Thread*> ready;
  std::vector<Thread*> polling;   // blocked until a flag changes
  Thread* current = nullptr;
  Site last_site = kNoSite;  // of the latest access
};

extern Device device;
extern std::vector<Buffer> buffers;

struct CtaRange {
  Cta *first, *last;
  Cta* begin() const { return first; }
  Cta* end() const { return last; }
};
inline CtaRange ctas_of(const Cluster& cluster) {
  Cta* first = device.ctas.data() + cluster.first;
  return {first, first + cluster.grid->launch.ctas()};
}
inline CtaRange ctas_of(const Grid& grid) {
  Cta* first = device.ctas.data() + grid.first_window;
  return {first, first + grid.clusters * grid.launch.ctas()};
}
inline int stream_of(const Cta& cta) { return cta.cluster->grid->launch.stream; }
inline const Started& start_of(const Access& access) {
  return device.started[access.cluster - device.first_cluster];
}
// Turns to the launch of a cluster for a while.
class Turn {
 public:
  explicit Turn(const Cluster& cluster) : before(device.grid) { device.grid = cluster.grid; }
  ~Turn() { device.grid = before; }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Grid* before;
};
// The CTA of some rank in the cluster of the running thread.
inline Cta& ranked(unsigned rank) {
  return device.ctas[device.current->cta->cluster->first + rank];
}

}  // namespace emu
