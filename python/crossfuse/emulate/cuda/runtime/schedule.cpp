#include "schedule.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <ucontext.h>

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
unsigned retries = 0;  // of pollers, since anything else happened
size_t most_at_once = 0;
unsigned hesitation = 1;  // rounds of the scheduler before the next launch begins, on average

void fiber_main() {
  device.grid->kernel->call(device.grid->pointers.data());
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
  const Grid& grid = *(device.grid = thread.cta->cluster->grid);
  if (_setjmp(scheduler) == 0) {
    if (thread.started) _longjmp(thread.context, 1);
    const unsigned cta = thread.cta->window - grid.first_window;
    enter(thread, grid.first_fiber + cta * grid.launch.threads() + thread.index());
  }
  device.current = nullptr;
}

CrossfuseIndex unflatten(unsigned linear, const CrossfuseIndex& size) {
  return {linear % size.x, linear / size.x % size.y, linear / size.x / size.y};
}

// The CTA of some number among those of a launch that run at the same time.
void make_cta(Grid& grid, unsigned number) {
  const Launch& launch = grid.launch;
  Cta& cta = device.ctas[grid.first_window + number];
  unsigned rank = number % launch.ctas();
  cta.rank = rank;
  cta.window = grid.first_window + number;
  cta.cluster = &device.clusters[grid.first_cluster + number / launch.ctas()];
  cta.warps.resize((launch.threads() + kWarp - 1) / kWarp);
  for (unsigned index = 0; index < launch.threads(); ++index) {
    Thread& thread = grid.threads[number * launch.threads() + index];
    thread.wait = Wait::kFinished;
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
  const Launch& launch = cta.cluster->grid->launch;
  CrossfuseIndex in = unflatten(cta.rank, launch.cluster), cluster = cta.cluster->index;
  CrossfuseIndex block{cluster.x * launch.cluster.x + in.x, cluster.y * launch.cluster.y + in.y,
                       cluster.z * launch.cluster.z + in.z};
  cta.linear = block.x + launch.grid.x * (block.y + launch.grid.y * block.z);
  cta.at_barrier = 0;
  cta.lets_begin = false;
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
  const Launch& launch = cluster.grid->launch;
  const CrossfuseIndex clusters{launch.grid.x / launch.cluster.x, launch.grid.y / launch.cluster.y,
                                launch.grid.z / launch.cluster.z};
  cluster.id = ++device.last_cluster;
  device.started.push_back({linear, device.ctas[cluster.first].window, cluster.grid});
  cluster.index = unflatten(linear, clusters);
  cluster.arrivals.assign(2, 0);
  cluster.released.assign(2, Clock());
  cluster.relaxed.assign(2, false);
  cluster.live = launch.ctas() * launch.threads();
  for (Cta& cta : ctas_of(cluster)) start_cta(cta);
}

void check_ended() {
  for (const Cluster* cluster : device.ended) {
    const Turn turn(*cluster);
    check_copies_at_end(*cluster);
    check_barriers_at_end(*cluster);
    for (const Cta& cta : ctas_of(*cluster)) check_exit(cta);
    check_pushes_at_end(*cluster);
    for (Cta& cta : ctas_of(*cluster)) let_next_begin(cta);
    if (--cluster->grid->running == 0 && device.grids.size() > 1) end_launch(*cluster->grid);
  }
  device.ended.clear();
}

// Starts clusters of a launch; `order` are their places in the grid.
void begin(Grid& grid, const uint32_t* order) {
  grid.begun = true;
  grid.running = grid.clusters;
  for (unsigned i = 0; i < grid.clusters; ++i) {
    start_cluster(device.clusters[grid.first_cluster + i], *order++);
  }
  if (device.streams && !grid.launch.early) {
    for (Thread& thread : grid.threads) know_before(thread);
  }
  auto runs = [](const Grid* each) { return each->running > 0; };
  const size_t now = std::count_if(device.grids.begin(), device.grids.end(), runs);
  most_at_once = std::max(most_at_once, now);
}

// All places of a grid, in random order.
std::vector<uint32_t> shuffled(size_t clusters) {
  std::vector<uint32_t> order(clusters);
  for (size_t i = 0; i < clusters; ++i) order[i] = static_cast<uint32_t>(i);
  std::shuffle(order.begin(), order.end(), random_source);
  return order;
}

// Lets the next launch of a chain begin, or of one of its streams, if it may, at once or some time later.
// False if none begins.
bool begin_next(bool at_once) {
  auto begins = [](const Grid* each) { return !each->begun && may_begin(*each); };
  std::vector<Grid*> next;  // at most one of each stream
  std::copy_if(device.grids.begin(), device.grids.end(), std::back_inserter(next), begins);
  if (next.empty()) return false;
  if (!at_once && random_source() % hesitation) return false;
  Grid& grid = *next[next.size() > 1 ? random_source() % next.size() : 0];
  begin(grid, shuffled(grid.clusters).data());
  return true;
}

// Finds somebody who can go on although nobody is ready.
void stir() {
  // A poller may have read again what it need not wait for; one that waits comes back soon.
  constexpr unsigned kMostRetries = 16;
  // Whoever helps looks at a flag until patience ends, and then goes on.
  constexpr unsigned kMostWithHelp = 4096;
  auto helps = [](const Grid* each) { return each->launch.helps; };
  const bool any = std::any_of(device.grids.begin(), device.grids.end(), helps);
  const unsigned most = any ? kMostWithHelp : kMostRetries;
  if (advance_copies(true) || answer_active_masks() || begin_next(true)) return;
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

void forget_clusters() {
  clear_barriers();
  clear_copies();
  clear_products();
  clear_tile_reads();
  clear_named_barriers();
  clear_flags();
  clear_repeats();
  poison_windows();
}

bool is_any_left() {
  auto is_over = [](const Grid* each) { return each->is_over(); };
  return !std::all_of(device.grids.begin(), device.grids.end(), is_over);
}

// Runs clusters until all have ended.
void run_clusters() {
  std::vector<Thread*> round;
  while (is_any_left()) {
    begin_next(false);
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
void bind_arguments(Grid& grid) {
  grid.pointers.clear();
  for (int index : grid.launch.arguments) {
    if (index == kRowCount) {
      grid.pointers.push_back(&grid.launch.rows);
      continue;
    }
    if (index >= 0) {
      grid.pointers.push_back(buffers[index].region.base);
      continue;
    }
    CUtensorMap& map = grid.launch.maps[-1 - index];
    map.base = buffers[map.buffer].region.base;
    grid.pointers.push_back(&map);
  }
}

size_t clusters_of(const Launch& launch) {
  return size_t(launch.grid.x) * launch.grid.y * launch.grid.z / launch.ctas();
}

// The launch that follows those of Device::grids, with room for clusters that run at the same time.
std::unique_ptr<Grid> make_grid(const Launch& launch, const CrossfuseKernel& kernel, size_t clusters) {
  auto grid = std::make_unique<Grid>();
  grid->launch = launch;
  grid->kernel = &kernel;
  grid->clusters = static_cast<unsigned>(clusters);
  grid->threads = std::vector<Thread>(clusters * launch.ctas() * launch.threads());
  grid->arrays.assign(1, SharedArray());
  grid->shared_end = kWindowStart;
  if (!device.grids.empty()) {
    const Grid& before = *device.grids.back();
    grid->number = before.number + 1;
    grid->first_cluster = before.first_cluster + before.clusters;
    grid->first_window = before.first_window + before.clusters * before.launch.ctas();
    grid->first_fiber = before.first_fiber + static_cast<unsigned>(before.threads.size());
  }
  bind_arguments(*grid);
  device.grids.push_back(grid.get());
  return grid;
}

// Makes the clusters of all launches that run at the same time.
void make_clusters() {
  const Grid& last = *device.grids.back();
  const unsigned ctas = last.first_window + last.clusters * last.launch.ctas();
  device.clusters.assign(last.first_cluster + last.clusters, Cluster());
  device.ctas.assign(ctas, Cta());
  for (Grid* grid : device.grids) {
    for (unsigned i = 0; i < grid->clusters; ++i) {
      Cluster& cluster = device.clusters[grid->first_cluster + i];
      cluster.grid = grid;
      cluster.first = grid->first_window + i * grid->launch.ctas();
    }
    for (unsigned i = 0; i < grid->clusters * grid->launch.ctas(); ++i) make_cta(*grid, i);
  }
  create_windows(ctas);
  create_stacks(last.first_fiber + static_cast<unsigned>(last.threads.size()));
}

// The clusters before are over, as those of launches before are.
void begin_anew() {
  device.first_cluster = device.last_cluster + 1;
  device.started.clear();
}

void end_grids() {
  for (Cta& cta : device.ctas) {
    for (Warp& warp : cta.warps) free_meetings(warp);
  }
  device.grids.clear();
  device.grid = nullptr;
}
}  // namespace

void run_launch(const Launch& launch, const CrossfuseKernel& kernel) {
  begin_anew();
  const size_t clusters = clusters_of(launch);
  const size_t together = launch.cooperative && !launch.alone ? clusters : 1;
  const std::unique_ptr<Grid> grid = make_grid(launch, kernel, together);
  device.grid = grid.get();
  make_clusters();
  const std::vector<uint32_t> order = shuffled(clusters);
  for (size_t i = 0; i < clusters; i += together) {
    // Whoever makes what a late one makes, too, stores the same bits, which is no race then. Together
    // nobody makes it twice.
    if (launch.alone) begin_anew();
    forget_clusters();
    begin(*grid, &order[i]);
    run_clusters();
  }
  check_waits(*grid);
  end_grids();
}

void run_chain(const std::vector<Launch>& launches, const CrossfuseKernel* kernels, bool eager) {
  begin_anew();
  std::vector<std::unique_ptr<Grid>> grids;
  for (Launch launch : launches) {
    launch.cooperative = launch.clocked = true;
    grids.push_back(make_grid(launch, kernels[launch.kernel], clusters_of(launch)));
  }
  device.grid = grids.front().get();
  make_clusters();
  forget_clusters();
  hesitation = eager ? 1 : 8;
  run_clusters();
  end_grids();
}

size_t most_launches_at_once() { return most_at_once; }

}  // namespace emu
