"""Copies of pixels (im2col mode): the walk through images, offsets, zeros, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.emulate.copies import BARRIERS, LOADS
from cpu.emulate.kernels import clean, only, statement
from crossfuse.emulate.cuda import emulate
from crossfuse.errors import CheckFailed
from crossfuse.lower.image import BufferSpec, KernelImage, Launch, PixelBox, TensorMap

HELPERS = (
    BARRIERS
    + LOADS
    + """
#include <cuda_fp16.h>
__forceinline__ __device__ void load(unsigned to, const void* map, int c, int x, int y, int n,
                                     unsigned barrier, unsigned short across, unsigned short down) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};"
               :: "r"(to), "l"(map), "r"(c), "r"(x), "r"(y), "r"(n), "r"(barrier), "h"(across),
                  "h"(down) : "memory");
}
__forceinline__ __device__ float4 fetch(unsigned address) {
  float4 found;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w) : "r"(address)
               : "memory");
  return found;
}
"""
)
BODY = """
  __shared__ alignas(128) half tile[PIXELS * 8];
  __shared__ alignas(8) uint64_t full[1];
  if (threadIdx.x == 0) {
    init(AT(full));
    publish();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    expect(AT(full), BYTES);
    load(AT(tile), &x_map, CHANNEL, X, Y, IMAGE, AT(full), ACROSS, DOWN);
  }
  wait(AT(full), 0);
  if (threadIdx.x < PIXELS) {
    float4 row = fetch(AT(tile + threadIdx.x * 8));
    for (int i = 0; i < 8; ++i) C[threadIdx.x * 8 + i] = ((half*)&row)[i];
  }
