"""What primitives share: checks, rehearsals that leave no half of a change, sizes of tiles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, TypeVar

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import (
    ClusterLoop,
    bindings,
    binds,
    cluster_loops,
    combiner,
    constant_extent,
    function,
    in_loops,
    is_reduction,
    name_of,
    position,
    span,
    written_buffer,
)
from crossfuse.calls import AnySchedule, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import MAX_SHARED_BYTES
from crossfuse.markers import (
    AXES,
    CLUSTER_AXIS,
    DSM_DTYPES,
    MAX_CLUSTER,
    cluster_axis,
    is_rank_bound,
    thread_tag,
)

# Checks of the arguments of primitives: live blocks and loops of this schedule.

_SOURCE = {"block": "sch.get_sblock(name)", "loop": "sch.get_loops(block)"}


def check_block(sch: Any, rule: str, role: str, item: Any) -> None:
    """Refuse anything but a live block of `sch`; `role` is the parameter's name."""
    _check(sch, rule, role, item, "block", ir.SBlockRV)


def check_loop(sch: Any, rule: str, role: str, item: Any) -> None:
    """Refuse anything but a live loop of `sch`; `role` is the parameter's name."""
    _check(sch, rule, role, item, "loop", ir.LoopRV)


def _check(sch: Any, rule: str, role: str, item: Any, kind: str, expected: type) -> None:
    found = type(item).__name__ if not isinstance(item, expected) else _missing(sch, item, kind)
    if found:
        raise refuse(
            ScheduleRefused,
            rule,
            f"argument '{role}'",
            found=found,
            limit=f"{expected.__name__} of a {kind} of this schedule that still exists",
            instead=f"take it anew from {_SOURCE[kind]}; primitives that make loops or blocks anew "
            "end the variables of the old ones",
        )


def _missing(sch: Any, item: Any, kind: str) -> str:
    """Why a random variable stands for nothing; empty if it is live."""
    try:
        sch.get(item)
    except IndexError:
        return f"a {kind} of another schedule"
    except ValueError:
        return f"a {kind} that no longer exists"
    return ""


# Checks of loops that become CTAs or GPUs, and of reductions that are split over them.


def check_unbound(sch: Any, rule: str, where: str, loop: Any) -> None:
    """Refuse a loop that is bound, unrolled or parallel already."""
    node = sch.get(loop)
    if int(node.kind) == int(ir.ForKind.SERIAL):
        return
    axis = cluster_axis(node)
    bound = thread_tag(node) or (f"cluster axis {axis}" if axis else "")
    bound = "the ranks" if is_rank_bound(node) else bound
    state = f"bound to {bound}" if bound else ir.ForKind(int(node.kind)).name.lower()
    raise refuse(
        ScheduleRefused,
        rule,
        where,
        found=f"a loop that is already {state}",
        limit="a serial loop",
        instead="split the loop and bind one of the parts",
    )


def check_spatial(sch: Any, rule: str, where: str, loop: Any, *, instead: str) -> None:
    """Refuse a reduction loop; `instead` says what to call for one."""
    node = sch.get(loop)
    found: list[str] = []

    def visit(realize: Any) -> None:
        pairs = zip(realize.block.iter_vars, realize.iter_values, strict=True)
        if any(is_reduction(each) and binds(node.loop_var, value) for each, value in pairs):
            found.append(str(realize.block.name_hint))

    ir.walk(node.body, (ir.SBlockRealize, visit))
    if found:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"a reduction loop of block '{found[0]}'",
            limit="a data-parallel loop",
            instead=f"bind a loop over output elements; {instead}",
        )


def check_combiner(sch: Any, rule: str, where: str, block: Any) -> None:
    """Refuse a block that is no reduction whose parts can be combined."""
    if combiner(sch, block) is None:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found="a block without one initialised sum, product, max or min",
            limit="a reduction by sum, product, max or min that is not decomposed",
            instead=f"call {rule} on the reduction block itself, before decompose_reduction",
        )


def check_reduction_loop(
    sch: Any, rule: str, where: str, block: Any, loop: Any, *, bind: str
) -> None:
    """Refuse a loop of no reduction axis of the block; `bind` takes those over outputs."""
    variable = sch.get(loop).loop_var
    users = [each for each, value in bindings(sch, block) if binds(variable, value)]
    if not users or not all(is_reduction(each) for each in users):
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found="a loop over output elements" if users else "a loop that the block does not use",
            limit="a reduction loop",
            instead="split a reduction loop of the block and pass the part that becomes the rank; "
            f"for a loop over output elements use {bind}",
        )


