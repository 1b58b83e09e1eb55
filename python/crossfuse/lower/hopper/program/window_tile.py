"""Tiles of the windows of a convolution, which are rows of a matrix that is nowhere stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse.lower.hopper.program.tile import Tile
from crossfuse.lower.image import PixelBox, TensorMap
from crossfuse.lower.refusal import refuse

#: Offsets of a pixel in its window at most, and steps from the image to the corner of the box of
#: pixels. PTX ISA, im2col mode; a tensor of four dimensions has 8 bits for either.
_MAX_WINDOW = 255


@dataclass(frozen=True)
class WindowTile(Tile):
    """A box of the windows of images as a matrix.

    The buffer holds images [batch, H, W, channels]. Row ``(n * H + y) * W + x`` of the matrix is
    the window around pixel (y, x) of image n; its column ``(r * k + s) * channels + c`` is channel
    c of pixel (y + r - k // 2, x + s - k // 2), or 0 beyond the image.

    Attributes
    ----------
    window : int
        k: rows and columns of a window, odd.
    """

    window: int

    @property
    def images(self) -> tuple[int, int, int, int]:
        """Images, their rows, columns and channels."""
        batch, height, width, channels = (int(each) for each in self.buffer.ty.shape)
        return batch, height, width, channels

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the matrix."""
        batch, height, width, channels = self.images
        return batch * height * width, self.window * self.window * channels

    @property
    def is_plain(self) -> bool:
        """Whether windows are pixels, so that the images themselves are the matrix."""
        return self.window == 1

    def corner(self, row: Any) -> tuple[Any, Any, Any]:
        """The image of a row, and where its window begins: row and column of a pixel."""
        _, height, width, _ = self.images
        rim = self.window // 2
        return row // (height * width), row // width % height - rim, row % width - rim

    def within(self, column: Any) -> tuple[Any, Any, Any]:
        """The row and the column of an element in its window, and its channel."""
        channels = self.images[3]
        pixel = column // channels
        return pixel // self.window, pixel % self.window, column % channels


def window_map(tile: WindowTile, channels: int, rows: int, item: int, swizzle: int) -> TensorMap:
    """Descriptor of copies of windows, `channels` of one pixel of as many windows as `rows`.

    Parameters
    ----------
    tile : WindowTile
        What is loaded.
    channels, rows : int
        What one copy moves.
    item : int
        Bytes of an element.
    swizzle : int
        Of the rows in shared memory.

    Raises
    ------
    LoweringRefused
        If steps of the reduction are no pixels' parts, or windows too large for TMA.
    """
    batch, height, width, depth = tile.images
    if depth % channels:
        raise refuse(
            "tile-operand",
            f"tensor '{tile.buffer.name}'",
            found=f"windows of {tile.window} x {tile.window} pixels of {depth} channels",
            limit=f"a multiple of {channels} channels ({swizzle} bytes), so that a step of the "
            "reduction lies within a pixel",
            instead="pad the channels, or leave the stages out for the general lowering",
        )
    if tile.window > _MAX_WINDOW:
        raise refuse(
            "tile-operand",
            f"tensor '{tile.buffer.name}'",
            found=f"windows of {tile.window} x {tile.window} pixels",
            limit=f"windows of at most {_MAX_WINDOW} x {_MAX_WINDOW}, which TMA copies",
            instead="split the window, or leave the stages out for the general lowering",
        )
    strides = (depth * item, width * depth * item, height * width * depth * item)
    name, rim = str(tile.buffer.name), tile.window // 2
    return TensorMap(
        f"{name}_map",
        name,
        (depth, width, height, batch),
        strides,
        (channels, rows),
        swizzle,
        # Windows begin as far before the image as they end behind it.
        pixels=PixelBox((-rim, -rim), (-rim, -rim)),
    )
