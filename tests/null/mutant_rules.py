"""Lines of text with a mutant of one of them, and why it is no fault; empty if it is one."""

from __future__ import annotations

WAIT = "tvm_builtin_cuda_mbarrier_wait"
MEET = "tvm_builtin_ptx_bar_sync_count_sync"
FENCE = "tvm_builtin_ptx_fence_proxy_proxy_async_shared__cta"
EXPECT = "tvm_builtin_ptx_mbarrier_arrive_expect_tx_arrive_expect_tx_shared_b64"
PRODUCTS = "tvm_builtin_ptx_wgmma_wait_group_wait_group_sync_aligned_"
ARRIVE = "tvm_builtin_ptx_mbarrier_arrive_x"
ONE_THREAD = "left out by all but one thread of a warp"
LANES = "tvm_builtin_cuda_warp_sync"
FLAG_READ = "uint launches_before = crossfuse_flags_0_ptr[8];"
COUNTED = "crossfuse_flags_0_ptr[8] = (launches_before + (uint)1);"
RAISE = "crossfuse_raise_flag(f);"
RAISE_FENCED = [
    "__device__ __forceinline__ void crossfuse_raise_flag(void* flag) {",
    '  asm volatile("fence.proxy.async.global;" ::: "memory");',
    '  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(flag), "r"(1) : "memory");',
    "}",
]
AWAIT_PARTS = [
    "__device__ __forceinline__ void crossfuse_await_parts(const void* flags, int pitch) {",
    "  for (int part = threadIdx.x & 31; part < 2; part += 32) {",
    "    unsigned seen = load(flags, part);",
    "  }",
    "  __syncwarp();",
    "}",
    "void k() {",
]
AWAIT_FLAGS = [each.replace("parts", "flags") for each in AWAIT_PARTS]
AWAITED = "    ready_ptr[0] = crossfuse_await_flags(f, ready_ptr[0], 0, 1, n);"
FIRST_LANE = ["  if ((((int)threadIdx.x) % 32) == 0) {", f"    {WAIT}(a, 1);", "  }"]
FIRST_STEP = [
    "for (int step_1 = 0; step_1 < 8; ++step_1) {",
    "  if (ready_ptr[0] <= 0) {",
    AWAITED,
    "  }",
    "}",
]
TOLD = "crossfuse_arrive_at_ranks(a, 0, 2, 8);"
COPY = "tvm_builtin_ptx_cp_async_bulk_tensor_g2s_x"