# Rehearsal: a primitive either does all of its work or leaves the schedule as it was.

Facts = TypeVar("Facts")
Result = TypeVar("Result")


def rehearsed(
    sch: Any,
    read: Callable[[Any], Facts],
    change: Callable[[Any, Facts], Result],
    check: Callable[[Any, Facts, Result], None],
) -> Result:
    """Read facts, make a composite change and check its result: on a copy, then on the schedule.

    TVM has no way back from a recorded instruction, and records questions such as ``get_loops``
    too, so a refusal half way has to come before the first of them. A copy shares all nodes but
    those that change and keeps the random variables: the rehearsal costs what the change costs. It
    takes its seed from the schedule's random state, which moves on by one step. `read` returns
    facts without random variables of the copy, and `check` gets the changed copy with the result of
    `change`, and raises to refuse.
    """
    trial = sch.copy()
    facts = read(trial)
    check(trial, facts, change(trial, facts))
    return change(sch, facts)


@contextmanager
def refusing(rule: str, where: str, *, limit: str, instead: str) -> Iterator[None]:
    """Turn TVM's schedule errors into a refusal with an alternative."""
    try:
        yield
    except ir.ScheduleError as error:
        raise refuse(
            ScheduleRefused, rule, where, found=reason(error), limit=limit, instead=instead
        ) from error


