"""Checks of stores: no two threads or CTAs write one element, and peers read only what they may."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.access import row_major
from crossfuse.lower.kernel import ClusterKernel, Part
from crossfuse.lower.refusal import refuse
from crossfuse.lower.tree import (
    Access,
    analyzer,
    are_apart,
    bounds,
    children,
    coordinate,
    coordinate_loop,
    is_call,
    stored_elements,
)
from crossfuse.markers import DSM_SCOPE, MERGED, marked_blocks_in

# Parallel iterations must store to distinct elements.
#
# Run sequentially, a thread that stores a stale value into another thread's element goes unseen:
# the right value comes later. On the chip it is a race. So every store to memory that threads share
# must be an injective map of the parallel loops around it.

_TRUE = ir.tirx.IntImm("bool", 1)


def check_distinct_stores(kernel: ClusterKernel) -> None:
    """No two threads store to one element by the same statement.

    Refused if a store is not provably injective in the loops bound to CTAs and threads, or if
    threads of the kernel execute it together because no loop around it is bound to them.
    """
    everywhere = _coordinates(kernel.body)
    for access in kernel.uses:
        if isinstance(access.site.node, ir.BufferStore) and access.write and access.indices:
            shared_by = _shared_by(kernel, access.buffer)
            if shared_by:
                _check_store(access, shared_by, everywhere)


def _check_store(access: Access, shared_by: tuple[str, ...], everywhere: dict[str, int]) -> None:
    fixed = _fixed(access)
    tags = [(each, coordinate(each)) for each in access.loops]
    loops = [each for each, tag in tags if not tag or tag.startswith(shared_by)]
    parallel = [
        each
        for each in loops
        if coordinate(each) and ir.constant(each.extent) != 1 and each.loop_var not in fixed
    ]
    bound = {coordinate(each) for each in access.loops}
    for tag, extent in everywhere.items():
        if tag not in bound and extent != 1 and tag.startswith(shared_by):
            raise _refuse(access, f"a store that all {extent} places along {tag} execute")
    if not parallel:
        return
    known = analyzer(access.loops)
    written = [ir.substitute(index, fixed) for index in access.indices or ()]
    indices = [known.simplify(index) for index in written]
    # What no loop changes, such as the rank of the GPU, tells no two stores apart.
    around = {each.loop_var for each in access.loops}
    indices = [index for index in indices if not around.isdisjoint(ir.variables(index))]
    used = {var for index in indices for var in ir.variables(index)}
    for loop in parallel:
        if loop.loop_var not in used:
            raise _refuse(access, f"a store that loop '{_name(loop)}' repeats")
    condition = known.simplify(ir.conjunction(access.site.conditions))
    used_loops = [each for each in loops if each.loop_var in used]
    serial = [each for each in used_loops if not ir.among(each, parallel)]
    ranges = {
        each.loop_var: ir.tvm.ir.Range.from_min_extent(each.min, each.extent) for each in used_loops
    }
    if _is_spread(indices, ranges):
        return
    # Injective without the predicate is injective with it; some maps need it to be affine.
    for predicate in (_TRUE, condition):
        found = ir.sym.detect_iter_map(indices, ranges, predicate, check_level="bijective")
        if len(found.indices) > 0:
            return
    stored = stored_elements(indices, bounds(parallel), bounds(serial), [condition])
    if stored is None or stored.of_several_actors().size:
        raise _refuse(access, "parallel iterations that may store to one element")


def _coordinates(body: Any) -> dict[str, int]:
    """Coordinates that any loop of the kernel is bound to, with their extents."""
    loops = (each for each in ir.nodes(body, ir.For) if coordinate(each))
    return {coordinate(each): ir.constant(each.extent) or 0 for each in loops}


def _shared_by(kernel: ClusterKernel, buffer: Any) -> tuple[str, ...]:
    """Coordinates (or their prefixes) along which memory of a buffer is shared."""
    scope = str(buffer.scope())
    if scope == "global":
        return ("blockIdx.", "cluster.", "threadIdx.")
    if scope == DSM_SCOPE:
        return (f"cluster.{kernel.buffers[buffer]}", "threadIdx.")
    return ("threadIdx.",) if scope.startswith("shared") else ()


def _fixed(access: Access) -> dict[Any, Any]:
    """Variables that conditions pin to one value: ``threadIdx.x == 0``, or ``threadIdx.x < 1``."""
    known = analyzer(access.loops)
    first = {each.loop_var: each.min for each in access.loops}
    found: dict[Any, Any] = {}
    for condition in access.site.conditions:
        for term in ir.terms(condition):
            equal = isinstance(term, ir.tirx.EQ) and isinstance(term.a, ir.Var)
            if equal and ir.constant(term.b) is not None:
                found[term.a] = term.b
                continue
            # What unit loops add is simplified away.
            least = known.simplify(term)
            if isinstance(least, ir.tirx.LT) and least.a in first:
                start = first[least.a]
                if known.can_prove_equal(least.b, start + 1):
                    found[least.a] = start
    return found


def _is_spread(indices: list[Any], ranges: dict[Any, Any]) -> bool:
    """Whether each variable's step exceeds all that smaller steps reach, in some dimension.

    Then different values give different places, even where places between are left out.
    """
    variables = list(ranges)
    if any(ir.constant(each.extent) is None for each in ranges.values()):
        return False
    left = dict(ranges)
    for index in indices:
        terms = ir.sym.detect_linear_equation(index, variables)
        steps = [abs(ir.constant(each) or 0) for each in terms[:-1]] if terms else []
        found = {var: step for var, step in zip(variables, steps, strict=False) if step}
        if are_apart((step, ir.constant(ranges[var].extent) or 0) for var, step in found.items()):
            for var in found:
                left.pop(var, None)
    return not left


def _name(loop: Any) -> str:
    tag = coordinate(loop)
    return str(loop.loop_var.name) if tag.startswith("cluster.") else tag


def _refuse(access: Access, found: str) -> Exception:
    return refuse(
        "distinct-stores",
        f"buffer '{access.buffer.name}'",
        found=f"{found}: {access.site.text}",
        limit="one thread stores each element",
        instead="bind the loops of the storing block to the threads with factors that divide its "
        "tile, so that no thread is left over",
    )


# Who owns an element: proofs that a coordinate of the grid follows from a buffer's index.

#: A number read off an index.
Projection = Callable[[list[Any]], Any]


def extents(loops: tuple[Any, ...]) -> dict[str, int | None]:
    """Coordinates that loops are bound to, with their extents; unit loops are left out."""
    found = {coordinate(loop): ir.constant(loop.extent) for loop in loops if coordinate(loop)}
    return {tag: extent for tag, extent in found.items() if extent != 1}


def stray_access(mine: list[Access], tag: str) -> Access | None:
    """An access to one buffer that may touch an element of another place along a grid coordinate.

    `mine` are all accesses to the buffer, at least one; `tag` is such as ``"cluster.x"``. None if
    one function of the index gives the coordinate at every access: then each element is touched by
    one place only.
    """
    for access in mine:
        if access.indices is None or coordinate_loop(access.loops, tag) is None:
            return access
    reference = next((each for each in mine if each.write), mine[0])
    stray: Access | None = reference
    for owner in _owners(reference, tag):
        stray = next((each for each in mine if not _agrees(each, tag, owner)), None)
        if stray is None:
            return None
    return stray


def _owners(access: Access, tag: str) -> list[Projection]:
    """Functions of the index that may give the coordinate, read off one access."""
    loop = coordinate_loop(access.loops, tag)
    count = ir.constant(loop.extent)
    if count is None:
        return []
    known = analyzer(access.loops)
    owners: list[Projection] = []
    for select in _projections(access):
        index = known.simplify(select(list(access.indices or ())))
        terms = ir.sym.detect_linear_equation(index, [loop.loop_var])
        scale = ir.constant(known.simplify(terms[0])) if terms else None
        if scale is not None and scale > 0:
            owners.append(_digit(select, scale, count))
    return owners


def _digit(select: Projection, scale: int, count: int) -> Projection:
    def owner(indices: list[Any]) -> Any:
        return ir.tirx.floormod(ir.tirx.floordiv(select(indices), scale), count)

    return owner


def _projections(access: Access) -> list[Projection]:
    """Each dimension of the index, and its row-major position where extents are known."""
    shape = [ir.constant(extent) for extent in access.buffer.ty.shape]
    found: list[Projection] = [itemgetter(dimension) for dimension in range(len(shape))]
    if len(shape) > 1 and None not in shape:
        found.append(lambda indices: row_major(indices, shape))
    return found


def _agrees(access: Access, tag: str, owner: Projection) -> bool:
    loop = coordinate_loop(access.loops, tag)
    place = owner(list(access.indices or ()))
    return bool(analyzer(access.loops).can_prove_equal(place, loop.loop_var))


def check_global_memory(kernel: ClusterKernel) -> None:
    """Global stores stand under loops over all CTAs of a cluster; what is stored stays private.

    Global memory is not ordered between the threads of a kernel, so it is refused if several CTAs
    of a cluster would execute a store, or a thread may touch an element that another one writes.
    Loops are those of the schedule.
    """
    written = {
        each.buffer: None for each in kernel.uses if each.write and each.buffer.scope() == "global"
    }
    for buffer in written:
        mine = [each for each in kernel.uses if each.buffer.same_as(buffer)]
        _check_cluster(kernel, mine)
        # One store alone is the business of check_distinct_stores.
        if len(mine) > 1:
            _check_owner(buffer, mine)


def _check_cluster(kernel: ClusterKernel, mine: list[Access]) -> None:
    for access in mine:
        missing = [
            axis
            for axis, extent in kernel.cluster.items()
            if extent > 1 and access.write and access.cluster_loop(axis) is None
        ]
        if missing:
            raise refuse(
                "global-store",
                f"buffer '{access.buffer.name}'",
                found=f"a store outside every loop of cluster axis {missing[0]}: "
                f"{access.site.text}",
                limit="one CTA stores each element",
                instead="split one of the loops around the store by the cluster size and "
                "cluster_bind the part",
            )


def _check_owner(buffer: Any, mine: list[Access]) -> None:
    tags: dict[str, int | None] = {}
    for access in mine:
        if access.write:
            tags |= extents(access.loops)
    for tag in sorted(tags):
        if tag.startswith("vthread"):
            continue
        stray = stray_access(mine, tag)
        if stray is not None:
            store = next(each for each in mine if each.write)
            raise refuse(
                "global-exchange",
                f"buffer '{buffer.name}'",
                found=f"an element that places along {tag} may share: {stray.site.text}, with "
                f"{store.site.text}",
                limit="global memory is not ordered between the threads of a kernel",
                instead="keep the intermediate in scope shared.dsm (dsm_shuffle), give all "
                "statements on the buffer the same bindings, or make two kernels",
            )


def check_private_buffers(kernel: ClusterKernel, part: Part) -> None:
    """Every element of a private buffer is touched by one CTA (of registers, by one thread).

    Sequentially there is one such buffer; on the chip every CTA has its own, and a value written by
    rank 0 does not appear in the copy of rank 1. Where a buffer is allocated inside the loop over
    CTAs, there is nothing to check; elsewhere, a function of the index must give the CTA. The rank
    of a `shared.dsm` buffer gives its cluster axis.
    """
    for buffer, outside in _allocations(part).items():
        is_slab = buffer.scope() == DSM_SCOPE
        if buffer.scope() == "global" or (is_slab and buffer not in kernel.buffers):
            continue  # a buffer that is no slab of any axis is refused when its shape is known
        mine = [each for each in kernel.uses if each.buffer.same_as(buffer)]
        for tag in _shared_coordinates(kernel, buffer, mine, outside):
            stray = stray_access([_below(each, outside) for each in mine], tag)
            if stray is not None:
                raise _refuse_private(buffer, tag, stray)


def _allocations(part: Part) -> dict[Any, tuple[Any, ...]]:
    """Buffers of a kernel, each with the loops around its allocation."""
    found: dict[Any, tuple[Any, ...]] = dict.fromkeys(part.buffers, ())

    def visit(node: Any, loops: tuple[Any, ...]) -> None:
        if isinstance(node, ir.SBlock):
            found.update(dict.fromkeys(node.alloc_buffers, loops))
        inside = (*loops, node) if isinstance(node, ir.For) else loops
        for child in children(node):
            visit(child, inside)

    visit(part.body, ())
    return found


def _shared_coordinates(
    kernel: ClusterKernel, buffer: Any, mine: list[Access], outside: tuple[Any, ...]
) -> list[str]:
    """Coordinates along which each place has a copy, and along which the buffer is written."""
    written: dict[str, int | None] = {}
    for access in mine:
        if access.write:
            written |= extents(_below(access, outside).loops)
    axis = kernel.buffers.get(buffer)
    equal = _is_allreduced(kernel, buffer) or _is_merged(kernel, buffer)
    by_thread = str(buffer.scope()) == "local" and not equal
    return [
        tag
        for tag in sorted(written)
        if tag != f"cluster.{axis}"
        and (by_thread or not tag.startswith("threadIdx."))
        and not tag.startswith("vthread")
    ]


def _is_allreduced(kernel: ClusterKernel, buffer: Any) -> bool:
    """Whether TVM made a thread's register for a reduction over threads."""
    calls = ir.nodes(kernel.body, ir.Call)
    reductions = (each for each in calls if is_call(each, "tirx.tvm_thread_allreduce"))
    return any(ir.mentions(each, buffer) for each in reductions)


