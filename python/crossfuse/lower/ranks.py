"""Functions over the GPUs of a group: whose each buffer is, and the part that one GPU runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.files import packaged_text
from crossfuse.lower.image import (
    ARRIVALS,
    RANK,
    WINDOW_UNIT,
    BufferSpec,
    KernelImage,
    Launch,
    kernel_heads,
    promising,
)
from crossfuse.lower.kernel import root_of
from crossfuse.lower.refusal import Rule
from crossfuse.lower.slabs import unused
from crossfuse.lower.tree import Access, accesses, analyzer, sites
from crossfuse.markers import (
    MAX_RANKS,
    PEER_SCOPE,
    is_rank_bound,
    is_tile_program,
    spans_ranks,
)

# Whose a buffer is.

RULE = "ranks"

_refused = Rule(RULE)


@dataclass(frozen=True)
class Ranks:
    """What a function says of the GPUs that compute it together."""

    #: GPUs of the group.
    count: int
    #: Buffers of which each GPU has the slice of its rank, and which of their indices that is.
    own: dict[Any, int]
    #: Buffers of which each GPU holds a slab that all may read.
    peers: tuple[Any, ...]


@dataclass
class _Uses:
    """How a buffer is indexed, by the first use of each kind."""

    #: Position of the index that is the rank, where there is one.
    own: int | None = None
    other: Access | None = None
    #: The rank is in an index, but does not make that one.
    mixed: Access | None = None
    stored: Access | None = None


def read_ranks(func: Any) -> Ranks:
    """Whose each buffer of a function over ranks is; refused if one GPU cannot know."""
    count = _count(func)
    uses: dict[Any, _Uses] = {}
    for access in accesses(func.body):
        _note(uses.setdefault(access.buffer, _Uses()), access, count)
    peers = [buffer for buffer in uses if buffer.scope() == PEER_SCOPE]
    for buffer, each in uses.items():
        if buffer in peers:
            _check_slabs(func, buffer, each, count)
        else:
            _check_owner(func, buffer, each, count)
    _check_nests(func, peers, count)
    own = {e: found.own for e, found in uses.items() if found.own is not None and e not in peers}
    return Ranks(count, own, tuple(peers))


def _count(func: Any) -> int:
    """Number of ranks, which all loops over them have."""
    loops = [each for each in ir.nodes(func.body, ir.For) if is_rank_bound(each)]
    if not loops:
        raise _refused(
            "function",
            found=f"buffers in scope {PEER_SCOPE} and no loop over the GPUs",
            limit="slabs that a loop over the GPUs fills",
            instead="call rank_bind for the loop that fills them",
        )
    counts = [ir.constant(each.extent) or 0 for each in loops]
    for loop, count in zip(loops, counts, strict=True):
        if count != counts[0] or not 1 <= count <= MAX_RANKS:
            raise _refused(
                f"loop '{loop.loop_var.name}'",
                found=f"extent {loop.extent}",
                limit=f"one number of GPUs in all loops over them, 1 to {MAX_RANKS}",
                instead="split the loops by the same number of GPUs",
            )
    for site in sites(func.body):
        around = site.loops
        inner = next((each for each in around[1:] if is_rank_bound(each)), None)
        if inner is not None:
            raise _refused(
                f"loop '{inner.loop_var.name}'",
                found=f"loop '{around[0].loop_var.name}' around it",
                limit="the outermost loop of its nest, which is a kernel in each GPU",
                instead="move blocks into loops inside of that over the GPUs",
            )
    return counts[0]


def _rank_loop(access: Access) -> Any:
    """The loop over the GPUs around an access, or None."""
    return next(filter(is_rank_bound, access.loops), None)


def _indices(access: Access) -> list[Any]:
    """Indices of an access as expressions of loops."""
    values: dict[Any, Any] = {}
    for node in access.site.path:
        if isinstance(node, ir.SBlockRealize):
            pairs = zip(node.block.iter_vars, node.iter_values, strict=True)
            values |= {each.var: ir.substitute(value, values) for each, value in pairs}
    known = analyzer(access.loops)
    return [known.simplify(ir.substitute(each, values)) for each in access.indices or ()]


def _own_axis(access: Access, count: int) -> int | None:
    """Position of the index that is the rank of the GPU that makes an access, or None.

    In global memory it is the first one. In that of a CTA a primitive may have put others in front.
    """
    loop, indices = _rank_loop(access), _indices(access)
    if loop is None:
        return None
    known, shape = analyzer(access.loops), access.buffer.ty.shape
    last = 1 if _is_global(access.buffer) else len(indices)
    return next(
        (
            axis
            for axis, each in enumerate(indices[:last])
            if ir.constant(shape[axis]) == count and known.can_prove_equal(each, loop.loop_var)
        ),
        None,
    )


def _is_global(buffer: Any) -> bool:
    """Whether a buffer is in some GPU's global memory."""
    return str(buffer.scope()).split(".")[0] == "global"


