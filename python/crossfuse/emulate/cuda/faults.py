"""Planting faults in generated text, so that a test can show that the emulator catches them.

Calls are found by the names of ``dsm.cuh`` in the bodies of kernels. Edits keep line numbers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from crossfuse.calls import checked
from crossfuse.emulate.cuda.translate import (
    arguments_of,
    calls_of,
    closing,
    nothing_to_plant,
    replaced,
)
from crossfuse.lower.image import KernelImage

_BARRIER = "crossfuse_cluster_sync"
_REMOTE = r"crossfuse_dsm_(?:load|store)_b\d+"


@checked
def remove_cluster_barrier(image: KernelImage, index: int = 0) -> KernelImage:
    """Remove one cluster barrier.

    Parameters
    ----------
    image : KernelImage
        A lowered function.
    index : int
        Which one, in the order of the text; negative counts from the last.

    Returns
    -------
    KernelImage
        With the faulty text.

    Raises
    ------
    CheckFailed
        If there is no such barrier.

    Examples
    --------
    >>> from crossfuse.emulate.cuda import emulate
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.threads import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func, random_inputs
    >>> spec = parse("gemm:M=16,K=64,N=16")
    >>> image = lower(schedule_split_k(prim_func(spec), cluster=4)).image
    >>> report = emulate(remove_cluster_barrier(image), random_inputs(spec))
    >>> "race" in {each.kind for each in report.findings}
    True
    """
    return drop_call(image, _BARRIER, index)


@checked
def drop_call(image: KernelImage, name: str, index: int = 0) -> KernelImage:
    """Remove one call from the kernels of an image.

    Parameters
    ----------
    image : KernelImage
        A lowered function.
    name : str
        Regular expression for the name of the called function.
    index : int
        Which call, in the order of the text; negative counts from the last.

    Returns
    -------
    KernelImage
        With the faulty text.

    Raises
    ------
    CheckFailed
        If there is no such call.

    Examples
    --------
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.threads import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func
    >>> image = lower(schedule_split_k(prim_func(parse("gemm:M=16,K=64,N=16")), cluster=4)).image
    >>> wrong = drop_call(image, "__syncthreads")
    >>> image.cuda.count("__syncthreads()") - wrong.cuda.count("__syncthreads()")
    1
    """
    start, end = _find_call(image, name, index)
    return replaced(image, start, end, "(void)0")


@checked
def change_argument(
    image: KernelImage, name: str, position: int, by: str, index: int = 0
) -> KernelImage:
    """Change one argument of one call.

    Parameters
    ----------
    image : KernelImage
        A lowered function.
    name : str
        Regular expression for the name of the called function.
    position : int
        Which argument.
    by : str
        What takes its place; ``{}`` stands for what was there.
    index : int
        Which call, in the order of the text; negative counts from the last.

    Returns
    -------
    KernelImage
        With the faulty text.

    Raises
    ------
    CheckFailed
        If there is no such call or argument.

    Examples
    --------
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.threads import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func
    >>> image = lower(schedule_split_k(prim_func(parse("gemm:M=16,K=64,N=16")), cluster=4)).image
    >>> wrong = change_argument(image, "crossfuse_dsm_load_b32", 1, "({} ^ 1)")
    >>> wrong.cuda != image.cuda
    True
    """
    return _change(image, _find_call(image, name, index), position, by)


def _change(image: KernelImage, span: tuple[int, int], position: int, by: str) -> KernelImage:
    arguments = arguments_of(image.cuda, *span)
    if not -len(arguments) <= position < len(arguments):
        raise nothing_to_plant(image, f"{len(arguments)} arguments", f"one with index {position}")
    start, end = arguments[position]
    return replaced(image, start, end, by.format(f"({image.cuda[start:end].strip()})"))


def _find_call(
    image: KernelImage, name: str, index: int, what: str | None = None
) -> tuple[int, int]:
    spans = calls_of(image.cuda, re.compile(rf"\b{name}\s*\("))
    if not -len(spans) <= index < len(spans):
        found = f"{len(spans)} {what or f'calls of {name}'}"
        raise nothing_to_plant(image, found, f"one with index {index}")
    return spans[index]


@checked
def early_exit(image: KernelImage) -> KernelImage:
    """Remove the last cluster barrier: CTAs exit while peers may still read their memory.

    Parameters
    ----------
    image : KernelImage
        A lowered function.

    Returns
    -------
    KernelImage
        With the faulty text.

    Raises
    ------
    CheckFailed
        If there is no cluster barrier.

    Examples
    --------
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.threads import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func
    >>> image = lower(schedule_split_k(prim_func(parse("gemm:M=16,K=64,N=16")), cluster=4)).image
    >>> early_exit(image).cuda != image.cuda
    True
    """
    return remove_cluster_barrier(image, -1)


@checked
def wrong_rank(image: KernelImage, index: int = 0, *, wrap: bool = False) -> KernelImage:
    """Address the next rank instead of the right one in one remote access.

    Parameters
    ----------
    image : KernelImage
        A lowered function.
    index : int
        Which remote access, in the order of the text; negative counts from the last.
    wrap : bool
        Whether the rank after the last is 0. Then every rank exists, and only wrong values (or a
        race, or memory that nobody wrote) can show the fault; otherwise the rank is out of range.

    Returns
    -------
    KernelImage
        With the faulty text.

    Raises
    ------
    CheckFailed
        If there is no such remote access.

    Examples
    --------
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.threads import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func
    >>> image = lower(schedule_split_k(prim_func(parse("gemm:M=16,K=64,N=16")), cluster=4)).image
    >>> wrong_rank(image).cuda != image.cuda
    True
    """
    what = "remote accesses (crossfuse_dsm_load_* and crossfuse_dsm_store_*)"
    span = _find_call(image, _REMOTE, index, what)
    size = max(launch.cluster_size for launch in image.launches)
    rank = f" ({{}} + 1) % {size}" if wrap else " ({} + 1)"
    return _change(image, span, 1, rank)


# Planting faults in merged dynamic shared memory: buffers that share what they must not.

_DYNAMIC = re.compile(r"extern\s+__shared__[^;]*?(\w+)\s*\[\s*\]\s*;")
_ITEM_BYTES = {
    **dict.fromkeys(("char", "signed char", "uchar", "unsigned char", "bool"), 1),
    **dict.fromkeys(("__nv_fp8_e4m3", "__nv_fp8_e5m2", "int8_t", "uint8_t"), 1),
    **dict.fromkeys(("half", "nv_bfloat16", "short", "ushort", "int16_t", "uint16_t"), 2),
    **dict.fromkeys(("float", "int", "uint", "unsigned", "unsigned int", "int32_t", "uint32_t"), 4),
    **dict.fromkeys(("double", "int64_t", "uint64_t", "long long"), 8),
}


@checked
def recycle_slab(image: KernelImage, buffer: tuple[int, int], onto: int) -> KernelImage:
    """Move a buffer of the merged dynamic shared memory onto another one.

    Merged buffers are told apart by the constant that ends each index, as in
    ``((half*)buf_dyn_shmem)[((((int)threadIdx.x) * 8) + 1024)]``.

    Parameters
    ----------
    image : KernelImage
        A lowered function with at least two buffers in dynamic shared memory.
    buffer : tuple[int, int]
        Byte offset and size in bytes of the buffer to move.
    onto : int
        Byte offset of the slab that it is to alias.

    Returns
    -------
    KernelImage
        With the faulty text.

    Raises
    ------
    CheckFailed
        If no access of the text lies in the buffer.

    Examples
    --------
    >>> from crossfuse.lower.image import BufferSpec, Launch
    >>> statements = [
    ...     "extern __shared__ float slab[];",
    ...     "((float*)slab)[(((int)threadIdx.x) + 32)] = 1.0f;",
    ...     "out[threadIdx.x] = ((float*)slab)[(((int)threadIdx.x) + 32)];",
    ... ]
    >>> text = "__global__ void copy(float* out) { " + " ".join(statements) + " }"
    >>> launch = Launch("copy", (1, 1, 1), (32, 1, 1), (1, 1, 1), 256, ("out",))
    >>> image = KernelImage("copy", text, (BufferSpec("out", (32,), "float32", True),), (launch,))
    >>> wrong = recycle_slab(image, (128, 128), onto=0)  # bytes 128 to 255 to bytes 0 to 127
    >>> "((float*)slab)[(((int)threadIdx.x)) + 0] = 1.0f;" in wrong.cuda
    True
    """
    first, size = buffer
    accesses = list(_shared_accesses(image.cuda))
    chosen = [access for access in accesses if first <= access.offset < first + size]
    if not chosen:
        found = f"accesses at bytes {sorted({access.offset for access in accesses})}"
        raise nothing_to_plant(image, found, f"one at bytes {first} to {first + size - 1}")
    for access in reversed(chosen):
        moved = (access.offset - first + onto) // access.item
        image = replaced(image, access.start, access.end, f"({access.index}) + {moved}")
    return image


@dataclasses.dataclass(frozen=True)
class _SharedAccess:
    """An index into dynamic shared memory: its place in the text, and its constant part, bytes."""

    start: int
    end: int
    index: str
    item: int
    offset: int


def _shared_accesses(text: str) -> Iterator[_SharedAccess]:
    names = "|".join(set(_DYNAMIC.findall(text)) or {"(?!)"})
    pattern = re.compile(rf"\(\(([\w ]+?)\s*\*\)(?:{names})\)(\s*\+\s*\(|\[)")
    for match in pattern.finditer(text):
        item = _ITEM_BYTES.get(match[1])
        if item is None:
            continue
        start, end = match.end(), closing(text, match.end() - 1)
        head, constant = _split_constant(text[start:end])
        yield _SharedAccess(start, end, head, item, constant * item)


def _split_constant(index: str) -> tuple[str, int]:
    """Split ``((a * b) + 8)`` into ``(a * b)`` and 8."""
    index = index.strip()
    while index.startswith("(") and closing(index, 0) == len(index) - 1:
        index = index[1:-1].strip()
    if index.isdigit():
        return "0", int(index)
    head, plus, last = index.rpartition(" + ")
    return (head, int(last)) if plus and last.isdigit() else (index, 0)
