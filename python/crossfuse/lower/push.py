"""States that CTAs of a cluster push to each other: counted words instead of barriers.

A nest whose block is marked `PUSH` fills a slab of every CTA. Cluster barriers would do: one before
it, because a peer may not have started, and one before the slabs are read. But these order all
memory of a CTA, and wait for it. Where the kernel pushes once and does nothing else to peers'
slabs, words are stored by ``st.async``, and each CTA waits for the bytes of its own slabs alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.barrier_plan import BarrierPlan
from crossfuse.lower.intrinsics import device_source
from crossfuse.lower.kernel import ClusterKernel, own_rank
from crossfuse.lower.passes import device_text
from crossfuse.lower.tree import Access
from crossfuse.markers import PUSH, cluster_axis, thread_tag

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
        return _call("crossfuse_push_open", self._pointer, size)

    def begin(self) -> Any:
        """Statement before the first word leaves: wait for peers to start."""
        return _call("crossfuse_push_begin")

    def end(self) -> Any:
        """Statement before slabs are read: wait for all words."""
        return _call("crossfuse_push_end", self._pointer)

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
    return _call("crossfuse_push_b32", address, rank, bits, pointer)


def take_word(address: Any, dtype: str) -> Any:
    """The value of four bytes that a peer stored at `address` of the own slab."""
    bits = ir.cuda_func_call(
        "crossfuse_push_take", address, source_code=_source(), return_type="uint32"
    )
    return ir.tirx.reinterpret(dtype, bits)


def _source() -> str:
    return f"{device_source()}\n{device_text('push.cuh')}"


def _call(name: str, *arguments: Any) -> Any:
    return ir.Evaluate(ir.cuda_func_call(name, *arguments, source_code=_source()))