def _is_merged(kernel: ClusterKernel, buffer: Any) -> bool:
    """Whether all threads end with equal registers, see `lower_merges`."""
    return any(
        written.source.same_as(buffer)
        for block in marked_blocks_in(kernel.body, MERGED)
        for written in block.writes
    )


def _below(access: Access, outside: tuple[Any, ...]) -> Access:
    """The access without the bindings of loops around the allocation."""
    bound = {each.loop_var for each in outside}
    inner = tuple(
        each
        for each in access.site.path
        if not (isinstance(each, ir.For) and coordinate(each) and each.loop_var in bound)
    )
    site = type(access.site)(access.site.node, inner)
    return Access(access.buffer, access.indices, access.read, access.write, site)


def _refuse_private(buffer: Any, tag: str, stray: Access) -> Exception:
    who = "thread" if tag.startswith("threadIdx.") else "CTA"
    return refuse(
        "private-buffer",
        f"buffer '{buffer.name}'",
        found=f"a {buffer.scope()} buffer written along {tag} and an access that may be to "
        f"another {who}'s element: {stray.site.text}",
        limit=f"each {who} has a copy of its own",
        instead="compute the buffer at the loop that uses it, inside the bound loop, or exchange "
        "it with dsm_reduce or dsm_shuffle",
    )
