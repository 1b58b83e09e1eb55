#include "schedule.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <ucontext.h>

#include "additions.h"
#include "async.h"
#include "memory.h"
#include "repeats.h"
#include "shadow.h"

namespace emu {

Device device;
std::vector<Buffer> buffers;
std::mt19937_64 random_source;

namespace {
jmp_buf scheduler;
const CrossfuseKernel* kernel = nullptr;
std::vector<void*> pointers;
unsigned retries = 0;  // of pollers, since anything else happened

void fiber_main() {
  kernel->call(pointers.data());
  check_uses_at_end();
  check_stores_at_end();
  settle();
  Thread& thread = *device.current;
  thread.wait = Wait::kFinished;
  Cluster& cluster = *thread.cta->cluster;
  if (--cluster.live == 0) device.ended.push_back(&cluster);
  lane_finished(thread);
  _longjmp(scheduler, 1);
}

// makecontext only enters a fiber; later switches are _setjmp/_longjmp, which make no system call.
void enter(Thread& thread, unsigned fiber) {
  thread.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack_of(fiber);
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, fiber_main, 0);
  setcontext(&context);
}

void resume(Thread& thread) {
  device.current = &thread;
  if (_setjmp(scheduler) == 0) {
    if (thread.started) _longjmp(thread.context, 1);
    unsigned index = thread.index();
    enter(thread, thread.cta->window * device.launch.threads() + index);
  }
  device.current = nullptr;
}

CrossfuseIndex unflatten(unsigned linear, const CrossfuseIndex& size) {
  return {linear % size.x, linear / size.x % size.y, linear / size.x / size.y};
}

void make_cta(Cta& cta, unsigned window, std::vector<Thread>& threads) {
  const Launch& launch = device.launch;
  unsigned rank = window % launch.ctas();
  cta.rank = rank;
  cta.window = window;
  cta.cluster = &device.clusters[window / launch.ctas()];
  cta.warps.resize((launch.threads() + kWarp - 1) / kWarp);
  for (unsigned index = 0; index < launch.threads(); ++index) {
    Thread& thread = threads[window * launch.threads() + index];
    thread.id = static_cast<uint16_t>(rank << kThreadBits | index);
    thread.lane = index % kWarp;
    thread.thread_index = unflatten(index, launch.block);
    thread.cta_in_cluster = unflatten(rank, launch.cluster);
    thread.cta = &cta;
    thread.warp = &cta.warps[index / kWarp];
    thread.warp->lanes.push_back(&thread);
    cta.threads.push_back(&thread);
  }
}

void start_thread(Thread& thread, const CrossfuseIndex& block) {
  thread.started = false;
  thread.wait = Wait::kNone;
  thread.cta_epoch = thread.warp_epoch = 0;
  thread.arrived = thread.waited = thread.acquired = 0;
  memset(thread.seen, 0, sizeof thread.seen);
  thread.met = nullptr;
  thread.bulk_groups = thread.last_store = thread.read_stores = thread.landed_stores = 0;
  thread.stores = 0;
  thread.store_groups.clear();
  thread.products = thread.ended_products = 0;
  thread.product_groups.clear();
  thread.registers = Registers();
  thread.relaxed.clear();
  thread.touched.clear();
  thread.makes_barriers = false;
  thread.flag = nullptr;
  thread.polls = 0;
  thread.clock = thread.behind_fence = thread.before_fence = Clock();
  thread.time = 1;
  thread.last_access = 0;
  thread.loads = 0;
  thread.block_index = block;
  device.ready.push_back(&thread);
}

void start_cta(Cta& cta) {
  const Launch& launch = device.launch;
  CrossfuseIndex in = unflatten(cta.rank, launch.cluster), cluster = cta.cluster->index;
  CrossfuseIndex block{cluster.x * launch.cluster.x + in.x, cluster.y * launch.cluster.y + in.y,
                       cluster.z * launch.cluster.z + in.z};
  cta.linear = block.x + launch.grid.x * (block.y + launch.grid.y * block.z);
  cta.at_barrier = 0;
  for (Warp& warp : cta.warps) {
    free_meetings(warp);
    warp.finished = 0;
    warp.cluster_phase = 0;
  }
  for (Thread* thread : cta.threads) start_thread(*thread, block);
}

// Sets every thread and barrier of a cluster back to how it starts; `linear` is its place in the
// grid.
void start_cluster(Cluster& cluster, uint32_t linear) {
  const Launch& launch = device.launch;
  const CrossfuseIndex clusters{launch.grid.x / launch.cluster.x, launch.grid.y / launch.cluster.y,
                                launch.grid.z / launch.cluster.z};
  cluster.id = ++device.last_cluster;
  device.linear_cluster.push_back(linear);
  cluster.index = unflatten(linear, clusters);
  cluster.arrivals.assign(2, 0);
  cluster.released.assign(2, Clock());
  cluster.relaxed.assign(2, false);
  cluster.live = launch.ctas() * launch.threads();
  for (Cta& cta : ctas_of(cluster)) start_cta(cta);
}

void check_ended() {
  for (const Cluster* cluster : device.ended) {
    check_copies_at_end(*cluster);
    check_barriers_at_end(*cluster);
    for (const Cta& cta : ctas_of(*cluster)) check_exit(cta);
    check_pushes_at_end(*cluster);
  }
  device.ended.clear();
}

// Finds somebody who can go on although nobody is ready.
void stir() {
  // A poller may have read again what it need not wait for; one that waits comes back soon.
  constexpr unsigned kMostRetries = 16;
  // Whoever helps looks at a flag until patience ends, and then goes on.
  constexpr unsigned kMostWithHelp = 4096;
  const unsigned most = device.launch.helps ? kMostWithHelp : kMostRetries;
  if (advance_copies(true) || answer_active_masks()) return;
  if (++retries > most || !wake_pollers(true)) explain_standstill();
}

// Of those that a thread has woken, some run in the same round, at any place of what is left of it.
void admit(size_t first, std::vector<Thread*>& round, size_t next, const Thread& waker) {
  size_t later = first;
  for (size_t each = first; each < device.ready.size(); ++each) {
    Thread* woken = device.ready[each];
    const uint64_t chance = woken == &waker ? 0 : random_source();
    if (chance % 4 == 0) {
      device.ready[later++] = woken;
      continue;
    }
    round.push_back(woken);
    std::swap(round.back(), round[next + chance / 4 % (round.size() - next)]);
  }
  device.ready.resize(later);
}

// Runs clusters until all have ended; `order` are their places in the grid.
void run_clusters(const uint32_t* order) {
  clear_barriers();
  clear_copies();
  clear_products();
  clear_tile_reads();
  clear_named_barriers();
  clear_flags();
  clear_sums();
  clear_repeats();
  poison_windows();
  for (Cluster& cluster : device.clusters) start_cluster(cluster, *order++);
  std::vector<Thread*> round;
  size_t running = device.clusters.size();
  while (running) {
    advance_copies(false);
    advance_products();
    wake_pollers(false);
    if (device.ready.empty()) stir();
    round.swap(device.ready);
    std::shuffle(round.begin(), round.end(), random_source);
    bool moved = false;
    for (size_t next = 0; next < round.size();) {
      Thread* thread = round[next++];
      const size_t woken = device.ready.size();
      resume(*thread);
      admit(woken, round, next, *thread);
      // The lanes of a warp may vote on what each has read: that alone gets nobody further.
      moved |= thread->wait != Wait::kFlag && thread->wait != Wait::kWarp &&
               thread->wait != Wait::kLook;
    }
    round.clear();
    if (moved) {
      retries = 0;
      wake_voters();
    }
    running -= device.ended.size();
    check_ended();
  }
}
}  // namespace

