"""Facts about the cluster kernels of a function, and how each is launched.

The passes of this folder run after TVM has compacted buffers: block iteration variables are gone,
every index is an expression of loop variables, and a `shared.dsm` buffer has shape
(CTAs, tile...) exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import RefusedError
from crossfuse.lower.image import WAIT_BEHIND
from crossfuse.lower.refusal import Rule, refuse
from crossfuse.lower.tree import Access, accesses, analyzer, is_call
from crossfuse.markers import (
    AHEAD,
    AXES,
    DSM_SCOPE,
    SIDE_BY_SIDE,
    cluster_axis,
    constant_parameters,
    starts_early,
    thread_tag,
)

_refused = Rule("shared.dsm")


@dataclass(frozen=True)
class ClusterKernel:
    """What the passes need to know about one kernel."""

    body: Any
    #: CTAs in the cluster, by axis.
    cluster: dict[str, int] = field(default_factory=dict)
    #: Iterations of the ``blockIdx`` loops by axis: clusters along an axis that has a cluster
    #: extent, else CTAs.
    grid: dict[str, int] = field(default_factory=dict)
    #: Extents of the ``threadIdx`` loops, by axis.
    threads: dict[str, int] = field(default_factory=dict)
    #: Cluster axis of each `shared.dsm` buffer.
    buffers: dict[Any, str] = field(default_factory=dict)
    #: Every use of any buffer, in program order.
    uses: tuple[Access, ...] = ()

    @property
    def size(self) -> int:
        """Number of CTAs in one cluster."""
        size = 1
        for extent in self.cluster.values():
            size *= extent
        return size

    @property
    def accesses(self) -> tuple[Access, ...]:
        """Uses of `shared.dsm` buffers; ``indices[0]`` is the rank."""
        return tuple(each for each in self.uses if each.buffer in self.buffers)


@dataclass(frozen=True)
class Part:
    """Statements of the root block that make one kernel."""

    statements: tuple[Any, ...]
    #: Buffers of the root block that live in the kernel's CTAs.
    buffers: tuple[Any, ...]

    @property
    def body(self) -> Any:
        """The statements as one."""
        only, *others = self.statements
        return ir.SeqStmt(list(self.statements)) if others else only


def root_of(func: Any) -> Any:
    """The root block of a function, as a statement; made for a function that has no blocks."""
    if isinstance(func.body, ir.SBlockRealize):
        return func.body
    return enclosed(func.body, (), "root")


def enclosed(body: Any, allocated: tuple[Any, ...], name: str = "") -> Any:
    """Statement: an opaque block around `body` that allocates buffers."""
    block = ir.SBlock([], [], [], name, body, None, list(allocated), [], {})
    return ir.SBlockRealize([], ir.tirx.IntImm("bool", 1), block)


def parts_of(root: Any) -> tuple[Part, ...]:
    """Split the root block into kernels.

    Each statement of the root block is a launch of its own, unless a buffer that lives in CTAs
    connects it with others: they and all statements between them are one kernel.
    """
    body = root.body
    statements = list(body.seq) if isinstance(body, ir.SeqStmt) else [body]
    inside = [buffer for buffer in root.alloc_buffers if buffer.scope() != "global"]
    users = {
        buffer: [i for i, each in enumerate(statements) if ir.mentions(each, buffer)]
        for buffer in inside
    }
    spans = [(min(found), max(found)) for found in users.values() if found]
    parts: list[Part] = []
    first = 0
    while first < len(statements):
        last = _reach(first, spans)
        group = tuple(statements[first : last + 1])
        held = tuple(b for b in inside if any(first <= i <= last for i in users[b]))
        parts.append(Part(group, held))
        first = last + 1
    return tuple(parts)


def _reach(first: int, spans: list[tuple[int, int]]) -> int:
    """Last statement that is connected with statement `first` or one after it."""
    last = first
    while True:
        reached = max([last, *(end for start, end in spans if first <= start <= last)])
        if reached == last:
            return last
        last = reached


def read_kernel(body: Any, *, compacted: bool = True) -> ClusterKernel:
    """Collect the facts of one kernel.

    Before buffers are `compacted` to their final shapes, a rank is one modulo the cluster size, and
    a buffer that is no slab of any axis is accepted. Refused if extents disagree, or a `shared.dsm`
    buffer is not used as one slab per CTA.
    """
    cluster: dict[str, int] = {}
    grid: dict[str, int] = {}
    threads: dict[str, int] = {}
    for loop in ir.nodes(body, ir.For):
        tag = thread_tag(loop)
        axis = cluster_axis(loop)
        if axis is not None:
            _agree(cluster, axis, loop, f"cluster axis {axis}")
        elif tag.startswith("blockIdx."):
            _agree(grid, tag[-1], loop, tag)
        elif tag.startswith("threadIdx."):
            _agree(threads, tag[-1], loop, tag)
    uses = tuple(accesses(body))
    slabs: dict[Any, list[Access]] = {}
    for access in uses:
        if access.buffer.scope() == DSM_SCOPE:
            slabs.setdefault(access.buffer, []).append(access)
    buffers: dict[Any, str] = {}
    for buffer, mine in slabs.items():
        _check_indexed(mine)
        axis = _slab_axis(buffer, mine, cluster, compacted)
        if axis is not None:
            buffers[buffer] = axis
        elif compacted:
            raise _no_axis(buffer, mine, cluster)
    return ClusterKernel(body, cluster, grid, threads, buffers, uses)


def own_rank(access: Access, axis: str, *, modulo: int | None = None) -> bool:
    """Whether the accessed rank is provably that of the executing CTA on `axis`."""
    loop = access.cluster_loop(axis)
    if loop is None or access.indices is None:
        return False
    rank = access.indices[0]
    return is_own(ir.tirx.floormod(rank, modulo) if modulo else rank, loop, access.loops)


def is_own(rank: Any, cluster_loop: Any, loops: tuple[Any, ...]) -> bool:
    """Whether `rank` provably equals the variable of `cluster_loop`."""
    return bool(analyzer(loops).can_prove_equal(rank, cluster_loop.loop_var))


def _check_indexed(mine: list[Access]) -> None:
    for access in mine:
        if access.indices is None:
            raise _refused(
                f"buffer '{access.buffer.name}'",
                found=f"a pointer to a slab or a view of it: {access.site.text}",
                limit="loads and stores of elements: a pointer does not say which CTA it means",
                instead="copy between the slab and a shared or local buffer by a block of loops, "
                "and use the pointer or the tensor intrinsic on that buffer",
            )


def _slab_axis(
    buffer: Any, mine: list[Access], cluster: dict[str, int], compacted: bool
) -> str | None:
    """The cluster axis along which a buffer's slabs lie, inferred from accesses to own slabs."""
    extent = ir.constant(buffer.ty.shape[0])
    for axis in AXES:
        size = cluster.get(axis)
        if size is None or (compacted and size != extent):
            continue
        if any(own_rank(access, axis, modulo=None if compacted else size) for access in mine):
            _check_enclosed(buffer, mine, axis)
            return axis
    return None


