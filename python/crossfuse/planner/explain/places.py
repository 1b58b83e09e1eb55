"""Where each tensor of a plan lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crossfuse.hardware import Device
from crossfuse.planner.chain.spec import Chain, Tensor
from crossfuse.planner.kernels.clustered import ClusteredKernel
from crossfuse.planner.kernels.every import Kernel
from crossfuse.planner.kernels.memory import Memory
from crossfuse.planner.kernels.registers import RegisterKernel
from crossfuse.planner.kernels.shape import Shape


@dataclass(frozen=True)
class Place:
    """Where a tensor, or the partial sums of one, lives between what makes it and what reads it.

    Attributes
    ----------
    tensor : str
        Its name.
    role : str
        ``"input"``, ``"intermediate"``, ``"output"``, or ``"sums"``: partial sums of the tensor.
    bytes : int
        Of the whole tensor as stored; of sums what a CTA holds.
    level : str
        ``"registers"``, ``"shared"``, ``"dsm"``, ``"l2"`` or ``"hbm"``.
    text : str
        How it gets there.
    """

    tensor: str
    role: str
    bytes: int
    level: str
    text: str


def places(
    chain: Chain, kernel: Kernel | None, shape: Shape, rooms: Sequence[Memory], device: Device
) -> tuple[Place, ...]:
    """Say where every tensor of a chain lives, in the order in which they are used.

    Parameters
    ----------
    chain, shape : Chain, Shape
        What is computed.
    kernel : Kernel | None
        Of one candidate; None of a library's kernels.
    rooms : Sequence[Memory]
        Shared memory of each kernel; of a library's none.
    device : Device
        Whose L2 it is.
    """
    found = []
    for index, product in enumerate(chain.products):
        room = rooms[min(index, len(rooms) - 1)] if rooms else None
        if not index:
            found.append(_input(chain, chain.tensor(product.left), _ring(room, "left")))
        found += [
            _input(chain, chain.tensor(each), _ring(room, "right")) for each in product.rights
        ]
        found += [
            _input(chain, chain.tensor(each), "read by the epilogue into registers")
            for each in product.further
        ]
        if kernel is not None:
            found += _sums(kernel, shape, index, product.output)
        tensor = chain.tensor(product.output)
        size = _bytes(chain, tensor)
        if tensor.role == "intermediate":
            level, text = _between(kernel, shape, size, device)
            found.append(Place(tensor.name, tensor.role, size, level, text))
        else:
            found.append(Place(tensor.name, tensor.role, size, "hbm", "written once"))
    return tuple(found)


def _bytes(chain: Chain, tensor: Tensor) -> int:
    return chain.elements(tensor.name) * tensor.item // tensor.repeats


def _input(chain: Chain, tensor: Tensor, text: str) -> Place:
    return Place(tensor.name, "input", _bytes(chain, tensor), "hbm", text)


def _ring(room: Memory | None, side: str) -> str:
    if room is None:
        return "read by the library"
    stages = int(room.left if side == "left" else room.right)
    return f"through L2 and a ring of {stages} {side} tiles in shared memory"


def _between(kernel: Kernel | None, shape: Shape, size: int, device: Device) -> tuple[str, str]:
    """Level of the intermediate, and how it gets there."""
    if isinstance(kernel, RegisterKernel):
        width = int(kernel.width(shape))
        return "registers", f"{width} columns in the CTA that made them and multiplies them"
    if isinstance(kernel, ClusteredKernel):
        held = int(kernel.rows * kernel.share(shape)) * shape.item
        size = int(kernel.size)
        if size == 1:
            return "shared", f"{held} bytes of the CTA that made them"
        return "dsm", f"{held} bytes of each of {size} CTAs, which push their slices to the others"
    if kernel is not None and kernel.family == "l2":
        return "l2", "stored by the first phase, read by the second when a flag says so"
    whose = "a kernel" if kernel is None else "the first kernel"
    # What L2 has no room for goes to memory and comes back.
    level = "l2" if size <= device.l2_bytes // 2 else "hbm"
    return level, f"stored by {whose}, read by the next"


def _sums(kernel: Kernel, shape: Shape, index: int, name: str) -> list[Place]:
    """Sums of a product, and partial sums that are exchanged."""
    phase = kernel.phases(shape)[index]
    tile = int(phase.rows * phase.columns) * phase.products * 4
    found = [Place(name, "sums", tile, "registers", f"{int(phase.sums)} of each thread")]
    split, last = int(phase.split), index == len(kernel.phases(shape)) - 1
    if split > 1:
        text = f"{split} CTAs send slices of their sums to each other"
        found.append(Place(name, "sums", int(phase.received), "dsm", text))
    elif last and isinstance(kernel, (RegisterKernel, ClusteredKernel)) and kernel.parts > 1:
        text = f"{int(kernel.parts)} parts store theirs, and each adds a slice of all"
        found.append(Place(name, "sums", tile, "l2", text))
    return found
