"""Small FFNs that are one persistent kernel, and ways to plant faults in them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from cpu.hopper.instructions import (
    FENCE,
)
from cpu.hopper.planting import one_changed
from crossfuse.emulate.cuda import change_argument, drop_call
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.workload import WorkloadSpec, parse, prim_func

# Two stages make both phases use the same memory, and partial sums take the place of right tiles.
CASES = {
    "boxes": ("M=64,K=128,N=512,L=128,dtype=bfloat16", {"columns": 32, "cluster": 4}),
    # Boxes are of 16-bit types.
    "elements": (
        "M=64,K=128,N=256,L=128,dtype=float8_e4m3fn,out=bfloat16",
        {"columns": 24, "cluster": 2},
    ),
    "across": (
        "M=64,K=128,N=512,L=128,dtype=bfloat16",
        {"columns": 32, "cluster": 2, "across": 2},
    ),
    "two warpgroups": (
        "M=128,K=64,N=512,L=64,dtype=bfloat16",
        {"rows": 128, "columns": 32, "cluster": 2},
    ),
}
GUARD = "0 < crossfuse_hide(turn)"
AWAIT = "crossfuse_await_flags"
LANDED = r"tvm_builtin_ptx_cp_async_bulk_wait_group_async_bulk_wait_group_0"
REMOTE = r"tvm_builtin_ptx_mbarrier_arrive\w*_shared__cluster_b64"
WEIGHTED = "tvm_builtin_ptx_mbarrier_arrive_arrive_shared_b64"
BOX = r"tvm_builtin_ptx_cp_async_bulk_tensor_s2g\w+"
STORE = "hidden_ptr"
PRODUCTS = r"tvm_builtin_ptx_wgmma_wait_group\w+_0"
# The proxy fences of what raises and of what awaits a flag.
FENCE_OF_RAISE = r'(void crossfuse_raise_flag.*\n  asm volatile\(")fence.proxy.async.global;'
FENCE_OF_AWAIT = r'(__syncwarp\(\);\n  asm volatile\(")fence.proxy.async.global;'


def spec_of(case: str) -> WorkloadSpec:
    return parse(f"gated_ffn:{CASES[case][0]}")


@cache
def right(case: str) -> KernelImage:
    first = TensorTiles(**{"rows": 64, **CASES[case][1]}, stages=2)
    second = TensorTiles(columns=64, split=first.cluster, stages=2)
    func = prim_func(spec_of(case))
    return lower(schedule_tiled_ffn(func, first=first, second=second)).image


def planted(case: str, pattern: str, by: str, index: int = 0) -> KernelImage:
    """One place of the text changed."""
    return one_changed(right(case), pattern, by, index)


def dropped(case: str, name: str, index: int = 0) -> KernelImage:
    return drop_call(right(case), name, index)


def changed(case: str, name: str, position: int, by: str, index: int = 0) -> KernelImage:
    return change_argument(right(case), name, position, by, index)


def early(case: str, name: str, index: int = 0) -> KernelImage:
    """A statement that the warm-up no longer leaves out."""
    return unguarded(right(case), name, index)


def unguarded(image: KernelImage, name: str, index: int = 0) -> KernelImage:
    """The same of any image."""
    body = image.cuda.rindex("__global__")
    call = [each.start() for each in re.finditer(rf"\b{name}[([]", image.cuda[body:])][index] + body
    guard = image.cuda.rindex(GUARD, 0, call)
    text = image.cuda[:guard] + "true" + image.cuda[guard + len(GUARD) :]
    return replace(image, cuda=text)


def unfenced(case: str) -> KernelImage:
    """Without the proxy fences on either side of a flag, and after the stores of each thread."""
    return without_fences(right(case))


def without_fences(image: KernelImage) -> KernelImage:
    """The same of any image."""
    raising = re.sub(FENCE_OF_RAISE, r"\1", image.cuda, count=1)
    both = re.sub(FENCE_OF_AWAIT, r"\1", raising)
    return drop_call(replace(image, cuda=both), FENCE)