#: Lines, what statements had to do, operation and change of the last of these, and the reason.
RULES = {
    "a wait that never waits": (
        [f"{WAIT}(a, 1);"],
        {1: False},
        "drop",
        "left out",
        "from the start",
    ),
    "a wait that waits": ([f"{WAIT}(a, 1);"], {1: True}, "drop", "left out", ""),
    "the other parity of a wait that never waits": (
        [f"{WAIT}(a, 1);"],
        {1: False},
        "parity",
        "the other parity",
        "",
    ),
    "a line that never runs": ([f"{FENCE}();"], {}, "drop", "left out", "not come to"),
    "an arrival for nobody": ([f"{EXPECT}(a, 8);"], {1: False}, "drop", "left out", "nobody waits"),
    "bytes announced late": (
        [f"{EXPECT}(a, 8);", f"{COPY}(b);"],
        {1: True},
        "move",
        f"behind `{COPY}(b);`",
        "does not end before",
    ),
    "a fence behind the meeting": (
        [f"{FENCE}();", f"{MEET}(1, 128);"],
        {1: True},
        "move",
        f"behind `{MEET}(1, 128);`",
        "either side",
    ),
    "a fence behind the copy": (
        [f"{FENCE}();", f"{COPY}(b);"],
        {1: True},
        "move",
        f"behind `{COPY}(b);`",
        "",
    ),
    "a second fence": ([f"{FENCE}();", f"{FENCE}();"], {1: True}, "drop", "left out", "another"),
    "threads meet twice": (
        [f"{MEET}(1, 128);", "x = 1;", f"{MEET}(1, 128);"],
        {1: True},
        "drop",
        "left out",
        "did nothing between",
    ),
    "one thread waits and tells": (
        [
            f"{MEET}(1, 128);",
            "if ((((int)threadIdx.x) % 128) == 0) {",
            "  tvm_builtin_ptx_cp_async_bulk_wait_group_read_0();",
            "}",
            f"{MEET}(1, 128);",
            "if ((((int)threadIdx.x) & 127) < 1) {",
            "  tvm_builtin_ptx_mbarrier_arrive_x(a);",
            "}",
        ],
        {1: True, 5: True},
        "drop",
        "left out",
        "one thread alone",
    ),
    "one thread waits and all tell": (
        [
            f"{MEET}(1, 128);",
            "if ((((int)threadIdx.x) % 128) == 0) {",
            "  tvm_builtin_ptx_cp_async_bulk_wait_group_read_0();",
            "}",
            f"{MEET}(1, 128);",
            "if ((((int)threadIdx.x) & 127) < 2) {",
            "  tvm_builtin_ptx_mbarrier_arrive_x(a);",
            "}",
        ],
        {1: True, 5: True},
        "drop",
        "left out",
        "",
    ),
    "an arrival that comes later": (
        ["tvm_builtin_ptx_mbarrier_arrive_x(a);", "memory_ptr[0] = 1;"],
        {1: True},
        "move",
        "behind `memory_ptr[0] = 1;`",
        "tells of more",
    ),
    "an arrival that comes earlier": (
        ["memory_ptr[0] = 1;", "tvm_builtin_ptx_mbarrier_arrive_x(a);"],
        {2: True},
        "move",
        "before `memory_ptr[0] = 1;`",
        "",
    ),
    "a fence behind another wait": (
        [f"{FENCE}();", f"{WAIT}(a, 1);"],
        {1: True},
        "move",
        f"behind `{WAIT}(a, 1);`",
        "and more",
    ),
    "a fence behind an arrival": (
        [f"{FENCE}();", "tvm_builtin_ptx_mbarrier_arrive_x(a);"],
        {1: True},
        "move",
        "behind `tvm_builtin_ptx_mbarrier_arrive_x(a);`",
        "",
    ),
    "a barrier behind a product": (
        [f"{PRODUCTS}0();", "if (thread < 1) {", f"  {ARRIVE}(a);", "}", f"{MEET}(1, 128);"],
        {5: True},
        "drop",
        "left out",
        "that all issued",
    ),
    "a barrier behind a product that may be left out": (
        ["if (0 < turn) {", f"  {PRODUCTS}0();", "}", f"{MEET}(1, 128);"],
        {4: True},
        "drop",
        "left out",
        "",
    ),
    "a barrier behind a product and a store": (
        [f"{PRODUCTS}0();", "memory_ptr[0] = 1;", f"{MEET}(1, 128);"],
        {3: True},
        "drop",
        "left out",
        "",
    ),
    "a barrier that nothing is told by": (
        ["__syncthreads();"],
        {1: False},
        "drop",
        "left out",
        "no two threads touch",
    ),
    "a flag read, and all parts awaited before it is written": (
        [*AWAIT_PARTS, FLAG_READ, f"{LANES}();", "crossfuse_await_parts(f, 4, 2, n);", COUNTED],
        {9: True},
        "drop",
        "left out",
        "lanes have read a flag alone",
    ),
    "a wait of one thread that meets the others": (
        ["if (more) {", f"  {WAIT}(a, 1);", "} else {", "  n = 1;", "}", f"{MEET}(1, 128);"],
        {2: True},
        "part",
        ONE_THREAD,
        "meets the others before",
    ),
    "a wait of one thread in a loop": (
        ["for (;;) {", f"  {WAIT}(a, 1);", "}", f"{MEET}(1, 128);"],
        {2: True},
        "part",
        ONE_THREAD,
        "",
    ),
    "a wait of one thread, and others read": (
        [f"{WAIT}(a, 1);", "x = memory_ptr[0];", f"{MEET}(1, 128);"],
        {1: True},
        "part",
        ONE_THREAD,
        "",
    ),
    "a wait of one thread, and a product": (
        [f"{WAIT}(a, 1);", "tvm_builtin_ptx_wgmma_x_mma_async(a);", f"{MEET}(1, 128);"],
        {1: True},
        "part",
        ONE_THREAD,
        "",
    ),
    "one flag, of which the lane learns that loads": (
        ["  " + FLAG_READ, f"  {LANES}();", AWAITED, *FIRST_LANE, "}"],
        {3: True},
        "weaken",
        "no __syncwarp",
        "alone touches memory",
    ),
    "one flag, and all lanes load": (
        ["  " + FLAG_READ, f"  {LANES}();", AWAITED, f"  {WAIT}(a, 1);", "}"],
        {3: True},
        "weaken",
        "no __syncwarp",
        "",
    ),
    "two flags, of which lanes learn": (
        ["  " + FLAG_READ, f"  {LANES}();", AWAITED.replace("0, 1,", "0, 2,"), *FIRST_LANE, "}"],
        {3: True},
        "weaken",
        "no __syncwarp",
        "",
    ),
    "a flag read, and flags awaited in the first step": (
        [*AWAIT_FLAGS, FLAG_READ, f"{LANES}();", "ready_ptr[0] = 0;", *FIRST_STEP, COUNTED],
        {9: True},
        "drop",
        "left out",
        "lanes have read a flag alone",
    ),
    "a flag read, and flags awaited unless they are known": (
        [*AWAIT_FLAGS, FLAG_READ, f"{LANES}();", "ready_ptr[0] = more;", *FIRST_STEP, COUNTED],
        {9: True},
        "drop",
        "left out",
        "",
    ),
    "a flag read, and flags awaited in a tile that there may not be": (
        [*AWAIT_FLAGS, FLAG_READ, f"{LANES}();", "if (tile < 2) {", AWAITED, "}", COUNTED],
        {9: True},
        "drop",
        "left out",
        "",
    ),
    "a flag read, and written before all parts are awaited": (
        [*AWAIT_PARTS, FLAG_READ, f"{LANES}();", COUNTED, "crossfuse_await_parts(f, 4, 2, n);"],
        {9: True},
        "drop",
        "left out",
        "",
    ),
    "a fence before a flag that loads wait for": (
        [*RAISE_FENCED, *AWAIT_PARTS, "crossfuse_raise_flag(f);"],
        {12: True},
        "weaken",
        "no fence",
        "ordinary loads",
    ),
    "a fence before a flag that copies wait for": (
        [*RAISE_FENCED, *AWAIT_FLAGS, RAISE],
        {12: True},
        "weaken",
        "no fence",
        "",
    ),
    "a wait in vain": (
        ["ready = crossfuse_await_flags_or_help(f, 0, 0, 1, n, a, b, c);"],
        {1: True},
        "count",
        "a count more is awaited",
        "ended by help",
    ),
    "a wait in vain without help": (
        ["ready = crossfuse_await_flags(f, 0, 0, 1, n);"],
        {1: True},
        "count",
        "a count more is awaited",
        "",
    ),
    "ranks are told of loads": (
        ["__global__ void k() {", "out_ptr[0] = a_peer_ptr[1];", TOLD],
        {3: True},
        "weaken",
        "a release to the GPU",
        "loads alone",
    ),
    "ranks are told of stores": (
        ["__global__ void k() {", "*(uint4*)(a_peer_ptr + (8)) = *(uint4*)(b_ptr);", TOLD],
        {3: True},
        "weaken",
        "a release to the GPU",
        "",
    ),
    "threads store between": (
        [f"{MEET}(1, 128);", "memory_ptr[0] = 1;", f"{MEET}(1, 128);"],
        {1: True},
        "drop",
        "left out",
        "",
    ),
}
