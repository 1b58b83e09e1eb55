"""Coordinates of CTAs, the boxes of tensors that depend on them, and stores of such boxes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from crossfuse import _tvm as ir
from crossfuse.lower.image import PixelBox, TensorMap
from crossfuse.lower.refusal import Rule, refuse
from crossfuse.lower.tree import analyzer, bounds, children, implies

refuse_program = Rule(
    "tile-program",
    instead="schedule as the tiled rules do (crossfuse.schedule.rules), or leave the stages "
    "out for the general lowering",
)

_Program = TypeVar("_Program")


@dataclass(frozen=True)
class Place:
    """A coordinate of a CTA, in the grid or in its cluster."""

    #: Such as ``"blockIdx.x"`` or ``"cluster.y"``.
    tag: str
    #: The loop variable, in which origins of tiles are written.
    var: Any
    extent: int

    @property
    def in_cluster(self) -> bool:
        """Whether it distinguishes CTAs of one cluster."""
        return self.tag.startswith("cluster.")


@dataclass(frozen=True)
class Tile:
    """A box of a tensor in global memory, which is a parameter of the function."""

    buffer: Any
    #: Index of the first element, in the variables of places and of the reduction's step.
    origin: tuple[Any, ...]
    #: The box may reach beyond the tensor: loads find zeros there, and nothing is stored.
    shape: tuple[int, int]

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the tensor: of the last two dimensions, if there are parts."""
        return tuple(int(each) for each in self.buffer.ty.shape)[-2:]

    @property
    def dtype(self) -> str:
        """Element type of the tensor."""
        return str(self.buffer.ty.dtype)


def with_parameters(program: _Program, images: Mapping[Any, Any]) -> _Program:
    """A program on other buffers than the function's parameters: those that are their `images`.

    What has none of them stays the same object, and what was one object is one.
    """
    known: dict[int, Any] = {}

    def image(part: Any) -> Any:
        if id(part) not in known:
            known[id(part)] = _image(part, images, image)
        return known[id(part)]

    found: _Program = image(program)
    return found


def _image(part: Any, images: Mapping[Any, Any], image: Callable[[Any], Any]) -> Any:
    """A dataclass, a tuple or a node, whose own parts are replaced by `image`."""
    if isinstance(part, tuple):
        made = tuple(map(image, part))
        return part if all(map(operator.is_, made, part)) else made
    if is_dataclass(part) and not isinstance(part, type):
        values = {each.name: getattr(part, each.name) for each in fields(part)}
        changed = {name: image(each) for name, each in values.items()}
        same = all(changed[name] is each for name, each in values.items())
        return part if same else replace(part, **changed)
    if isinstance(part, ir.Var):
        return images.get(part, part)
    if not isinstance(part, ir.tvm_ffi.Object):
        return part
    found = ir.substitute(part, images)
    return part if found.same_as(part) else found


def identifier(buffer: Any) -> str:
    """Name of a buffer as C has it: TVM calls partial sums ``gemm.rf``."""
    return re.sub(r"\W", "_", str(buffer.name))


@dataclass(frozen=True)
class Gather:
    """An intermediate that stays in a cluster: each CTA makes a slice, and all get the whole."""

    #: The cluster axis whose CTAs make the slices, in the order of their ranks.
    place: Place
    #: The buffer of slices in scope ``shared.dsm``, [rank, row, column] or, where clusters make
    #: different parts, [rank, part, row, column].
    slab: Any
    #: The buffer in each CTA's shared memory that all slices are copied to.
    whole: Any

    @property
    def width(self) -> int:
        """Columns of a slice."""
        return int(self.slab.ty.shape[-1])

    @property
    def extents(self) -> tuple[int, int]:
        """Rows of the intermediate, and columns of all slices of a cluster."""
        return int(self.slab.ty.shape[-2]), self.place.extent * self.width

    def side_by_side(self, indices: Any) -> tuple[Any, Any]:
        """Row and column of an element in the matrix of slices that lie side by side."""
        rank, *_, row, column = indices
        return row, ir.sym.Analyzer().simplify(rank * self.width + column)


