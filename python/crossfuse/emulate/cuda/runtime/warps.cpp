// Warp-wide operations: lanes named by a mask meet, exchange 64-bit words, and are ordered.
#include <algorithm>

#include "device/small_float.h"
#include "findings.h"
#include "guarantees.h"
#include "schedule.h"

namespace emu {

namespace {

Meeting& meeting_of(Warp& warp, unsigned mask, bool orders) {
  for (Meeting* meeting : warp.meetings) {
    if (meeting->mask == mask && meeting->orders == orders) return *meeting;
  }
  warp.meetings.push_back(new Meeting);
  warp.meetings.back()->mask = mask;
  warp.meetings.back()->orders = orders;
  return *warp.meetings.back();
}

// Lanes that exist, are named, and have not exited: the hardware waits for these.
unsigned expected(const Warp& warp, unsigned mask) {
  unsigned existing = warp.lanes.size() == kWarp ? ~0u : (1u << warp.lanes.size()) - 1;
  return mask & existing & ~warp.finished;
}

void go_on(Warp& warp, Meeting& meeting) {
  for (Thread* lane : warp.lanes) {
    if ((meeting.arrived >> lane->lane & 1) && lane->wait == Wait::kWarp) wake(*lane);
  }
  meeting.arrived = 0;
  meeting.parity ^= 1;
}

// Joins what the lanes have seen of each other.
void order_lanes(Warp& warp, const Meeting& meeting) {
  uint32_t joined[kWarp] = {};
  uint16_t acquired = 0;
  std::vector<Thread*> met;
  met.reserve(kWarp);
  for (Thread* lane : warp.lanes) {
    if (!(meeting.arrived >> lane->lane & 1)) continue;
    met.push_back(lane);
    note_guarantee(guarantee_of(*lane));
    ++lane->warp_epoch;
    lane->seen[lane->lane] = lane->warp_epoch;
    acquired = std::max(acquired, lane->acquired);
    for (unsigned i = 0; i < kWarp; ++i) joined[i] = std::max(joined[i], lane->seen[i]);
  }
  for (Thread* lane : warp.lanes) {
    if (!(meeting.arrived >> lane->lane & 1)) continue;
    lane->acquired = acquired;
    std::copy(joined, joined + kWarp, lane->seen);
  }
  meet_clocks(met);
}

// PTX ISA: bar.warp.sync orders memory among its lanes; votes and shuffles do not.
void complete(Warp& warp, Meeting& meeting) {
  if (meeting.orders) order_lanes(warp, meeting);
  go_on(warp, meeting);
}

}  // namespace

const uint64_t* meet(unsigned mask, uint64_t value, Site site, bool orders) {
  Thread& self = *device.current;
  Warp& warp = *self.warp;
  if (!(mask >> self.lane & 1) && is_news("barrier-divergence", site, kNoSite)) {
    report({"barrier-divergence", {}, site, kNoSite, current_cta(), current_thread(),
            format("lane %u calls a warp-wide operation whose mask 0x%08x does not name it",
                   self.lane, mask)});
  }
  mask |= 1u << self.lane;
  Meeting& meeting = meeting_of(warp, mask, orders);
  uint64_t* values = meeting.values[meeting.parity];
  if (!meeting.arrived) std::fill(values, values + kWarp, ~uint64_t(0));
  values[self.lane] = value;
  meeting.arrived |= 1u << self.lane;
  if (meeting.arrived == expected(warp, mask)) {
    complete(warp, meeting);
  } else {
    block(Wait::kWarp, site);
  }
  return values;
}

void free_meetings(Warp& warp) {
  for (Meeting* meeting : warp.meetings) delete meeting;
  warp.meetings.clear();
}

void lane_finished(Thread& thread) {
  Warp& warp = *thread.warp;
  warp.finished |= 1u << thread.lane;
  for (Meeting* meeting : warp.meetings) {
    if (meeting->arrived && meeting->arrived == expected(warp, meeting->mask)) {
      complete(warp, *meeting);
    }
  }
}

bool answer_active_masks() {
  bool answered = false;
  for (Cta& cta : device.ctas) {
    for (Warp& warp : cta.warps) {
      for (Thread* first : warp.lanes) {
        if (first->wait != Wait::kActiveMask) continue;
        // The lanes that stand at the same statement are the ones that run together.
        Site site = first->wait_site;
        unsigned mask = 0;
        for (Thread* lane : warp.lanes) {
          if (lane->wait == Wait::kActiveMask && lane->wait_site == site) mask |= 1u << lane->lane;
        }
        for (Thread* lane : warp.lanes) {
          if (!(mask >> lane->lane & 1)) continue;
          lane->active_mask = mask;
          wake(*lane);
        }
        answered = true;
      }
    }
  }
  return answered;
}

}  // namespace emu

