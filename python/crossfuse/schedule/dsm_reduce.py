"""`dsm_reduce`: splits a reduction over the CTAs of a cluster and combines it through DSM."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import (
    bindings,
    binds,
    constant_extent,
    function,
    is_reduction,
    name_of,
    position,
    realize,
    written_buffer,
)
from crossfuse.calls import AnySchedule, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import DSM_REDUCE, DSM_SCOPE, MAX_CLUSTER
from crossfuse.schedule.exchange import (
    check_exchange,
    check_whole_tile,
    exchange_intermediate,
    exchange_output,
)
from crossfuse.schedule.primitive import (
    check_agreement,
    check_axis,
    check_block,
    check_combiner,
    check_dtype,
    check_loop,
    check_not_within,
    check_reduction_loop,
    check_slab,
    cluster_bind,
    is_sampled_tile,
    refusing,
    rehearsed,
    symbolic_extent,
    tile_extents,
)

# The reduction, which is refused where it cannot be split.

# Shares of a reduction over a number of CTAs that does not divide its extent.


def has_last_share(predicate: Any, rank: Any, loops: list[Any]) -> bool:
    """Whether the last rank has at least one iteration of a masked reduction.

    A rank without one would not initialise its partial result either: TVM masks the initialisation
    together with the update. False only if the block's predicate rules out the first iteration of
    the last rank; `rank` is the loop over ranks, `loops` are all loops around the block.
    """
    first = {loop.loop_var: loop.min for loop in loops}
    first[rank.loop_var] = rank.min + rank.extent - 1
    value = ir.sym.Analyzer().simplify(ir.substitute(predicate, lambda var: first.get(var, var)))
    return ir.constant(value) != 0


@dataclass(frozen=True)
class Reduction:
    """A reduction and the loop that becomes the rank, read before anything is changed."""

    #: Block and loop, as refusals name them.
    where: str
    #: Cluster axis of the ranks.
    axis: str
    #: Loops outside the rank loop; they walk over tiles.
    depth: int
    #: CTAs, as the trace knows the number.
    ranks: Any
    #: CTAs, as a number.
    count: int
    #: Of the tile, by dimension of the result.
    extents: tuple[int, ...]
    #: Whether a mutation of the trace may change them.
    sampled: bool
    #: Whether the block writes a parameter of the function.
    output: bool
    #: Whether every rank has the same share of the reduction, so that no iteration is masked.
    exact: bool

    @property
    def elements(self) -> int:
        """Elements of the tile."""
        return prod(self.extents)


def read_reduction(sch: Any, rule: str, block: Any, loop: Any, axis: str) -> Reduction:
    """Analyse a reduction and the loop that becomes the rank.

    Refused are a block that is no reduction that can be split, and a loop that is not one of its
    reduction loops with an extent that fits the cluster.
    """
    loops, depth = position(sch, rule, block, loop)
    where = f"{name_of(sch, block)}, {name_of(sch, loop)}"
    check_axis(rule, where, axis)
    check_combiner(sch, rule, where, block)
    check_reduction_loop(sch, rule, where, block, loop, bind="cluster_bind")
    count = _check_extent(sch, rule, where, loop)
    _check_outside(sch, rule, where, block, loops[:depth])
    check_not_within(rule, where, [sch.get(each) for each in loops[:depth]], axis)
    check_agreement(sch, rule, where, loop, axis, count)
    check_dtype(rule, where, written_buffer(sch, block))
    _check_shares(sch, rule, where, block, loop, loops)
    return Reduction(
        where=where,
        axis=axis,
        depth=depth,
        ranks=symbolic_extent(sch, rule, loop),
        count=count,
        extents=tile_extents(sch, block, loop),
        sampled=is_sampled_tile(sch, block, loop),
        output=_is_output(sch, block),
        exact=_is_exact(sch, block),
    )


def _check_extent(sch: Any, rule: str, where: str, loop: Any) -> int:
    extent = constant_extent(sch, rule, loop)
    serial = int(sch.get(loop).kind) == int(ir.ForKind.SERIAL)
    if not serial or not 1 <= extent <= MAX_CLUSTER:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"extent {extent}" if serial else "a loop that is already bound",
            limit=f"a serial loop of extent 1 to {MAX_CLUSTER}, one iteration a CTA",
            instead="split the reduction loop by the number of CTAs and pass that part",
        )
    return extent


def _check_outside(sch: Any, rule: str, where: str, block: Any, outside: list[Any]) -> None:
    """Refuse a reduction loop around the ranks: each of its iterations would combine anew."""
    for loop in outside:
        variable = sch.get(loop).loop_var
        users = [each for each, value in bindings(sch, block) if binds(variable, value)]
        if any(is_reduction(each) for each in users):
            raise refuse(
                ScheduleRefused,
                rule,
                where,
                found=f"reduction loop '{variable.name}' outside it",
                limit="loops over output elements outside the loop that becomes the rank",
                instead="reorder the reduction loops so that this one is the outermost",
            )


def _check_shares(sch: Any, rule: str, where: str, block: Any, loop: Any, loops: list[Any]) -> None:
    nodes = [sch.get(each) for each in loops]
    if not has_last_share(realize(sch, block).predicate, sch.get(loop), nodes):
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"no share of the reduction for the last of {sch.get(loop).extent} CTAs",
            limit="an iteration for every CTA, which initialises its partial result",
            instead="split the reduction loop by fewer CTAs, or by a number that divides it",
        )


def _is_output(sch: Any, block: Any) -> bool:
    written = written_buffer(sch, block)
    return any(each.same_as(written) for each in function(sch, block).params)


def _is_exact(sch: Any, block: Any) -> bool:
    """Whether the block's predicate does not mask its reduction."""
    predicate = realize(sch, block).predicate
    reduced = [value for each, value in bindings(sch, block) if is_reduction(each)]
    return not any(
        binds(variable, predicate) for value in reduced for variable in ir.variables(value)
    )


