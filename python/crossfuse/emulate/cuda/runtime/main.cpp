// Runs one job: a text file of settings, buffers and launches in the working directory, inputs and
// outputs as raw files beside it, findings as JSON lines.
#include <algorithm>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include "schedule.h"
#include "shadow.h"

extern "C" const CrossfuseKernel crossfuse_kernels[];
extern "C" const unsigned crossfuse_kernel_count;

namespace emu {
namespace {

struct Job {
  uint64_t seed = 0;
  unsigned orders = 1, limit = 1, seconds = 0;
  unsigned streams = 1;
  std::vector<Launch> launches;
};

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "%s\n", what);
  exit(3);
}

void read_index(FILE* file, CrossfuseIndex& index) {
  if (fscanf(file, "%u %u %u", &index.x, &index.y, &index.z) != 3) fail("bad job: extents");
}

void read_map(FILE* file, CUtensorMap& map) {
  bool good = fscanf(file, "%d %u", &map.buffer, &map.rank) == 2 && map.rank <= 5;
  for (unsigned i = 0; good && i < map.rank; ++i) good = fscanf(file, "%llu", &map.extents[i]) == 1;
  for (unsigned i = 1; good && i < map.rank; ++i) {
    good = fscanf(file, "%llu", &map.strides[i - 1]) == 1;
  }
  good = good && fscanf(file, "%u %u %u %u %u %d", &map.box[0], &map.box[1], &map.box[2],
                        &map.swizzle, &map.item, &map.pixels) == 6;
  if (good && map.pixels) {
    good = fscanf(file, "%d %d %d %d", &map.lower[0], &map.lower[1], &map.upper[0],
                  &map.upper[1]) == 4;
  }
  if (!good) fail("bad job: map");
}

Launch read_launch(FILE* file) {
  Launch launch;
  unsigned count = 0;
  int cooperative = 0, helps = 0, early = 0, clocked = 0;
  if (fscanf(file, "%d %d %d %d %d %d %d", &launch.kernel, &cooperative, &helps, &early, &clocked,
             &launch.rows, &launch.stream) != 7) {
    fail("bad job: launch");
  }
  launch.cooperative = cooperative || helps;
  launch.helps = helps != 0;
  launch.early = early != 0;
  launch.clocked = launch.cooperative || clocked;
  read_index(file, launch.grid);
  read_index(file, launch.block);
  read_index(file, launch.cluster);
  if (fscanf(file, "%zu %u", &launch.dynamic_bytes, &count) != 2) fail("bad job: launch");
  launch.arguments.resize(count);
  for (int& argument : launch.arguments) {
    if (fscanf(file, "%d", &argument) != 1) fail("bad job: arguments");
  }
  unsigned maps = 0;
  if (fscanf(file, "%u", &maps) != 1) fail("bad job: maps");
  launch.maps.resize(maps);
  for (CUtensorMap& map : launch.maps) read_map(file, map);
  if (crossfuse_kernels[launch.kernel].pointers != count) fail("argument count");
  return launch;
}

Job read_job() {
  FILE* file = fopen("job.txt", "r");
  if (!file) fail("no job.txt");
  Job job;
  unsigned count = 0, launches = 0;
  if (fscanf(file, "%" SCNu64 " %u %u %u %u %u %u", &job.seed, &job.orders, &job.limit,
             &job.seconds, &job.streams, &count, &launches) != 7) {
    fail("bad job: settings");
  }
  buffers.resize(count);
  for (Buffer& buffer : buffers) {
    int role = 0;
    char name[128];
    if (fscanf(file, "%127s %d %zu %u", name, &role, &buffer.bytes, &buffer.item) != 4) {
      fail("bad job: buffer");
    }
    buffer.name = name;
    buffer.role = static_cast<Role>(role);
  }
  while (launches--) job.launches.push_back(read_launch(file));
  fclose(file);
  return job;
}

void read_inputs() {
  for (size_t i = 0; i < buffers.size(); ++i) {
    create_buffer(static_cast<unsigned>(i));
    if (buffers[i].role != Role::kInput || !buffers[i].bytes) continue;
    FILE* file = fopen(format("input_%zu.bin", i).c_str(), "rb");
    if (!file || fread(buffers[i].region.base, 1, buffers[i].bytes, file) != buffers[i].bytes) {
      fail("cannot read an input");
    }
    fclose(file);
  }
}