"""
#: Three images of 4 x 3 pixels of 16 channels.
SHAPE = (3, 4, 3, 16)
IMAGES = np.arange(1, np.prod(SHAPE) + 1, dtype="uint16").reshape(SHAPE).view("float16")
PIXELS = 20


def pixels(
    start: tuple[int, int, int] = (-1, -1, 0),
    offset: tuple[int, int] = (0, 0),
    channel: int = 8,
    rim: int = 1,
    size: int = 16 * PIXELS,
) -> KernelImage:
    """A warp loads 20 pixels of 8 channels from (x, y, image) on, at an offset (across, down)."""
    x = BufferSpec("X", SHAPE, "float16", False)
    c = BufferSpec("C", (PIXELS, 8), "float16", True)
    names = dict(zip(("X", "Y", "IMAGE"), start, strict=True))
    names |= {"ACROSS": offset[0], "DOWN": offset[1]}
    names |= {"CHANNEL": channel, "PIXELS": PIXELS, "BYTES": size}
    defined = "\n".join(f"#define {name} ({value})" for name, value in names.items())
    text = (
        f'{HELPERS}\n{defined}\nextern "C" __global__ void __launch_bounds__(32) '
        f"k(half* C_pointer, const __grid_constant__ CUtensorMap x_map) "
        f"{{{BODY.replace('C[', 'C_pointer[')}}}\n"
    )
    box = PixelBox((-rim, -rim), (-rim, -rim))
    map_ = TensorMap("x_map", "X", (16, 3, 4, 3), (32, 96, 384), (8, PIXELS), 0, pixels=box)
    launch = Launch("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, ("C", "x_map"), (map_,))
    return KernelImage("k", text, (x, c), (launch,))


def wanted(first: int, offset: tuple[int, int], channel: int, rim: int = 1) -> np.ndarray:
    """Pixels from the `first` on, of all images one after the other."""
    found = np.zeros((PIXELS, 8), "float16")
    for i in range(PIXELS):
        image, place = divmod(first + i, 12)
        y, x = place // 3 + offset[1] - rim, place % 3 + offset[0] - rim
        if image < 3 and 0 <= y < 4 and 0 <= x < 3:
            part = IMAGES[image, y, x, channel : channel + 8]
            found[i, : len(part)] = part
    return found


@pytest.mark.parametrize("offset", [(0, 0), (1, 1), (2, 0), (0, 2), (2, 2), (9, 0)], ids=str)
@pytest.mark.parametrize("first", [0, 4, 17, 30, 35], ids=str)
def test_pixels_follow_one_another(first: int, offset: tuple[int, int]) -> None:
    """Through rows and images, with zeros beside an image, and beyond the last one."""
    image, place = divmod(first, 12)
    start = (place % 3 - 1, place // 3 - 1, image)
    found = clean(pixels(start, offset), IMAGES)["C"]
    np.testing.assert_array_equal(found.view("uint16"), wanted(first, offset, 8).view("uint16"))


@pytest.mark.parametrize("channel", [0, 12, -4])
def test_channels_beyond_a_pixel_are_zero(channel: int) -> None:
    found = clean(pixels((0, 0, 0), channel=channel, rim=0), IMAGES)["C"]
    padded = np.pad(IMAGES, ((0, 0), (0, 0), (0, 0), (8, 8))).reshape(36, 32)
    right = padded[:PIXELS, channel + 8 : channel + 16]
    np.testing.assert_array_equal(found.view("uint16"), right.view("uint16"))


REFUSED = {
    "a pixel left of the box": (pixels((-2, -1, 0)), "begins outside the box"),
    "a pixel right of the box": (pixels((2, -1, 0)), "begins outside the box"),
    "a pixel below the box": (pixels((0, 3, 0)), "begins outside the box"),
    "an image before the first": (pixels((0, 0, -1)), "begins outside the box"),
    "an image behind the last": (pixels((0, 0, 3)), "begins outside the box"),
    "too large an offset": (pixels(offset=(0, 256)), "an offset of more than 255 pixels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_map_does_not_allow(name: str) -> None:
    image, detail = REFUSED[name]
    finding = only(emulate(image, [IMAGES]), "tensor-map")
    assert detail in finding.detail
    assert finding.first == statement(image, "load(AT(tile)")


def test_too_many_bytes_are_awaited() -> None:
    assert only(emulate(pixels(size=16 * PIXELS + 16), [IMAGES]), "deadlock")


def test_maps_of_a_matrix_and_of_pixels_are_told_apart() -> None:
    image = pixels()
    (launch,) = image.launches
    matrix = TensorMap("x_map", "X", (16, 36), (32,), (8, PIXELS), 0)
    wrong = replace(image, launches=(replace(launch, tensor_maps=(matrix,)),))
    finding = only(emulate(wrong, [IMAGES]), "tensor-map")
    assert "a copy of pixels takes a map of a matrix" in finding.detail
    text = image.cuda.replace(
        "load(AT(tile), &x_map, CHANNEL, X, Y, IMAGE, AT(full), ACROSS, DOWN)",
        "load_box(AT(tile), &x_map, 0, 0, AT(full))",
    )
    finding = only(emulate(replace(image, cuda=text), [IMAGES]), "tensor-map")
    assert "a copy of a tile takes a map of pixels" in finding.detail


MAPS = {
    "of 2 dimensions, 1 strides": {"extents": (16, 36), "strides": (32,)},
    r"strides \(24, 96, 384\); limit: multiples of 16": {"strides": (24, 96, 384)},
    "of 1025 pixels of 8 channels": {"box": (8, 1025)},
    "of 20 pixels of 257 channels": {"box": (257, 20)},
    r"corners \(-129, 0, 0, 0\)": {"pixels": PixelBox((-129, 0), (0, 0))},
    "a box of at least one pixel": {"pixels": PixelBox((0, 0), (-3, 0))},
}


@pytest.mark.parametrize("message", MAPS)
def test_maps_that_the_driver_would_not_encode(message: str) -> None:
    image = pixels()
    (launch,) = image.launches
    (map_,) = launch.tensor_maps
    wrong = replace(launch, tensor_maps=(replace(map_, **MAPS[message]),))
    with pytest.raises(CheckFailed, match=f"emulate-image: k: found .*{message}"):
        emulate(replace(image, launches=(wrong,)), [IMAGES])