# `dsm_reduce`: splits a reduction over the CTAs of a cluster and combines it through DSM.

RULE = "dsm_reduce"


@checked
def dsm_reduce(
    sch: AnySchedule,
    block: Any,
    loop: Any,
    *,
    scatter: bool = True,
    axis: str = "x",
    whole_rows: bool = False,
) -> Any:
    """Split a reduction over the CTAs of a cluster and combine the partial tiles through DSM.

    `loop` is the part of the reduction that becomes the rank; the loops outside it walk over
    tiles, the loops inside it are one CTA's work. Before, with ``k0`` of extent 4::

        for i0, j0:                              # tiles
            for k0 in range(4):                  # <- loop
                for k1, i1, j1:  C[i, j] += A[i, k] * B[k, j]

    After ``sch.dsm_reduce(C, k0)``, each CTA keeps a quarter of the tile (reduce-scatter)::

        for i0, j0:
            for k0 in cluster(4):                # P: shared.dsm, slab k0 in CTA k0
                for k1, i1, j1:  P[k0, i, j] += A[i, k] * B[k, j]
            for z in cluster(4):                 # CTA z combines quarter z of the tile
                for e, r:  C[e] += P[r, e]

    After ``sch.dsm_reduce(C, k0, scatter=False)``, every CTA has the whole tile (all-exchange)::

        for i0, j0:
            for k0 in cluster(4):  P[k0, ...] = ...
            for z in cluster(4):
                for r, i1, j1:  S[i, j] += P[r, i, j]   # S: this CTA's own shared memory
                for e:  C[e] = S[e]                     # quarter z of the tile

    If `block` writes an intermediate, all-exchange stores no tile itself: the combination moves
    into the cluster-bound loop of the consumer, which finds the whole tile in its CTA, and the
    partial tiles are made in front of that loop::

        for i0:
            for k0 in cluster(4):  P[k0, ...] = ...
            for z in cluster(4):                        # the consumer's, bound before
                for r, i1, k:  C[i, k] += P[r, i, k]    # C: this CTA's own shared memory
                for i1, j, k:  D[i, j] += C[i, k] * W[k, j]

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The schedule; as a method, ``sch.dsm_reduce(block, loop, scatter=...)``.
    block : SBlockRV
        A reduction by sum, product, max or min, not yet decomposed. Afterwards it combines.
    loop : LoopRV
        A serial reduction loop of the block, extent 1 to 16, outside its other reduction loops.
    scatter : bool
        True: each CTA ends with its own slice of the tile. False: with all of it.
    axis : str
        Cluster axis of the ranks, "x", "y" or "z"; tile loops may be bound to the others.
    whole_rows : bool
        With ``scatter=True``: whether slices are whole rows of the tile, as many for each CTA;
        those of the last CTAs are shorter or empty where the ranks do not divide the rows. Else
        they are equal numbers of elements, counted row by row.

    Returns
    -------
    SBlockRV
        The block of the partial tiles. Its rank loop is bound to the cluster axis, and so is the
        slice loop of `block`; the loops inside both are serial, to be bound to threads. Take
        them from ``sch.get_loops``: random variables of the block's former loops have ended.

    Raises
    ------
    ScheduleRefused
        If the loop is no reduction loop of the block or has the wrong extent, if the reduction
        cannot be split, if the element type has no DSM access, if a slab exceeds the shared
        memory of a CTA, or, with ``scatter=False``, if no consumer is cluster-bound or the tile
        does not divide into slices. The schedule is then as it was.

    Notes
    -----
    Composed of ``rfactor``, ``set_scope``, ``reverse_compute_at`` or ``compute_at``, ``fuse``,
    ``split``, ``reorder`` and `cluster_bind`, all recorded. Partial sums are combined in rank
    order, so results are bitwise repeatable.

    A tile of sampled size cannot be declared to a trace: with ``scatter=False`` a CTA whose
    consumer reads a slice then combines that slice only, which the consumer cannot tell.

    With ``scatter=True`` the slices of a tile that the ranks do not divide are masked; TVM gives
    no such mask to a block that is moved behind the combination, and the lowering refuses it.

    Examples
    --------
    >>> import tvm
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = tvm.s_tir.Schedule(prim_func(parse("gemm:M=32,K=64,N=32")))
    >>> product = sch.get_sblock("gemm0")
    >>> i, j, k = sch.get_loops(product)
    >>> k0, k1 = sch.split(k, [4, None])
    >>> sch.reorder(k0, i, j, k1)
    >>> partial = sch.dsm_reduce(product, k0)
    >>> [(each.name, each.count, each.shape) for each in sch.cluster_layout().buffers]
    [('gemm0.rf_shared.dsm', 4, (32, 32))]
    """
    check_block(sch, RULE, "block", block)
    check_loop(sch, RULE, "loop", loop)

    def read(trial: Any) -> Reduction:
        reduction = read_reduction(trial, RULE, block, loop, axis)
        if not scatter:
            check_exchange(trial, RULE, block, reduction)
        return reduction

    def change(target: Any, reduction: Reduction) -> Any:
        return _split(target, block, loop, reduction, scatter, whole_rows)

    def check(trial: Any, reduction: Reduction, partial: Any) -> None:
        check_slab(trial, RULE, reduction.where, partial, _rank_loop(trial, partial))
        if not scatter:
            check_whole_tile(trial, RULE, block, reduction)

    return rehearsed(sch, read, change, check)


