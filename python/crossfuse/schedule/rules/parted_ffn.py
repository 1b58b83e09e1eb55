"""Rules for two products on tensor cores whose intermediate stays on the chip, and their tiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, TypeVar

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, read_two_products
from crossfuse.blocks.scheduled import name_of, read_of
from crossfuse.calls import AnyFunction, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import Device, device
from crossfuse.planner.families.parted import (
    REGISTERS,
    SLICE,
    STEP,
    ClusteredKernel,
    RegisterKernel,
)
from crossfuse.planner.kernels.shape import Flag, shape_of_blocks
from crossfuse.schedule.rules.pipelined import (
    by_part,
    depth_beside,
    has_uneven_rows,
    place_products,
    stage_weights,
    store_parts,
    sum_parts,
)
from crossfuse.schema import Tile

Tiles = TypeVar("Tiles", bound="PartedTiles")


class PartedTiles(ABC):
    """Tiles of one launch, as dataclasses of the rule's extents. Zero means: choose."""

    #: The planner's kernels of these tiles.
    kind: ClassVar[type[ClusteredKernel] | type[RegisterKernel]]
    #: Name of the rule in refusals.
    rule: ClassVar[str]
    #: Alternative that refusals suggest where no division fits.
    instead: ClassVar[str]
    #: Parts of the intermediate's columns.
    parts: int
    #: Stages in shared memory; 0 for as many as fit.
    stages: int

    @property
    @abstractmethod
    def kernel(self) -> ClusteredKernel | RegisterKernel:
        """The planner's kernel of the same tiles, which computes their widths."""

    @abstractmethod
    def limit(self, chain: Chain) -> str:
        """Requirements on tiles of a chain, for refusals."""

    def leaves_room(self, chain: Chain, kernels: Any) -> Flag:
        """Which of many legal kernels may be chosen."""
        return True

    def complete(self: Tiles, sch: Any, chain: Chain, device: Device) -> Tiles:
        """Choose the sizes that the caller left open: the fastest by the planner's estimate.

        The schedule is for messages. Refused if no division fits.
        """
        from crossfuse.planner.cost.estimate import fill_tiles

        wanted = asdict(self)  # type: ignore[call-overload]
        given = {name: each for name, each in wanted.items() if each and name != "stages"}
        shape = shape_of_blocks(chain)
        possible = self.kind.possible(shape, given)
        found = fill_tiles(possible, shape, device, lambda each: self.leaves_room(chain, each))
        if found is None:
            raise refuse(
                ScheduleRefused,
                self.rule,
                name_of(sch, chain.second),
                found=f"{chain.n} columns of the intermediate and {chain.l} of the output, "
                f"for {self}{chain.narrow}",
                limit=self.limit(chain),
                instead=self.instead,
            )
        return replace(self, **found.tiles())  # type: ignore[type-var]


# Of an intermediate that stays in a cluster.


@checked
@dataclass(frozen=True)
class ClusterTiles(PartedTiles):
    """How a chain is divided over clusters. Zero means: choose."""

    kind: ClassVar[type[ClusteredKernel]] = ClusteredKernel
    rule: ClassVar[str] = "cluster-tiles"
    instead: ClassVar[str] = "leave tiles open, or keep the intermediate in L2 (schedule_tiled_ffn)"
    #: Rows of a cluster's tile: 64 for each warpgroup that multiplies.
    rows: Tile = 0
    #: CTAs of a cluster: each makes a slice of the intermediate and of the output.
    cluster: Tile = 0
    #: Parts of the intermediate's columns, which different clusters make.
    parts: Tile = 0
    #: Stages in shared memory; 0 for as many as fit.
    stages: Tile = 0

    def limit(self, chain: Chain) -> str:
        """Requirements on tiles of a chain, for refusals."""
        return (
            f"clusters with slices of multiples of {SLICE} and 8 columns that find room at "
            "the same time, and parts that each have some; elements of 16 bits"
        )

    @property
    def kernel(self) -> ClusteredKernel:
        """The planner's kernel of the same tiles, which computes their widths."""
        return ClusteredKernel(self.rows, self.cluster, self.parts)


# Of an intermediate that stays in registers.