@dataclass(frozen=True)
class GatheredTile(Tile):
    """A box of what a cluster gathers, as if slices lay side by side in one matrix."""

    gather: Gather

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the matrix."""
        return self.gather.extents


@dataclass(frozen=True)
class KeptTile(Tile):
    """A box of an intermediate that stays in the registers of the CTA that makes it."""


@dataclass(frozen=True)
class Rows:
    """The rows of a call, which may have fewer than the function."""

    #: The number of rows: a parameter of kernels that need it.
    count: Any
    #: Parameters of the function that have as many.
    tensors: tuple[Any, ...]

    def end(self, buffer: Any) -> Any:
        """Where the rows of a buffer end; None if a call has all of them."""
        return self.count if ir.among(buffer, self.tensors) else None


@dataclass(frozen=True)
class Store:
    """The values that leave registers, and where they go."""

    #: The whole tile of the product.
    tile: Tile
    #: The element's index in the tensor, as variables that `value` is written in.
    row: Any
    column: Any
    #: Expression over the accumulator and further tensors at that index.
    value: Any
    #: Index of the matrix among several partial ones, [part, row, column]; None for one matrix.
    part: Any = None
    #: Column from which on elements are zero: the tile stays in the cluster or in registers, and
    #: reaches beyond the intermediate. None if it does not.
    zeros_from: int | None = None
    #: Of functions that accept fewer rows.
    rows: Rows | None = None

    def end_of_rows(self, buffer: Any) -> Any:
        """Where the rows of a buffer end in a call of fewer; None if a call has all of them."""
        return None if self.rows is None else self.rows.end(buffer)


def covers(tile: Tile, wanted: Tile, known: Any) -> bool:
    """Whether two tiles are the same, but for what lies outside their tensor."""
    return all(
        known.can_prove_equal(a, b) and (has == size or min(has, size) == extent)
        for a, b, has, size, extent in zip(
            tile.origin, wanted.origin, tile.shape, wanted.shape, tile.extents, strict=True
        )
    )


#: Most offsets of a pixel in its window, and steps from the image to the corner of the box of
#: pixels. PTX ISA, im2col mode; a tensor of four dimensions has 8 bits for either.
_MAX_WINDOW = 255


@dataclass(frozen=True)
class WindowTile(Tile):
    """A box of a convolution's windows, as rows of a matrix that is stored nowhere.

    The buffer holds images [batch, H, W, channels]. Row ``(n * H + y) * W + x`` of the matrix is
    the window around pixel (y, x) of image n; its column ``(r * k + s) * channels + c`` is channel
    c of pixel (y + r - k // 2, x + s - k // 2), or 0 beyond the image.
    """

    #: k: rows and columns of a window, odd.
    window: int

    @property
    def images(self) -> tuple[int, int, int, int]:
        """Number of images, and their rows, columns and channels."""
        batch, height, width, channels = (int(each) for each in self.buffer.ty.shape)
        return batch, height, width, channels

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the matrix."""
        batch, height, width, channels = self.images
        return batch * height * width, self.window * self.window * channels

    @property
    def is_plain(self) -> bool:
        """Whether a window is one pixel, so that the images themselves are the matrix."""
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
    """Descriptor of copies of windows: `channels` of one pixel, of as many windows as `rows`.

    `item` is the bytes of an element, `swizzle` that of the rows in shared memory. Refused if steps
    of the reduction are not parts of a pixel, or windows are too large for TMA.
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


# Reads one block of a tile program, with the loops of its tile.


@dataclass(frozen=True)
class TileNest:
    """A block with the loops of its tile, and those around them."""

    #: Loops outside the tile, outermost first.
    around: tuple[Any, ...]
    #: Serial loops of the tile.
    loops: tuple[Any, ...]
    realize: Any

    @property
    def known(self) -> Any:
        """An analyzer that knows the ranges of all loops."""
        return analyzer((*self.around, *self.loops))

    @property
    def block(self) -> Any:
        """The block without the values of its iterators."""
        return self.realize.block

    @property
    def where(self) -> str:
        """The nest, as messages name it."""
        return f"block '{self.block.name_hint}'"

    def placed(self, index: Any) -> Any:
        """An index in the block's variables, rewritten in those of loops."""
        variables = (each.var for each in self.block.iter_vars)
        return ir.substitute(index, dict(zip(variables, self.realize.iter_values, strict=True)))

    def moved(self, index: Any) -> Any:
        """The loop of the tile that an index follows, or None."""
        placed = self.placed(index)
        followed = [each for each in self.loops if ir.mentions(placed, each.loop_var)]
        # Beside the loop with most iterations, others may have one.
        return max(followed, key=lambda each: ir.constant(each.extent) or 0, default=None)

    def tile(self, buffer: Any, indices: Any) -> Tile:
        """The box of a matrix that the nest's loops traverse."""
        origin: list[Any] = []
        shape: list[int] = []
        for index in indices:
            first, moved = self.along(buffer, index)
            origin.append(first)
            shape.append(1 if moved is None else int(ir.constant(moved.extent) or 0))
        if len(shape) != 2:
            raise refuse_program(
                f"{self.where}, buffer '{buffer.name}'", f"{len(shape)} dimensions", "matrices"
            )
        self.check_predicate(buffer)
        return Tile(buffer, tuple(origin), (shape[0], shape[1]))

    def along(self, buffer: Any, index: Any) -> tuple[Any, Any]:
        """The first value of an index of a buffer in the tile, and the loop that it follows.

        Refused if it follows several loops, or not with step 1.
        """
        known = self.known
        placed = self.placed(index)
        first = ir.at_zero(placed, *(each.loop_var for each in self.loops))
        moved = self.moved(index)
        rest = known.simplify(placed - first)
        if moved is not None and not known.can_prove_equal(rest, moved.loop_var):
            raise refuse_program(
                f"{self.where}, buffer '{buffer.name}'",
                f"index {placed}",
                "one loop of the tile for each dimension, with step 1",
            )
        return known.simplify(first), moved

    def check_predicate(self, buffer: Any) -> None:
        """Refuse a predicate that does more than leave out the tails of tensors.

        A sum leaves out terms beyond its operands: those that a kernel adds are zero.
        """
        for term in self.further_conditions():
            raise refuse_program(
                f"{self.where}, buffer '{buffer.name}'",
                f"the condition {term}",
                "conditions that keep indices within their tensor",
            )

    def further_conditions(self) -> list[Any]:
        """Conditions of the block that do more than keep indices within their tensors."""
        loops = bounds((*self.around, *self.loops))
        inside = [
            value < each.dom.extent
            for each, value in zip(self.block.iter_vars, self.realize.iter_values, strict=True)
        ]
        if self.block.init is not None:
            inside += [
                self.placed(index.min) < extent
                for read in self.block.reads
                for index, extent in zip(read.region, read.source.ty.shape, strict=True)
            ]
        return [
            term
            for term in ir.terms(self.realize.predicate)
            if ir.constant(term) != 1 and not any(implies(each, term, loops) for each in inside)
        ]


def tile_nest(node: Any, around: tuple[Any, ...]) -> TileNest:
    """Read a nest: serial loops around one block; refuse anything else."""
    loops: list[Any] = []
    while isinstance(node, ir.For):
        if int(node.kind) != int(ir.ForKind.SERIAL) or ir.constant(node.extent) is None:
            raise refuse_program(
                f"loop '{node.loop_var.name}'",
                f"a loop of the tile that is bound or has extent {node.extent}",
                "serial loops of constant extent: the lowering divides a tile over threads",
            )
        check_start(node)
        loops.append(node)
        node = node.body
    if not isinstance(node, ir.SBlockRealize):
        raise refuse_program(
            "function", f"{len(children(node))} statements in a nest", "one block a nest"
        )
    return TileNest(around, tuple(loops), node)


def check_start(loop: Any) -> None:
    """Refuse a loop that does not count from 0."""
    if ir.constant(loop.min) != 0:
        raise refuse_program(
            f"loop '{loop.loop_var.name}'", f"a loop that starts at {loop.min}", "loops from 0"
        )