def _split(
    sch: Any, block: Any, loop: Any, reduction: Reduction, scatter: bool, whole_rows: bool
) -> Any:
    """Make partial tiles in the slabs of the ranks, and combine them."""
    with refusing(
        RULE,
        reduction.where,
        limit="a complete reduction block alone in its loops",
        instead="call dsm_reduce before decompose_reduction and before other blocks are moved "
        "into the loops of this one",
    ):
        partial = sch.rfactor(loop, 0)
        sch.set_scope(partial, 0, DSM_SCOPE)
        sch.annotate(block, DSM_REDUCE, "scatter" if scatter else "all-exchange")
        if not scatter and not reduction.output:
            exchange_intermediate(sch, RULE, partial, block, reduction)
            cluster_bind(sch, _rank_loop(sch, partial), reduction.axis)
            return partial
        loops = sch.get_loops(partial)
        cluster_bind(sch, loops[reduction.depth], reduction.axis)
        tile_loop = loops[reduction.depth - 1] if reduction.depth else None
        if tile_loop is not None:
            sch.reverse_compute_at(block, tile_loop, preserve_unit_loops=True)
        if scatter:
            _scatter(sch, block, reduction, whole_rows)
        else:
            exchange_output(sch, block, tile_loop, reduction)
    return partial


def _rank_loop(sch: Any, partial: Any) -> Any:
    """The loop of the partial tiles that drives the rank."""
    _, rank = bindings(sch, partial)[0]
    return next(each for each in sch.get_loops(partial) if binds(sch.get(each).loop_var, rank))


def _scatter(sch: Any, block: Any, reduction: Reduction, whole_rows: bool) -> None:
    """Let each CTA combine one slice of the tile."""
    tile = list(sch.get_loops(block))[reduction.depth :]
    ranks = [each for each in tile if _drives_reduction(sch, block, each)]
    rest = [each for each in tile if not any(each is taken for taken in ranks)]
    if whole_rows:
        rows, *rest = rest
        slices, row = sch.split(rows, [reduction.ranks, None])
        sch.reorder(slices, row, *rest, *ranks)
    else:
        flat = sch.fuse(*rest) if len(rest) > 1 else rest[0]
        slices, element = sch.split(flat, [reduction.ranks, None])
        sch.reorder(slices, element, *ranks)
    cluster_bind(sch, slices, reduction.axis)


def _drives_reduction(sch: Any, block: Any, loop: Any) -> bool:
    """Whether a loop drives the reduction over ranks; an unused unit loop does not."""
    variable = sch.get(loop).loop_var
    users = [each for each, value in bindings(sch, block) if binds(variable, value)]
    return bool(users) and all(is_reduction(each) for each in users)
