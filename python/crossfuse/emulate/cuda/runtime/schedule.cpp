#include "schedule.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <ucontext.h>

#include "async.h"
#include "memory.h"

namespace emu {

Device device;
std::vector<Buffer> buffers;
std::mt19937_64 random_source;

namespace {
jmp_buf scheduler;
const CrossfuseKernel* kernel = nullptr;
std::vector<void*> pointers;

void fiber_main() {
  kernel->call(pointers.data());
  Thread& thread = *device.current;
  thread.wait = Wait::kFinished;
  --device.live;
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
    enter(thread, thread.cta->rank * device.launch.threads() + index);
  }
  device.current = nullptr;
}

CrossfuseIndex unflatten(unsigned linear, const CrossfuseIndex& size) {
  return {linear % size.x, linear / size.x % size.y, linear / size.x / size.y};
}

void make_cta(Cta& cta, unsigned rank, std::vector<Thread>& threads) {
  const Launch& launch = device.launch;
  cta.rank = rank;
  cta.warps.resize((launch.threads() + kWarp - 1) / kWarp);
  for (unsigned index = 0; index < launch.threads(); ++index) {
    Thread& thread = threads[rank * launch.threads() + index];
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

// Sets every thread and barrier back to how a cluster starts; `linear` is its place in the grid.
void start_cluster(uint32_t linear) {
  const Launch& launch = device.launch;
  const CrossfuseIndex clusters{launch.grid.x / launch.cluster.x, launch.grid.y / launch.cluster.y,
                                launch.grid.z / launch.cluster.z};
  ++device.cluster;
  device.linear_cluster.push_back(linear);
  device.cluster_index = unflatten(linear, clusters);
  device.arrivals.assign(2, 0);
  device.live = launch.ctas() * launch.threads();
  for (Cta& cta : device.ctas) {
    CrossfuseIndex in = unflatten(cta.rank, launch.cluster);
    CrossfuseIndex block{device.cluster_index.x * launch.cluster.x + in.x,
                         device.cluster_index.y * launch.cluster.y + in.y,
                         device.cluster_index.z * launch.cluster.z + in.z};
    cta.linear = block.x + launch.grid.x * (block.y + launch.grid.y * block.z);
    cta.at_barrier = 0;
    cta.touched = LastTouch();
    for (Warp& warp : cta.warps) {
      free_meetings(warp);
      warp.finished = 0;
      warp.cluster_phase = 0;
    }
    for (Thread* thread : cta.threads) {
      thread->started = false;
      thread->wait = Wait::kNone;
      thread->cta_epoch = thread->warp_epoch = 0;
      thread->arrived = thread->waited = thread->acquired = 0;
      memset(thread->seen, 0, sizeof thread->seen);
      thread->bulk_groups = 0;
      thread->products = 0;
      thread->product_groups.clear();
      thread->stored.clear();
      thread->fenced.clear();
      thread->block_index = block;
      device.ready.push_back(thread);
    }
  }
  clear_barriers();
  clear_copies();
  clear_products();
  clear_visibility();
  clear_named_barriers();
  poison_windows();
}

// A CTA may exit only when nobody can touch its shared memory any more: after a cluster barrier
// that the last remote access precedes.
void check_exits() {
  for (const Cta& cta : device.ctas) {
    if (!cta.touched.any) continue;
    uint16_t waited = 0;
    for (const Thread* thread : cta.threads) waited = std::max(waited, thread->waited);
    const LastTouch& last = cta.touched;
    if (waited > last.arrived || !is_news("early-exit", last.site, kNoSite)) continue;
    Access access;
    access.cluster = device.cluster;
    access.thread = last.thread;
    report({"early-exit", shared_place(last.offset), last.site, kNoSite,
            static_cast<int>(cta.linear), -1,
            format("CTA %u (rank %u) may exit while %s touches its shared memory: it waits at "
                   "%u cluster barriers, and needs one after this access",
                   cta.linear, cta.rank, who(access).c_str(), waited)});
  }
}

void run_cluster() {
  std::vector<Thread*> round;
  while (device.live) {
    bool stuck = device.ready.empty();
    advance_copies(stuck);
    if (device.ready.empty() && stuck && !advance_copies(true) && !answer_active_masks()) {
      explain_standstill();
    }
    round.swap(device.ready);
    std::shuffle(round.begin(), round.end(), random_source);
    for (Thread* thread : round) resume(*thread);
    round.clear();
  }
  check_copies_at_end();
  check_barriers_at_end();
  check_exits();
}
}  // namespace

void block(Wait wait, Site site) {
  Thread& thread = *device.current;
  thread.wait = wait;
  thread.wait_site = site;
  if (_setjmp(thread.context) == 0) _longjmp(scheduler, 1);
}

void pause(Site site) {
  if (random_source() % 4) return;
  device.ready.push_back(device.current);
  block(Wait::kNone, site);
}

void wake(Thread& thread) {
  thread.wait = Wait::kNone;
  device.ready.push_back(&thread);
}

void run_launch(const Launch& launch, const CrossfuseKernel& which) {
  kernel = &which;
  device.launch = launch;
  device.first_cluster = device.cluster + 1;
  device.linear_cluster.clear();
  device.arrays.assign(1, SharedArray());
  device.dynamic_offset = 0;
  device.shared_end = kWindowStart;
  pointers.clear();
  for (int index : launch.arguments) {
    if (index >= 0) {
      pointers.push_back(buffers[index].region.base);
      continue;
    }
    CUtensorMap& map = device.launch.maps[-1 - index];
    map.base = buffers[map.buffer].region.base;
    pointers.push_back(&map);
  }

  std::vector<Thread> threads(launch.ctas() * launch.threads());
  device.ctas.assign(launch.ctas(), Cta());
  for (unsigned rank = 0; rank < launch.ctas(); ++rank) make_cta(device.ctas[rank], rank, threads);
  create_windows(launch.ctas());
  create_stacks(launch.ctas() * launch.threads());

  size_t clusters = size_t(launch.grid.x) * launch.grid.y * launch.grid.z / launch.ctas();
  std::vector<uint32_t> order(clusters);
  for (size_t i = 0; i < clusters; ++i) order[i] = static_cast<uint32_t>(i);
  std::shuffle(order.begin(), order.end(), random_source);
  for (uint32_t linear : order) {
    start_cluster(linear);
    run_cluster();
  }
  for (Cta& cta : device.ctas) {
    for (Warp& warp : cta.warps) free_meetings(warp);
  }
}

}  // namespace emu