def _note(uses: _Uses, access: Access, count: int) -> None:
    """Add an access to what is known of its buffer."""
    if access.indices is None:
        raise _refused(
            f"buffer '{access.buffer.name}'",
            found=f"a pointer to it or a view of it: {access.site.text}",
            limit="loads and stores of elements: a pointer does not say whose they are",
            instead="copy elements by a block of loops",
        )
    loop, indices = _rank_loop(access), _indices(access)
    axis = _own_axis(access, count)
    if axis is not None and uses.own in (None, axis):
        uses.own = axis
        return
    uses.other = uses.other or access
    if access.write:
        uses.stored = uses.stored or access
    if loop is not None and any(ir.mentions(each, loop.loop_var) for each in indices):
        uses.mixed = uses.mixed or access


def _check_slabs(func: Any, buffer: Any, uses: _Uses, count: int) -> None:
    where = f"buffer '{buffer.name}'"
    shape = ", ".join(map(str, buffer.ty.shape))
    if any(each.same_as(buffer) for each in func.params):
        raise _refused(
            where,
            found=f"a parameter in scope {PEER_SCOPE}",
            limit="an intermediate, of which the runtime makes the window",
            instead="copy between it and a parameter whose first dimension is the rank",
        )
    if not buffer.ty.shape or ir.constant(buffer.ty.shape[0]) != count:
        raise _refused(
            where,
            found=f"shape ({shape})",
            limit=f"{count} slabs along the first dimension, one in each GPU",
            instead="give the buffer the rank as its first dimension",
        )
    if uses.stored is not None:
        raise _refused(
            where,
            found=f"a store to another rank's slab: {uses.stored.site.text}",
            limit="slabs that their own GPU fills, in a loop over the GPUs, and all may read",
            instead="let each GPU fill its slab, and the others read from there",
        )


def _check_owner(func: Any, buffer: Any, uses: _Uses, count: int) -> None:
    """Check that a buffer is one GPU's, or the same on all."""
    where = f"buffer '{buffer.name}'"
    if uses.own is not None and uses.other is not None:
        raise _refused(
            where,
            found=f"another rank's slice, beside the own one: {uses.other.site.text}",
            limit=f"the slice of the own rank alone, in loops over {count} GPUs; only buffers in "
            f"scope {PEER_SCOPE} are read at other ranks",
            instead="call rank_gather for the block that reads it",
        )
    if uses.mixed is not None:
        raise _refused(
            where,
            found=f"the rank in an index that it does not make alone: {uses.mixed.site.text}",
            limit="the rank as the first index of what is no peers' buffer",
            instead="give the buffer the rank as its first dimension",
        )
    stored = uses.stored
    if stored is not None and _is_global(buffer) and _rank_loop(stored) is not None:
        raise _refused(
            where,
            found=f"a store by one rank to what all have a copy of: {stored.site.text}",
            limit="in a loop over the GPUs, stores to slices of the own rank",
            instead="give the buffer the rank as its first dimension, or take the block out of the "
            "loop over the GPUs: then all of them make it",
        )