def reason(error: Exception) -> str:
    """The sentence of a schedule error, without the rendered program."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("Error message:"):
            line = line.removeprefix("Error message:").removeprefix(" ScheduleError:")
            break
    else:
        line = lines[-1] if lines else type(error).__name__
    # TVM's names of nodes point into the program that is left out.
    return re.sub(r" (s_tir|tirx)\.\w+#\d+", "", line).strip().rstrip(".:")


# What all cluster-bound loops of a function must agree on: axes, extents, nesting.


def check_axis(rule: str, where: str, axis: Any) -> None:
    """Refuse an axis that a cluster does not have."""
    if axis not in AXES:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"axis {axis!r}",
            limit="'x', 'y' or 'z'",
            instead="name one of the three cluster axes",
        )


def check_extent(rule: str, where: str, extent: int) -> None:
    """Refuse an extent that no cluster has."""
    if not 1 <= extent <= MAX_CLUSTER:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"extent {extent}",
            limit=f"1 to {MAX_CLUSTER} CTAs in a cluster",
            instead="split the loop so that one part has at most that extent, and pass that part",
        )


def check_agreement(sch: Any, rule: str, where: str, loop: Any, axis: str, extent: int) -> None:
    """Refuse an extent that contradicts other cluster-bound loops, one by one or as a cluster."""
    known = {other.axis: other for other in cluster_loops(function(sch, loop))}
    check_same(rule, where, known, ClusterLoop(axis, "", extent))
    check_cluster(rule, where, known)


def check_same(rule: str, where: str, known: dict[str, ClusterLoop], loop: ClusterLoop) -> None:
    """Refuse a loop of another extent than the known one on its axis; a first one becomes known."""
    other = known.setdefault(loop.axis, loop)
    if other.extent != loop.extent:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"extent {loop.extent} on axis {loop.axis}",
            limit=f"extent {other.extent}, as loop '{other.name}' has on that axis",
            instead="split both loops by the same number of CTAs",
        )


def check_cluster(rule: str, where: str, known: dict[str, ClusterLoop]) -> None:
    """Refuse a cluster, given by a loop for each axis, that is too large."""
    size = prod(each.extent for each in known.values())
    if size > MAX_CLUSTER:
        shape = " x ".join(f"{name}={known[name].extent}" for name in AXES if name in known)
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"a cluster of {size} CTAs ({shape})",
            limit=f"{MAX_CLUSTER} CTAs over all axes",
            instead="bind a smaller loop on one of the axes",
        )


def check_not_within(rule: str, where: str, nest: list[Any], axis: str) -> None:
    """Refuse a nest in which a ``For`` is bound to `axis` already."""
    for loop in nest:
        if cluster_axis(loop) == axis:
            raise refuse(
                ScheduleRefused,
                rule,
                where,
                found=f"loop '{loop.loop_var.name}' of the same nest bound to axis {axis} too",
                limit="one loop a nest on each cluster axis",
                instead="bind the second loop to another axis, or fuse the two loops and bind that",
            )


# The tile of a buffer that one iteration of a loop works on.

# Loop extents as the trace knows them, so that a sampled size stays mutable.
#
# ``sch.get(loop).extent`` is a number: baked into a later instruction it would survive a mutation
# of the decision it came from. The factor given to ``split`` is the random variable itself.


def symbolic_extent(sch: Any, rule: str, loop: Any) -> Any:
    """Extent of `loop` as a random variable where the trace has one, else as an int.

    The variable is the factor of the ``split`` that made the loop, if one was given. An extent that
    follows from a sampled factor without being one is refused: a trace has no expressions of random
    variables, so a number would be recorded, and be wrong after a mutation.
    """
    number = constant_extent(sch, rule, loop)
    output = _made_by_split(sch, loop)
    if output is None:
        return number
    factor = _factor(sch, output)
    if isinstance(factor, ir.Var):
        return factor
    if factor is None and _sampled(sch, output):
        raise refuse(
            ScheduleRefused,
            rule,
            name_of(sch, loop),
            found=f"extent {number}, what sampled factors leave over",
            limit="an extent that the trace can mutate: a number or a sampled factor",
            instead="give the sampled size to split as the factor of this loop and leave another "
            "factor None, or sample all factors with sample_perfect_tile",
        )
    return number


def is_sampled(sch: Any, loop: Any) -> bool:
    """Whether the extent of `loop` is a sampled factor, or inferred from such factors."""
    output = _made_by_split(sch, loop)
    if output is None:
        return False
    return isinstance(_factor(sch, output), ir.Var) or _sampled(sch, output)


def _made_by_split(sch: Any, loop: Any) -> Any:
    """The random variable under which a ``split`` or ``fuse`` made the loop, or None."""
    target = sch.get_sref(loop)
    for instruction in reversed(_instructions(sch)):
        for output in instruction.outputs:
            if _is_live(sch, output, target):
                return output
    return None


def _instructions(sch: Any) -> list[Any]:
    if sch.trace is None:
        return []
    return [each for each in sch.trace.insts if each.kind.name in ("Split", "Fuse")]


def _is_live(sch: Any, output: Any, target: Any) -> bool:
    """Whether a loop made by an earlier instruction is still the loop `target` refers to."""
    try:
        return bool(sch.get_sref(output).same_as(target))
    except (IndexError, ValueError):
        return False


def _maker(sch: Any, loop: Any) -> tuple[Any, int]:
    """The instruction that made a loop variable, live or not, and the index among its outputs."""
    for instruction in _instructions(sch):
        for index, output in enumerate(instruction.outputs):
            if output.same_as(loop):
                return instruction, index
    return None, 0


def _factor(sch: Any, loop: Any) -> Any:
    """The factor a loop was split by: a random variable, a number, or None where inferred."""
    instruction, index = _maker(sch, loop)
    if instruction is None or instruction.kind.name != "Split":
        return None
    return list(instruction.inputs)[1 + index]


def _sampled(sch: Any, loop: Any) -> bool:
    """Whether the extent of a loop without a given factor depends on sampled ones."""
    instruction, index = _maker(sch, loop)
    if instruction is None:
        return False
    inputs = list(instruction.inputs)
    if instruction.kind.name == "Fuse":
        return any(isinstance(_factor(sch, each), ir.Var) or _sampled(sch, each) for each in inputs)
    factor = inputs[1 + index]
    if factor is not None:
        return isinstance(factor, ir.Var)
    return any(isinstance(each, ir.Var) for each in inputs[1:]) or _sampled(sch, inputs[0])


def written_starts(sch: Any, block: Any) -> list[Any]:
    """First index that a block writes, by dimension, in terms of its loops."""
    return [in_loops(sch, block, each.min) for each in sch.get(block).writes[0].region]


def tile_extents(sch: Any, block: Any, loop: Any) -> tuple[int, ...]:
    """Extents of the region that a block writes in one iteration of `loop`, by buffer dimension."""
    inner = [sch.get(each) for each in _inside(sch, block, loop)]
    return tuple(span(start, inner) for start in written_starts(sch, block))


def is_sampled_tile(sch: Any, block: Any, loop: Any) -> bool:
    """Whether a mutation of the trace may change `tile_extents`."""
    starts = written_starts(sch, block)
    return any(
        is_sampled(sch, each)
        for each in _inside(sch, block, loop)
        if any(binds(sch.get(each).loop_var, start) for start in starts)
    )


def _inside(sch: Any, block: Any, loop: Any) -> list[Any]:
    """The loops of a block inside one of them."""
    loops, depth = position(sch, "tile", block, loop)
    return loops[depth + 1 :]


def check_dtype(rule: str, where: str, buffer: Any) -> None:
    """Refuse an element type that has no DSM access."""
    dtype = str(buffer.ty.dtype)
    if dtype not in DSM_DTYPES:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"element type {dtype}",
            limit=", ".join(DSM_DTYPES),
            instead="compute the exchanged tile in one of these types and cast afterwards",
        )


def check_slab(sch: Any, rule: str, where: str, block: Any, rank: Any) -> None:
    """Refuse a slab, written by `block` in one iteration of loop `rank`, that no CTA can hold."""
    dtype = str(written_buffer(sch, block).ty.dtype)
    # The leading extent is the rank's: one, in one iteration.
    extents = tile_extents(sch, block, rank)[1:]
    size = prod(extents) * ir.item_bytes(dtype)
    if size > MAX_SHARED_BYTES:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"a slab of {' x '.join(map(str, extents))} {dtype}, {size} bytes",
            limit=f"{MAX_SHARED_BYTES} bytes of shared memory in a CTA",
            instead="split the output loops and reorder the parts outside the exchange, so that "
            "a smaller tile is exchanged at a time",
        )


# `cluster_bind`: binds the iterations of a parallel loop to the CTAs of a thread-block cluster.


RULE = "cluster_bind"


@checked
def cluster_bind(sch: AnySchedule, loop: Any, axis: str = "x") -> None:
    """Bind a parallel loop to the CTAs of a thread-block cluster.

    Before, with ``c`` a parallel loop of extent 4 inside the grid loop ``i``::

        for i in thread_binding(8, "blockIdx.x"):
            for c in range(4):
                body(i, c)

    After ``sch.cluster_bind(c)``: 8 clusters of 4 CTAs, launched as 32 CTAs along x; iteration c
    of the loop runs in the CTA whose rank in its cluster is c::

        for i in thread_binding(8, "blockIdx.x"):
            for c in parallel(4):            # crossfuse.cluster_axis = "x"
                body(i, c)                   # CTA c of cluster i

    Several loops may be bound to one axis, one after the other: the same CTAs run them in turn.
    Recorded as ``parallel`` and ``annotate``, so a trace replays it in stock TVM.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The schedule; as a method, ``sch.cluster_bind(loop, axis)``.
    loop : LoopRV
        A data-parallel loop of constant extent, 1 to 16.
    axis : str
        Cluster axis, "x", "y" or "z". Ranks count x fastest, as the hardware does.

    Raises
    ------
    ScheduleRefused
        If the extent is not 1 to 16 or differs from another loop on the axis, if the cluster
        would exceed 16 CTAs, if the loop is not parallel, is bound already, or lies inside
        another loop of the axis.

    Notes
    -----
    At most 16 CTAs share a cluster on sm_90; more than 8 need the non-portable launch attribute,
    which the launcher sets (CUDA C++ Programming Guide, thread block clusters).

    Examples
    --------
    >>> import tvm
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = tvm.s_tir.Schedule(prim_func(parse("gemm:M=32,K=64,N=32")))
    >>> i, j, k = sch.get_loops(sch.get_sblock("gemm0"))
    >>> outer, c = sch.split(i, [None, 4])
    >>> sch.cluster_bind(c)
    >>> sch.cluster_layout().axes
    (('x', 4),)
    """
    check_loop(sch, RULE, "loop", loop)
    where = name_of(sch, loop)
    check_axis(RULE, where, axis)
    extent = constant_extent(sch, RULE, loop)
    check_extent(RULE, where, extent)
    check_unbound(sch, RULE, where, loop)
    check_spatial(
        sch,
        RULE,
        where,
        loop,
        instead="for a reduction loop call dsm_reduce, which makes one partial result a CTA and "
        "combines them",
    )
    check_agreement(sch, RULE, where, loop, axis, extent)
    _check_nesting(sch, loop, where, axis)
    with refusing(
        RULE,
        where,
        limit="a data-parallel loop",
        instead="bind a loop whose iterations write different elements, and read none of them",
    ):
        sch.parallel(loop)
    sch.annotate(loop, CLUSTER_AXIS, axis)


def _check_nesting(sch: Any, loop: Any, where: str, axis: str) -> None:
    """Refuse a loop with another loop of the axis around it or inside it."""
    nest: list[Any] = []
    ir.walk(sch.get(loop).body, (ir.For, nest.append))
    sref = sch.get_sref(loop).parent
    while sref is not None:
        if isinstance(sref.stmt, ir.For):
            nest.append(sref.stmt)
        sref = sref.parent
    check_not_within(RULE, where, nest, axis)
