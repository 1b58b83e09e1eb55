// Counts of threads and of what runs beside them, shared by all who know the same. Making, copying and
// joining them is most of an emulation's time.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace emu {

// What references count. The process has one thread, so that they need not do so atomically.
struct Counted {
  mutable uint32_t references = 0;
  Counted() = default;
  Counted(const Counted&) {}
};
template <class T>
void discard(const T* unknown) {
  delete unknown;
}

template <class T>
class Ref {
 public:
  Ref(T* at = nullptr) : at(at) {
    if (at) ++at->references;
  }
  Ref(const Ref& other) : Ref(other.at) {}
  Ref(Ref&& other) noexcept : at(std::exchange(other.at, nullptr)) {}
  ~Ref() {
    if (at && --at->references == 0) discard(at);
  }
  Ref& operator=(Ref other) noexcept {
    std::swap(at, other.at);
    return *this;
  }
  T* get() const { return at; }
  T& operator*() const { return *at; }
  T* operator->() const { return at; }
  explicit operator bool() const { return at; }
  bool operator==(const Ref& other) const { return at == other.at; }
  bool operator!=(const Ref& other) const { return at != other.at; }

 private:
  T* at;
};

// Counts by slot. They end with the last block of them that is known; all behind it are 0.
class Times : public Counted {
 public:
  static constexpr size_t kBlock = 64;
  // A copy of others, with room for so many; all 0 without others.
  static Times* make(size_t size, const Times* others = nullptr);
  size_t size() const { return blocks * kBlock; }
  uint32_t* data() { return reinterpret_cast<uint32_t*>(this + 1); }
  const uint32_t* data() const { return reinterpret_cast<const uint32_t*>(this + 1); }
  uint32_t operator[](size_t slot) const { return slot < size() ? data()[slot] : 0; }
  uint32_t& at(size_t slot) { return data()[slot]; }

 private:
  friend void discard(const Times* unknown);  // memory of the same size is used again
  explicit Times(size_t blocks) : blocks(static_cast<uint32_t>(blocks)) {}
  uint32_t blocks;
};
void discard(const Times* unknown);

// The counts of a CTA, those of CTAs side by side, and those of all CTAs by window. Null: nothing is known.
// A release changes one CTA's, and copies references to the others' of its group and to other groups.
constexpr size_t kGroup = 8;
using Shared = Ref<const Times>;
struct Group : Counted, std::array<Shared, kGroup> {};
struct Knowledge : Counted, std::vector<Ref<const Group>> {
  using vector::vector;
};
using Known = Ref<const Knowledge>;

bool covers(const Times& a, const Times& b);
Shared joined(const Shared& a, const Shared& b);
Known joined(const Known& a, const Known& b);
// The counts of one CTA; null where nothing is known.
const Times* times_of(const Known& known, unsigned window);
// The same with a count of one CTA that is at least `time`. Threads that know the same share the result, as
// they do of joins.
Known raised(const Known& known, unsigned window, size_t slot, uint32_t time);
Known replaced(const Known& known, unsigned window, const Shared& times);

}  // namespace emu