#: Registers for the intermediate and the sums that it is made of, where the rule chooses: a long
#: epilogue needs some more.
_MAKING = 160


@checked
@dataclass(frozen=True)
class RegisterTiles(PartedTiles):
    """How a chain is divided over CTAs. Zero means: choose."""

    kind: ClassVar[type[RegisterKernel]] = RegisterKernel
    rule: ClassVar[str] = "register-tiles"
    instead: ClassVar[str] = (
        "leave tiles open, or keep the intermediate in the cluster (schedule_clustered_ffn) or in "
        "L2 (schedule_tiled_ffn)"
    )
    #: Rows of a CTA's tiles: 64 for each warpgroup that multiplies.
    rows: Tile = 0
    #: Columns of a tile of the output. Each CTA makes the intermediate that it needs: where several
    #: tiles stand side by side, it is made several times.
    columns: Tile = 0
    #: Parts of the intermediate's columns, which different CTAs make.
    parts: Tile = 0
    #: 1: the parts are summed through L2. As many as parts: they are the CTAs of a cluster, which
    #: sum them through DSM.
    cluster: Tile = 0
    #: Stages in shared memory; 0 for as many as fit.
    stages: Tile = 0

    def limit(self, chain: Chain) -> str:
        """Requirements on tiles of a chain, for refusals."""
        return (
            f"parts of a multiple of {STEP} columns, each with some of them, of at most "
            f"{256 // len(chain.first)} (a single part: all of them), and tiles of the output "
            f"of a multiple of 8 that together take {REGISTERS} registers a thread; parts "
            "that all find room at the same time, or that are the CTAs of a cluster and have "
            "as many rows of a tile each; elements of 16 bits"
        )

    def leaves_room(self, chain: Chain, kernels: RegisterKernel) -> Flag:
        """Whether chosen numbers of parts leave registers for an epilogue of any length."""
        column = len(chain.first) / 2 + 1 / 4
        return bool(self.parts) | (column * chain.n <= _MAKING * kernels.parts)

    @property
    def kernel(self) -> RegisterKernel:
        """The planner's kernel of the same tiles, which computes their widths."""
        return RegisterKernel(self.rows, self.columns, self.parts, self.cluster)


# Rule for two products on tensor cores whose intermediate never leaves the cluster.


@checked
def schedule_clustered_ffn(
    func: AnyFunction,
    *,
    tiles: ClusterTiles | None = None,
    constant_weights: bool = False,
    target: str | Device | None = None,
) -> Any:
    """Schedule a chain of two products for the Hopper pipeline, the intermediate in DSM.

    Each CTA of a cluster makes a slice of the intermediate; all of them gather all slices and
    make a slice of the output each. With several parts, clusters make different parts of the
    intermediate, and their partial sums are added through L2 in the order of the parts::

        for t in blockIdx.x:                                 # (part, row tile)
            for c in cluster x:
                for k0 in range(K / 64):                     # crossfuse.stages
                    gemm0[tile] += A B                       # A by multicast
                hidden[c, part] = act(gemm0)                 # shared.dsm
            for c in cluster x:
                whole = hidden[:, part]                      # all-gather
                for n0 in range(N / parts / 64):             # crossfuse.stages
                    gemm1[part, tile] += whole D
                partial[part, tile] = gemm1                  # crossfuse.grid_stage, if parts > 1
        for t in blockIdx.x:
            for c in cluster x:
                for e in range(elements of a slice):
                    out[e] = epilogue(sum over part of partial[part, e])

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A canonical chain, see `crossfuse.workload.prim_func`.
    tiles : ClusterTiles | None
        Tile extents; what is left out is chosen.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights: they are then loaded before
        the kernel before is over (programmatic dependent launch).
    target : str | Device | None
        Device whose clusters the choice counts.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the function is no chain of two products, or its extents do not divide.

    Examples
    --------
    >>> from crossfuse.schedule.rules.parted_ffn import ClusterTiles
    >>> from crossfuse.workload import parse, prim_func
    >>> func = prim_func(parse("gemm_chain:M=128,K=256,N=512,L=256,weights=nk"))
    >>> schedule_clustered_ffn(func, tiles=ClusterTiles(cluster=4)).cluster_layout().axes
    (('x', 4),)
    """
    sch = ir.Schedule(func)
    chain = read_two_products(sch, "clustered_ffn")
    chosen = (tiles or ClusterTiles()).complete(sch, chain, device(target))
    kernel, shape = chosen.kernel, shape_of_blocks(chain)
    share, width, columns = (int(e(shape)) for e in (kernel.share, kernel.width, kernel.columns))
    consumer = by_part(sch, chain, chosen.parts, share)
    _lay_out(sch, chain, chosen.parts, share)
    rank = _second_of_cluster(sch, chain, consumer, chosen, (width, columns), constant_weights)
    store_parts(sch, chain, consumer, rank, chosen.parts)
    if chosen.parts > 1:
        extents = int(kernel.rows_of_sum(shape)), columns, chosen.cluster
        sum_parts(sch, chain, chosen.parts, *extents)
    _, making, *_ = sch.get_loops(chain.middle)
    place_products(sch, chain.first, making, 0, constant_weights)
    return sch


