"""Barriers in shared memory that count arrivals and bytes (PTX ISA, mbarrier)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP
from crossfuse.lower.hopper.statements import Variable, run, when


def initialise(barrier: Any, arrivals: int) -> None:
    """Initialise a barrier for phases of `arrivals` arrivals."""
    run(ir.script.ptx.mbarrier.init.shared.b64(barrier, ir.script.uint32(arrivals)))


def publish_initialised() -> None:
    """Make initialised barriers visible to the cluster and to TMA; a cluster barrier follows."""
    run(ir.script.ptx.fence.mbarrier_init.release.cluster())


def wait(barrier: Any, parity: Any) -> None:
    """Wait until the phase of this parity is complete."""
    run(ir.script.cuda.mbarrier_wait(barrier, parity))


def expect(barrier: Any, size: Any) -> None:
    """Arrive, and announce the bytes that will arrive in this phase."""
    arrive = ir.script.ptx.mbarrier.arrive.expect_tx.shared.b64
    run(arrive(barrier, ir.script.uint32(size)))


def wait_cluster(barrier: Any, parity: Any) -> None:
    """Wait until the phase of this parity is complete, and acquire what other CTAs stored."""
    run(ir.script.cuda.mbarrier_wait_acquire_cluster(barrier, parity))


def arrive(barrier: Any, count: int = 1) -> None:
    """Arrive at a barrier of this CTA, `count` times."""
    call = ir.script.ptx.mbarrier.arrive.shared.b64
    run(call(barrier) if count == 1 else call(barrier, ir.script.uint32(count)))


def arrive_remote(address: Any, count: int = 1) -> None:
    """Arrive at a barrier of any CTA of the cluster, by its cluster address."""
    call = ir.script.ptx.mbarrier.arrive.shared__cluster.b64
    run(call(address) if count == 1 else call(address, ir.script.uint32(count)))


def cluster_address(destination: Any, pointer: Any, rank: Any) -> None:
    """Store in `destination` the address that `pointer` of this CTA has in the CTA of a rank."""
    shared = ir.script.cuda.cvta_generic_to_shared(pointer)
    run(ir.script.ptx.mapa.shared__cluster.u32(destination, shared, ir.script.Cast("uint32", rank)))


class Peer:
    """A CTA of the cluster that something is pushed to: a place there, and a barrier.

    `names` are those of the variables for the cluster addresses of both.
    """

    def __init__(self, names: tuple[str, str], place: Any, barrier: Any, rank: Any) -> None:
        self.place, self.barrier = (Variable(each, "uint32") for each in names)
        cluster_address(self.place.value, place, rank)
        cluster_address(self.barrier.value, barrier, rank)

    def push(self, offset: Any, values: Sequence[Any]) -> None:
        """Send values to an offset in bytes behind the place."""
        address = self.place.value + ir.script.Cast("uint32", offset)
        push(address, values, self.barrier.value)


def push(address: Any, values: Sequence[Any], barrier: Any) -> None:
    """Store two or four float32 in any CTA of the cluster, whose barrier counts their bytes.

    Both are cluster addresses (PTX ISA, st.async).
    """
    call = ir.script.ptx.st_async.shared__cluster.mbarrier__complete_tx__bytes
    run(getattr(call, f"v{len(values)}").f32(address, *values, barrier))


def meet_warpgroup(warpgroup: Any) -> None:
    """Synchronise a multiplying warpgroup, by a barrier of its own: 0 is that of the whole CTA."""
    barrier = ir.script.Cast("uint32", 1 + warpgroup)
    run(ir.script.ptx.bar.sync(barrier, ir.script.uint32(WARPGROUP)))


def await_copies(thread: Any, pending: int = 0) -> None:
    """Wait until bulk copies have read shared memory, but for `pending` groups of the last ones.

    By the first thread of a warpgroup, which issues them (PTX ISA, cp.async.bulk.wait_group).
    """
    with when(thread == 0):
        run(ir.script.ptx.cp.async_.bulk.wait_group.read(pending))


def meet_started(size: int) -> None:
    """Synchronise all threads of the cluster (of a lone CTA, its own) without ordering memory.

    The fence after the barriers' initialisation has published them. A release would wait until the
    memory has answered, which costs half a microsecond.
    """
    if size == 1:
        run(ir.script.cuda.cta_sync())
        return
    say_started()
    await_started()


def say_started() -> None:
    """Signal the cluster that this CTA's barriers are initialised."""
    run(ir.script.ptx.barrier.cluster.arrive.relaxed.aligned())


def await_started() -> None:
    """Wait until all threads of the cluster have signalled it: now their CTAs may be reached."""
    run(ir.script.ptx.barrier.cluster.wait.acquire.aligned())


def leave_cluster() -> None:
    """Arrive at the last barrier: this thread does not access its peers any more."""
    run(ir.script.ptx.barrier.cluster.arrive.release.aligned())


def await_left() -> None:
    """Wait until all threads of the cluster have left: nobody accesses this CTA any more."""
    run(ir.script.ptx.barrier.cluster.wait.acquire.aligned())
