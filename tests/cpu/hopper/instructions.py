"""Names of the helpers that instructions of the generated text have, to plant faults in them."""

from __future__ import annotations

WAIT = "tvm_builtin_cuda_mbarrier_wait"
RECEIVED = "tvm_builtin_cuda_mbarrier_wait_acquire_cluster"
EXPECT = r"tvm_builtin_ptx_mbarrier_arrive_expect_tx\w+"
MAP = r"tvm_builtin_ptx_mapa\w+"
PUSH = r"tvm_builtin_ptx_st_async\w+"
#: Bulk copies to the shared memory of another CTA.
FENCE = r"tvm_builtin_ptx_fence_proxy\w+"
#: Threads of a warpgroup meet.
MEET = r"tvm_builtin_ptx_bar_sync\w+"
#: CTAs of a cluster meet, or leave each other: either half of the barrier.
ARRIVE = r"tvm_builtin_ptx_barrier_cluster_arrive\w+"
LEAVE = r"tvm_builtin_ptx_barrier_cluster_wait\w+"
RAISE = "crossfuse_raise_flag"
