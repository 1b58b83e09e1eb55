"""Functions over the GPUs of a group: whose each buffer is, and the part that one GPU runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.image import (
    ARRIVALS,
    RANK,
    TURNS,
    WINDOW_UNIT,
    BufferSpec,
    KernelImage,
    kernel_heads,
    promising,
)
from crossfuse.lower.kernel import root_of
from crossfuse.lower.rank_barriers import EXCHANGES, FILL_AND_READ, MEETS, counts_of
from crossfuse.lower.refusal import Rule
from crossfuse.lower.slabs import unused
from crossfuse.lower.tree import Access, accesses, analyzer, coordinate_loop, sites
from crossfuse.markers import (
    MAX_RANKS,
    MOST_EXCHANGING,
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
    #: CTAs that exchange what is in slabs, see `_exchanging`; 0 where kernels wait for all others.
    exchanging: int = 0


@dataclass
class _Uses:
    """How a buffer is indexed, by the first use of each kind."""

    #: Position of the index that is the rank, where there is one.
    own: int | None = None
    other: Access | None = None
    #: The rank is in an index, but does not make that one.
    mixed: Access | None = None
    stored: Access | None = None


def read_ranks(func: Any, sms: int = MOST_EXCHANGING) -> Ranks:
    """Whose each buffer of a function over ranks is; refused if one GPU cannot know.

    `sms` is how many multiprocessors each GPU has.
    """
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
    return Ranks(count, own, tuple(peers), _exchanging(func, peers, min(sms, MOST_EXCHANGING)))


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


# Nests that become one kernel.

_CTA = "blockIdx.x"


def _exchanging(func: Any, peers: Sequence[Any], most: int) -> int:
    """CTAs of the two nests of a function of which each reads what those of its number filled.

    In slabs the CTA is the dimension behind the rank. 0 for all other functions, and for more CTAs
    than run at the same time. Nothing but slabs goes from one nest to the other: no CTA waits for
    others of its GPU.
    """
    nests = ir.sequence(root_of(func).block.body)
    if len(nests) != FILL_AND_READ:
        return 0
    first, second = (accesses(each) for each in nests)
    filled, read = ([each for each in part if each.buffer in peers] for part in (first, second))
    in_turn = all(each.write for each in filled) and not any(each.write for each in read)
    if not (filled and read and in_turn) or _passed_on(first, second, peers):
        return 0
    launches = [_launch(nest) for nest in nests]
    ctas = dict(launches[0]).get(_CTA, 0)
    same = launches[0] == launches[1] and len(dict(launches[0])) == len(launches[0])
    plain = all(tag == _CTA or tag.startswith("threadIdx") for tag, _ in launches[0])
    fits = same and plain and 0 < ctas <= most
    return ctas if fits and all(_is_of_its_cta(each) for each in (*filled, *read)) else 0


def _passed_on(first: Sequence[Access], second: Sequence[Access], peers: Sequence[Any]) -> bool:
    """Whether two nests share a buffer, other than slabs, that one of them writes."""
    mine, theirs = ({each.buffer for each in part} for part in (first, second))
    written = {each.buffer for each in (*first, *second) if each.write}
    return any(each in written and each not in peers for each in mine & theirs)


def _launch(nest: Any) -> frozenset[tuple[str, int]]:
    """Tags and extents of the loops of a nest that are bound to CTAs and threads."""
    bound = [each for each in ir.nodes(nest, ir.For) if each.thread_binding is not None]
    return frozenset((str(e.thread_binding.thread_tag), ir.constant(e.extent) or 0) for e in bound)


def _is_of_its_cta(access: Access) -> bool:
    """Whether an access to slabs is to what the CTAs of one number have in them."""
    loop = coordinate_loop(access.loops, _CTA)
    if loop is None or len(access.buffer.ty.shape) <= _CTAS:
        return False
    same_extent = ir.constant(access.buffer.ty.shape[_CTAS]) == ir.constant(loop.extent)
    place = _indices(access)[_CTAS]
    return same_extent and analyzer(access.loops).can_prove_equal(place, loop.loop_var)


#: Dimension of exchanged slabs that is the CTA.
_CTAS = 1

# What one GPU runs.

#: TVM's annotation of a block: for a written buffer and an axis, what its stride is a multiple of.
_ALIGN = "buffer_dim_align"
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


def exchanged_row(elements: int, dtype: str, least: int = 0) -> int:
    """Elements between what two CTAs have in a slab: each has two places for so many elements.

    In slabs of at least `least` bytes each has the same share, whatever the number of CTAs is: in
    all functions that share memory the CTAs of one number use the same places, and no others do.
    """
    size = ir.item_bytes(dtype)
    place = -(-elements * size // _LINE) * _LINE
    share = least // MOST_EXCHANGING // _LINE * _LINE
    if least and 2 * place > share:
        raise _refused(
            f"slabs of {least} bytes",
            found=f"{elements * size} bytes of a CTA",
            limit=f"{share // 2}, of {MOST_EXCHANGING} CTAs with two places each",
            instead="share the tensor among more CTAs, or make slabs larger",
        )
    return (share or 2 * place) // size


#: Bytes of a line of L2, in which places of CTAs begin.
_LINE = 128


def with_slabs(func: Any, size: int) -> Any:
    """The same function, whose buffers in peers' memory have slabs of `size` bytes or more.

    Functions with slabs of one size can use one another's memory.
    """
    return func.with_attr(_SLAB, size)


def of_one_rank(func: Any, sms: int = MOST_EXCHANGING) -> Any:
    """The function that the GPU of one rank runs.

    Loops over ranks are gone; own buffers are slices; windows of peers' buffers, the rank and the
    counts of arrivals are parameters behind the others. `meet_ranks` adds the barriers.
    """
    _check_plain(func)
    ranks = read_ranks(func, sms)
    meets = EXCHANGES if ranks.exchanging else MEETS
    return _OneRank(func, ranks).run().with_attr(meets, ranks.count)


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
        name = TURNS if self.ranks.exchanging else ARRIVALS
        row = window_row(1, "int32")  # has room for all counts
        self.counts = ir.tirx.decl_buffer([self.ranks.count, row], "int32", name)
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
            shape = [int(each) for each in buffer.ty.shape]
            strides = self._strides(shape, str(buffer.ty.dtype), least)
            self.windows[buffer] = ir.tirx.decl_buffer(
                shape, buffer.ty.dtype, name, strides=strides, layout=None
            )

    def _strides(self, shape: Sequence[int], dtype: str, least: int) -> list[int]:
        """Strides of a window, in elements: rows of ranks, and in exchanged ones of CTAs, apart."""
        strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        held = strides[0]
        if self.ranks.exchanging:
            strides[_CTAS] = exchanged_row(strides[_CTAS], dtype, least)
            held = shape[_CTAS] * strides[_CTAS]
        return [window_row(held, dtype, least), *strides[1:]]

    def run(self) -> Any:
        body = ir.mutate(
            self.func.body,
            (ir.For, self._loop),
            (ir.TensorLoad, self._load),
            (ir.BufferStore, self._store),
            (ir.SBlock, self._block),
        )
        params = [self.slices.get(each, each) for each in self.func.params]
        params += [self.rank, self.counts, *self.windows.values()]
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


# Its image.


def with_windows(image: KernelImage, mine: Any) -> KernelImage:
    """The image of a function of one rank, which says what spans ranks and may change meanwhile.

    In kernels that touch peers' memory only pointers to inputs promise that nobody writes there.
    Else nvcc loads slabs through the read-only cache, even in front of a barrier: it does that
    where it sees no store that may be to them, and does not count what barriers let others do.
    """
    names = [each.name for each in image.buffers]
    first = counts_of(names)
    pairs = zip(image.buffers[first:], mine.params[first:], strict=True)
    windows = [_window(spec, parameter) for spec, parameter in pairs]
    inputs = [each.name for each in image.buffers[:first] if not each.output]

    def plain(head: str) -> str:
        return head if names[first] not in head else promising(head, inputs.__contains__)

    text = kernel_heads(image.cuda, plain)
    return replace(image, cuda=text, buffers=(*image.buffers[:first], *windows))


def _window(buffer: BufferSpec, parameter: Any) -> BufferSpec:
    """A buffer of slabs with all that lies between them."""
    row = int(parameter.ty.strides[0]) if parameter.ty.strides else prod(buffer.shape[1:])
    return replace(buffer, shape=(buffer.shape[0], row), output=True, ranks=buffer.shape[0])
