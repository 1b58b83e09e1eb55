"""Analyses an intermediate for `dsm_shuffle`, and refuses those that it cannot slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import (
    analyzer,
    bindings,
    binds,
    constant_extent,
    function,
    in_loops,
    is_reduction,
    name_of,
    position,
    written_buffer,
)
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import MAX_CLUSTER, cluster_axis
from crossfuse.schedule.extents import symbolic_extent
from crossfuse.schedule.tiles import check_dtype


@dataclass(frozen=True)
class Slices:
    """How an intermediate is cut into one slice for each CTA, read before anything is changed."""

    #: Producer, consumer and staging loop, as refusals name them.
    where: str
    #: Cluster axis whose CTAs own the slices.
    axis: str
    #: Slices, as the trace knows the number.
    count: Any
    #: Extent of the sliced dimension.
    columns: int
    #: Index of the dimension of the intermediate that is sliced.
    dimension: int
    #: Index of the iteration variable of the producer that walks over it.
    column: int
    #: Loops around the consumer's cluster-bound loop.
    cluster: int


def read_slices(
    sch: Any, rule: str, producer: Any, consumer: Any, index: int, at: Any, *, ring: bool
) -> Slices:
    """Analyse how a consumer reads an intermediate in slices.

    Refused is a consumer that does not take it slice by slice on the CTAs of a cluster, or a
    producer that does not write it column by column.
    """
    loops, depth = position(sch, rule, consumer, at)
    where = f"{name_of(sch, producer)} -> {name_of(sch, consumer)}, {name_of(sch, at)}"
    buffer = _intermediate(sch, rule, where, producer, consumer, index)
    cluster = _cluster_loop(sch, rule, where, loops, depth)
    step, dimension = _slice_loop(sch, rule, where, consumer, index, loops)
    _check_order(sch, rule, where, loops, (cluster, step, depth), ring)
    columns = ir.constant(buffer.ty.shape[dimension]) or 0
    count = _check_count(sch, rule, where, loops[step], loops[cluster], columns)
    _check_contiguous(sch, rule, where, consumer, (index, dimension), loops, step, columns // count)
    return Slices(
        where=where,
        axis=str(cluster_axis(sch.get(loops[cluster]))),
        count=symbolic_extent(sch, rule, loops[step]),
        columns=columns,
        dimension=dimension,
        column=_column(sch, rule, where, producer, dimension, placed=cluster > 0),
        cluster=cluster,
    )


def _intermediate(sch: Any, rule: str, where: str, producer: Any, consumer: Any, index: int) -> Any:
    """The buffer, read by this consumer only and by that index."""
    reads = sch.get(consumer).reads
    buffer = written_buffer(sch, producer)
    if not 0 <= index < len(reads) or not reads[index].source.same_as(buffer):
        names = ", ".join(f"{i}: '{region.source.name}'" for i, region in enumerate(reads))
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"read buffer index {index}",
            limit=f"the read of '{buffer.name}' among {names}",
            instead="pass the index of the producer's buffer in the consumer's reads",
        )
    others = [each for each in sch.get_consumers(producer) if not _same(sch, each, consumer)]
    kept = any(each.same_as(buffer) for each in function(sch, producer).params)
    if others or kept:
        reader = f"{name_of(sch, others[0])} reads it too" if others else "it is an output"
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"other uses of '{buffer.name}': {reader}",
            limit="an intermediate that lives in the cluster, for one consumer",
            instead="compute the other use from a copy of its own (cache_read, or reindex)",
        )
    check_dtype(rule, where, buffer)
    return buffer


def _same(sch: Any, one: Any, other: Any) -> bool:
    return bool(sch.get_sref(one).same_as(sch.get_sref(other)))


def _cluster_loop(sch: Any, rule: str, where: str, loops: list[Any], depth: int) -> int:
    """The innermost cluster-bound loop of the consumer, by position."""
    found = [i for i, each in enumerate(loops) if cluster_axis(sch.get(each)) is not None]
    if not found or found[-1] > depth:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found="no cluster-bound loop of the consumer outside the staging loop",
            limit="the consumer runs on the CTAs of a cluster",
            instead="split a loop over the consumer's output by the cluster size, reorder it "
            "outside the reduction and cluster_bind it",
        )
    return found[-1]


def _slice_loop(
    sch: Any, rule: str, where: str, consumer: Any, index: int, loops: list[Any]
) -> tuple[int, int]:
    """Position of the outermost reduction loop over the intermediate, and its dimension."""
    region = sch.get(consumer).reads[index]
    values = bindings(sch, consumer)
    for step, loop in enumerate(loops):
        variable = sch.get(loop).loop_var
        users = [each for each, value in values if binds(variable, value)]
        if not users or not all(is_reduction(each) for each in users):
            continue
        indices = [each.min for each in region.region]
        sliced = [n for n, each in enumerate(indices) if any(binds(u.var, each) for u in users)]
        if sliced:
            # A layout may count parts in front of the columns, and have only one.
            several = [n for n in sliced if ir.constant(region.source.ty.shape[n]) != 1]
            return step, (several or sliced)[0]
    raise refuse(
        ScheduleRefused,
        rule,
        where,
        found=f"no reduction loop over '{region.source.name}'",
        limit="a consumer that reduces over the columns of the intermediate",
        instead="use compute_at: an intermediate that is read element by element needs no exchange",
    )


def _check_order(
    sch: Any, rule: str, where: str, loops: list[Any], order: tuple[int, int, int], ring: bool
) -> None:
    cluster, step, depth = order
    name = sch.get(loops[step]).loop_var.name
    if step < cluster:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"slice loop '{name}' outside the cluster-bound loop",
            limit="every CTA walks over all slices",
            instead="reorder the cluster-bound loop outside the consumer's reduction",
        )
    if ring and depth < step:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"all slices staged at once, outside slice loop '{name}'",
            limit="a ring stages one slice, or a part of one, at a time",
            instead="pass ring=False for an all-gather, or stage at the slice loop or inside it",
        )


def _check_count(sch: Any, rule: str, where: str, step: Any, cluster: Any, columns: int) -> int:
    slices, ctas = constant_extent(sch, rule, step), constant_extent(sch, rule, cluster)
    if slices != ctas or columns % slices:
        divisors = [n for n in range(1, MAX_CLUSTER + 1) if columns % n == 0]
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"{slices} slices of {columns} columns for {ctas} CTAs",
            limit="one slice a CTA, all of one width",
            instead="split the consumer's reduction loop and its cluster-bound loop by the same "
            f"number, one of {', '.join(map(str, divisors))}",
        )
    return slices


def _check_contiguous(
    sch: Any,
    rule: str,
    where: str,
    consumer: Any,
    operand: tuple[int, int],
    loops: list[Any],
    step: int,
    width: int,
) -> None:
    """Refuse a slice loop whose iterations take other columns than those of one slab."""
    index, dimension = operand
    start = sch.get(consumer).reads[index].region[dimension].min
    column = in_loops(sch, consumer, start)
    known = analyzer([sch.get(each) for each in loops])
    variable = sch.get(loops[step]).loop_var
    if not known.can_prove_equal(ir.tirx.floordiv(column, width), variable):
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"slice loop '{variable.name}' over columns {column}",
            limit=f"{width} consecutive columns in each of its iterations",
            instead="split the consumer's reduction loop by [slices, None] and use the outer part",
        )


def _column(sch: Any, rule: str, where: str, producer: Any, dimension: int, *, placed: bool) -> int:
    """The index of the producer's iteration variable that walks over the columns.

    `placed` says that compute_at will make the producer's loops anew; otherwise they stay, and one
    of them must walk over all columns.
    """
    start = sch.get(producer).writes[0].region[dimension].min
    for index, (each, value) in enumerate(bindings(sch, producer)):
        if each.var.same_as(start) and (placed or isinstance(value, ir.Var)):
            return index
    raise refuse(
        ScheduleRefused,
        rule,
        where,
        found=f"a producer that writes column {start} in several loops",
        limit="one loop of the producer for the columns",
        instead="call dsm_shuffle before the producer's layout or loops are transformed",
    )