void block(Wait wait, Site site) {
  settle();
  Thread& thread = *device.current;
  bool polls_on = wait == Wait::kNone || wait == Wait::kFlag || wait == Wait::kWarp;
  if (!polls_on) thread.polls = 0;
  thread.wait = wait;
  thread.wait_site = site;
  if (_setjmp(thread.context) == 0) _longjmp(scheduler, 1);
}

void yield(Site site) {
  device.ready.push_back(device.current);
  block(Wait::kNone, site);
}

void pause(Site site) {
  device.current->polls = 0;
  if (random_source() % 4 == 0) yield(site);
}

unsigned random_delay() {
  uint64_t number = random_source();
  return static_cast<unsigned>(number % 4 ? number / 4 % 6 : number / 4 % 64);
}

void wake(Thread& thread) {
  thread.wait = Wait::kNone;
  device.ready.push_back(&thread);
}

namespace {
void bind_arguments() {
  pointers.clear();
  for (int index : device.launch.arguments) {
    if (index == kRowCount) {
      pointers.push_back(&device.launch.rows);
      continue;
    }
    if (index >= 0) {
      pointers.push_back(buffers[index].region.base);
      continue;
    }
    CUtensorMap& map = device.launch.maps[-1 - index];
    map.base = buffers[map.buffer].region.base;
    pointers.push_back(&map);
  }
}

// Makes room for as many clusters as run at the same time.
void make_clusters(size_t count, std::vector<Thread>& threads) {
  const unsigned size = device.launch.ctas();
  const auto ctas = static_cast<unsigned>(count * size);
  threads.resize(size_t(ctas) * device.launch.threads());
  device.clusters.assign(count, Cluster());
  for (size_t i = 0; i < count; ++i) device.clusters[i].first = static_cast<unsigned>(i * size);
  device.ctas.assign(ctas, Cta());
  for (Cta& cta : device.ctas) {
    make_cta(cta, static_cast<unsigned>(&cta - device.ctas.data()), threads);
  }
  create_windows(ctas);
  create_stacks(ctas * device.launch.threads());
}
}  // namespace

// The clusters before are over, as if they were of another launch: whoever makes what a late one
// makes, too, stores the same bits, which is no race here. Together nobody makes it twice.
void begin_alone() {
  device.first_cluster = device.last_cluster + 1;
  device.linear_cluster.clear();
}

void run_launch(const Launch& launch, const CrossfuseKernel& which) {
  kernel = &which;
  device.launch = launch;
  device.first_cluster = device.last_cluster + 1;
  device.linear_cluster.clear();
  device.arrays.assign(1, SharedArray());
  device.dynamic_offset = 0;
  device.shared_end = kWindowStart;
  bind_arguments();

  const size_t clusters = size_t(launch.grid.x) * launch.grid.y * launch.grid.z / launch.ctas();
  const size_t together = launch.cooperative && !launch.alone ? clusters : 1;
  std::vector<Thread> threads;
  make_clusters(together, threads);
  std::vector<uint32_t> order(clusters);
  for (size_t i = 0; i < clusters; ++i) order[i] = static_cast<uint32_t>(i);
  std::shuffle(order.begin(), order.end(), random_source);
  for (size_t i = 0; i < clusters; i += together) {
    if (launch.alone) begin_alone();
    run_clusters(&order[i]);
  }
  for (Cta& cta : device.ctas) {
    for (Warp& warp : cta.warps) free_meetings(warp);
  }
}

}  // namespace emu
