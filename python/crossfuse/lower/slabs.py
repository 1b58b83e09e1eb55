"""Slabs of `shared.dsm` buffers: what replaces them in a kernel, and how peers' are reached.

Accesses to peers' slabs go through a stand-in until loops are vectorised, and become calls of the
device helpers then; or words that are pushed and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.access import row_major
from crossfuse.lower.barrier_plan import BarrierPlan
from crossfuse.lower.kernel import ClusterKernel, own_rank
from crossfuse.lower.passes import (
    LOWERED,
    body_pass,
    device_text,
    prim_func_pass,
    unused,
    was_lowered,
)
from crossfuse.lower.refusal import refuse
from crossfuse.lower.tree import Access, is_call
from crossfuse.markers import DSM_SCOPE, PUSH, SHARED_SCOPES, cluster_axis, thread_tag

#: Scope of the stand-in through which peers' slabs are addressed until loops are vectorised.
PEERS_SCOPE = "shared.dsm"
#: Elements between the slabs of two ranks in a stand-in: larger than any slab, a power of two, so
#: that rank and offset are told apart again after flattening and vectorising.
RANK_STRIDE = 1 << 22
#: What the name of a stand-in adds to that of the slab, and of one to which words are pushed.
PEERS_SUFFIX, PUSHED_SUFFIX = "_peers", "_pushed"
_SUFFIXES = ("", PEERS_SUFFIX, PUSHED_SUFFIX)


class Slabs:
    """The CTA's own slab, and the stand-in for its peers' slabs, of each DSM buffer of a function.

    The own slab has the shape without the rank. The stand-in is addressed by (rank in the cluster,
    row-major element); it has no memory, and `lower_dsm_access` removes it. The two are matched by
    their names, which are unique in the function.
    """

    def __init__(self, func: Any) -> None:
        blocks = ir.nodes(func.body, ir.SBlock)
        buffers = [*func.params, *(buffer for each in blocks for buffer in each.alloc_buffers)]
        mine = dict.fromkeys(each for each in buffers if _is_slab(each))
        taken = {str(each.name) for each in buffers if each not in mine}
        self._images: dict[Any, tuple[Any, Any]] = {}
        for buffer in mine:
            name = unused(str(buffer.name), taken, _SUFFIXES)
            taken |= {name + each for each in _SUFFIXES}
            self._images[buffer] = (_own_slab(buffer, name), _stand_in(buffer, name, PEERS_SUFFIX))

    def push(self, buffer: Any) -> None:
        """Have stores to peers' slabs of a buffer pushed, see `crossfuse.lower.slabs`."""
        own, _ = self._images[buffer]
        self._images[buffer] = (own, _stand_in(buffer, str(own.name), PUSHED_SUFFIX))

    def images(self, buffer: Any) -> list[Any]:
        """The buffers to allocate instead of a DSM buffer."""
        return list(self._images[buffer])

    def own_element(self, buffer: Any, place: list[Any]) -> tuple[Any, list[Any]]:
        """Buffer and indices of an element of the CTA's own slab."""
        return self._images[buffer][0], place or [ir.tirx.IntImm("int32", 0)]

    def peer_element(self, buffer: Any, rank: Any, place: list[Any]) -> tuple[Any, list[Any]]:
        """Stand-in and indices of an element of the slab of `rank`, counted in the cluster."""
        return self._images[buffer][1], [rank, row_major(place, list(buffer.ty.shape)[1:])]

    def regions(self, region: Any) -> list[Any]:
        """The regions that replace a region of a DSM buffer, and contain it."""
        whole = ir.tvm.ir.Range.from_min_extent
        return [
            ir.tirx.BufferRegion(image, [whole(0, extent) for extent in image.ty.shape])
            for image in self._images[region.source]
        ]


def _is_slab(variable: Any) -> bool:
    return ir.is_buffer_var(variable) and variable.scope() == DSM_SCOPE


def _own_slab(buffer: Any, name: str) -> Any:
    shape = list(buffer.ty.shape)[1:] or [1]
    return ir.tirx.decl_buffer(
        shape, buffer.ty.dtype, name, scope="shared.dyn", data_alignment=16, layout=None
    )


def _stand_in(buffer: Any, name: str, suffix: str) -> Any:
    shape = [buffer.ty.shape[0], RANK_STRIDE]
    return ir.tirx.decl_buffer(
        shape, buffer.ty.dtype, name + suffix, scope=PEERS_SCOPE, layout=None
    )