def _check_nests(func: Any, peers: Sequence[Any], count: int) -> None:
    """Check that no kernel fills slabs and reads others: a barrier of ranks stands between two."""
    for nest in ir.sequence(root_of(func).block.body):
        uses = [each for each in accesses(nest) if each.buffer in peers]
        filled = [each.buffer for each in uses if each.write]
        for access in uses:
            if access.buffer in filled and _own_axis(access, count) is None:
                raise _refused(
                    f"buffer '{access.buffer.name}'",
                    found=f"a read of other ranks' slabs in the nest that fills them: "
                    f"{access.site.text}",
                    limit="a nest that fills slabs, then one that reads them: ranks wait for each "
                    "other between two kernels",
                    instead="leave the reading block in a nest of its own",
                )


# What one GPU runs.

#: TVM's annotation of a block: for a written buffer and an axis, what its stride is a multiple of.
_ALIGN = "buffer_dim_align"
#: Attribute of a function: its kernels wait for other ranks; the value is the number of ranks.
_MEETS = "crossfuse.meets_ranks"
#: Attribute of a function: bytes that a slab has at least.
_SLAB = "crossfuse.slab_bytes"


def check_one_gpu(func: Any) -> None:
    """Refuse a function over several GPUs where TVM's own runtime would run it."""
    if spans_ranks(func):
        raise _refused(
            "module",
            found="a function over several GPUs",
            limit="functions of one GPU: TVM's runtime has no memory of peers",
            instead="lower it with crossfuse.lower.extract.lower, to what one GPU runs",
        )


