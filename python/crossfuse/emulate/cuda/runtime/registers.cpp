// Registers that wgmma uses: those of the accumulators and of a left operand (PTX ISA, wgmma.fence and
// wgmma.wait_group). Generated text keeps them in arrays on the stack of a thread, so that the
// hooks of ordinary accesses see who touches them.
#include <algorithm>

#include "async.h"
#include "registers.h"
#include "schedule.h"

namespace emu {

namespace {
constexpr uint32_t kFlying = 0x80000000u;
// Of each word of all stacks: the count of fences when it was touched last, and whether a product
// uses it now.
uint32_t* touched = nullptr;
uint32_t fences = 1;  // of all threads: it only counts on, so that old marks never look new

size_t word_at(const void* place) {
  return (static_cast<const uint8_t*>(place) - arena.slot(kStackSlot)) / sizeof(uint32_t);
}

// Of the products of this thread that use a register, the latest one.
const RegisterUse* use_of(const void* place) {
  const size_t word = word_at(place);
  const std::vector<RegisterUse>& uses = device.current->registers.uses;
  for (auto use = uses.rbegin(); use != uses.rend(); ++use) {
    for (const auto* group : {&use->sums, &use->left}) {
      if (std::find(group->begin(), group->end(), word) != group->end()) return &*use;
    }
  }
  return nullptr;
}

void touch_flying(size_t word, bool writes, Site site) {
  const void* place = arena.slot(kStackSlot) + word * sizeof(uint32_t);
  const RegisterUse* use = use_of(place);
  if (!use || !is_news("register-race", use->site, site)) return;
  report({"register-race", {}, use->site, site, current_cta(), current_thread(),
          format("a register is %s before the product that %s it is waited for: no wgmma.commit_group "
                 "and wgmma.wait_group lie between",
                 writes ? "written" : "read",
                 std::count(use->left.begin(), use->left.end(), word) ? "reads" : "adds to")});
}

// Whether a fence follows what the thread itself has done with these registers.
bool are_fenced(const std::vector<size_t>& words) {
  const Registers& own = device.current->registers;
  return own.fence && std::none_of(words.begin(), words.end(), [&](size_t word) {
    return (touched[word] & ~kFlying) > own.fence;
  });
}

// Whether the last fence but one would do, too.
bool are_touched_before(const RegisterUse& use) {
  const Registers& own = device.current->registers;
  auto before = [&](size_t word) { return (touched[word] & ~kFlying) <= own.fence_before; };
  return own.fence_before && std::all_of(use.sums.begin(), use.sums.end(), before) &&
         std::all_of(use.left.begin(), use.left.end(), before);
}

void unfenced(Site site, const char* what) {
  if (!is_news("register-race", site, kNoSite)) return;
  report({"register-race", {}, site, kNoSite, current_cta(), current_thread(),
          format("wgmma uses registers of %s, and no wgmma.fence follows %s", what,
                 device.current->registers.fence ? "the last ordinary access to them"
                                                 : "the beginning of the thread")});
}

// Products in flight may add to the same registers in turn, if they are of one shape.
void check_shape(const RegisterUse& use) {
  const Registers& own = device.current->registers;
  if (!(touched[use.sums[0]] & kFlying)) return;
  auto before = std::find_if(own.uses.rbegin(), own.uses.rend(), [&](const RegisterUse& each) {
    return each.sums[0] == use.sums[0];
  });
  bool same = before == own.uses.rend() || before->shape == use.shape || before->fence != own.fence;
  if (same || !is_news("register-race", before->site, use.site)) return;
  report({"register-race", {}, before->site, use.site, current_cta(), current_thread(),
          "products of different shapes add to the same registers, and no wgmma.fence lies between"});
}

void mark(const RegisterUse& use, bool flies) {
  for (const auto& group : {&use.sums, &use.left}) {
    for (size_t word : *group) touched[word] = (touched[word] & ~kFlying) | (flies ? kFlying : 0);
  }
}
}  // namespace

void create_register_marks(size_t stacks_bytes) {
  static size_t bytes = 0;
  if (stacks_bytes <= bytes) return;
  if (touched) release_memory(touched, bytes);
  bytes = stacks_bytes;
  touched = static_cast<uint32_t*>(reserve_memory(bytes));
}

void touch_registers(size_t offset, size_t bytes, bool writes, Site site) {
  for (size_t word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) {
    if (touched[word] & kFlying) touch_flying(word, writes, site);
    touched[word] = (touched[word] & kFlying) | fences;
  }
}

void use_registers(RegisterUse use, float* const* sums, size_t count, unsigned* const* left) {
  Registers& own = device.current->registers;
  use.fence = own.fence;
  use.sums.reserve(count);
  for (size_t each = 0; each < count; ++each) use.sums.push_back(word_at(sums[each]));
  for (unsigned each = 0; left && each < kOperandRegisters; ++each) {
    use.left.push_back(word_at(left[each]));
  }
  if (!are_touched_before(use)) note_use(own.fence_site, true);
  if (!are_fenced(use.left)) unfenced(use.site, "its left operand");
  if (!are_fenced(use.sums)) unfenced(use.site, "accumulators");
  check_shape(use);
  mark(use, true);
  own.uses.push_back(std::move(use));
}

void end_uses(size_t until) {
  std::vector<RegisterUse>& uses = device.current->registers.uses;
  auto pending = std::find_if(uses.begin(), uses.end(),
                              [&](const RegisterUse& use) { return use.product >= until; });
  std::for_each(uses.begin(), pending, [](const RegisterUse& use) { mark(use, false); });
  std::for_each(pending, uses.end(), [](const RegisterUse& use) { mark(use, true); });
  uses.erase(uses.begin(), pending);
}

void check_uses_at_end() {
  Registers& own = device.current->registers;
  for (const RegisterUse& use : own.uses) {
    if (!is_news("early-exit", use.site, kNoSite)) continue;
    report({"early-exit", {}, use.site, kNoSite, current_cta(), current_thread(),
            "the thread has exited before its product was waited for"});
  }
  end_uses(~size_t(0));
}

}  // namespace emu

extern "C" void crossfuse_emulate_wgmma_fence() {
  emu::Registers& own = emu::device.current->registers;
  own.fence_before = own.fence;
  own.fence = emu::fences++;
  own.fence_site = CROSSFUSE_SITE;
  emu::note_use(own.fence_site, false);
}
