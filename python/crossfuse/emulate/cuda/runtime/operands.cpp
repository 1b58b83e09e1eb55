// Registers that wgmma reads as its left operand: what is written to them, and when.
#include <map>
#include <set>
#include <vector>

#include "async.h"
#include "findings.h"
#include "schedule.h"

namespace emu {

namespace {
// Registers of one thread that a product reads.
struct Read {
  size_t product;
  RegisterOperand operand;
  Site site;
};

struct Registers {
  bool fenced = false;                   // the thread has been through wgmma.fence at all
  std::set<const unsigned*> written;     // since its last one
  std::map<const unsigned*, unsigned> known;  // what products read since then
  std::vector<Read> reads;               // not waited for
};
std::map<const Thread*, Registers> registers_of;

void check_fenced(Registers& own, const RegisterOperand& operand, Site site) {
  bool ordered = own.fenced;
  for (unsigned each = 0; each < kOperandRegisters; ++each) {
    const unsigned* place = operand.places[each];
    auto before = own.known.find(place);
    bool changed = before != own.known.end() && before->second != operand.values[each];
    ordered = ordered && !own.written.count(place) && !changed;
    own.known[place] = operand.values[each];
  }
  if (ordered || !is_news("register-race", site, kNoSite)) return;
  report({"register-race", {}, site, kNoSite, current_cta(), current_thread(),
          "wgmma reads registers whose writing no wgmma.fence follows"});
}
}  // namespace

RegisterOperand read_operand(unsigned* const* places, size_t product, Site site) {
  RegisterOperand operand;
  for (unsigned each = 0; each < kOperandRegisters; ++each) {
    operand.places[each] = places[each];
    operand.values[each] = *places[each];
  }
  Registers& own = registers_of[device.current];
  check_fenced(own, operand, site);
  own.reads.push_back({product, operand, site});
  return operand;
}

void end_reads(size_t until) {
  Registers& own = registers_of[device.current];
  std::vector<Read> pending;
  for (const Read& read : own.reads) {
    if (read.product >= until) {
      pending.push_back(read);
      continue;
    }
    for (unsigned each = 0; each < kOperandRegisters; ++each) {
      if (*read.operand.places[each] == read.operand.values[each]) continue;
      if (!is_news("register-race", read.site, kNoSite)) break;
      report({"register-race", {}, read.site, kNoSite, current_cta(), current_thread(),
              "a register is written before the product that reads it is waited for"});
      break;
    }
  }
  own.reads.swap(pending);
}

void clear_operands() { registers_of.clear(); }

}  // namespace emu

extern "C" {
void crossfuse_emulate_wgmma_fence() {
  emu::Registers& own = emu::registers_of[emu::device.current];
  own.fenced = true;
  own.written.clear();
  own.known.clear();
}

void crossfuse_emulate_register_written(const unsigned* place) {
  emu::registers_of[emu::device.current].written.insert(place);
}
}
