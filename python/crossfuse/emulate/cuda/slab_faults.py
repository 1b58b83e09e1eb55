"""Planting faults in merged dynamic shared memory: buffers that share what they must not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from crossfuse.calls import checked
from crossfuse.emulate.cuda.text import closing, nothing_to_plant, replaced
from crossfuse.lower.image import KernelImage

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
