// wgmma: products of tiles in shared memory, done by a warpgroup some time after they are issued.
#include <cstdarg>
#include <cstring>
#include <deque>
#include <memory>

#include "async.h"
#include "device/small_float.h"
#include "schedule.h"
#include "shadow.h"
#include "tiles.h"

namespace emu {

namespace {
// A matrix descriptor: PTX ISA, "matrix descriptor format" of wgmma.
struct Descriptor {
  size_t start, leading, stride;
  unsigned layout;  // 0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes
  explicit Descriptor(uint64_t bits)
      : start((bits & 0x3FFF) << 4),
        leading((bits >> 16 & 0x3FFF) << 4),
        stride((bits >> 32 & 0x3FFF) << 4),
        layout(static_cast<unsigned>(bits >> 62)) {}
};

struct Shape {
  unsigned n, k;
  int left, right;   // element types, as in CrossfuseElement
  int right_is_transposed;
};

struct Product {
  Shape shape{};
  uint64_t left = 0, right = 0;
  bool keep = false;
  bool left_is_registers = false;
  unsigned operands[kWarpgroup][kOperandRegisters];  // of the left one, in registers
  std::vector<float*> registers[kWarpgroup];
  unsigned issued = 0;
  // Of the first of a group: what the warpgroup had done before. All have issued a product that is done.
  std::vector<Arrived> issuers;
  Clock before;
  Site site = kNoSite;
  Span reads[2];  // the left one is empty if that operand is in registers
  unsigned delay = 0;     // rounds of the scheduler until it is computed
  bool computed = false;  // its sums are there
  bool done = false;      // and somebody has waited for it: before that, it may still read
};

struct Warpgroup {
  std::deque<Product> products;
  size_t first = 0;  // number of the first one that is kept
  Product& at(size_t number) { return products[number - first]; }
};
std::map<std::pair<unsigned, unsigned>, Warpgroup> warpgroups;  // by window and number in it
size_t uncomputed = 0;  // products of all of them

Warpgroup& mine() {
  const Thread& self = *device.current;
  return warpgroups[{self.cta->window, self.index() / kWarpgroup}];
}

unsigned bytes_of(int element) { return element < 2 ? 2 : 1; }

float decoded(const uint8_t* at, int element) {
  using namespace crossfuse_emulated;
  uint16_t wide = 0;
  memcpy(&wide, at, bytes_of(element));
  switch (element) {
    case CROSSFUSE_F16: return decode<Half>(wide);
    case CROSSFUSE_BF16: return decode<Bfloat16>(wide);
    case CROSSFUSE_E4M3: return decode<E4m3>(static_cast<uint8_t>(wide));
    default: return decode<E5m2>(static_cast<uint8_t>(wide));
  }
}

size_t swizzle(size_t address, unsigned layout) {
  constexpr size_t masks[] = {0, 7, 3, 1};
  return address ^ ((address >> 7 & masks[layout]) << 4);
}

// Where element (row, k) of an operand lies in the window.
size_t place(const Descriptor& tile, unsigned row, unsigned k, unsigned bytes, bool transposed) {
  size_t at;
  unsigned span = tile.layout ? 128u >> (tile.layout - 1) : 16;
  if (transposed) {
    unsigned group = span / bytes;
    at = row / group * tile.leading + k / 8 * tile.stride + k % 8 * span + row % group * bytes;
  } else if (tile.layout == 0) {
    unsigned group = 16 / bytes;
    at = row / 8 * tile.stride + k / group * tile.leading + row % 8 * 16 + k % group * bytes;
  } else {
    at = row / 8 * tile.stride + row % 8 * span + k * bytes;
  }
  return swizzle(tile.start + at, tile.layout);
}

Span span_of(uint64_t bits, unsigned rows, unsigned k, int element, bool transposed) {
  Descriptor tile(bits);
  unsigned bytes = bytes_of(element);
  Span span{device.current->cta->window, ~size_t(0), 0};
  for (unsigned row = 0; row < rows; ++row) {
    for (unsigned i = 0; i < k; i += 8) {
      size_t at = place(tile, row, i, bytes, transposed);
      span.begin = std::min(span.begin, at);
      span.end = std::max(span.end, at + bytes);
    }
  }
  return span;
}

// Element (row, k) of a left operand in registers: PTX ISA, wgmma, register fragments for A.
float kept(const Product& product, unsigned row, unsigned k) {
  unsigned bytes = bytes_of(product.shape.left), each = 4 / bytes;  // elements of a register
  unsigned thread = row / 16 * kWarp + row % 8 * 4 + k % (4 * each) / each;
  const unsigned* registers = product.operands[thread];
  const unsigned* from = registers + row % 16 / 8 + k / (4 * each) * 2;
  return decoded(reinterpret_cast<const uint8_t*>(from) + k % each * bytes, product.shape.left);
}

// Sums of neighbouring columns, which are added to side by side.
typedef float Lanes __attribute__((vector_size(16)));
constexpr unsigned kLanes = sizeof(Lanes) / sizeof(float);

// Calls `each(sum, row, column)` for the sums of a warpgroup: PTX ISA, wgmma, register fragments for D.
template <class Each>
void for_sums(const Product& product, Each each) {
  for (unsigned thread = 0; thread < kWarpgroup; ++thread) {
    const unsigned lane = thread % kWarp;
    for (unsigned index = 0; index < product.shape.n / 2; ++index) {
      const unsigned row = thread / kWarp * 16 + lane / 4 + index / 2 % 2 * 8;
      each(*product.registers[thread][index], row, index / 4 * 8 + lane % 4 * 2 + index % 2);
    }
  }
}

// Every sum is added to in the order of k.
void multiply(Product& product, unsigned index) {
  const uint8_t* window = window_of(index);
  const Shape& shape = product.shape;
  Descriptor left(product.left), right(product.right);
  const unsigned lines = shape.n / kLanes;  // n is a multiple of 8
  std::vector<Lanes> b(size_t(shape.k) * lines), sums(size_t(64) * lines);
  std::vector<float> a(size_t(64) * shape.k);
  for (unsigned row = 0; row < 64; ++row) {
    for (unsigned k = 0; k < shape.k; ++k) {
      float& element = a[row * shape.k + k];
      if (product.left_is_registers) {
        element = kept(product, row, k);
      } else {
        element = decoded(window + place(left, row, k, bytes_of(shape.left), false), shape.left);
      }
    }
  }
  for (unsigned column = 0; column < shape.n; ++column) {
    for (unsigned k = 0; k < shape.k; ++k) {
      size_t at = place(right, column, k, bytes_of(shape.right), shape.right_is_transposed);
      b[k * lines + column / kLanes][column % kLanes] = decoded(window + at, shape.right);
    }
  }
  for_sums(product, [&](const float& sum, unsigned row, unsigned column) {
    sums[row * lines + column / kLanes][column % kLanes] = product.keep ? sum : 0.0f;
  });
  for (unsigned row = 0; row < 64; ++row) {
    for (unsigned line = 0; line < lines; ++line) {
      Lanes sum = sums[row * lines + line];
      for (unsigned k = 0; k < shape.k; ++k) sum += a[row * shape.k + k] * b[k * lines + line];
      sums[row * lines + line] = sum;
    }
  }
  for_sums(product, [&](float& sum, unsigned row, unsigned column) {
    sum = sums[row * lines + column / kLanes][column % kLanes];
  });
  product.computed = true;
  --uncomputed;
}

void check_reads(Product& product) {
  const char* names[] = {"a product reads the left tile while a copy writes it",
                         "a product reads the right tile while a copy writes it"};
  for (int side = 0; side < 2; ++side) {
    Site writer = copy_into(product.reads[side]);
    if (writer == kNoSite || !is_news("async-race", writer, product.site)) continue;
    report({"async-race", shared_place(product.reads[side].begin), writer, product.site,
            current_cta(), current_thread(), names[side]});
  }
}

void wake_warpgroup() {
  const Thread& self = *device.current;
  for (Thread* thread : self.cta->threads) {
    bool same = thread->index() / kWarpgroup == self.index() / kWarpgroup;
    if (same && thread->wait == Wait::kProducts) wake(*thread);
  }
}
}  // namespace

Site product_reads(const Span& span) {
  auto each = warpgroups.lower_bound({span.window, 0});
  for (; each != warpgroups.end() && each->first.first == span.window; ++each) {
    for (const Product& product : each->second.products) {
      if (product.done) continue;
      if (product.reads[0].meets(span) || product.reads[1].meets(span)) return product.site;
    }
  }
  return kNoSite;
}

void clear_products() {
  warpgroups.clear();
  uncomputed = 0;
}

void advance_products() {
  if (uncomputed == 0) return;
  for (auto& [key, group] : warpgroups) {
    for (Product& product : group.products) {
      if (product.computed) continue;
      if (product.issued < kWarpgroup || product.delay) {
        product.delay -= product.delay > 0;
        break;
      }
      multiply(product, key.first);
    }
  }
}

namespace {
// The addresses of a thread's accumulators, which are arguments: at most 256 columns.
struct Accumulators {
  Accumulators(va_list list, unsigned count) {
    for (unsigned i = 0; i < count; ++i) each[i] = va_arg(list, float*);
  }
  float* each[128];
};

// One thread's part of a product; the left operand is a descriptor, or registers if `kept` is.
void issue(float* const* registers, const Shape& shape, uint64_t left, unsigned* const* kept,
           uint64_t right, bool keep, Site site) {
  Thread& self = *device.current;
  Warpgroup& group = mine();
  size_t number = self.products++;
  if (number - group.first >= group.products.size()) {
    group.products.emplace_back();
    ++uncomputed;
    Product& made = group.products.back();
    made.delay = random_delay();
    made.shape = shape;
    made.left = left;
    made.right = right;
    made.keep = keep;
    made.left_is_registers = kept != nullptr;
    made.site = site;
    bool transposed = shape.right_is_transposed != 0;
    if (!kept) made.reads[0] = span_of(left, 64, shape.k, shape.left, false);
    made.reads[1] = span_of(right, shape.n, shape.k, shape.right, transposed);
  }
  Product& product = group.at(number);
  bool same = product.left == left && product.right == right && product.shape.n == shape.n &&
              product.left_is_registers == (kept != nullptr);
  if (!same && is_news("barrier-divergence", site, product.site)) {
    report({"barrier-divergence", {}, site, product.site, current_cta(), current_thread(),
            "threads of a warpgroup issue different products"});
  }
  check_reads(product);
  // The first thread of the warpgroup and the last one look for all.
  const bool looks = product.issued == 0 || product.issued == kWarpgroup - 1;
  for (const Span& span : product.reads) {
    if (looks) check_visible(span, Reader::kProduct, product.site);
    if (product.issued == 0) note_product_read(span, static_cast<uint32_t>(number + 1), product.site);
  }
  unsigned thread = self.index() % kWarpgroup;
  RegisterUse use;
  use.product = number;
  use.site = site;
  use.shape = uint64_t(shape.n) << 32 | shape.k << 16 | unsigned(shape.left) << 8 |
              unsigned(shape.right);
  use_registers(std::move(use), registers, shape.n / 2, kept);
  for (unsigned each = 0; kept && each < kOperandRegisters; ++each) {
    product.operands[thread][each] = *kept[each];
  }
  product.registers[thread].assign(registers, registers + shape.n / 2);
  const size_t group_start = self.product_groups.empty() ? 0 : self.product_groups.back();
  if (number == group_start) product.issuers.push_back(arrive_now(self));
  ++product.issued;
  if (product.issued == kWarpgroup) wake_warpgroup();
}
}  // namespace

}  // namespace emu