def _no_axis(buffer: Any, mine: list[Access], cluster: dict[str, int]) -> RefusedError:
    return _refused(
        f"buffer '{buffer.name}'",
        found=f"a leading extent of {buffer.ty.shape[0]} and no access by a CTA to its own slab, "
        f"in {mine[0].site.text}",
        limit="one slab for each CTA of a cluster axis "
        f"({', '.join(f'{a}={n}' for a, n in cluster.items()) or 'none is bound'})",
        instead="cluster_bind the loop over the leading dimension, as dsm_reduce and dsm_shuffle "
        "do, or give a buffer that stays within a CTA the scope shared.dyn",
    )


def _check_enclosed(buffer: Any, mine: list[Access], axis: str) -> None:
    for access in mine:
        if access.cluster_loop(axis) is None:
            raise _refused(
                f"buffer '{buffer.name}'",
                found=f"an access outside every loop bound to cluster axis {axis}: "
                + access.site.text,
                limit="slabs are accessed by the CTAs that run the cluster-bound loop",
                instead="cluster_bind a loop around the statement",
            )


def _agree(extents: dict[str, int], axis: str, loop: Any, what: str) -> None:
    extent = ir.constant(loop.extent)
    if extent is None or extents.setdefault(axis, extent) != extent:
        raise refuse(
            what,
            f"loop '{loop.loop_var.name}'",
            found=f"extent {loop.extent}",
            limit=f"extent {extents.get(axis, 'constant')}, as another loop on it has",
            instead="split both loops by the same factor",
        )


# How kernels are launched: independent nests side by side, and loads ahead of an early start.


_CTAS = "blockIdx.x"


@dataclass(frozen=True)
class _Launch:
    """A nest that would be a kernel by itself."""

    #: Its extents of CTAs and threads, outermost first, each an attribute of a statement.
    extents: tuple[Any, ...]
    body: Any

    @property
    def indices(self) -> dict[str, Any]:
        """Variables of CTAs and threads by their tags."""
        return {str(each.node.thread_tag): each.node.var for each in self.extents}

    @property
    def sizes(self) -> dict[str, int]:
        """Extents by the same tags."""
        return {str(each.node.thread_tag): int(each.value) for each in self.extents}