def storage_rewrite_elsewhere() -> Any:
    """Pass: TVM's ``StorageRewrite`` on every function but cluster kernels.

    It gives the memory of a dead shared buffer to the next one. A slab is not dead while peers may
    read it, and the rewrite adds no synchronisation; `place_shared_memory` shares memory where that
    is safe.
    """
    rewrite = ir.tirx.transform.StorageRewrite()

    def transform(func: Any) -> Any:
        if was_lowered(func):
            return func
        (rewritten,) = rewrite(ir.IRModule({"main": func})).functions.values()
        return rewritten

    return prim_func_pass("StorageRewriteElsewhere", transform)


# Calls of the device helpers in `device/dsm.cuh`, as TIR expressions.

BARRIER = "crossfuse_cluster_sync"
#: Unsigned type that carries the bits of an access, by its size in bytes.
WORDS = {
    1: ("b8", "uint8", 1),
    2: ("b16", "uint16", 1),
    4: ("b32", "uint32", 1),
    8: ("b64", "uint32", 2),
    16: ("b128", "uint32", 4),
}


def device_source() -> str:
    """CUDA text of the helpers of clusters."""
    return device_text("dsm.cuh")


def cluster_barrier() -> Any:
    """Statement: all threads of the cluster synchronise.

    It is preceded by markers by which TVM's thread-synchronisation pass sees that this CTA's
    threads synchronise here too; `drop_markers` removes them again.
    """
    sync = "tirx.tvm_storage_sync"
    marks = [ir.tirx.call_intrin("void", sync, scope) for scope in SHARED_SCOPES]
    call = ir.cuda_func_call(BARRIER, source_code=device_source())
    return ir.SeqStmt([ir.Evaluate(each) for each in (*marks, call)])


def is_barrier(statement: Any) -> bool:
    """Whether a statement is the call made by `cluster_barrier`."""
    return isinstance(statement, ir.Evaluate) and is_helper_call(statement.value, BARRIER)


def is_sync(statement: Any, scopes: tuple[str, ...] = SHARED_SCOPES) -> bool:
    """Whether a statement synchronises the threads of a CTA for memory of the given scopes."""
    value: Any = statement.value if isinstance(statement, ir.Evaluate) else None
    return is_call(value, "tirx.tvm_storage_sync") and str(value.args[0].value) in scopes


def is_helper_call(value: Any, name: str) -> bool:
    """Whether an expression calls the device helper `name`."""
    return is_call(value, "tirx.cuda.func_call") and str(value.args[0].value) == name