def _lay_out(sch: Any, chain: Chain, parts: int, share: int) -> None:
    """Divide the intermediate's columns by part; those beyond the last one are zero.

    An activation of zero may be no number, so padding is not even multiplied by zero.
    """

    def by_part(i: Any, j: Any) -> list[Any]:
        return [j // share, i, j % share]

    if parts * share > chain.n:
        (written,) = sch.get(chain.middle).writes
        zero = ir.tirx.FloatImm(str(written.source.ty.dtype), 0.0)
        sch.transform_layout(chain.middle, ("write", 0), by_part, pad_value=zero)
    elif parts > 1:
        sch.transform_block_layout(chain.middle, by_part)
        sch.transform_layout(chain.middle, ("write", 0), by_part)


def _second_of_cluster(
    sch: Any,
    chain: Chain,
    consumer: Any,
    tiles: ClusterTiles,
    extents: tuple[int, int],
    constant: bool,
) -> Any:
    """Schedule the second product: columns over the CTAs, all slices in their shared memory."""
    width, columns = extents
    *part, i, j, k = sch.get_loops(consumer)
    row_tile, row = sch.split(i, [None, tiles.rows])
    rank, column = sch.split(j, [tiles.cluster, columns])
    slices, inside = sch.split(k, [tiles.cluster, width])
    sch.reorder(*part, row_tile, rank, slices, inside, row, column)
    sch.bind(sch.fuse(*part, row_tile) if part else row_tile, "blockIdx.x")
    sch.cluster_bind(rank)
    index = read_of(sch, consumer, chain.middle)
    sch.dsm_shuffle(chain.middle, consumer, index, rank, ring=False)
    _, rank, slices, inside, row, column = sch.get_loops(consumer)
    # Steps are as deep as a tile of D, however wide the slices are.
    step, depth = sch.split(sch.fuse(slices, inside), [None, depth_beside(sch, consumer, index)])
    sch.reorder(step, row, column, depth)
    stage_weights(sch, consumer, index, tiles.stages, constant)
    return rank


# Rule for two products on tensor cores whose intermediate never leaves registers.


@checked
def schedule_register_ffn(
    func: AnyFunction,
    *,
    tiles: RegisterTiles | None = None,
    constant_weights: bool = False,
    target: str | Device | None = None,
) -> Any:
    """Schedule a chain of two products for the Hopper pipeline, the intermediate in registers.

    Each CTA makes the columns of the intermediate that it multiplies; every warpgroup multiplies
    the rows that it has made, so that nobody waits between the products. With several parts, CTAs
    make different columns, and their partial sums are added in the order of the parts, through L2::

        for t in blockIdx.x:                                 # (part, row tile, column tile)
            for k0 in range(K / 64):                         # crossfuse.stages
                gemm0[tile] += A B                           # local
            hidden[tile] = act(gemm0)                        # local
            for n0 in range(N / parts / 64):                 # crossfuse.stages
                gemm1[part, tile] += hidden D
            partial[part, tile] = gemm1                      # crossfuse.grid_stage, if parts > 1
        for t in blockIdx.x:
            for e in range(elements of a slice):
                out[e] = epilogue(sum over part of partial[part, e])

    or, where the parts are the CTAs of a cluster, through DSM (`dsm_reduce`).

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A canonical chain, see `crossfuse.workload.prim_func`.
    tiles : RegisterTiles | None
        Tile extents; what is left out is chosen.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights: they are then loaded before
        the kernel before is over (programmatic dependent launch).
    target : str | Device | None
        Device whose CTAs the choice counts.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the function is no chain of two products, or its extents do not divide.

    Examples
    --------
    >>> from crossfuse.workload import parse, prim_func
    >>> func = prim_func(parse("gemm_chain:M=128,K=256,N=512,L=256,weights=nk"))
    >>> "crossfuse.stages" in schedule_register_ffn(func).mod.script()
    True
    """
    sch = ir.Schedule(func)
    chain = read_two_products(sch, "register_ffn")
    chosen = (tiles or RegisterTiles()).complete(sch, chain, device(target))
    kernel, shape = chosen.kernel, shape_of_blocks(chain)
    width = int(kernel.width(shape))
    if chosen.cluster > 1:
        place = _in_cluster(sch, chain, chosen, width, constant_weights)
        _first_of_cta(sch, chain, place, constant_weights)
        return sch
    consumer = by_part(sch, chain, chosen.parts, width)
    place = _second_of_cta(sch, chain, consumer, chosen, constant_weights)
    store_parts(sch, chain, consumer, place, chosen.parts)
    if chosen.parts > 1:
        sum_parts(sch, chain, chosen.parts, int(kernel.rows_of_sum(shape)), chosen.columns)
    _first_of_cta(sch, chain, place, constant_weights)
    return sch


def _second_of_cta(
    sch: Any, chain: Chain, consumer: Any, tiles: RegisterTiles, constant: bool
) -> Any:
    """Schedule the second product, whose left operand is in registers."""
    *part, i, j, k = sch.get_loops(consumer)
    row_tile, row = sch.split(i, [None, tiles.rows])
    column_tile, column = sch.split(j, [None, tiles.columns])
    index = read_of(sch, consumer, chain.middle)
    step, depth = sch.split(k, [None, depth_beside(sch, consumer, index)])
    sch.reorder(*part, row_tile, column_tile, step, row, column, depth)
    place = sch.fuse(*part, row_tile, column_tile)
    sch.bind(place, "blockIdx.x")
    stage_weights(sch, consumer, index, tiles.stages, constant)
    return place


def _in_cluster(sch: Any, chain: Chain, tiles: RegisterTiles, width: int, constant: bool) -> Any:
    """Split the second product's reduction over a cluster; returns the loop over its CTAs."""
    i, j, k = sch.get_loops(chain.second)
    row_tile, row = sch.split(i, [None, tiles.rows])
    column_tile, column = sch.split(j, [None, tiles.columns])
    depth = depth_beside(sch, chain.second, read_of(sch, chain.second, chain.middle))
    rank, step, inside = sch.split(k, [tiles.cluster, width // depth, depth])
    sch.reorder(row_tile, column_tile, rank, step, row, column, inside)
    sch.bind(sch.fuse(row_tile, column_tile), "blockIdx.x")
    uneven = has_uneven_rows(chain.m, tiles.rows, tiles.cluster)
    partial = sch.dsm_reduce(chain.second, rank, whole_rows=uneven)
    store = sch.cache_write(partial, 0, "local")
    _, rank, *_ = sch.get_loops(partial)
    sch.reverse_compute_at(store, rank, preserve_unit_loops=True)
    index = read_of(sch, partial, chain.middle)
    stage_weights(sch, partial, index, tiles.stages, constant)
    sch.set_scope(chain.second, 0, "local")
    _, slices, *_ = sch.get_loops(chain.second)
    sch.reverse_compute_at(chain.epilogue, slices, preserve_unit_loops=True)
    return rank


def _first_of_cta(sch: Any, chain: Chain, place: Any, constant: bool) -> None:
    """Place the first products: each CTA makes the columns that it multiplies."""
    sch.set_scope(chain.middle, 0, "local")
    sch.compute_at(chain.middle, place, preserve_unit_loops=True)
    place_products(sch, chain.first, place, 0, constant)
