"""Kernels that start while the one before them runs (programmatic dependent launch).

Such a kernel lets the next one begin at its own beginning, and waits for the end of the one before
it: its CTAs are there when that one ends, which hides a launch. Any kernel of ours can. One that
waits where it has to, as a product with constant weights does, stays as it is; others wait before
they touch global memory. Some thread waits in each, so that whoever waits for the end of a kernel
comes after all kernels before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from crossfuse.lower.image import BufferSpec, KernelImage, Launch
from crossfuse.lower.refusal import refuse
from crossfuse.markers import EARLY, constant_parameters

#: The call by which kernels of the Hopper pipeline let the next one begin.
_LETS = "griddepcontrol_launch_dependents"
_BEHIND = "crossfuse_behind_wait"
# nvcc may make loads of constants from plain ones, and move them in front of a wait; but not in
# front of what their address comes from: a zero that is known behind the wait is added to pointers.
_HELPERS = """\
__device__ __forceinline__ void crossfuse_let_next_begin() {
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}
__device__ __forceinline__ long long crossfuse_await_kernel_before() {
  asm volatile("griddepcontrol.wait;" : : : "memory");
  long long zero = 0;
  asm volatile("" : "+l"(zero) : : "memory");
  return zero;
}
"""
_KERNEL = 'extern "C" __global__'
_POINTER = re.compile(r"\*\s*(?:__restrict__\s*)?(\w+)\s*$")


def starting_early(func: Any, constant: Sequence[str] = ()) -> Any:
    """The same function, whose kernels `lower` has start while the kernel before them runs.

    No kernel that may still be running then writes the parameters named in `constant`: a product
    whose right operands are all among them loads these before it waits.
    """
    return func.with_attr(EARLY, ",".join(constant))


def check_constant(func: Any, buffers: Sequence[BufferSpec]) -> None:
    """Refuse a function that names what is no input of it as constant."""
    inputs = [each.name for each in buffers if not each.output]
    for name in constant_parameters(func):
        if name not in inputs:
            raise refuse(
                EARLY,
                f"parameter '{name}'",
                found="an output" if name in [e.name for e in buffers] else "no parameter",
                limit=f"inputs of the function ({', '.join(inputs)})",
                instead="name parameters that no kernel writes before this one is over",
            )


def start_early(image: KernelImage) -> KernelImage:
    """The same function, each of whose kernels may start before the one before it is over."""
    text = image.cuda
    for launch in {each.symbol: each for each in image.launches}.values():
        text = _begun(text, launch)
    first = text.index(_KERNEL)
    return replace(
        image,
        cuda=f"{text[:first]}{_HELPERS}{text[first:]}",
        launches=tuple(replace(each, early=True) for each in image.launches),
    )


def _begun(text: str, launch: Launch) -> str:
    """The text with what a kernel lacks at its beginning."""
    head = rf"{_KERNEL}[^;{{]*\b{re.escape(launch.symbol)}\s*\(([^;{{]*)\)\s*\{{\n"
    kernel = re.search(head, text)
    assert kernel is not None, launch.symbol
    body = text[kernel.end() : text.index("\n}\n", kernel.end())]
    lines = [] if _LETS in body else ["crossfuse_let_next_begin();"]
    if not launch.early:
        lines.append(f"const long long {_BEHIND} = crossfuse_await_kernel_before();")
        pointers = map(_POINTER.search, kernel[1].split(","))
        lines += [f"{each[1]} += {_BEHIND};" for each in pointers if each is not None]
    start = kernel.end()
    return text[:start] + "".join(f"  {each}\n" for each in lines) + text[start:]
