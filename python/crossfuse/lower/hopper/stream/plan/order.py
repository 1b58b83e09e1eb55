"""Which tiles of rows a CTA goes through, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from crossfuse import _tvm as ir
from crossfuse.hardware import Device
from crossfuse.lower.hopper.program.tile import Place
from crossfuse.lower.hopper.stream.program.stream import StreamProgram


@dataclass(frozen=True)
class TileOrder:
    """Turns of all CTAs: CTA c takes turns ``c, c + CTAs, ...``, tile after tile of a head.

    Attributes
    ----------
    outer : tuple[Place, ...]
        Places that tell heads apart, outermost first.
    inner : Place | None
        The place that counts tiles of rows; None if a head has one.
    uneven : bool
        Whether streams of later tiles are longer, as under a causal mask.
    paired : bool
        Whether a turn is two tiles, the longest left and the shortest left: all turns are as long.
    ctas : int
        CTAs that run, or clusters that share keys.
    """

    outer: tuple[Place, ...]
    inner: Place | None
    uneven: bool
    paired: bool
    ctas: int

    @property
    def tiles(self) -> int:
        """Tiles of a head."""
        return 1 if self.inner is None else self.inner.extent

    @property
    def turns_of_head(self) -> int:
        """Turns that a head takes."""
        return -(-self.tiles // 2) if self.paired else self.tiles

    @property
    def turns(self) -> int:
        """All turns."""
        return self.turns_of_head * prod(each.extent for each in self.outer)


def order_tiles(program: StreamProgram, device: Device) -> TileOrder:
    """Divide the tiles among as many CTAs as run at once."""
    down = program.queries.origin[program.queries.axis]
    rows = set(ir.variables(down))
    on_grid = [each for each in program.places if not each.in_cluster]
    inner = [each for each in on_grid if each.var in rows and each.extent > 1]
    place = inner[-1] if inner else None
    outer = tuple(each for each in on_grid if each is not place)
    bounds = {
        each
        for bound in (program.stream.first, program.stream.count)
        for each in ir.variables(bound)
    }
    uneven = place is not None and place.var in bounds
    beside = program.beside
    most = device.resident_clusters(1 if beside is None else beside.extent)
    heads = prod(each.extent for each in outer)
    pairs = heads * -(-(place.extent if place else 1) // 2)
    paired = uneven and pairs >= most and program.split is None
    order = TileOrder(outer, place, uneven, paired, most)
    if program.split is not None:
        most = order.turns  # what CTAs receive has room for one tile of rows
    return TileOrder(outer, place, uneven, order.paired, min(most, order.turns))
