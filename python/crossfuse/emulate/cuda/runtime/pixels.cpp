// Copies of pixels (im2col mode): the walk through a box of each image, and the offset from there.
#include "copies.h"

namespace emu {

namespace {
// Columns (axis 0) or rows (axis 1) of the box.
long box_extent(const CUtensorMap& map, int axis) {
  return long(map.extents[axis + 1]) + map.upper[axis] - map.lower[axis];
}
}  // namespace

long pixel_number(const CUtensorMap& map, int x, int y, int image) {
  long column = long(x) - map.lower[0], row = long(y) - map.lower[1];
  long columns = box_extent(map, 0), rows = box_extent(map, 1);
  if (image < 0 || image >= long(map.extents[3])) return -1;
  if (column < 0 || row < 0 || column >= columns || row >= rows) return -1;
  return (image * rows + row) * columns + column;
}

uint8_t* pixel(const Copy& copy, unsigned number) {
  const CUtensorMap& map = copy.map;
  long columns = box_extent(map, 0), rows = box_extent(map, 1), at = copy.y + number;
  long x = at % columns + map.lower[0] + copy.across;
  long y = at / columns % rows + map.lower[1] + copy.down;
  long image = at / columns / rows;
  if (x < 0 || y < 0 || x >= long(map.extents[1]) || y >= long(map.extents[2])) return nullptr;
  if (image >= long(map.extents[3])) return nullptr;
  return static_cast<uint8_t*>(map.base) + size_t(image) * map.strides[2] +
         size_t(y) * map.strides[1] + size_t(x) * map.strides[0];
}

}  // namespace emu