def window_row(elements: int, dtype: str, least: int = 0) -> int:
    """Elements between the slabs of two ranks in a window of one address range.

    `least` is the size of a slab in bytes, if it is larger than what it holds.
    """
    size = ir.item_bytes(dtype)
    return -(-max(elements * size, least) // WINDOW_UNIT) * WINDOW_UNIT // size


def with_slabs(func: Any, size: int) -> Any:
    """The same function, whose buffers in peers' memory have slabs of `size` bytes or more.

    Functions with slabs of one size can use one another's memory.
    """
    return func.with_attr(_SLAB, size)


def of_one_rank(func: Any) -> Any:
    """The function that the GPU of one rank runs.

    Loops over ranks are gone; own buffers are slices; windows of peers' buffers, the rank and the
    counts of arrivals are parameters behind the others. `meet_ranks` adds the barriers.
    """
    _check_plain(func)
    ranks = read_ranks(func)
    return _OneRank(func, ranks).run().with_attr(_MEETS, ranks.count)


def _check_plain(func: Any) -> None:
    if is_tile_program(func):
        raise _refused(
            "function",
            found="loops with stages, of the Hopper pipeline",
            limit="kernels of the general lowering in functions over GPUs",
            instead="leave that out of the schedule of this function",
        )


@dataclass
class _OneRank:
    """Rewrites a function over ranks for one of them."""

    func: Any
    ranks: Ranks
    slices: dict[Any, Any] = field(default_factory=dict)
    windows: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank = ir.tirx.decl_buffer([1], "int32", RANK)
        row = window_row(self.ranks.count + 2, "int32")
        self.arrivals = ir.tirx.decl_buffer([self.ranks.count, row], "int32", ARRIVALS)
        for buffer, axis in self.ranks.own.items():
            shape = _without(buffer.ty.shape, axis) or [1]
            self.slices[buffer] = ir.tirx.decl_buffer(
                shape, buffer.ty.dtype, buffer.name, scope=buffer.scope()
            )
        taken = {str(each.name) for each in self.func.params}
        least = int((self.func.attrs or {}).get(_SLAB, 0))
        for buffer in self.ranks.peers:
            name = unused(re.sub(r"\W", "_", str(buffer.name)), taken)
            taken.add(name)
            count, *rest = (int(each) for each in buffer.ty.shape)
            row = window_row(prod(rest), str(buffer.ty.dtype), least)
            strides = [row, *(prod(rest[axis + 1 :]) for axis in range(len(rest)))]
            self.windows[buffer] = ir.tirx.decl_buffer(
                [count, *rest], buffer.ty.dtype, name, strides=strides, layout=None
            )

    def run(self) -> Any:
        body = ir.mutate(
            self.func.body,
            (ir.For, self._loop),
            (ir.TensorLoad, self._load),
            (ir.BufferStore, self._store),
            (ir.SBlock, self._block),
        )
        params = [self.slices.get(each, each) for each in self.func.params]
        params += [self.rank, self.arrivals, *self.windows.values()]
        return ir.PrimFunc(params, body, self.func.ret_type, self.func.attrs)

    def _loop(self, loop: Any, mutator: Any) -> Any:
        loop = mutator.default_mutate(loop)
        if not is_rank_bound(loop):
            return loop
        rank = ir.tirx.BufferLoad(self.rank, [ir.tirx.IntImm("int32", 0)])
        return ir.substitute(loop.body, {loop.loop_var: rank.astype(str(loop.loop_var.ty))})

    def _place(self, buffer: Any, indices: Any, mutator: Any) -> tuple[Any, list[Any]]:
        indices = [mutator.mutate(each) for each in indices]
        if buffer in self.slices:
            place = _without(indices, self.ranks.own[buffer])
            return self.slices[buffer], place or [ir.tirx.IntImm("int32", 0)]
        return self.windows[buffer], indices

    def _is_changed(self, buffer: Any) -> bool:
        return buffer in self.slices or buffer in self.windows

    def _load(self, load: Any, mutator: Any) -> Any:
        if not self._is_changed(load.source):
            return mutator.default_mutate(load)
        return ir.tirx.BufferLoad(*self._place(load.source, load.indices, mutator))

    def _store(self, store: Any, mutator: Any) -> Any:
        if not self._is_changed(store.buffer):
            return mutator.default_mutate(store)
        value = mutator.mutate(store.value)
        buffer, indices = self._place(store.buffer, store.indices, mutator)
        return ir.BufferStore(buffer, value, indices)

    def _block(self, block: Any, mutator: Any) -> Any:
        notes = self._notes(block)
        reads, writes = ([self._region(e) for e in part] for part in (block.reads, block.writes))
        block = mutator.default_mutate(ir.block_like(block, reads=reads, writes=writes))
        kept = [self.slices.get(e, e) for e in block.alloc_buffers if e not in self.windows]
        return ir.block_like(block, alloc_buffers=kept, annotations=notes)

    def _notes(self, block: Any) -> dict[str, Any]:
        """Annotations of a block, with axes of what it writes counted without the rank."""
        notes = dict(block.annotations)
        padded = notes.pop(_ALIGN, ())
        own = self.ranks.own
        ranks = [own.get(each.source, len(each.source.ty.shape)) for each in block.writes]
        kept = [
            [index, axis - (axis > ranks[index]), *rest]
            for index, axis, *rest in ([int(n) for n in each] for each in padded)
            if axis != ranks[index]
        ]
        return {**notes, _ALIGN: kept} if kept else notes

    def _region(self, region: Any) -> Any:
        buffer = region.source
        if not self._is_changed(buffer):
            return region
        whole = ir.tvm.ir.Range.from_min_extent
        if buffer in self.slices:
            rest = _without(region.region, self.ranks.own[buffer])
            return ir.tirx.BufferRegion(self.slices[buffer], rest or [whole(0, 1)])
        return ir.tirx.BufferRegion(self.windows[buffer], region.region)


def _without(items: Any, axis: int) -> list[Any]:
    return [each for place, each in enumerate(items) if place != axis]


# Barriers of ranks.


def meet_ranks() -> Any:
    """Pass: kernels that touch peers' memory wait for all ranks first, and arrive in the end.

    Between any two such kernels, of one call or of two, stands a barrier of all ranks: what one
    rank writes others read afterwards, and it is not written again before they have. It runs where
    kernels have their threads and buffers their shapes.
    """

    def transform(func: Any) -> Any:
        count = (func.attrs or {}).get(_MEETS)
        if count is None:
            return func
        return ir.with_body(func, ir.mutate(func.body, (ir.AttrStmt, _Meeting(func, int(count)))))

    return ir.prim_func_pass("MeetRanks", transform)


class _Meeting:
    """Adds the barriers to the kernels of a function of one rank."""

    def __init__(self, func: Any, count: int) -> None:
        names = [str(each.name) for each in func.params]
        place = names.index(ARRIVALS)
        self.rank, self.arrivals = func.params[place - 1 : place + 1]
        self.windows = func.params[place + 1 :]
        self.count = count

    def __call__(self, node: Any, mutator: Any) -> Any:
        if node.attr_key != "thread_extent":
            return mutator.default_mutate(node)
        touches = any(ir.mentions(node, each) for each in self.windows)
        return self._met(node) if touches else node

    def _met(self, node: Any) -> Any:
        """The kernel with its barriers, inside of all that says how it is launched."""
        if isinstance(node, ir.AttrStmt) and node.attr_key == "thread_extent":
            return ir.AttrStmt(node.node, node.attr_key, node.value, self._met(node.body))
        await_, arrive = map(self._call, ("crossfuse_await_ranks", "crossfuse_arrive_at_ranks"))
        return ir.SeqStmt([await_, *ir.sequence(node), arrive])

    def _call(self, name: str) -> Any:
        zero = ir.tirx.IntImm("int32", 0)
        return ir.Evaluate(
            ir.cuda_func_call(
                name,
                ir.tirx.address_of(ir.tirx.BufferLoad(self.arrivals, [zero, zero])),
                ir.tirx.BufferLoad(self.rank, [zero]),
                ir.tirx.IntImm("int32", self.count),
                ir.tirx.IntImm("int64", int(self.arrivals.ty.shape[1])),
                source_code=packaged_text("crossfuse.lower", "device/ranks.cuh"),
            )
        )


def with_windows(image: KernelImage, mine: Any) -> KernelImage:
    """The image of a function of one rank, which says what spans ranks and may change meanwhile.

    In kernels that touch peers' memory only pointers to inputs promise that nobody writes there.
    Else nvcc loads slabs through the read-only cache, even in front of a barrier: it does that
    where it sees no store that may be to them, and does not count what barriers let others do.
    """
    names = [each.name for each in image.buffers]
    first = names.index(ARRIVALS)
    pairs = zip(image.buffers[first:], mine.params[first:], strict=True)
    windows = [_window(spec, parameter) for spec, parameter in pairs]
    inputs = [each.name for each in image.buffers[:first] if not each.output]

    def plain(head: str) -> str:
        return head if ARRIVALS not in head else promising(head, inputs.__contains__)

    text = kernel_heads(image.cuda, plain)
    return replace(image, cuda=text, buffers=(*image.buffers[:first], *windows))


def _window(buffer: BufferSpec, parameter: Any) -> BufferSpec:
    """A buffer of slabs with all that lies between them."""
    row = int(parameter.ty.strides[0]) if parameter.ty.strides else prod(buffer.shape[1:])
    return replace(buffer, shape=(buffer.shape[0], row), output=True, ranks=buffer.shape[0])


#: Threads of a kernel that does nothing but meet the other ranks: one for each of them.
_MEETING = 32


def meeting(ranks: int, slab: int) -> KernelImage:
    """A kernel of one CTA that ends when all ranks have done what comes before theirs.

    `slab` is the size in bytes of the buffer in peers' memory that copies between two of its calls
    are to; the kernel does not touch it.
    """
    row, name = window_row(ranks + 2, "int32"), "meet_ranks"
    windows = tuple(
        BufferSpec(each, (ranks, window_row(0, dtype, size)), dtype, output=True, ranks=ranks)
        for each, dtype, size in ((ARRIVALS, "int32", WINDOW_UNIT), ("slabs", "float32", slab))
    )
    text = (
        f"{packaged_text('crossfuse.lower', 'device/ranks.cuh')}\n"
        f'extern "C" __global__ void __launch_bounds__({_MEETING}) {name}_kernel('
        "int* arrivals, const int* rank) {\n"
        f"  crossfuse_arrive_at_ranks(arrivals, rank[0], {ranks}, {row});\n"
        "  __syncthreads();  // the own arrival is counted, which says for how many to wait\n"
        f"  crossfuse_await_ranks(arrivals, rank[0], {ranks}, {row});\n"
        "}\n"
    )
    one = (1, 1, 1)
    launch = Launch(f"{name}_kernel", one, (_MEETING, 1, 1), one, 0, (ARRIVALS, RANK))
    own = BufferSpec(RANK, (1,), "int32", output=False)
    return KernelImage(name, text, (own, *windows), (launch,))