void write_outputs(unsigned order) {
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].role != Role::kOutput) continue;
    FILE* file = fopen(format("output_%zu_%u.bin", i, order).c_str(), "wb");
    if (!file || fwrite(buffers[i].region.base, 1, buffers[i].bytes, file) != buffers[i].bytes ||
        fclose(file)) {
      fail("cannot write an output");
    }
  }
}

void compare_outputs(const std::vector<std::vector<uint8_t>>& first, unsigned order) {
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].role != Role::kOutput) continue;
    const uint8_t* now = buffers[i].region.base;
    size_t differing = 0, at = 0;
    for (size_t byte = 0; byte < buffers[i].bytes; byte += buffers[i].item) {
      if (memcmp(now + byte, first[i].data() + byte, buffers[i].item) == 0) continue;
      if (!differing++) at = byte;
    }
    if (differing) {
      report({"order-dependent", {static_cast<int>(i), "", static_cast<long>(at)}, kNoSite, kNoSite,
              -1, -1, format("%zu elements differ between thread orders 0 and %u", differing, order)});
    }
  }
}

// Launches that start early run beside those before them in every other order. In the first one it is
// looked at what launches before have touched, which is known once they are over. Where a launch helps,
// every other order is one in which its clusters run one after another.
bool runs_as_chain(const Job& job, unsigned order) {
  auto begins_early = [](const Launch& launch) { return launch.early; };
  auto helps = [](const Launch& launch) { return launch.helps; };
  const auto first = job.launches.begin(), last = job.launches.end();
  const bool turn = std::any_of(first, last, helps) ? order % 2 == 0 : order % 2 != 0;
  return order > 0 && turn && std::any_of(first + 1, last, begins_early);
}

void run_once(const Job& job, unsigned order) {
  random_source.seed(job.seed * 1000003u + order);
  clear_buffers_shadow();
  for (Buffer& buffer : buffers) {
    const bool poisoned = buffer.role == Role::kOutput || buffer.role == Role::kWindow;
    if (poisoned) memset(buffer.region.base, kPoison, buffer.bytes);
  }
  device.streams = job.streams > 1;
  if (device.streams) return run_chain(job.launches, crossfuse_kernels, order % 2 == 0);
  if (runs_as_chain(job, order)) {
    return run_chain(job.launches, crossfuse_kernels, order % 4 == 1 || order % 4 == 2);
  }
  for (const Launch& launch : job.launches) {
    start_launch_dependences(&launch == &job.launches.front(), launch.early);
    Launch now = launch;
    now.alone = launch.helps && order % 2 != 0;
    run_launch(now, crossfuse_kernels[launch.kernel]);
  }
}

void on_alarm(int) {
  report({"timeout", {}, device.last_site, kNoSite, current_cta(), current_thread(),
          "the emulation was still running when its time was up"});
  stop();
}

void run(const Job& job) {
  std::vector<std::vector<uint8_t>> first(buffers.size());
  for (unsigned order = 0; order < job.orders; ++order) {
    run_once(job, order);
    write_outputs(order);
    if (order == 0) {
      check_outputs();
      for (size_t i = 0; i < buffers.size(); ++i) {
        const Region& region = buffers[i].region;
        if (buffers[i].role != Role::kOutput) continue;
        first[i].assign(region.base, region.base + region.bytes);
      }
    } else {
      compare_outputs(first, order);
    }
    if (faults_count()) return;  // a wrong kernel needs no second opinion
  }
}

}  // namespace
}  // namespace emu

int main() {
  using namespace emu;
  Job job = read_job();
  open_findings("findings.jsonl", job.limit);
  create_arena(static_cast<unsigned>(buffers.size()));
  read_inputs();
  install_fault_handler();
  signal(SIGALRM, on_alarm);
  if (job.seconds) alarm(job.seconds);
  run(job);
  note_launches(most_launches_at_once());
  write_uses();
  return 0;
}
