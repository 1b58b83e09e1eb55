// Fibers: one for each CUDA thread of the running clusters.
#pragma once
#include <random>

#include "state.h"

namespace emu {

extern std::mt19937_64 random_source;

// Leaves the current fiber until `wake`; `wait` and the site say why, for reports.
void block(Wait wait, Site site);
void wake(Thread& thread);
// Lets others run, or only now and then, where hardware would too.
void yield(Site site);
void pause(Site site);
// Rounds of the scheduler that what runs beside the threads takes: mostly few, now and then many.
unsigned random_delay();
// Runs all clusters of a launch, in random order or, of a cooperative launch, at the same time.
void run_launch(const Launch& launch, const CrossfuseKernel& kernel);
// Runs launches as a chain, each with all of its clusters at the same time: those that start early begin
// while launches before them run; at once, if they are eager.
void run_chain(const std::vector<Launch>& launches, const CrossfuseKernel* kernels, bool eager);
// How many launches ran at the same time at most.
size_t most_launches_at_once();
// Gives lanes that ask for the active mask their answer once nobody else in the warp can run.
bool answer_active_masks();
void lane_finished(Thread& thread);
// Meets the lanes of `mask` and returns their values, indexed by lane; lanes outside the mask read
// as all ones, which no correct kernel uses. The values last until two meetings later.
const uint64_t* meet(unsigned mask, uint64_t value, Site site, bool orders);
void free_meetings(Warp& warp);
// Nothing can run: reports why, and ends the run.
[[noreturn]] void explain_standstill();

}  // namespace emu