def side_by_side() -> Any:
    """Pass: launches of a function with `SIDE_BY_SIDE` become branches of one.

    The kernel has the CTAs of all of them, one after another::

        for blockIdx.x in 8: first(blockIdx.x)      for blockIdx.x in 8 + 4:
        for blockIdx.x in 4: second(blockIdx.x)         if blockIdx.x < 8: first(blockIdx.x)
                                                        else: second(blockIdx.x - 8)

    It runs after barriers of threads are placed, which TVM refuses to do in a branch; all threads
    of a CTA take the same one. Refused are launches of different threads, and those that share
    what one of them stores.
    """
    return ir.body_pass("SideBySide", SIDE_BY_SIDE, _joined)


def _joined(body: Any) -> Any:
    statements = list(body.seq) if isinstance(body, ir.SeqStmt) else [body]
    at = [place for place, each in enumerate(statements) if _is_launch(each)]
    launches = [_launch(statements[each]) for each in at]
    _check_alike(launches)
    _check_apart(launches)
    kept = [each for place, each in enumerate(statements) if place not in at[1:]]
    kept[at[0]] = _one_launch(launches)
    return ir.SeqStmt(kept) if len(kept) > 1 else kept[0]


def _is_launch(statement: Any) -> bool:
    return isinstance(statement, ir.AttrStmt) and str(statement.attr_key) == "thread_extent"


def _launch(nest: Any) -> _Launch:
    """Take the extents out of a nest; what is allocated between them moves inside."""
    extents: list[Any] = []

    def inside(node: Any, mutator: Any) -> Any:
        if not _is_launch(node):
            return mutator.default_mutate(node)
        extents.append(node)
        return mutator.mutate(node.body)

    body = ir.mutate(nest, (ir.AttrStmt, inside))
    return _Launch(tuple(extents), body)


def _check_alike(launches: Sequence[_Launch]) -> None:
    first, *_ = (_threads(each) for each in launches)
    for each in launches:
        if _threads(each) != first or _CTAS not in each.sizes:
            raise refuse(
                "side-by-side",
                "function",
                found=f"nests of {_text(launches[0])} and of {_text(each)}",
                limit="CTAs along x, and threads alike in all nests",
                instead="schedule all nests with the same tiles, or leave the annotation out",
            )


def _threads(launch: _Launch) -> dict[str, int]:
    return {tag: size for tag, size in launch.sizes.items() if tag != _CTAS}


def _text(launch: _Launch) -> str:
    return ", ".join(f"{size} {tag}" for tag, size in launch.sizes.items())


def _check_apart(launches: Sequence[_Launch]) -> None:
    """Refuse nests of which one stores what another one uses: none waits for another."""
    for one in launches:
        stored = {each.buffer for each in ir.nodes(one.body, ir.BufferStore)}
        for other in (each for each in launches if each is not one):
            used = set(ir.variables(other.body))
            shared = next((each for each in stored if each in used), None)
            if shared is not None:
                raise refuse(
                    "side-by-side",
                    f"buffer '{shared.name}'",
                    found="a nest that stores what another one uses",
                    limit="nests that run at the same time, in any order",
                    instead="leave the annotation out: then they are kernels one after another",
                )


def _one_launch(launches: Sequence[_Launch]) -> Any:
    first = launches[0]
    body = _branches(launches, 0, first.indices)
    total = sum(each.sizes[_CTAS] for each in launches)
    for each in reversed(first.extents):
        is_ctas = str(each.node.thread_tag) == _CTAS
        size = ir.tirx.IntImm("int32", total) if is_ctas else each.value
        body = ir.AttrStmt(each.node, each.attr_key, size, body)
    return body


def _branches(launches: Sequence[_Launch], start: int, indices: Mapping[str, Any]) -> Any:
    """What CTAs from `start` on do: those of the first launch, then those of the others."""
    first, *others = launches
    place = indices[_CTAS]
    own = {first.indices[tag]: var for tag, var in indices.items()}
    own[first.indices[_CTAS]] = place - start if start else place
    body = ir.substitute(first.body, own)
    if not others:
        return body
    end = start + first.sizes[_CTAS]
    return ir.IfThenElse(place < end, body, _branches(others, end, indices))


# The pass by which kernels that start early ask for weights before they wait.
#
# Such a kernel begins while the one before it ends, and what that one writes may not be read yet.
# Weights may: with them on their way, most of a short product's time passes while others compute.

#: The next kernel begins only here: its loads stand behind those of this one in memory's queue.
_SOURCE = f"""\
__device__ __forceinline__ void {WAIT_BEHIND}() {{
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
  asm volatile("griddepcontrol.wait;" : : : "memory");
}}
"""


