"""Emits TIRx statements: the few forms that kernels are made of, and coordinates of threads.

Everything here adds to the function that `crossfuse._tvm.IRBuilder` is building.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP
from crossfuse.lower.hopper.program.tile import Place, identifier

if TYPE_CHECKING:
    from crossfuse.lower.hopper.plan.kernel import KernelPlan
    from crossfuse.lower.hopper.plan.phase import PhasePlan
    from crossfuse.lower.hopper.program.tile_program import TileProgram
    from crossfuse.lower.hopper.stream.merge import MergePlan
    from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan
    from crossfuse.lower.hopper.stream.warps import WarpPlan


def ctas_of_sm(count: int) -> dict[str, int]:
    """Attribute of a kernel: so many CTAs share an SM, and have registers accordingly."""
    return {"tirx.launch_bounds_min_blocks_per_sm": count}


@contextmanager
def when(condition: Any) -> Iterator[None]:
    """Context whose statements run if a condition holds."""
    with ir.script.If(condition), ir.script.Then():
        yield


@contextmanager
def branches(condition: Any) -> Iterator[tuple[Any, Any]]:
    """Two contexts, for the statements of either case."""
    with ir.script.If(condition):
        yield ir.script.Then(), ir.script.Else()


def run(call: Any) -> None:
    """Emit a call as a statement."""
    ir.script.evaluate(call)


def let(name: str, value: Any) -> Any:
    """Bind an immutable value to a name."""
    if ir.constant(value) is not None:
        return value
    variable = ir.script.bind(value)
    ir.IRBuilder.name(name, variable)
    return variable


def parameter(buffer: Any) -> Any:
    """Declare a parameter as TIRx has them, with a layout."""
    shape = [int(each) for each in buffer.ty.shape]
    return ir.script.arg(identifier(buffer), ir.script.Buffer(shape, str(buffer.ty.dtype)))


def set_registers(direction: str, count: int) -> None:
    """Move registers between warpgroups (PTX ISA, setmaxnreg)."""
    if count:
        run(getattr(ir.script.ptx.setmaxnreg, direction).sync.aligned.u32(count))


def registers(name: str, count: int, dtype: str) -> Any:
    """Declare a buffer in registers of each thread."""
    buffer = ir.script.alloc_local((count,), dtype)
    ir.IRBuilder.name(name, buffer)
    return buffer


class Variable:
    """A mutable variable in a register of each thread; undefined where its first value is None."""

    def __init__(self, name: str, dtype: str, value: Any = None) -> None:
        self.buffer = registers(name, 1, dtype)
        if value is not None:
            self.set(value)

    @property
    def value(self) -> Any:
        """The current value."""
        return self.buffer[0]

    def set(self, value: Any) -> None:
        """Assign."""
        ir.script.buffer_store(self.buffer, value, [0])

    @property
    def address(self) -> Any:
        """Its address, for calls that write it."""
        return ir.script.address_of(self.buffer[0])


# A dry run that fetches code before it is needed.
#
# What follows a product runs once in a kernel of one tile a CTA: several thousand instructions one
# after another, each new line of them from L2, behind all weights that are being loaded. So its
# warpgroups go through all code twice. The first time, the warm-up, nothing is multiplied, stored
# or waited for; it takes place while the first tiles are in flight. On an H100 small FFNs took 4 us
# less with it (docs/hopper-measured.md).

#: Hides a value from the compiler, which would else make code of its own for the warm-up.
_HIDE = """\
__device__ __forceinline__ int crossfuse_hide(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
"""


class Warmup:
    """Distinguishes the warm-up from the real run, by guards around statements.

    `turn` is 0 in the warm-up and 1 after it; None where there is no warm-up.
    """

    def __init__(self, turn: Any = None) -> None:
        self.turn = turn

    def conditions(self) -> list[Any]:
        """Guards for statements of the real run alone; none without a warm-up."""
        return [] if self.turn is None else [hidden(self.turn) > 0]

    def turns(self, count: int) -> Any:
        """Iterations of a loop up to `count`: one in the warm-up."""
        return count if self.turn is None else hidden(self.turn) * (count - 1) + 1

    def skipped(self) -> Any:
        """A context for statements that the warm-up leaves out."""
        return when(self.conditions()[0]) if self.turn is not None else nullcontext()


@contextmanager
def warmed_up(wanted: bool) -> Iterator[Warmup]:
    """Emit statements that run twice if `wanted`, once if not."""
    if not wanted:
        yield Warmup()
        return
    with ir.script.serial(0, hidden(ir.script.int32(2))) as turn:
        ir.IRBuilder.name("turn", turn)
        yield Warmup(turn)


def hidden(value: Any) -> Any:
    """A value that is opaque to the compiler, which therefore does not compute with it early."""
    return ir.cuda_func_call("crossfuse_hide", value, source_code=_HIDE, return_type="int32")


# Coordinates of a thread: CTA, cluster, warpgroup and lane, and the tile it works on.


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
    plan: KernelPlan | StreamPlan | WarpPlan | MergePlan, phases: tuple[PhasePlan, ...] = ()
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