extern "C" {
void crossfuse_emulate_wgmma(unsigned n, unsigned k, int left_type, int right_type,
                             int right_is_transposed, unsigned long long left,
                             unsigned long long right, unsigned keep, ...) {
  va_list list;
  va_start(list, keep);
  const emu::Accumulators registers(list, n / 2);
  va_end(list);
  emu::Shape shape{n, k, left_type, right_type, right_is_transposed};
  emu::issue(registers.each, shape, left, nullptr, right, keep != 0, CROSSFUSE_SITE);
}

void crossfuse_emulate_wgmma_registers(unsigned n, unsigned k, int left_type, int right_type,
                                       int right_is_transposed, unsigned* a, unsigned* b,
                                       unsigned* c, unsigned* d, unsigned long long right,
                                       unsigned keep, ...) {
  va_list list;
  va_start(list, keep);
  const emu::Accumulators registers(list, n / 2);
  va_end(list);
  unsigned* const left[emu::kOperandRegisters] = {a, b, c, d};
  emu::Shape shape{n, k, left_type, right_type, right_is_transposed};
  emu::issue(registers.each, shape, 0, left, right, keep != 0, CROSSFUSE_SITE);
}

void crossfuse_emulate_wgmma_commit() {
  emu::Thread& self = *emu::device.current;
  emu::note_use(CROSSFUSE_SITE, true);
  self.product_groups.push_back(self.products);
  emu::pause(CROSSFUSE_SITE);
}

void crossfuse_emulate_wgmma_wait(unsigned pending) {
  using namespace emu;
  Thread& self = *device.current;
  note_use(CROSSFUSE_SITE, false);
  if (self.product_groups.size() <= pending) return;
  size_t until = self.product_groups[self.product_groups.size() - 1 - pending];
  Warpgroup& group = mine();
  for (size_t number = group.first; number < until; ++number) {
    // All four warps of a warpgroup work on a product.
    while (number >= group.first && group.at(number).issued < kWarpgroup) {
      block(Wait::kProducts, CROSSFUSE_SITE);
    }
    if (number < group.first) continue;
    Product& product = group.at(number);
    if (!product.computed) multiply(product, self.cta->window);
    product.done = true;
    if (number < self.ended_products || product.issuers.empty()) continue;
    if (product.issuers.size() == kWarpgroup) {
      product.before = met_clock(product.issuers);
      product.issuers.resize(1);
    }
    know_over(product.before);
  }
  note_use(CROSSFUSE_SITE, until > self.ended_products);
  self.ended_products = until;
  end_uses(until);
  products_done(static_cast<uint32_t>(until));
  while (!group.products.empty() && group.products.front().done && group.first + 8 < until) {
    group.products.pop_front();
    ++group.first;
  }
}
}
