#include "guarantees.h"

#include "findings.h"

namespace emu {

namespace {
uint64_t sum = 0;

// SplitMix64: equal sums of mixed numbers are equal numbers, but for chance.
uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
  value = (value ^ value >> 27) * 0x94d049bb133111ebu;
  return value ^ value >> 31;
}

// Copies in the first so many groups that a thread has committed.
uint64_t copies_in(const Thread& thread, unsigned groups) {
  return groups ? thread.store_groups[groups - 1] : 0;
}
}  // namespace

uint64_t guarantee_of(const Thread& thread) {
  if (!notes_uses()) return 0;
  uint64_t all = mixed(uint64_t(thread.cta->linear) << kThreadBits | thread.index());
  all = mixed(all ^ thread.ended_products);
  all = mixed(all ^ copies_in(thread, thread.read_stores));
  return mixed(all ^ copies_in(thread, thread.landed_stores));
}

void note_guarantee(uint64_t guarantee) { sum += guarantee; }
uint64_t sum_of_guarantees() { return sum; }

}  // namespace emu
