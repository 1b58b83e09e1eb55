"""Coordinates of a thread: CTA, cluster, warpgroup and lane, and the tile it works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.program.tile import Place
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.hopper.statements import let

if TYPE_CHECKING:
    from crossfuse.lower.hopper.plan.kernel import KernelPlan
    from crossfuse.lower.hopper.stream.merge import MergePlan
    from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of a thread, as expressions."""

    #: Of the CTA in its cluster.
    rank: Any
    cluster: Any
    #: In the CTA.
    warpgroup: Any
    #: In the warpgroup.
    thread: Any
    #: Values of the cluster's places of all phases, by variable.
    places: dict[Any, Any]

    @property
    def lane(self) -> Any:
        """Index of the thread in its warp."""
        return self.thread % 32

    @property
    def warp(self) -> Any:
        """Index of the thread's warp in its warpgroup."""
        return self.thread // 32


def declare_coordinates(
    plan: KernelPlan | StreamPlan | MergePlan, phases: tuple[PhasePlan, ...] = ()
) -> Coordinates:
    """Declare the launch and name its coordinates.

    Places of `phases` distinguish the CTAs of a cluster.
    """
    rank = ir.script.cta_id_in_cluster([plan.cluster_size])
    cluster = ir.script.cluster_id([plan.clusters])
    warpgroup = ir.script.warpgroup_id([plan.threads // WARPGROUP])
    thread = ir.script.thread_id_in_wg([WARPGROUP])
    names = {"rank": rank, "cluster": cluster, "warpgroup": warpgroup, "thread": thread}
    for name, variable in names.items():
        ir.IRBuilder.name(name, variable)
    places: dict[Any, Any] = {}
    for phase in phases:
        places |= _unravel(phase.program.cluster, rank)
    return Coordinates(rank, cluster, warpgroup, thread, places)


def grid_places(program: TileProgram, tile: Any) -> dict[Any, Any]:
    """Values of the grid's places for the number of a tile."""
    return _unravel(program.grid, tile)


def unravel(places: tuple[Place, ...], cluster: Any, rank: Any) -> dict[Any, Any]:
    """Values of places of the grid and of the cluster, from linear indices of both."""
    inside = tuple(each for each in places if each.in_cluster)
    outside = tuple(each for each in places if not each.in_cluster)
    return _unravel(outside, cluster) | _unravel(inside, rank)


def at(expression: Any, *values: Mapping[Any, Any]) -> Any:
    """An expression with values substituted for its variables."""
    known = {var: value for each in values for var, value in each.items()}
    return ir.sym.Analyzer().simplify(ir.substitute(expression, known))


def strides(places: tuple[Place, ...]) -> dict[Any, int]:
    """How far apart neighbours along each place are in the linear order, innermost first."""
    stride, found = 1, {}
    for place in reversed(places):
        found[place.var] = stride
        stride *= place.extent
    return found


def _unravel(places: tuple[Place, ...], linear: Any) -> dict[Any, Any]:
    steps = strides(places)
    values: dict[Any, Any] = {}
    for place in places:
        outermost = place is places[0]
        index = linear // steps[place.var]
        index = index if outermost else index % place.extent
        dtype = str(place.var.ty)
        if place.extent > 1:
            values[place.var] = let(str(place.var.name), index).astype(dtype)
        else:
            values[place.var] = ir.tirx.IntImm(dtype, 0)
    return values
