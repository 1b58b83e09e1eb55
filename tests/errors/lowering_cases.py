"""What the lowering refuses: a function, the text of the refusal, the beginning of its cure."""

from __future__ import annotations

from typing import Any

from cpu.lower import refused as r
from cpu.lower import refused_memory as m
from cpu.lower import refused_vectors as v

UNIFORM = "all threads of a cluster reach every cluster barrier, equally often and in order"
OWN_COPY = "compute the buffer at the loop that uses it, inside the bound loop, or exchange it with"
ONE_THREAD = "bind the loops of the storing block to the threads with factors that divide its tile"
APART = "put the exchange into a cluster-bound nest of its own, after the nest that fills the slabs"
DIVIDE = "choose tile extents that divide the problem, or move the exchange out of the conditional"
VECTOR = "split the vectorised loop by 16 bytes or less, with an extent that divides the rows"

#: Function, or what makes it; the text up to the limit; the beginning of the cure.
CASES: dict[str, tuple[Any, str, str]] = {
    "naive bind": (
        r.naive_bind,
        "cluster-binding: loop 'my_loop': found a plain bind to clusterCtaIdx.y",
        'call sch.cluster_bind(loop, axis="y") instead of sch.bind(loop, "clusterCtaIdx.y")',
    ),
    "unknown axis": (
        r.unknown_axis,
        "cluster-binding: loop 'c': found the annotation of an axis 'w'; limit: axes x, y, z",
        'call sch.cluster_bind(loop, axis="x") instead of sch.annotate',
    ),
    "gathered vector": (
        v.gathered_vector,
        "vectors: statement B[blockIdx_x * 8:blockIdx_x * 8 + 8] = "
        "A[T.Ramp(blockIdx_x * 24, 3, 8)]: found a vector of 8 elements that lie apart in memory",
        "vectorise by 4 or less",
    ),
    "scattered fp8": (
        v.scattered_fp8,
        "vectors: statement B[blockIdx_x * 6:blockIdx_x * 6 + 6:3] = "
        "A[T.Ramp(blockIdx_x * 2, 1, 2)]: found a vector of 2 elements that lie apart in memory",
        "leave the loop serial",
    ),
    "some virtual threads": (
        r.some_virtual_threads,
        "virtual-threads: buffer 'R', statement R_1[c, e] = R_1[c, e] + A[c, e]: found a store "
        "outside vthread.x, which other statements of the kernel have",
        "bind a loop around every statement to vthread.x, or leave them serial",
    ),
    "nested axis": (
        r.nested_axis,
        "cluster-binding: loop 'inner': found loop 'outer' of cluster axis x around it",
        "bind one of them to another axis, or fuse the two and bind that",
    ),
    "thread bound twice": (
        r.diagonal,
        "thread-binding: loop 'inner': found loop 'outer' of threadIdx.x around it, and block "
        "'copy' uses both; limit: one loop a nest on each coordinate",
        "bind one of them to another axis, or fuse the two and bind that",
    ),
    "unequal threads": (
        r.unequal_threads,
        "thread-binding: loop 'inner': found loop 'wide' of threadIdx.x around it, with extents "
        "2 and 4",
        "bind one of them to another axis, or fuse the two and bind that",
    ),
    "cluster extents": (
        r.cluster_extents,
        "cluster axis x: loop 'halves': found extent 2",
        "split both loops by the same factor",
    ),
    "thread extents": (
        r.thread_extents,
        "threadIdx.x: loop 'four': found extent 4",
        "split both loops by the same factor",
    ),
    "no owner": (
        r.no_owner,
        "shared.dsm: buffer 'P': found a leading extent of 4 and no access by a CTA to its own "
        "slab, in P[(c + 1) % 4, 0] = A[c]",
        "cluster_bind the loop over the leading dimension, as dsm_reduce and dsm_shuffle do",
    ),
    "no cluster": (
        r.no_cluster,
        "shared.dsm: buffer 'P': found a leading extent of 4 and no access by a CTA to its own",
        "cluster_bind the loop over the leading dimension, as dsm_reduce and dsm_shuffle do",
    ),
    "outside access": (
        r.outside_access,
        "shared.dsm: buffer 'P': found an access outside every loop bound to cluster axis x: "
        "B[b] = P[2]",
        "cluster_bind a loop around the statement",
    ),
    "pointer": (
        r.pointer_to_slab,
        "shared.dsm: buffer 'P': found a pointer to a slab or a view of it: B[c] = T.call_extern(",
        "copy between the slab and a shared or local buffer by a block of loops",
    ),
    "view": (
        r.view_of_slab,
        "shared.dsm: buffer 'P': found a pointer to a slab or a view of it: V[0, e] = A[c, e]",
        "copy between the slab and a shared or local buffer by a block of loops",
    ),
    "one nest": (
        r.exchange_in_one_nest,
        "cluster-dependence: loop 'both', buffer 'P': found a nest that writes slabs and touches "
        "those of other ranks",
        APART,
    ),
    "two pushes": (
        r.two_pushes,
        "cluster-dependence: loop 'give', buffer 'P': found two stores to slabs of other ranks: "
        "P[3 - give, threadIdx_x] = T.float32(0.0); P[3 - give, 7 - threadIdx_x]",
        APART,
    ),
    "some threads": (
        r.some_threads,
        "cluster-barrier: loop 'z': found control flow that depends on 'threadIdx.x': "
        "threadIdx_x < 4",
        DIVIDE,
    ),
    "some ranks": (
        r.some_ranks,
        "cluster-barrier: loop 'c': found control flow that depends on 'y': y + 1",
        DIVIDE,
    ),
    "value in memory": (
        r.value_in_memory,
        "cluster-barrier: loop 'z': found control flow that depends on 'S': S[0] > 0",
        DIVIDE,
    ),
    "named condition": (
        r.named_condition,
        "cluster-barrier: loop 'z': found control flow that depends on 'threadIdx.x': half == 0",
        DIVIDE,
    ),
    "while": (
        r.while_around,
        "cluster-barrier: loop 'z': found a while loop",
        "use a for loop of constant extent",
    ),
    "virtual threads": (
        m.virtual_threads,
        "cluster-barrier: loop 'z': found virtual threads (vthread.x) around the exchange",
        "unroll the loop",
    ),
    "vectorised": (
        v.vectorised_outside,
        "cluster-barrier: loop 'c': found vectorised loop 's' around the exchange",
        "vectorise a loop inside the cluster-bound loop",
    ),
    "software pipeline": (
        m.pipelined,
        "cluster-barrier: loop 'c': found a software pipeline over loop 's'",
        "pipeline a loop inside the cluster-bound loop",
    ),
    "double buffer": (
        m.double_buffered,
        "cluster-barrier: loop 'c': found a double buffer over loop 's' (block 'fill')",
        "double-buffer a stage of a loop inside the cluster-bound loop",
    ),
    "ring with init": (
        m.ring_with_init,
        "dsm_shuffle: block 'hidden_shared.dsm_shared.dyn', loop 'k_0': found an initialisation "
        "inside the ring: if k_0 * 16 + k_1 == 0",
        "call sch.decompose_reduction(consumer, slice_loop) before lowering",
    ),
    "split ring": (
        m.split_ring,
        "dsm_shuffle: block 'hidden_shared.dsm_shared.dyn': found slice k_0_0 * 2 + k_0_1 of 4",
        "keep the slice loop whole, or call dsm_shuffle with ring=False",
    ),
    "ring of a scan": (
        m.ring_of_a_scan,
        "dsm_shuffle: block 'stage', loop 'r': found a statement whose order matters: "
        "B[z] = B[z] * T.float32(0.5) + P[r]",
        "call dsm_shuffle with ring=False",
    ),
    "private across ranks": (
        m.private_across_ranks,
        "private-buffer: buffer 'S': found a shared.dyn buffer written along cluster.x and an "
        "access that may be to another CTA's element: S[t] = A[c, t]",
        OWN_COPY,
    ),
    "private inside another axis": (
        m.private_inside_another_axis,
        "private-buffer: buffer 'S': found a shared.dyn buffer written along cluster.x and an "
        "access that may be to another CTA's element: S[t] = A[y, c, t]",
        OWN_COPY,
    ),
    "registers": (
        m.registers_of_another_thread,
        "private-buffer: buffer 'R': found a local buffer written along threadIdx.x and an access "
        "that may be to another thread's element: B[c, t] = ",
        OWN_COPY,
    ),
    "slab across an axis": (
        m.slab_across_another_axis,
        "private-buffer: buffer 'P': found a shared.dsm buffer written along cluster.y and an "
        "access that may be to another CTA's element: B[y, z, t] = P[3 - z, 1 - y, t]",
        OWN_COPY,
    ),
    "slab across the grid": (
        m.slab_across_the_grid,
        "private-buffer: buffer 'P': found a shared.dsm buffer written along blockIdx.x and an "
        "access that may be to another CTA's element: P[c, t] = A[b, c, t]",
        OWN_COPY,
    ),
    "global store": (
        m.store_outside,
        "global-store: buffer 'C': found a store outside every loop of cluster axis x: "
        "C[b] = T.float32(1.0)",
        "split one of the loops around the store by the cluster size and cluster_bind the part",
    ),
    "global exchange": (
        m.global_exchange,
        "global-exchange: buffer 'B': found an element that places along cluster.x may share: "
        "C[z + b] = B[3 - (z + b)], with B[c + b] = A[c + b]",
        "keep the intermediate in scope shared.dsm (dsm_shuffle), give all statements on the "
        "buffer the same bindings, or make two kernels",
    ),
    "global between threads": (
        m.global_threads,
        "global-exchange: buffer 'B': found an element that places along threadIdx.x may share: ",
        "keep the intermediate in scope shared.dsm (dsm_shuffle)",
    ),
    "unbound store": (
        m.all_threads,
        "distinct-stores: buffer 'P': found a store that all 8 places along threadIdx.x execute: "
        "P[c, e] = A[c, e]",
        ONE_THREAD,
    ),
    "two first threads": (
        lambda: m.first_threads(2),
        "distinct-stores: buffer 'P': found a store that loop 'threadIdx.x' repeats: "
        "P[c, 0] = A[c, 0]",
        ONE_THREAD,
    ),
    "idle threads": (
        m.idle_threads,
        "distinct-stores: buffer 'out': found parallel iterations that may store to one element: "
        "out[",
        ONE_THREAD,
    ),
    "reduction over threads": (
        m.thread_reduction,
        "thread-reduction: kernel: found a reduction over threads that TVM lowers without "
        "synchronising warps",
        "bind a multiple of 32 threads, or a power of two below, to the reduction loop",
    ),
    "threads": (
        lambda: m.bound(4, 2048, "cluster.x", "threadIdx.x"),
        "threads: kernel: found 2048 threads (threadIdx.x=2048)",
        "split the loops bound to threadIdx by smaller factors",
    ),
    "grid": (
        lambda: m.bound(4, 70000, "cluster.x", "blockIdx.y"),
        "grid-size: blockIdx.y: found 70000 CTAs",
        "bind the large loop to blockIdx.x",
    ),
    "grid of clusters": (
        lambda: m.bound(4, 20000, "cluster.z", "blockIdx.z"),
        "grid-size: blockIdx.z: found 80000 CTAs",
        "bind the large loop to blockIdx.x",
    ),
    "cluster size": (
        lambda: m.bound(4, 8, "cluster.x", "cluster.y"),
        "cluster-size: kernel: found 32 CTAs in a cluster (y=8 x x=4)",
        "bind smaller loops to the cluster axes",
    ),
    "element type": (
        m.wide_elements,
        "shared.dsm: buffer 'P': found element type float64",
        "exchange the tile in one of these types",
    ),
    "shared memory": (
        m.large_slab,
        "shared-memory: kernel: found 300000 bytes ('P' 300000)",
        "use smaller tiles, a larger cluster, or stage parts of a slice",
    ),
    "wide vector": (
        lambda: v.vectors(8),
        "dsm-vector: buffer 'P': found 8 elements of 32 bytes together, from 0",
        VECTOR,
    ),
    "strided vector": (
        lambda: v.vectors(4, stride=2),
        "dsm-vector: buffer 'P': found an access that is not contiguous: 4 elements from 0 in "
        "steps of 2",
        VECTOR,
    ),
    "misaligned vector": (
        lambda: v.vectors(4, start=1),
        "dsm-vector: buffer 'P': found 4 elements together, from 1, which may be misaligned",
        VECTOR,
    ),
}