def dsm_load(address: Any, rank: Any, dtype: str, lanes: int) -> Any:
    """Load `lanes` elements at `address` of this CTA's slab from the slab of `rank`."""
    suffix, word, words = WORDS[ir.tvm.DataType(dtype).bits // 8 * lanes]
    raw = ir.cuda_func_call(
        f"crossfuse_dsm_load_{suffix}",
        address,
        rank,
        source_code=device_source(),
        return_type=word if words == 1 else f"{word}x{words}",
    )
    return ir.tirx.reinterpret(dtype if lanes == 1 else f"{dtype}x{lanes}", raw)


def dsm_store(address: Any, rank: Any, value: Any, dtype: str, lanes: int) -> Any:
    """Statement: store `value` at `address` of the slab of `rank`."""
    suffix, word, words = WORDS[ir.tvm.DataType(dtype).bits // 8 * lanes]
    raw = ir.tirx.reinterpret(word if words == 1 else f"{word}x{words}", value)
    return ir.Evaluate(
        ir.cuda_func_call(
            f"crossfuse_dsm_store_{suffix}", address, rank, raw, source_code=device_source()
        )
    )


# The pass that turns accesses to peers' slabs into loads and stores of distributed shared memory.
#
# It runs after loops are vectorised, so that a vectorised loop over a slab is one access of up to
# 16 bytes.


def lower_dsm_access() -> Any:
    """Pass: loads and stores through a stand-in become calls of the device helpers.

    ``P_peers[rank * stride + e]`` becomes ``crossfuse_dsm_load_b32(&P[e], rank)``: every CTA of the
    cluster has the same shared memory layout, so a slab lies at the same offset in all.
    """
    return body_pass("LowerDsmAccess", LOWERED, lambda body: _Lowering().run(body))


class _Lowering:
    """Rewrites a body in program order, so that allocations are seen before their uses."""

    def __init__(self) -> None:
        self.allocated: dict[str, Any] = {}
        self.slabs: dict[Any, Any] = {}
        self.counters: dict[Any, Any] = {}
        self.ranges: list[tuple[Any, Any]] = []

    def run(self, body: Any) -> Any:
        return ir.mutate(
            body,
            (ir.TensorLoad, self._load),
            (ir.BufferStore, self._store),
            (ir.SeqStmt, self._sequence),
            (ir.For, self._loop),
            (ir.AttrStmt, self._launch),
        )

    def _loop(self, loop: Any, mutator: Any) -> Any:
        return self._inside(loop, loop.loop_var, loop.min, loop.extent, mutator)

    def _launch(self, node: Any, mutator: Any) -> Any:
        if str(node.attr_key) != "thread_extent":
            return mutator.default_mutate(node)
        return self._inside(node, node.node.var, 0, node.value, mutator)

    def _inside(self, node: Any, variable: Any, start: Any, extent: Any, mutator: Any) -> Any:
        """A loop or a launch, its body mutated where the range of its variable is known."""
        values = ir.tvm.ir.Range.from_min_extent(start, extent)
        self.ranges.append((variable, values))
        mutated = mutator.default_mutate(node)
        self.ranges.pop()
        return mutated

    def _sequence(self, sequence: Any, mutator: Any) -> Any:
        kept: list[Any] = []
        for each in sequence.seq:
            if isinstance(each, ir.AllocBuffer):
                name = str(each.buffer.name)
                if str(each.buffer.scope()) == PEERS_SCOPE:
                    suffix = next(s for s in (PEERS_SUFFIX, PUSHED_SUFFIX) if name.endswith(s))
                    self.slabs[each.buffer] = self.allocated[name.removesuffix(suffix)]
                    if suffix == PUSHED_SUFFIX:
                        self.counters[each.buffer] = self.allocated[ARRIVED]
                    continue
                self.allocated[name] = each.buffer
            kept.append(mutator.mutate(each))
        return ir.SeqStmt(kept) if len(kept) != 1 else kept[0]

    def _load(self, load: Any, mutator: Any) -> Any:
        if load.source not in self.slabs:
            return mutator.default_mutate(load)
        slab = self.slabs[load.source]
        address, rank, lanes = self._locate(slab, mutator.mutate(load.indices[0]))
        if load.source in self.counters:
            return take_word(address, str(slab.ty.dtype))
        return dsm_load(address, rank, str(slab.ty.dtype), lanes)

    def _store(self, store: Any, mutator: Any) -> Any:
        if store.buffer not in self.slabs:
            return mutator.default_mutate(store)
        slab = self.slabs[store.buffer]
        address, rank, lanes = self._locate(slab, mutator.mutate(store.indices[0]))
        if store.buffer in self.counters:
            counter = barrier_pointer(self.counters[store.buffer])
            return push_word(address, rank, mutator.mutate(store.value), counter)
        return dsm_store(address, rank, mutator.mutate(store.value), str(slab.ty.dtype), lanes)

    def _locate(self, slab: Any, index: Any) -> tuple[Any, Any, int]:
        """Own address, rank and number of elements of an access through the stand-in."""
        known = ir.sym.Analyzer()
        for variable, values in self.ranges:
            known.bind(variable, values)
        # Vectorising leaves sums of ramps and broadcasts; simplified, a contiguous one is a ramp.
        index = known.simplify(index)
        base, lanes = index, 1
        if isinstance(index, ir.tirx.Ramp) and ir.constant(index.stride) == 1:
            base, lanes = index.base, int(index.lanes)
        elif ir.tvm.DataType(str(index.ty)).lanes != 1:
            raise _refuse(slab, f"an access that is not contiguous: {_in_slab(index, known)}")
        stride = ir.tirx.const(RANK_STRIDE, str(base.ty))
        rank = known.simplify(ir.tirx.floordiv(base, stride))
        offset = known.simplify(ir.tirx.floormod(base, stride))
        size = ir.tvm.DataType(str(slab.ty.dtype)).bits // 8 * lanes
        if size not in WORDS:
            raise _refuse(slab, f"{lanes} elements of {size} bytes together, from {offset}")
        modular = known.modular_set(offset)
        if gcd(int(modular.coeff), int(modular.base)) % lanes:
            raise _refuse(
                slab, f"{lanes} elements together, from {offset}, which may be misaligned"
            )
        return ir.tirx.address_of(ir.tirx.BufferLoad(slab, [offset])), rank, lanes


def _in_slab(index: Any, known: Any) -> str:
    """Text for an error: which elements of a slab a vector touches, without the rank."""
    if not isinstance(index, ir.tirx.Ramp):
        return str(index)
    stride = ir.tirx.const(RANK_STRIDE, str(index.base.ty))
    start = known.simplify(ir.tirx.floormod(index.base, stride))
    return f"{index.lanes} elements from {start} in steps of {index.stride}"


def _refuse(slab: Any, found: str) -> Exception:
    return refuse(
        "dsm-vector",
        f"buffer '{slab.name}'",
        found=found,
        limit="one aligned, contiguous access of 1, 2, 4, 8 or 16 bytes",
        instead="split the vectorised loop by 16 bytes or less, with an extent that divides "
        "the rows of the tile",
    )


# States that CTAs of a cluster push to each other: counted words instead of barriers.
#
# A nest whose block is marked `PUSH` fills a slab of every CTA. Cluster barriers would do: one
# before it, because a peer may not have started, and one before the slabs are read. But these order
# all memory of a CTA, and wait for it. Where the kernel pushes once and does nothing else to peers'
# slabs, words are stored by ``st.async``, and each CTA waits for the bytes of its own slabs alone.

#: Bytes of a word that is counted.
WORD = 4
#: Name of a CTA's mbarrier.
ARRIVED = "crossfuse_arrived"


@dataclass(frozen=True, eq=False)
class Push:
    """The one exchange of a kernel that goes by ``st.async`` and an mbarrier."""

    #: DSM buffers whose slabs are filled.
    buffers: tuple[Any, ...]
    #: Variable of the loop over the nest that stores.
    sending: Any
    #: Variable of the loop over the first nest that reads.
    receiving: Any
    #: The mbarrier of each CTA.
    barrier: Any

    @property
    def bytes(self) -> int:
        """Bytes that arrive in each CTA: all of its slabs."""
        return sum(WORD * prod(map(int, each.ty.shape[1:])) for each in self.buffers)

    def open(self) -> Any:
        """Statement at the start: set up the barrier, say that the CTA may be reached."""
        size = ir.tirx.const(self.bytes, "uint32")
        return _counted("crossfuse_push_open", self._pointer, size)

    def begin(self) -> Any:
        """Statement before the first word leaves: wait for peers to start."""
        return _counted("crossfuse_push_begin")

    def end(self) -> Any:
        """Statement before slabs are read: wait for all words."""
        return _counted("crossfuse_push_end", self._pointer)

    @property
    def _pointer(self) -> Any:
        return barrier_pointer(self.barrier)


def push_of(kernel: ClusterKernel, plan: BarrierPlan) -> Push | None:
    """The exchange of a kernel that needs no cluster barriers, given those that it would have.

    None where there is no marked nest, where it runs more than once, its words are not of four
    bytes, or anything else in the kernel needs a barrier.
    """
    remote = [each for each in kernel.accesses if not own_rank(each, kernel.buffers[each.buffer])]
    if not remote or len(plan.before) != 2 or plan.after or not all(map(_is_pushed, remote)):
        return None
    sending, receiving = plan.before
    nests = [each.cluster_loop(kernel.buffers[each.buffer]) for each in remote]
    buffers = tuple(dict.fromkeys(each.buffer for each in remote))
    if any(not each.loop_var.same_as(sending) for each in nests):
        return None
    if any(ir.tvm.DataType(str(each.ty.dtype)).bits != 8 * WORD for each in buffers):
        return None
    if any(each.write and each not in remote for each in kernel.accesses if each.buffer in buffers):
        return None
    barrier = ir.tirx.decl_buffer(
        [1], "uint64", ARRIVED, scope="shared.dyn", data_alignment=16, layout=None
    )
    return Push(buffers, sending, receiving, barrier)


def _is_pushed(access: Access) -> bool:
    """Whether an access is a store of a marked block that runs once."""
    path = access.site.path
    marked = any(isinstance(each, ir.SBlock) and PUSH in each.annotations for each in path)
    repeated = [each for each in _until_cluster(path) if not thread_tag(each)]
    return access.write and marked and all(ir.constant(each.extent) == 1 for each in repeated)


def _until_cluster(path: tuple[Any, ...]) -> list[Any]:
    """Loops around the innermost cluster-bound one."""
    loops = [each for each in path if isinstance(each, ir.For)]
    last = max((i for i, each in enumerate(loops) if cluster_axis(each) is not None), default=0)
    return loops[:last]


def barrier_pointer(barrier: Any) -> Any:
    """Address of an mbarrier."""
    return ir.tirx.address_of(ir.tirx.BufferLoad(barrier, [ir.tirx.IntImm("int32", 0)]))


def push_word(address: Any, rank: Any, value: Any, pointer: Any) -> Any:
    """Statement: store a value of four bytes at `address` of the slab of `rank`, counted there."""
    bits = ir.tirx.reinterpret("uint32", value)
    return _counted("crossfuse_push_b32", address, rank, bits, pointer)


def take_word(address: Any, dtype: str) -> Any:
    """The value of four bytes that a peer stored at `address` of the own slab."""
    bits = ir.cuda_func_call(
        "crossfuse_push_take", address, source_code=_push_source(), return_type="uint32"
    )
    return ir.tirx.reinterpret(dtype, bits)


def _push_source() -> str:
    return f"{device_source()}\n{device_text('push.cuh')}"


def _counted(name: str, *arguments: Any) -> Any:
    return ir.Evaluate(ir.cuda_func_call(name, *arguments, source_code=_push_source()))
