// What releases tell of the copies and products that their thread has waited for. Asked for by the
// environment: a mutant of groups after which all releases tell of the same is no fault.
#pragma once
#include <cstdint>

namespace emu {

struct Thread;

// Whose copies and products are over, as a number, if a thread releases now.
uint64_t guarantee_of(const Thread& thread);
// Somebody learns of it: counted in the sum of a run, whatever the order of threads.
void note_guarantee(uint64_t guarantee);
uint64_t sum_of_guarantees();

}  // namespace emu
