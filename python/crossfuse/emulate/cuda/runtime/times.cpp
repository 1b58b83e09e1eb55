#include "times.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "state.h"

namespace emu {

namespace {
// Counts side by side. Signed, as SSE2 compares; no count comes near the sign.
typedef int32_t Counts __attribute__((vector_size(16)));
constexpr size_t kSide = sizeof(Counts) / sizeof(uint32_t);

Counts counts_at(const Times& times, size_t place) {
  Counts counts;
  memcpy(&counts, times.data() + place, sizeof counts);
  return counts;
}

// Memory of counts that nobody knows any more, by their blocks; used until the process ends.
std::vector<void*>& spare(size_t blocks) {
  static auto& all = *new std::vector<std::vector<void*>>;
  if (all.size() <= blocks) all.resize(blocks + 1);
  return all[blocks];
}

// What was joined lately. Threads that met know the same and learn the same next, each by itself:
// one of them does the work, and all go on with one result, which later joins see at once. Entries
// keep what they were made of, so no address among them is reused.
template <class T>
class Recent {
 public:
  template <class Join>
  const T& joined(const T& a, const T& b, Join join) {
    size_t place = reinterpret_cast<uintptr_t>(a.get()) / 16 * 31 +
                   reinterpret_cast<uintptr_t>(b.get()) / 16;
    Entry& entry = entries[place % kEntries];
    if (entry.a != a || entry.b != b) entry = {a, b, join(a, b)};
    return entry.both;
  }

 private:
  static constexpr size_t kEntries = 4093;
  struct Entry {
    T a, b, both;
  };
  Entry entries[kEntries];
};

Shared joined_anew(const Shared& a, const Shared& b) {
  if (covers(*a, *b)) return a;
  if (covers(*b, *a)) return b;
  Times* both = Times::make(b->size(), a.get());
  for (size_t i = 0; i < b->size(); i += kSide) {
    const Counts x = counts_at(*both, i), y = counts_at(*b, i), more = x > y;
    const Counts most = (x & more) | (y & ~more);
    memcpy(both->data() + i, &most, sizeof most);
  }
  return both;
}

template <class T>
Ref<const T> joined_lately(const Ref<const T>& a, const Ref<const T>& b);

// Part by part; nothing is made where one of them has all parts.
template <class Parts>
Ref<const Parts> joined_anew(const Ref<const Parts>& a, const Ref<const Parts>& b) {
  bool is_a = true, is_b = true;
  Ref<Parts> both;
  for (size_t i = 0; i < a->size(); ++i) {
    const auto &x = (*a)[i], &y = (*b)[i];
    if (x == y) continue;
    const auto each = joined_lately(x, y);
    const bool was_a = is_a;
    is_a &= each == x;
    is_b &= each == y;
    if (is_a || is_b) continue;
    if (!both) both = new Parts(was_a ? *a : *b);
    (*both)[i] = each;
  }
  if (is_a) return a;
  if (is_b) return b;
  return both.get();
}

template <class T>
Ref<const T> joined_lately(const Ref<const T>& a, const Ref<const T>& b) {
  static Recent<Ref<const T>> recent;
  if (!b || a == b) return a;
  if (!a) return b;
  return recent.joined(a, b, [](const auto& x, const auto& y) { return joined_anew(x, y); });
}
}  // namespace

Times* Times::make(size_t size, const Times* others) {
  const size_t known = others ? others->blocks : 0;
  const size_t blocks = std::max(known, (size + kBlock - 1) / kBlock);
  constexpr size_t bytes = kBlock * sizeof(uint32_t);
  std::vector<void*>& unused = spare(blocks);
  if (unused.empty()) unused.push_back(::operator new(sizeof(Times) + blocks * bytes));
  Times* times = new (unused.back()) Times(blocks);
  unused.pop_back();
  if (others) memcpy(times->data(), others->data(), known * bytes);
  memset(times->data() + known * kBlock, 0, (blocks - known) * bytes);
  return times;
}

void discard(const Times* unknown) { spare(unknown->blocks).push_back(const_cast<Times*>(unknown)); }

bool covers(const Times& a, const Times& b) {
  const size_t both = std::min(a.size(), b.size());
  for (size_t i = 0; i < both; i += Times::kBlock) {
    Counts less{};
    for (size_t j = i; j < i + Times::kBlock; j += kSide) less |= counts_at(a, j) < counts_at(b, j);
    if (less[0] | less[1] | less[2] | less[3]) return false;
  }
  return std::all_of(b.data() + both, b.data() + b.size(), [](uint32_t count) { return count == 0; });
}

Shared joined(const Shared& a, const Shared& b) { return joined_lately(a, b); }
Known joined(const Known& a, const Known& b) { return joined_lately(a, b); }

const Times* times_of(const Known& known, unsigned window) {
  if (!known) return nullptr;
  const auto& group = (*known)[window / kGroup];
  return group ? (*group)[window % kGroup].get() : nullptr;
}

namespace {
// As many as all CTAs that run at the same time have: launches differ in that.
size_t groups() { return (device.ctas.size() + kGroup - 1) / kGroup; }
}  // namespace

Known raised(const Known& known, unsigned window, size_t slot, uint32_t time) {
  static constexpr size_t kEntries = 1021;
  static struct Entry {
    Known known;
    unsigned window = 0;
    size_t slot = 0;
    uint32_t time = 0;
    Known both;
  } entries[kEntries];
  const Times* old = times_of(known, window);
  if (old && (*old)[slot] >= time) return known;
  Entry& entry = entries[(reinterpret_cast<uintptr_t>(known.get()) / 16 + slot) % kEntries];
  const bool is_same = entry.both && entry.known == known && entry.window == window &&
                       entry.slot == slot && entry.time == time &&
                       entry.both->size() == groups();
  if (is_same) return entry.both;
  Times* times = Times::make(slot + 1, old);
  times->at(slot) = time;
  entry = {known, window, slot, time, replaced(known, window, times)};
  return entry.both;
}

Known replaced(const Known& known, unsigned window, const Shared& times) {
  auto* all = known ? new Knowledge(*known) : new Knowledge(groups());
  auto& old = (*all)[window / kGroup];
  auto* group = old ? new Group(*old) : new Group;
  (*group)[window % kGroup] = times;
  old = group;
  return all;
}

}  // namespace emu