def ask_ahead() -> Any:
    """Pass: functions that start early do the loads marked `AHEAD` before they wait.

    That is where all of these are of constants. Loads of a loop are done for its first step::

        squares = sum(A * A)                  weights = B[0]
        for step in 8:                        wait()
            weights = B[step]                 squares = sum(A * A)
            sums += A[step] * weights         sums += A[0] * weights
                                              for step in 1 to 8:
                                                  weights = B[step]
                                                  sums += A[step] * weights

    Other kernels of such functions wait at their beginning, see `crossfuse.lower.image`, where it
    is also said why no compiler moves a load of `A` in front of the wait.
    """

    def transform(func: Any) -> Any:
        if not starts_early(func):
            return func
        body = _Asked(constant_parameters(func)).of(func.body)
        return func if body.same_as(func.body) else ir.with_body(func, body)

    return ir.prim_func_pass("AskAhead", transform)


def waits_itself(kernel: Any) -> bool:
    """Whether a kernel waits for the one before it behind loads of its own."""
    calls = (each for each in ir.nodes(kernel.body, ir.Call) if is_call(each, _CALL))
    return any(str(each.args[0].value) == WAIT_BEHIND for each in calls)


_CALL = "tirx.cuda.func_call"


class _Asked:
    """Bodies of kernels with their waits behind loads of constants."""

    def __init__(self, constant: Sequence[str]) -> None:
        self.constant = frozenset(constant)

    def of(self, body: Any) -> Any:
        """The body of a function, launch by launch."""
        return ir.mutate(body, (ir.AttrStmt, self._launch))

    def _launch(self, node: Any, mutator: Any) -> Any:
        """A kernel, if all that it may ask for ahead is constant."""
        marked = [each for each in ir.nodes(node.body, ir.For) if AHEAD in each.annotations]
        given = {str(load.source.name) for each in marked for load in ir.global_loads(each)}
        if str(node.attr_key) != "thread_extent" or not marked or not given <= self.constant:
            return mutator.default_mutate(node)
        asked = ir.mutate(node.body, (ir.For, _loop), (ir.SeqStmt, _sequence))
        return ir.AttrStmt(node.node, node.attr_key, node.value, asked)


def _loop(node: Any, mutator: Any) -> Any:
    """A loop that asks for weights step by step."""
    if not _asks(node):
        return mutator.default_mutate(node)
    front, behind = _apart(node)
    return ir.SeqStmt([*front, *behind])


def _sequence(node: Any, mutator: Any) -> Any:
    """Statements of which some ask for all weights at once, or one is a loop that does.

    What stands in front of these, as sums of rows, may read what the wait is for.
    """
    statements = list(node.seq)
    if any(map(_is_ahead, statements)):
        front, behind = _loads_first(statements)
        return ir.SeqStmt([*front, _wait(), *behind])
    place = next((place for place, each in enumerate(statements) if _asks(each)), None)
    if place is None:
        return mutator.default_mutate(node)
    front, behind = _apart(statements[place])
    return ir.SeqStmt([*front, *statements[:place], *behind, *statements[place + 1 :]])


def _asks(statement: Any) -> bool:
    """Whether a statement is a loop that asks for weights step by step."""
    return isinstance(statement, ir.For) and any(map(_is_ahead, ir.sequence(statement.body)))


def _apart(loop: Any) -> tuple[list[Any], list[Any]]:
    """What a loop that asks for weights does up to the wait, and behind it."""
    front, others = _loads_first(ir.sequence(loop.body))
    start = {loop.loop_var: loop.min}
    loads = [each for each in front if _is_ahead(each)]
    first = [_again(ir.substitute(each, start)) if each in loads else each for each in front]
    behind = [_again(ir.substitute(each, start)) for each in others]
    rest = ir.SeqStmt([*loads, *others])
    steps = ir.for_like(loop, rest, min=loop.min + 1, extent=loop.extent - 1)
    return [*first, _wait()], [*behind, steps]


def _loads_first(statements: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Loads of weights with the registers of all statements, and the other statements."""
    loads = [each for each in statements if _is_ahead(each)]
    allocated = [each for each in statements if isinstance(each, ir.AllocBuffer)]
    others = [each for each in statements if each not in loads and each not in allocated]
    return [*allocated, *loads], others


def _wait() -> Any:
    return ir.Evaluate(ir.cuda_func_call(WAIT_BEHIND, source_code=_SOURCE))


def _is_ahead(statement: Any) -> bool:
    return isinstance(statement, ir.For) and AHEAD in statement.annotations


def _again(statement: Any) -> Any:
    """The same statement with loop variables of its own."""

    def loop(node: Any, mutator: Any) -> Any:
        own = ir.Var(node.loop_var.name, str(node.loop_var.ty))
        body = ir.substitute(mutator.default_mutate(node).body, {node.loop_var: own})
        return ir.for_like(node, body, loop_var=own)

    return ir.mutate(statement, (ir.For, loop))
