// A copy in flight (copies.cpp), as the instructions that issue copies make it (bulk.cpp).
#pragma once
#include "async.h"

namespace emu {

enum class Flight : uint8_t {
  kLoad,     // from global to shared memory; completes bytes of an mbarrier
  kPush,     // of values to shared memory, as a load
  kStore,    // from shared to global memory, still to be read
  kLanding,  // the same, read but still to be written
};

struct Copy {
  CUtensorMap map{};
  int x = 0;   // column of a tile; channel of pixels
  long y = 0;  // row of a tile; of pixels the first one, as the box counts them
  int matrix[3] = {};        // of a tile: coordinates of its matrix, of a map of several
  int across = 0, down = 0;  // from there to the pixel that is loaded
  Span shared;
  Flight flight = Flight::kLoad;
  Agent fills = Agent::kFills;  // of what fills shared memory: which kind
  size_t barrier = 0;  // that a load or push completes
  Site site = kNoSite;
  Thread* owner = nullptr;      // who issued it
  Clock past;                   // and what it knew to be past
  unsigned number = 0;          // of the owner's loads; of the group of a store
  std::vector<uint8_t> values;  // of a push; of a store once it has been read
  unsigned delay = 0;
  bool fills_shared() const { return flight == Flight::kLoad || flight == Flight::kPush; }
};

// Rows of a box: of all matrices that it goes through.
inline unsigned box_rows(const CUtensorMap& map) { return map.box[1] * map.box[2]; }
// The number of a pixel on the walk through the boxes of all images; -1 outside the box.
long pixel_number(const CUtensorMap& map, int x, int y, int image);
// Where a pixel of a copy begins in global memory, counted from the first one; null outside.
uint8_t* pixel(const Copy& copy, unsigned number);
// Lets a copy of the running thread fly.
void launch(Copy copy);
// The copy touches its part of global memory: bounds, initialisation, races.
void note_global(const Copy& copy);
// Whether a store of all but the `pending` latest groups of a thread is to be read or, unless only
// that is asked, to land.
bool in_flight(const Thread& thread, unsigned pending, bool only_reads);

}  // namespace emu
