"""Parts of a kernel that do not depend on what it computes."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.pipeline import Ring
from crossfuse.lower.hopper.plan.memory import Arena
from crossfuse.lower.hopper.program.tile import identifier
from crossfuse.lower.hopper.statements import run, when
from crossfuse.lower.image import TensorMap

#: Attribute of a kernel: a CTA has an SM for itself.
ONE_CTA = {"tirx.launch_bounds_min_blocks_per_sm": 1}
# Descriptors are parameters: a generic address, which the instruction takes.
_FETCH_DESCRIPTOR = """\
__device__ __forceinline__ void crossfuse_fetch_descriptor(unsigned long long map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
}
"""


def parameter(buffer: Any) -> Any:
    """Declare a parameter as TIRx has them, with a layout."""
    shape = [int(each) for each in buffer.ty.shape]
    return ir.script.arg(identifier(buffer), ir.script.Buffer(shape, str(buffer.ty.dtype)))


def ring_barriers(arena: Arena, memory: Any, name: str, stages: int, offset: int) -> Ring:
    """The barriers of a ring, at an offset among those of the kernel."""
    buffer = ir.script.decl_buffer(
        (2 * stages,),
        "uint64",
        data=memory.data,
        scope="shared.dyn",
        byte_offset=arena["barriers"].offset + offset,
    )
    ir.IRBuilder.name(name, buffer)
    return Ring(stages, buffer)


def fetch_descriptors(descriptors: tuple[TensorMap, ...], lane: Any, maps: dict[str, Any]) -> None:
    """Prefetch all descriptors, one by each lane: the first copy would wait for its own."""
    for number, each in enumerate(descriptors):
        with when(lane == number):
            address = ir.script.address_of(maps[each.name])
            run(
                ir.cuda_func_call(
                    "crossfuse_fetch_descriptor", address, source_code=_FETCH_DESCRIPTOR
                )
            )


def set_registers(direction: str, count: int) -> None:
    """Move registers between warpgroups (PTX ISA, setmaxnreg)."""
    if count:
        run(getattr(ir.script.ptx.setmaxnreg, direction).sync.aligned.u32(count))