extern "C" {
void crossfuse_emulate_warp_sync(unsigned mask) {
  emu::note_use(CROSSFUSE_SITE, true);
  emu::meet(mask, 0, CROSSFUSE_SITE, true);
}

unsigned long long crossfuse_emulate_warp_shuffle(unsigned mask, unsigned long long value,
                                                  unsigned source_lane) {
  return emu::meet(mask, value, CROSSFUSE_SITE, false)[source_lane % emu::kWarp];
}

// mma.m16n8k16, row by column: lane 4 * g + t has elements 2 * t, 2 * t + 1 and those 8 behind of rows
// g and g + 8 of the left operand, of column g of the right one; and gets sums of both rows and
// columns 2 * t, 2 * t + 1 (PTX ISA, matrix fragments).
void crossfuse_emulate_warp_multiply(int element, float* sum0, float* sum1, float* sum2, float* sum3,
                                     unsigned low, unsigned low_behind, unsigned high,
                                     unsigned high_behind, unsigned right, unsigned right_behind) {
  // Words of both rows, then those eight elements behind them.
  const uint64_t given[] = {low | uint64_t(low_behind) << 32, high | uint64_t(high_behind) << 32,
                            right | uint64_t(right_behind) << 32};
  uint64_t words[3][emu::kWarp];
  for (int i = 0; i < 3; ++i) {
    const uint64_t* all = emu::meet(~0u, given[i], CROSSFUSE_SITE, false);
    std::copy(all, all + emu::kWarp, words[i]);
  }
  auto decoded = [&](uint64_t word, unsigned at) {
    using namespace crossfuse_emulated;
    const auto bits = static_cast<uint16_t>(word >> 16 * at);
    return element == CROSSFUSE_F16 ? decode<Half>(bits) : decode<Bfloat16>(bits);
  };
  const unsigned lane = emu::device.current->lane, group = lane / 4;
  float* sums[] = {sum0, sum1, sum2, sum3};
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned column = lane % 4 * 2 + i % 2;
    for (unsigned half = 0; half < 2; ++half) {
      for (unsigned t = 0; t < 4; ++t) {
        const uint64_t left = words[half][group * 4 + t] >> 32 * (i / 2);
        const uint64_t other = words[2][column * 4 + t] >> 32 * half;
        for (unsigned at = 0; at < 2; ++at) *sums[i] += decoded(left, at) * decoded(other, at);
      }
    }
  }
}

// movmatrix: lane 4 * g + t has elements 2 * t and 2 * t + 1 of row g, and gets those of column g.
unsigned crossfuse_emulate_warp_transpose(unsigned word) {
  const uint64_t* words = emu::meet(~0u, word, CROSSFUSE_SITE, false);
  const unsigned lane = emu::device.current->lane, column = lane / 4, row = lane % 4 * 2;
  unsigned transposed = 0;
  for (unsigned i = 0; i < 2; ++i) {
    const uint64_t from = words[(row + i) * 4 + column / 2];
    transposed |= unsigned(from >> 16 * (column % 2) & 0xffff) << 16 * i;
  }
  return transposed;
}

unsigned crossfuse_emulate_warp_ballot(unsigned mask, int predicate) {
  const uint64_t* values = emu::meet(mask, predicate != 0, CROSSFUSE_SITE, false);
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < emu::kWarp; ++lane) ballot |= unsigned(values[lane] == 1) << lane;
  return ballot;
}

unsigned crossfuse_emulate_active_mask() {
  emu::block(emu::Wait::kActiveMask, CROSSFUSE_SITE);
  return emu::device.current->active_mask;
}
}
